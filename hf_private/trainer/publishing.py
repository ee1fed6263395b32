"""What leaves the machine: a card with every saved model, and uploads of exactly what may be published.

Trainer uploads the whole output folder, logs and pickled arguments included. Here the release guard decides, at the
end of training (`push_to_hub`) and during it (`hub_strategy="every_save"`).
"""

import copy
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from transformers import Trainer, TrainingArguments
from transformers.utils import PushInProgress, logging

from hf_private.publishing.card import weight_hashes, write_card
from hf_private.publishing.release import publish, stage

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


class PublishingTrainer(Trainer):
    """Trainer whose saved and pushed models carry a card that anyone can check."""

    def privacy_record(self) -> dict[str, Any]:
        """All public facts that a card needs, as plain values."""
        raise NotImplementedError

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save a model that `from_pretrained` loads, with its card; all ranks call it.

        Under FSDP2's SHARDED_STATE_DICT Trainer saves none. Here only checkpoints are in shards, which resume faster.
        """
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        in_shards = "SHARDED_STATE_DICT" in str(getattr(plugin, "state_dict_type", ""))
        if in_shards and (output_dir is None or not _internal_call):
            whole = self.accelerator.get_state_dict(self.model)
            if self.args.should_save:
                self._save(output_dir, state_dict=whole)
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        self._write_card(output_dir or self.args.output_dir)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Trainer's card, with the privacy section in it and the record beside it."""
        super().create_model_card(*args, **kwargs)
        self._write_card(self.args.output_dir)

    def _write_card(self, folder: str) -> None:
        if self.is_world_process_zero():
            write_card(folder, self.privacy_record())

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> CommitInfo | Future | None:
        """Upload model, processing class, card and record, as Trainer does, and nothing that gives away more."""
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        token = token or self.args.hub_token
        if self.hub_model_id is None:
            self.init_hf_repo(token=token)
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
            self.args.output_dir,
            self.hub_model_id,
            commit_message=commit_message,
            token=token,
            run_as_future=not blocking,
            revision=revision or self.args.hub_revision,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a checkpoint's model, card and record while training goes on; its optimizer and ledger stay here."""
        args, pushing = self.args, self.push_in_progress
        busy = pushing is not None and not pushing.is_done()
        if not self.is_world_process_zero() or args.hub_strategy == "end" or (busy and not args.hub_always_push):
            return
        if not weight_hashes(checkpoint_folder):
            logger.warning(f"{checkpoint_folder} is in shards, which nobody could load: it is not pushed.")
            return
        self.callback_handler.on_push_begin(args, self.state, self.control)
        # the checkpoint may be rotated away before it has been uploaded
        staged = stage(checkpoint_folder, Path(args.output_dir, "_dp", "push", Path(checkpoint_folder).name))
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
            pushing.jobs.append(job)
        else:
            self.push_in_progress = PushInProgress([job])
