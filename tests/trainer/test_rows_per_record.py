"""Records of several rows, as a collator declares them: one gradient each, clipped as one."""

import pytest
import torch

from hf_private.mechanism.clipping import Clipping
from hf_private.tasks.unit_loss import RowsLoss
from tests.mechanism.test_units import assert_close, gradients, make, released
from tests.support import oracle, training, zoo

ROWS = 3


class Chunks:
    """Pads the chunks of a text, and adds empty rows up to ROWS."""

    rows_per_record = ROWS

    def __call__(self, records):
        length = max(len(chunk) for record in records for chunk in record["input_ids"])
        ids = torch.zeros(len(records), ROWS, length, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for n, record in enumerate(records):
            for r, chunk in enumerate(record["input_ids"]):
                ids[n, r, : len(chunk)] = torch.tensor(chunk)
                mask[n, r, : len(chunk)] = 1
        labels = torch.tensor([[record["labels"]] * ROWS for record in records])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def texts():
    """40 records of one to ROWS chunks."""
    flat = training.text(records=40 * ROWS)
    return [
        {"input_ids": [flat[ROWS * n + r]["input_ids"] for r in range(1 + n % ROWS)], "labels": n % 2}
        for n in range(40)
    ]


def test_the_gradient_of_a_record_is_that_of_the_mean_of_its_rows():
    model, loss = zoo.build("bert")
    records = texts()[:7]
    wanted = []
    for record in records:
        chunks = [{"input_ids": torch.tensor([ids]), "labels": torch.tensor([record["labels"]])}
                  for ids in record["input_ids"]]  # fmt: skip
        mean = torch.stack([loss(model.eval(), one | {"attention_mask": torch.ones_like(one["input_ids"])})
                            for one in chunks]).mean()  # fmt: skip
        wanted.append(oracle.gradient(model, mean))
    clipping = Clipping("flat", oracle.norms(wanted).median().item())
    mechanism = make(model, RowsLoss(loss, ROWS), clipping=clipping)
    mechanism.step([Chunks()(records[:4]), Chunks()(records[4:])])
    assert_close(gradients(model), released(mechanism.method, wanted, clipping, 4))


def test_a_loss_may_combine_the_rows_itself():
    model, loss = zoo.build("bert")
    batch = Chunks()([record for record in texts() if len(record["input_ids"]) == ROWS][:3])

    def largest(model, batch):
        return loss(model, batch).unflatten(0, (-1, ROWS)).logsumexp(1)

    rows = [{name: value[n] for name, value in batch.items()} for n in range(3)]
    wanted = [oracle.gradient(model.eval(), loss(model, one).logsumexp(0)) for one in rows]
    mechanism = make(model, RowsLoss(largest, ROWS))
    mechanism.step([batch])
    assert_close(gradients(model), released(mechanism.method, wanted, mechanism.clipping, 4))


@pytest.mark.parametrize("dp", [{}, {"carriers": {"r": 2}}, {"unit_column": "who", "records_per_unit": 2}])
def test_a_trainer_trains_on_them_and_micro_batches_change_nothing(tmp_path, dp):
    found = []
    for size in (2, 8):
        made = training.trainer(
            tmp_path / str(size), records=[{**record, "who": n // 3} for n, record in enumerate(texts())],
            dp={"expected_batch_size": 6, **dp}, data_collator=Chunks(), key=training.KEY, max_steps=2,
            per_device_train_batch_size=size,
        )  # fmt: skip
        made.train()
        found.append(training.weights(made.model))
    assert (found[0] - found[1]).norm() <= 1e-5 * found[0].norm()
    assert not torch.equal(found[0], training.weights(zoo.small("bert")))


@pytest.mark.parametrize("declared", [2, 6])
def test_another_number_of_rows_than_declared_is_refused(tmp_path, declared):
    """A record that counts as several would have several times the influence."""

    class Wrong(Chunks):
        rows_per_record = declared

    with pytest.raises(ValueError, match="`input_ids`|`attention_mask`"):
        training.trainer(tmp_path, records=texts(), data_collator=Wrong(), max_steps=1).train()


def test_the_declared_number_is_checked(tmp_path):
    class Wrong(Chunks):
        rows_per_record = 0

    with pytest.raises(ValueError, match="`rows_per_record`"):
        training.trainer(tmp_path, records=texts(), data_collator=Wrong(), max_steps=1).train()
