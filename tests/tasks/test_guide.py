"""The worked examples of hf_private/tasks/README.md: they run, and each record's gradient is exact."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_private
from hf_private.tasks.losses import PerSampleLoss
from tests.support import oracle

GUIDE = Path(hf_private.__file__).parent / "tasks" / "README.md"
EXAMPLES = {
    "language_model": "nll_with_z_loss",
    "classifier": "word_classification",
    "encoder": "against_fixed_negatives",
}


def test_the_examples_run_and_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        exec(compile(block, GUIDE.name, "exec"), names)
    for trained, loss in EXAMPLES.items():
        trainer = names[trained]
        assert trainer.state.global_step == 2
        model = trainer.model.double().eval()
        batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
        oracle.assert_exact(model, PerSampleLoss(model, names[loss]), dict(batch), tolerance=1e-6)


def test_the_examples_are_what_they_say() -> None:
    """Against torch's own functions on single records."""
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    for block in blocks:
        exec(compile(block.split("\nrecords = ")[0], GUIDE.name, "exec"), names)

    class Outputs:
        logits = torch.randn(2, 5, 50)
        last_hidden_state = torch.randn(2, 5, 16)

    labels = torch.randint(5, 50, (2, 5))
    labels[1, 3:] = -100
    got = names["nll_with_z_loss"](Outputs, labels)
    kept = Outputs.logits[1, :2]
    plain = torch.nn.functional.cross_entropy(kept, labels[1, 1:3], label_smoothing=0.1)
    torch.testing.assert_close(got[1], plain + 1e-4 * (kept.logsumexp(-1) ** 2).mean())

    answer = torch.full((2, 5), -100)
    answer[0, 3], answer[1, 4] = 2, 3
    got = names["word_classification"](Outputs, answer)
    wanted = [-Outputs.logits[0, 2, [2, 3]].log_softmax(-1)[0], -Outputs.logits[1, 3, [2, 3]].log_softmax(-1)[1]]
    torch.testing.assert_close(got, torch.stack(wanted))

    got = names["against_fixed_negatives"](Outputs, torch.tensor([4, 7]))
    last, candidates = Outputs.last_hidden_state[:, -1, None], names["candidates"]
    cosines = torch.nn.functional.cosine_similarity(last, candidates, dim=-1)
    torch.testing.assert_close(got, -(cosines / 0.1).log_softmax(-1)[[0, 1], [4, 7]])
