"""What DPTrainer relies on inside Trainer, read from the installed source.

Supported: transformers 5.22. A newer release that keeps this contract works; one that breaks it fails here first, by
the name of the method, and not in somebody's private run.
"""

import inspect
import re

import pytest
import transformers
from transformers import Trainer
from transformers.trainer_callback import CallbackHandler, TrainerState

from hf_private.trainer.trainer import DPTrainer

SUPPORTED = ("5.22",)

SIGNATURES = {  # overridden or called method -> its parameters
    "_validate_args": ["self"],
    "train": ["self", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
    "get_train_dataloader": ["self"],
    "evaluation_loop": None,
    "get_eval_dataloader": ["self", "eval_dataset"],
    "get_test_dataloader": ["self", "test_dataset"],
    "get_total_train_batch_size": ["self", "args"],
    "_prepare_for_training": ["self", "max_steps", "train_dataloader", "resume_from_checkpoint"],
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
    "_clip_grad_norm": ["self", "model"],
    "_get_grad_norm": ["self", "model", "grad_norm"],
    "log": ["self", "logs", "start_time"],
    "save_model": ["self", "output_dir", "_internal_call"],
    "_save": ["self", "output_dir", "state_dict"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_save_rng_state": ["self", "output_dir"],
    "_load_rng_state": ["self", "checkpoint"],
    "_load_from_checkpoint": ["self", "resume_from_checkpoint", "model"],
    "_load_best_model": ["self"],
    "hyperparameter_search": None,
    "create_model_card": None,
    "push_to_hub": ["self", "commit_message", "blocking", "token", "revision", "kwargs"],
    "_push_from_checkpoint": ["self", "checkpoint_folder"],
    "_prepare_input": ["self", "data"],
    "_prepare_inputs": ["self", "inputs"],
    "_remove_unused_columns": ["self", "dataset", "description"],
    "_get_collator_with_removed_columns": ["self", "data_collator", "description"],
}


OVERRIDDEN = {
    name
    for owner in DPTrainer.__mro__[: DPTrainer.__mro__.index(Trainer)]
    for name, value in vars(owner).items()
    if name in vars(Trainer) and inspect.isfunction(value)
}


def source(name: str) -> str:
    """A method's code without comments and docstring, on one line."""
    code = re.sub(r'""".*?"""', "", inspect.getsource(getattr(Trainer, name)), flags=re.DOTALL)
    return " ".join(re.sub(r"#.*", "", code).split())


def in_order(name: str, *pieces: str) -> None:
    """Demand that the pieces of code occur in this order."""
    code, position = source(name), 0
    for piece in pieces:
        found = code.find(piece, position)
        assert found >= 0, (
            f"Trainer.{name} has no `{piece}` where it is expected (transformers {transformers.__version__})"
        )
        position = found + len(piece)


def test_the_installed_version_is_supported() -> None:
    assert transformers.__version__.startswith(SUPPORTED), "read tests/trainer/test_contract.py, then add the version"


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    theirs = list(inspect.signature(getattr(Trainer, name)).parameters)
    assert SIGNATURES[name] in (None, theirs)
    if name in OVERRIDDEN:
        ours = inspect.signature(getattr(DPTrainer, name)).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in ours.values())
        assert takes_all or list(ours) == theirs


def test_everything_overridden_is_in_the_list() -> None:
    assert OVERRIDDEN <= set(SIGNATURES) | {"__init__"}


def test_the_constructor_takes_all_that_trainer_takes() -> None:
    theirs = inspect.signature(Trainer.__init__).parameters
    ours = inspect.signature(DPTrainer.__init__).parameters
    positional = [name for name, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == list(theirs)
    assert any(p.kind is p.VAR_KEYWORD for p in ours.values())
    assert not set(theirs) & {"dp_config", "per_sample_loss", "anchor_dataset"}


def test_arguments_are_checked_before_the_hub_repo_is_created() -> None:
    in_order("__init__", "self.create_accelerator_and_postprocess()", "self._validate_args()", "self.init_hf_repo()")


def test_the_run_is_prepared_after_the_checkpoint_is_read() -> None:
    in_order("train", "self._load_from_checkpoint(resume_from_checkpoint)", "inner_training_loop(")
    in_order(
        "_inner_training_loop",
        "self.get_train_dataloader()",
        "self.set_initial_training_values(args, train_dataloader)",
        "self._init_training_state(",
        "self._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)",
        "self.callback_handler.on_train_begin(",
        "self._run_epoch(",
        "self._finalize_training(",
    )
    in_order("_prepare_for_training", "self.create_optimizer()", "self.accelerator.prepare(", "self.create_scheduler(")


def test_one_loader_item_is_one_optimizer_step() -> None:
    """Without accumulation each item gives training_step, optimizer, scheduler and global_step, in this order."""
    in_order(
        "_run_epoch",
        "skip_first_batches(train_dataloader, steps_trained_in_current_epoch)",
        "train_dataloader.set_epoch(epoch)",
        "underlying_sampler.set_epoch(epoch)",
        "iter(train_dataloader)",
        "for update_step in range(num_update_steps_trained, num_update_steps_per_epoch):",
        "self.get_batch_samples(epoch_iterator, num_batches, self.args.device)",
        "for i, inputs in enumerate(batch_samples):",
        "do_sync_step = (step + 1) % self.args.gradient_accumulation_steps == 0",
        "tr_loss_step = self.training_step(model, inputs, num_items_in_batch)",
        "self._clip_grad_norm(model)",
        "self._get_grad_norm(model, grad_norm=grad_norm)",
        "on_pre_optimizer_step",
        "self.optimizer.step()",
        "self.lr_scheduler.step()",
        "model.zero_grad()",
        "self.state.global_step += 1",
        "on_step_end",
        "self._maybe_log_save_evaluate(",
    )


def test_an_opaque_batch_is_left_alone() -> None:
    assert '"labels" in batch_samples[0]' in source("_get_num_items_in_batch")
    assert "in inputs" in source("floating_point_ops")


def test_everything_logged_goes_through_log() -> None:
    in_order("_maybe_log_save_evaluate", 'logs["loss"]', "self.log(logs, start_time)")
    in_order("_finalize_training", 'metrics["train_loss"] = train_loss', "self.log(metrics)")
    in_order("log", "self.state.log_history.append(output)", "self.callback_handler.on_log(")
    others = [name for name, value in vars(Trainer).items() if inspect.isfunction(value) and name != "log"]
    assert [name for name in others if "log_history.append" in source(name)] == []


def test_checkpoints_hold_what_is_thought() -> None:
    in_order(
        "_save_checkpoint",
        "self.save_model(output_dir, _internal_call=True)",
        "self._save_optimizer_and_scheduler(output_dir)",
        "self._save_rng_state(output_dir)",
        "self.state.save_to_json(",
        "self._push_from_checkpoint(output_dir)",
        "rotate_checkpoints(",
    )
    writers = [
        name for name, value in vars(Trainer).items() if inspect.isfunction(value) and "torch.save(" in source(name)
    ]
    assert sorted(writers) == [
        "_push_from_checkpoint",  # the arguments, whose token does not pickle
        "_save",  # the same
        "_save_optimizer_and_scheduler",
        "_save_rng_state",
        "_save_scaler",
        "_tune_save_checkpoint",  # of hyperparameter_search, which is refused
    ]


def test_callbacks_are_called_in_the_order_of_the_list() -> None:
    assert "for callback in self.callbacks" in " ".join(inspect.getsource(CallbackHandler.call_event).split())
    assert "log_history" in TrainerState.__dataclass_fields__
