"""The self-check of units: after single rows it exchanges units, whose rows may meet."""

import pytest
import torch

from hf_private.gradients.layers import UncoveredError
from hf_private.gradients.selfcheck import SelfCheckError, self_check
from hf_private.tasks.unit_loss import CHECKED_ROWS, UnitLoss, made_up_units
from tests.support import training, zoo

REFUSED = (SelfCheckError, UncoveredError)  # by the comparison, or by the engine before it


def check(loss, rows, family="bert", **changes):
    model, plain = zoo.build(family)
    made = made_up_units(
        lambda size, length, generator=None: zoo.make_batch(model, size, length, seed(generator)), rows
    )
    return self_check(model, UnitLoss(loss or plain, rows), made, **changes)


def seed(generator):
    return 0 if generator is None else int(torch.randint(1, 99, (), generator=generator))


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "vit", "bert-choice"])
def test_units_that_keep_apart_pass(family):
    model, loss = zoo.build(family)
    assert "passed" in check(loss, 2, family)


def coupled(rows):
    """A loss that is scaled by the mean over `rows` rows that follow each other, shifted by one row."""

    def loss(model, batch):
        losses = zoo.loss_of(model)(model, batch)
        return losses * (1 + losses.unflatten(0, (-1, rows)).mean(1, keepdim=True).expand(-1, rows).flatten())

    return loss


def test_rows_of_one_unit_may_meet():
    """They are clipped as one. As records of their own they are refused."""
    assert "passed" in check(coupled(2), 2)
    with pytest.raises(REFUSED, match="`per_device_train_batch_size=1`"):
        check(lambda model, batch: coupled(len(batch["labels"]))(model, batch), 1)


def test_units_that_meet_are_refused():
    with pytest.raises(REFUSED, match="`per_device_train_batch_size=1`"):
        check(lambda model, batch: coupled(len(batch["labels"]))(model, batch), 2)


@pytest.mark.parametrize(
    ("dp", "rows"),
    [
        ({"unit_column": "who", "records_per_unit": 2}, [1, CHECKED_ROWS]),
        ({"augmentations": 2}, [1, CHECKED_ROWS]),
        ({"unit_column": "who", "records_per_unit": 2, "unit_sampling": "records"}, [1]),
        ({}, [1]),
    ],
)
def test_the_trainer_checks_units_where_it_draws_them(tmp_path, monkeypatch, dp, rows):
    seen = []

    def watch(model, loss, make_batch, *args):
        seen.append(getattr(loss, "rows_per_record", 1))
        assert make_batch(3, 5)["input_ids"].shape == ((3, 5) if seen[-1] == 1 else (3, 2, 5))
        return self_check(model, loss, make_batch, *args)

    monkeypatch.setattr("hf_private.trainer.setup.self_check", watch)
    records = [{**record, "who": i // 3} for i, record in enumerate(training.text())]
    training.trainer(tmp_path, records=records, dp={"expected_batch_size": 4, **dp}, max_steps=1).train()
    assert seen == rows
