"""Averages the weights of a run's steps, and evaluates and saves the average in place of the last weights.

Each step leaves weights that are private, so an average of them is post-processing: it costs no privacy.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerState

from hf_private import _validate as validate
from hf_private.gradients.bookkeeper import trainable
from hf_private.gradients.tensors import accumulation_dtype
from hf_private.spending.spending import LEDGER

from .base import TrainerBase
from .provenance import Provenance

FILE = "average.safetensors"  # beside the ledger of a checkpoint: the average, and the weights to go on with


class WeightAverage(TrainerCallback):
    """Averages the trained weights after each step: pass it to a trainer's `callbacks`.

    Evaluations and saved models, those of checkpoints included, then have the average, and so has the model after
    `train()`. Training itself goes on with the weights of the last step, also after a resume. Set exactly one of the
    arguments. Until an average has begun, the weights of the last step are used.

    Args:
        decay: Exponential average: the weights of k steps ago count `decay**k` as much as the last ones.
        tail: Plain average over this share of the steps, the last ones: 0.5 is the second half.

    Guarantee: The average is computed from the weights that private steps have left. Weights that anything else has
    written to are refused, as without it, so that the card stays bound to the weights.

    It takes the memory of one more copy of the trained weights, and of another one while it evaluates or saves.

    >>> average = WeightAverage(decay=0.5)
    >>> [round(average.weight_of(count), 2) for count in (1, 2, 3)]  # of the newest weights; after many steps 0.5
    [1.0, 0.67, 0.57]
    """

    def __init__(self, decay: float | None = None, tail: float | None = None) -> None:
        if (decay is None) == (tail is None):
            raise ValueError(
                f"Exactly one of `decay` and `tail` must be set, got {decay!r} and {tail!r}. For instance"
                " WeightAverage(decay=0.9), or WeightAverage(tail=0.5) for the second half of the steps."
            )
        validate.probability(**({"tail": tail} if decay is None else {"decay": decay}))
        self.decay, self.tail = decay, tail
        self.values: dict[str, Tensor] = {}  # the average, by parameter; empty if it has not begun
        self._parameters: dict[str, nn.Parameter] = {}
        self._count = 0  # weights in the average
        self._step = 0
        self._write: Callable[[Mapping[str, Tensor]], None] = lambda values: None

    def has_begun(self, step: int, last: int) -> bool:
        """Whether the weights after `step` of `last` belong to the average."""
        return self.tail is None or step > last - max(round(self.tail * last), 1)

    def weight_of(self, count: int) -> float:
        """Weight of the newest of `count` weights in their average."""
        return 1 / count if self.decay is None else (1 - self.decay) / (1 - self.decay**count)

    def begin(
        self, parameters: Mapping[str, nn.Parameter], write: Callable[[Mapping[str, Tensor]], None], step: int
    ) -> None:
        """Begin a run after `step`; `write` puts values into the parameters."""
        self._parameters, self._write, self._step = dict(parameters), write, step

    def end(self) -> None:
        """Forget the average."""
        self.values, self._parameters, self._count = {}, {}, 0

    @torch.no_grad()
    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        """Add the weights after a step to the average."""
        if state.global_step <= self._step:  # of a complete run that was resumed: no step was taken
            return
        self._step = state.global_step
        if not self.has_begun(state.global_step, state.max_steps):
            self.values, self._count = {}, 0  # a run that was resumed may be longer than before
            return
        self._count += 1
        for name, p in self._parameters.items():
            if self._count == 1:
                self.values[name] = p.detach().to(accumulation_dtype(p), copy=True)
            else:
                self.values[name].lerp_(p.to(self.values[name].dtype), self.weight_of(self._count))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Leave the average in the model."""
        if self.values:
            self._write(self.values)
        self.end()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The model has the average, if there is one; afterwards its own weights again."""
        if not self.values:
            yield
            return
        own = {name: p.detach().clone() for name, p in self._parameters.items()}
        average, self.values = self.values, {}
        self._write(average)
        try:
            yield
        finally:
            self._write(own)
            self.values = average

    # ---- checkpoints

    @property
    def _settings(self) -> dict[str, str]:
        return {"decay": str(self.decay), "tail": str(self.tail)}

    def save(self, folder: Path) -> None:
        """Write the average, and the weights to go on with, into a checkpoint."""
        if self.values:
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {f"average.{name}": x for name, x in self.values.items()}
            tensors |= {f"own.{name}": p.detach() for name, p in self._parameters.items()}
            metadata = self._settings | {"count": str(self._count)}
            save_file({name: x.contiguous() for name, x in tensors.items()}, folder / FILE, metadata=metadata)

    def load(self, folder: Path, parameters: Mapping[str, nn.Parameter]) -> None:
        """Read what `save` has written, and put the weights to go on with into the parameters."""
        self.end()
        if not (folder / FILE).is_file():
            return
        with safe_open(folder / FILE, "pt") as file, torch.no_grad():
            saved = {name: found for name, found in file.metadata().items() if name in self._settings}
            if saved != self._settings:
                raise ValueError(
                    f"`WeightAverage` must be as it was when the checkpoint was saved ({saved}), got {self._settings}."
                )
            self._count = int(file.metadata()["count"])
            for key in file.keys():  # noqa: SIM118  not a dict
                kind, _, name = key.partition(".")
                if kind == "own":
                    parameters[name].copy_(file.get_tensor(key))
                else:
                    self.values[name] = file.get_tensor(key).to(parameters[name].device)


class AveragingMixin(TrainerBase):
    """Lets a private Trainer class evaluate and save the average of a `WeightAverage` among its callbacks."""

    provenance: Provenance
    bare_model: nn.Module

    @property
    def _averaging(self) -> WeightAverage | None:
        found = [callback for callback in self.callback_handler.callbacks if isinstance(callback, WeightAverage)]
        if len(found) > 1:
            raise ValueError(
                f"`callbacks` must hold one WeightAverage at most, got {len(found)}. Leave out the others."
            )
        return found[0] if found else None

    def _write_weights(self, values: Mapping[str, Tensor]) -> None:
        """Put values into the trained parameters. What anything else has written to them since is noticed first."""
        self.provenance.check_update()
        with torch.no_grad():
            for name, p in trainable(self.bare_model).items():
                p.copy_(values[name])
        self.provenance.note_update()

    def _end_average(self) -> None:
        """Called at the end of `train()`, however it ends: without a run there is no average."""
        if (averaging := self._averaging) is not None:
            averaging.end()

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if self._averaging is not None:
            parameters = trainable(self.bare_model)
            if any(isinstance(p, DTensor) for p in parameters.values()):
                raise ValueError(
                    "`callbacks` must be without WeightAverage under FSDP2, got one. Use DDP, or leave it out."
                )
            self._averaging.begin(parameters, self._write_weights, self.state.global_step)
        return prepared

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's loop of `evaluate` and `predict`, on the average."""
        if self._averaging is None:
            return super().evaluation_loop(*args, **kwargs)
        with self._averaging.shown():
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Trainer's `save_model`, of the average."""
        if self._averaging is None:
            return super().save_model(output_dir, _internal_call)
        with self._averaging.shown():
            super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self._averaging is not None and self.args.should_save:
            assert self.args.output_dir is not None, "TrainingArguments sets a default"
            self._averaging.save(Path(self.args.output_dir, f"checkpoint-{self.state.global_step}", LEDGER).parent)
        super()._save_checkpoint(model, trial)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        averaging = self._averaging
        if averaging is not None:
            averaging.load(Path(resume_from_checkpoint, LEDGER).parent, dict(self.bare_model.named_parameters()))

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self._averaging is not None:
            self._averaging.end()  # the best checkpoint has an average of its own
