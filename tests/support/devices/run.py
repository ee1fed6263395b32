"""Run by tests/devices in a process of its own: DPTrainer on the CPU and the emulated device, from start to card."""

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers.training_args
from transformers import TrainerCallback, set_seed

from hf_private.trainer.trainer import DPTrainer
from tests.support import training, zoo
from tests.support.devices import emulated

CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16, gradient checkpointing": {"bf16": True, "gradient_checkpointing": True},
}
STAGES = ("start", "step", "save", "evaluate")


class Stages(TrainerCallback):
    """Counts by stage of a run; "step" is one step that knows every layout already."""

    def __init__(self) -> None:
        self.counts = {stage: emulated.Counts() for stage in STAGES}
        self._open = ExitStack()
        self.steps = 0

    def enter(self, stage: str | None) -> None:
        """Count for this stage from now on, or for none."""
        self._open.close()
        if stage is not None:
            self._open.enter_context(emulated.counted(self.counts[stage]))

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.steps += 1
        self.enter("step" if self.steps == 2 else None)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.enter(None)


def made(folder: Path, device: str, steps: int, stages: Stages, **settings: Any) -> DPTrainer:
    set_seed(0)
    model = zoo.small("bert")
    args = {"max_steps": steps, "use_cpu": device == "cpu", "save_strategy": "steps", "save_steps": 2}
    evaluation = training.text(seed=5)
    return training.trainer(
        folder, model, key=training.KEY, eval_dataset=evaluation, callbacks=[stages], **args, **settings
    )


def run(folder: Path, device: str, **settings: Any) -> tuple[dict[str, Any], Stages]:
    """Train two steps, resume for two more, evaluate, save and write the card."""
    stages = Stages()
    stages.enter("start")
    trainer = made(folder, device, 2, stages, **settings)
    trainer.train()
    first = training.weights(trainer.model).to("cpu")
    stages.steps = -10  # counted above
    trainer = made(folder, device, 4, stages, **settings)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    stages.enter("evaluate")
    metrics = trainer.evaluate()
    stages.enter("save")
    trainer.save_model()
    trainer.create_model_card()
    stages.enter(None)
    found = {
        "device": str(next(trainer.model.parameters()).device.type),
        "first": first,
        "weights": training.weights(trainer.model).to("cpu"),
        "eval_loss": metrics["eval_loss"],
        "charged": training.steps(folder),
        "files": sorted(path.name for path in folder.iterdir()),
    }
    return found, stages


def main(folder: str) -> None:
    """Write what each case gives on both devices."""
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True  # it knows a list of devices
    library = emulated.register()
    found: dict[str, Any] = {}
    for case, settings in CASES.items():
        for device in ("cpu", "emu"):
            os.environ["ACCELERATE_TORCH_DEVICE"] = device
            found[case, device], stages = run(Path(folder, case, device), device, **settings)
            found[case, device]["counts"] = {
                stage: {
                    kind: dict(getattr(counts, kind))
                    for kind in ("syncs", "copied_to_host", "copied_to_device", "copied_async", "mixed", "largest")
                }
                for stage, counts in stages.counts.items()
            }
    torch.save(found, Path(folder, "found.pt"))
    del library
    emulated.leave()


if __name__ == "__main__":
    main(sys.argv[1])
