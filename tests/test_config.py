"""DPConfig: every wrong value is an error that names the field; parsing and JSON give back what went in."""

import json
import math
from dataclasses import fields

import pytest
import torch
from transformers import DataCollatorWithFlattening, HfArgumentParser, TrainingArguments

from hf_private.config import BUDGETS, DPConfig
from hf_private.methods.carriers.config import CarrierConfig
from hf_private.trainer.refusals import REFUSED_ARGS, refusals

WRONG = {  # field -> values that must be refused
    "target_epsilon": [0, -1, "8", math.nan, True],
    "target_risk": [0, 1, -0.1, "0.1", math.nan, True],
    "target_delta": [0, 1, -1e-5, 2, None],
    "noise_multiplier": [-0.1, math.inf, math.nan, "1"],
    "clip_norm": [0, -1, None, math.inf, math.nan],
    "clipping": ["ghost", None],
    "gamma": [-0.1, None, "0.01", math.nan],
    "train_only": ["weight", True],
    "expected_batch_size": [0, -8, 1.5, "64", True],
    "unit_column": ["", "a\nb", "a b", "`a`", 3],
    "records_per_unit": [0, 1.5, None],
    "unit_sampling": ["people", None, "records"],
    "disjoint_units": ["yes", None, True],
    "augmentations": [0, 1.5, None],
    "accountant": ["gdp", None],
    "carriers": ["{r: 8", "[8]", 8],
    "anchors": ["{", 3.0],
    "noise": ["none", None, 1.0],
    "log_nonprivate": ["yes", None],
    "micro_batch_tokens": [0, -1, 0.5],
    "check_dataset": ["no", None],
    "disjoint_data": ["no", None],
}


def test_every_field_has_wrong_values_here_and_a_help_text() -> None:
    assert {item.name for item in fields(DPConfig)} == set(WRONG)
    assert all(item.metadata["help"] for item in fields(DPConfig))


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_named(name: str, value: object) -> None:
    budget = {} if name in BUDGETS else {"target_epsilon": 8.0}
    with pytest.raises(ValueError, match=f"`{name}`"):
        DPConfig(**budget, **{name: value})


def test_epsilon_and_noise_exclude_each_other_and_one_is_needed() -> None:
    values = {"target_epsilon": 8.0, "target_risk": 0.1, "noise_multiplier": 1.0}
    for some in ([0, 1], [0, 2], [1, 2], [0, 1, 2]):
        given = {name: values[name] for name in (BUDGETS[i] for i in some)}
        with pytest.raises(ValueError, match=".*".join(f"`{name}` = " for name in given)):
            DPConfig(**given)
    with pytest.raises(ValueError, match="`target_epsilon`.*`target_risk`.*`noise_multiplier`.*got none"):
        DPConfig()


def test_infinite_clip_norm_is_for_the_non_private_twin_only() -> None:
    twin = DPConfig(noise_multiplier=0, clip_norm=math.inf)
    assert not twin.is_private
    assert DPConfig(noise_multiplier=0.1).is_private
    for budget in ({"noise_multiplier": 1.0}, {"target_epsilon": 8.0}):
        with pytest.raises(ValueError, match="`clip_norm`.*got inf"):
            DPConfig(**budget, clip_norm=math.inf)


def test_biases_have_no_carriers() -> None:
    with pytest.raises(ValueError, match="`train_only`.*`carriers`"):
        DPConfig(target_epsilon=8.0, carriers={"r": 8}, train_only="bias")


def test_carriers_and_anchors_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="`carriers`.*`anchors`"):
        DPConfig(target_epsilon=8.0, carriers={"r": 8}, anchors={"k": 8})


@pytest.mark.parametrize(
    "config",
    [
        DPConfig(target_epsilon=8.0),
        DPConfig(noise_multiplier=0, clip_norm=math.inf),
        DPConfig(noise_multiplier=1.5, clipping="automatic", expected_batch_size=64, log_nonprivate=True),
    ],
)
def test_json_round_trip(config: DPConfig) -> None:
    text = config.to_json_string()
    assert "Infinity" not in text
    assert DPConfig.from_dict(json.loads(text)) == config


@pytest.mark.parametrize(
    ("name", "meant"),
    [("epsilon", "target_epsilon"), ("max_grad_norm", "clip_norm"), ("target_epsilom", "target_epsilon")],
)
def test_an_unknown_field_gets_a_suggestion(name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"`{name}`: did you mean `{meant}`"):
        DPConfig(**{name: 8})
    with pytest.raises(ValueError, match=f"`{name}`: did you mean `{meant}`"):
        DPConfig.from_dict({name: 8})


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(ValueError, match="`epsilon`"):
        DPConfig.from_dict({"epsilon": 8})


def test_the_argument_parser_of_transformers_reads_it() -> None:
    parser = HfArgumentParser((DPConfig, TrainingArguments))
    line = "--output_dir x --target_epsilon 8 --clip_norm 0.5 --clipping per-layer --expected_batch_size 512"
    config, _ = parser.parse_args_into_dataclasses(line.split())
    assert config == DPConfig(target_epsilon=8.0, clip_norm=0.5, clipping="per-layer", expected_batch_size=512)
    twin, _ = parser.parse_args_into_dataclasses("--output_dir x --noise_multiplier 0 --clip_norm inf".split())
    assert twin == DPConfig(noise_multiplier=0, clip_norm=math.inf)


@pytest.mark.parametrize("value", [{"r": 4}, '{"r": 4}'])
def test_carriers_from_a_dict_or_json(value: object) -> None:
    config = DPConfig(target_epsilon=8.0, carriers=value)
    assert isinstance(config.carriers, CarrierConfig) and config.carriers.r == 4
    assert DPConfig.from_dict(json.loads(config.to_json_string())).to_dict() == config.to_dict()


# ---- what is refused


def arguments(**settings: object) -> TrainingArguments:
    args = TrainingArguments(output_dir="unused", report_to=[])
    for name, value in settings.items():  # set afterwards: some values need libraries or devices to be built
        setattr(args, name, value)
    return args


class Plan:
    tp_size, cp_size, sp_size = 2, 1, 1


REFUSED_VALUES = {
    "fp16": True,
    "mixed_precision": "fp16",
    "gradient_accumulation_steps": 2,
    "torch_compile": True,
    "use_liger_kernel": True,
    "deepspeed": "ds.json",
    "fsdp": "full_shard",
    "parallelism_config": Plan(),
    "n_gpu": 2,
    "use_cpu": False,
    "auto_find_batch_size": True,
    "skip_memory_metrics": False,
    "train_sampling_strategy": "group_by_length",
    "max_grad_norm": 0.5,
    "neftune_noise_alpha": 5.0,
    "optim": "adalomo",
    "hub_strategy": "all_checkpoints",
    "dataloader_drop_last": True,
    "packing": True,
    "num_generations": 8,
    "padding_free": True,
    "debug": ["underflow_overflow"],
}


def test_every_refused_argument_has_a_value_here() -> None:
    assert {refusal.name for refusal in REFUSED_ARGS} == set(REFUSED_VALUES)


@pytest.mark.parametrize("name", REFUSED_VALUES)
def test_an_argument_is_refused_with_reason_and_remedy(name: str) -> None:
    args = arguments(fsdp_config={"version": 1})
    if name == "n_gpu":
        args._n_gpu = 2
    else:
        setattr(args, name, REFUSED_VALUES[name])
    if name == "use_cpu":
        args.__class__ = type("OnApple", (type(args),), {"device": torch.device("mps")})
    (message,) = refusals(args)
    assert message.startswith(f"`{name}` = ") and message.endswith(".")


def test_ordinary_arguments_pass() -> None:
    assert list(refusals(arguments(), train_dataset=[1, 2, 3])) == []
    assert list(refusals(arguments(max_grad_norm=0.0, bf16=True, gradient_checkpointing=True))) == []
    assert list(refusals(arguments(fsdp="full_shard", fsdp_config={"version": 2}))) == []


class Stream(torch.utils.data.IterableDataset):
    def __len__(self) -> int:  # a length does not make it indexable
        return 3

    def __iter__(self):
        return iter(range(3))


class LeftPadding:
    class tokenizer:
        padding_side = "left"


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"train_dataset": Stream()}, "`train_dataset`"),
        ({"train_dataset": iter([1])}, "`train_dataset`"),
        ({"data_collator": DataCollatorWithFlattening()}, "`data_collator`.*DataCollatorWithFlattening"),
        ({"data_collator": LeftPadding()}, "`padding_side`"),
        ({"compute_loss_func": len}, "`compute_loss_func`.*per_sample_loss"),
        ({"custom_compute_loss": True}, "`compute_loss`.*per_sample_loss"),
    ],
)
def test_data_and_losses_that_are_refused(parts: dict, named: str) -> None:
    messages = list(refusals(arguments(), **parts))
    assert len(messages) == 1
    with pytest.raises(ValueError, match=named):
        raise ValueError(messages[0])
