"""Saves a card with every model, and uploads exactly the files that may be published.

Trainer uploads the whole output folder, logs and pickled arguments included. Here the release guard decides, at the
end of training (`push_to_hub`) and during it (`hub_strategy="every_save"`). A card is written only for weights whose
whole cost is in its ledger.
"""

import copy
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from torch import nn
from transformers import TrainingArguments
from transformers.utils import PushInProgress, logging

from hf_private import _validate as validate
from hf_private.accounting.budget import EpsilonReport
from hf_private.config import DPConfig
from hf_private.distributed.ranks import Ranks
from hf_private.publishing.card import weight_hashes, write_card
from hf_private.publishing.release import publish, stage
from hf_private.spending.admissions import POST_PROCESSING
from hf_private.spending.ledger import LedgerError
from hf_private.spending.spending import LEDGER, Spending
from hf_private.spending.statement import STATEMENT, read_statement

from .base import TrainerBase
from .provenance import Provenance

logger = logging.get_logger(__name__)


class UnsavedToken(str):
    """A token that reads as usual and pickles as None: training_args.bin is saved with every model."""

    def __reduce__(self) -> tuple[Any, tuple]:
        return type(None), ()


def own_arguments(args: TrainingArguments) -> TrainingArguments:
    """A copy for the loop, in which one loader item is one step, and for saving; the user's stay as they are."""
    args = copy.copy(args)
    args.gradient_accumulation_steps = 1
    args.include_num_input_tokens_seen = "no"  # it counts private tokens
    if args.hub_token is not None:
        args.hub_token = UnsavedToken(args.hub_token)
    return args


class PublishingMixin(TrainerBase):
    """Makes the saved and pushed models of a Trainer class carry a card that anyone can check.

    Its `provenance` carries the spending of earlier training into each run, and refuses to save weights whose spending
    is not all in the ledger.

    Args:
        dp_config: Privacy settings.
        continues: Folder or Hub repository with the statement of earlier training that cannot be found.
        spending: The ledger of the output folder.
        ranks: The processes that train together.
        **arguments: Those of the Trainer class.
    """

    def __init__(
        self, *, dp_config: DPConfig, continues: str | Path | None, spending: Spending, ranks: Ranks, **arguments: Any
    ) -> None:
        self.dp_config = dp_config
        self.continues = continues
        self.spending = spending
        self.ranks = ranks
        self.provenance = Provenance(self)
        super().__init__(**arguments)

    @property
    def bare_model(self) -> nn.Module:
        """The model without the wrappers of Accelerate."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def output_dir(self) -> str:
        """The output folder; TrainingArguments sets a default."""
        assert self.args.output_dir is not None
        return self.args.output_dir

    # ---- earlier training

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.provenance.note_checkpoint()

    def _load_best_model(self) -> None:
        self.provenance.check_update()
        super()._load_best_model()
        self.provenance.note_update()

    def declare_post_processing(self, *kinds: str) -> None:
        """State that the weights differ from those that the runs have left, by post-processing alone.

        Post-processing uses no training data, so it costs no privacy. It is not checked: the card says that it was
        stated. Call it before `save_model`, and before `train` on such weights.

        Args:
            kinds: "average" (of weights that the run has released), "dtype", "merge" (of an adapter), "quantization".

        Guarantee: Without it, weights that were changed outside of a run are not saved with the card of that run.
        """
        for kind in kinds:
            validate.one_of(tuple(POST_PROCESSING), post_processing=kind)
        self.provenance.post_processing = sorted({*self.provenance.post_processing, *kinds})

    # ---- what is saved

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save a model that `from_pretrained` loads, with its card; all ranks call it.

        Nothing is written if the output folder's ledger does not have all that the weights have cost. Under FSDP2's
        SHARDED_STATE_DICT Trainer saves no model. Here only checkpoints are in shards, which resume faster.
        """
        self.provenance.check_save()
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        in_shards = "SHARDED_STATE_DICT" in str(getattr(plugin, "state_dict_type", ""))
        if in_shards and (output_dir is None or not _internal_call):
            whole = self.accelerator.get_state_dict(self.model)
            if self.args.should_save:
                self._save(output_dir, state_dict=whole)
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        self._write_card(output_dir or self.output_dir)
        config = self.dp_config.method_config
        if config is not None and self.args.should_save:
            config.save_pretrained(output_dir or self.output_dir)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(self.output_dir, f"checkpoint-{self.state.global_step}")
        if self.args.should_save:
            self.spending.save_copy(folder)
        self._save_method_state(Path(folder, LEDGER).parent)
        super()._save_checkpoint(model, trial)

    def _save_method_state(self, folder: Path) -> None:
        """What a gradient method needs to resume from a checkpoint."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Nothing: a generator's state would let others replay dropout and augmentation."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Nothing: a resumed run draws fresh randomness."""

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Trainer's card, with the privacy section in it and the statement beside it."""
        if self.is_world_process_zero():
            self._check_files()
        super().create_model_card(*args, **kwargs)
        self._write_card(self.output_dir)

    def _check_files(self) -> None:
        """Refuse to write a card for files that `save_model` has not written."""
        saved = (read_statement(self.output_dir) or {}).get("weights")
        if weight_hashes(self.output_dir) not in ({}, saved):
            raise LedgerError(
                f"The weights in {self.output_dir!r} are not those that its {STATEMENT} is about. Save the model with"
                " `trainer.save_model()`, which writes the card, too."
            )

    def _write_card(self, folder: str) -> None:
        if self.is_world_process_zero():
            write_card(folder, self.privacy_record())

    # pyrefly: ignore[bad-override]  Trainer returns None on other ranks, and a Future, too: its annotation is too narrow
    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> CommitInfo | Future | None:
        """Upload model, processing class, card and statement, as Trainer does, and no file that would leak data."""
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        token = token or self.args.hub_token
        if self.hub_model_id is None:
            self.init_hf_repo(token=token)
        assert self.hub_model_id is not None, "init_hf_repo sets it"
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        tags = kwargs.pop("tags", None) or []
        kwargs["tags"] = [
            *([tags] if isinstance(tags, str) else tags),
            *(getattr(self.model, "model_tags", None) or ()),
        ]
        kwargs.setdefault("model_name", self.hub_model_id.rpartition("/")[2])
        self.create_model_card(**kwargs)
        self._finish_current_push()
        return publish(
            self.output_dir,
            self.hub_model_id,
            commit_message=commit_message,
            token=token,
            run_as_future=not blocking,
            revision=revision or self.args.hub_revision,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a checkpoint's model, card and statement while training goes on; its optimizer and ledger stay here."""
        args, pushing = self.args, self.push_in_progress
        busy = pushing is not None and not pushing.is_done()
        if not self.is_world_process_zero() or args.hub_strategy == "end" or (busy and not args.hub_always_push):
            return
        if not weight_hashes(checkpoint_folder):
            logger.warning(
                f"{checkpoint_folder} holds shards, which `from_pretrained` cannot load, so it is not pushed."
            )
            return
        assert self.hub_model_id is not None, "Trainer sets it before training if it pushes"
        self.callback_handler.on_push_begin(args, self.state, self.control)
        # the checkpoint may be rotated away before it has been uploaded
        staged = stage(checkpoint_folder, Path(self.output_dir, "_dp", "push", Path(checkpoint_folder).name))
        job = publish(
            staged,
            self.hub_model_id,
            commit_message=f"Training in progress, step {self.state.global_step}",
            token=args.hub_token,
            run_as_future=True,
            revision=args.hub_revision,
        )
        job.add_done_callback(lambda _: shutil.rmtree(staged, ignore_errors=True))
        if busy:
            pushing.jobs.append(job)  # pyrefly: ignore[missing-attribute]  a list, whatever its annotation says
        else:
            self.push_in_progress = PushInProgress([job])  # pyrefly: ignore[bad-argument-type]  the same

    # ---- what is reported

    def privacy_spent(self) -> EpsilonReport:
        """What has been spent on the records so far, in all runs on this output folder."""
        return self.spending.report()

    def privacy_record(self) -> dict[str, Any]:
        """The facts of the statement (privacy.json), as plain values; everything that it claims follows from them."""
        return {**self.spending.statement(), **self._public_facts(), **self._tuning()}

    def _public_facts(self) -> dict[str, Any]:
        """Settings, data, evaluation and software of the run."""
        raise NotImplementedError

    def _tuning(self) -> dict[str, Any]:
        """The runs that were tried before, for the card: they count wherever the weights are saved."""
        try:
            tuning = self.spending.tuning
        except LedgerError as error:  # no reason to lose a trained model
            logger.warning(str(error))
            return {}
        return {"tuning": tuning} if tuning else {}
