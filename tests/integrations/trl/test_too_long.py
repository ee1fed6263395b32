"""Records that TRL leaves out, because they are too long: their number, which is private, changes nothing."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs the extra `trl`")

from hf_private.integrations.trl import DPDPOTrainer, DPRewardTrainer, DPSFTTrainer  # noqa: E402
from hf_private.integrations.trl.preparation import without_gaps  # noqa: E402
from tests.integrations.trl import runs  # noqa: E402
from tests.support import chats, oracle, zoo  # noqa: E402

LONG = " ".join(f"w{i}" for i in range(12))
TRAINERS = {DPSFTTrainer: "prompt", DPDPOTrainer: "pair", DPRewardTrainer: "pair"}


def made(cls: type, folder: Path, too_long: tuple[int, ...], **settings: Any) -> Any:
    """A trainer whose records of these numbers TRL leaves out."""
    columns = ("chosen", "rejected") if cls is DPRewardTrainer else ("prompt",)

    def lengthen(record: dict[str, Any], row: int) -> dict[str, Any]:
        return dict.fromkeys(columns, LONG) if row in too_long else {}

    records = chats.made(TRAINERS[cls], 12).map(lengthen, with_indices=True)
    records = records.add_column("who", [f"p{row // 2}" for row in range(12)])
    model = zoo.small("gpt2-cls", num_labels=1, pad_token_id=0) if cls is DPRewardTrainer else zoo.small("gpt2")
    model = model.double()
    if cls is DPDPOTrainer:
        settings["ref_model"] = copy.deepcopy(model)
    return runs.trainer(cls, folder, records, model, max_length=12, **settings)


@pytest.mark.parametrize("cls", TRAINERS)
def test_the_statement_does_not_tell_how_many_there_were(tmp_path: Path, cls: type) -> None:
    dp = {"unit_column": "who", "records_per_unit": 1}
    trainer = made(cls, tmp_path, too_long=(4, 5, 9))
    trainer.train()
    trainer.save_model()
    assert json.loads((tmp_path / "privacy.json").read_text())["dataset"]["num_records"] == 12
    units = made(cls, tmp_path / "units", too_long=(4, 5, 9), dp=dp)
    assert units.num_units == 6, "p2 is one of them, though all of its records were left out"


@pytest.mark.parametrize("cls", TRAINERS)
def test_they_add_nothing(tmp_path: Path, cls: type) -> None:
    """A full batch without noise: the clipped gradients of the others, divided by the number of all."""
    trainer = made(
        cls, tmp_path, too_long=(4, 5, 9), dp={"noise_multiplier": 0.0, "clip_norm": 0.1, "expected_batch_size": 12},
        **runs.SGD, per_device_train_batch_size=2,
    )  # fmt: skip
    loss, model = trainer.create_loss(trainer.model), trainer.model
    collator = getattr(trainer, "training_collator", trainer.data_collator)
    signature = [name for name in trainer.train_dataset.column_names if name.endswith("ids") or name == "labels"]
    records = [{name: row[name] for name in signature} for row in trainer.train_dataset]
    gradients = [oracle.gradient(model, loss(model, collator([record])).sum()) for record in records]
    norms = oracle.norms(gradients)
    assert norms[9:].max() < 1e-12 and norms[:9].min() > 1e-6
    total = oracle.weighted_sum(gradients[:9], (0.1 / norms[:9]).clamp(max=1))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.train()
    for name, p in model.named_parameters():
        torch.testing.assert_close(before[name] - p.detach(), total[name] / 12, rtol=1e-5, atol=1e-9)


def test_a_transform_is_refused() -> None:
    records = chats.made("text").with_transform(lambda rows: rows)
    with pytest.raises(ValueError, match="`train_dataset`.*with_transform"):
        without_gaps(lambda prepared: prepared, records, {})
