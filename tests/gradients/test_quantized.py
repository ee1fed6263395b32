"""LoRA on bases of 4 and 8 bits: the engine against plain autograd, and against float64 on the dequantised weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import BitsAndBytesConfig, TorchAoConfig

from hf_private.cli.doctor.quantised import layer_bytes
from hf_private.publishing.verify import verify
from hf_private.tasks.losses import PerSampleLoss
from hf_private.tasks.packed_weights import keep_unpacked
from tests.support import oracle, training, zoo


def lora() -> LoraConfig:
    return LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")


BNB, TORCHAO = "bitsandbytes", "torchao"
SIZE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}  # 4 bits need blocks of 64 entries


def settings(kind: str) -> Any:
    """The quantisation, or a skip that names the extra."""
    package = TORCHAO if kind.startswith(TORCHAO) else BNB
    pytest.importorskip(package, reason=f"needs {package}: pip install 'hf-private[quantized]'")
    if package == TORCHAO:
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    compute = torch.bfloat16 if kind == "nf4-bf16" else torch.float32
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
    )


def model(kind: str, folder: Path, checkpointing: bool = False) -> Any:
    """A Llama whose linear layers are quantised, with LoRA that is not zero."""
    plain = zoo.small("llama", **SIZE)
    plain.save_pretrained(folder)
    dtype = torch.bfloat16 if kind.endswith("bf16") else torch.float32
    base = type(plain).from_pretrained(folder, quantization_config=settings(kind), device_map="cpu", dtype=dtype)
    made = get_peft_model(prepare_model_for_kbit_training(base, use_gradient_checkpointing=checkpointing), lora())
    generator = torch.Generator().manual_seed(0)
    for name, p in made.named_parameters():
        if "lora_B" in name:
            p.data.copy_(0.1 * torch.randn(p.shape, generator=generator))
    return made.train()  # in evaluation, bitsandbytes computes in bfloat16 on processors that can


def batch() -> dict[str, torch.Tensor]:
    return training.Padding()(training.text("itself", records=4))


def dequantised(made: Any) -> Any:
    """The same model in float64, with the weights that the quantised ones stand for."""
    import bitsandbytes

    plain = zoo.small("llama", **SIZE).double()
    other = get_peft_model(plain, lora())
    state = other.state_dict()
    for name, module in made.named_modules():
        weight = getattr(module, "weight", None)
        if weight is None or hasattr(module, "base_layer"):
            continue
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            weight = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
        elif isinstance(module, bitsandbytes.nn.Linear8bitLt):
            weight = weight.data.double() * weight.SCB[:, None] / 127
        elif hasattr(weight, "dequantize") and type(weight.data) is not torch.Tensor:
            weight = weight.dequantize()
        state[f"{name}.weight"] = weight.detach().double()
    other.load_state_dict(state)
    return other


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "nf4-bf16", "int8", "torchao-int8"])
def test_the_engine_is_that_of_plain_autograd(tmp_path: Path, kind: str, checkpointing: bool) -> None:
    made = model(kind, tmp_path, checkpointing)
    loss = PerSampleLoss(made)
    oracle.assert_exact(made, loss, batch(), tolerance=1e-2 if kind == "nf4-bf16" else 1e-5)


@pytest.mark.parametrize(("kind", "tolerance"), [("nf4", 1e-5), ("torchao-int8", 1e-5), ("int8", 0.05)])
def test_the_gradients_are_those_of_the_dequantised_weights(tmp_path: Path, kind: str, tolerance: float) -> None:
    """LLM.int8 rounds the activations to 8 bits, too."""
    made = model(kind, tmp_path)
    other = dequantised(made)
    records = batch()
    ours = oracle.per_sample_gradients(made, PerSampleLoss(made), records)
    theirs = oracle.per_sample_gradients(other, PerSampleLoss(other), records)
    for got, wanted in zip(ours, theirs, strict=True):
        difference = oracle.flat(got).double() - oracle.flat(wanted)
        assert difference.norm() < tolerance * oracle.flat(wanted).norm(), (
            difference.norm() / oracle.flat(wanted).norm()
        )


@pytest.mark.parametrize("evaluated_before", [False, True])
def test_gradients_pass_4_bit_weights_after_an_evaluation(tmp_path: Path, evaluated_before: bool) -> None:
    """On some processors bitsandbytes packs weights when it evaluates, and gradients do not pass packed ones."""
    made, records = model("nf4", tmp_path), batch()
    other = dequantised(made)

    def evaluate() -> None:
        with torch.no_grad():
            made.eval()(**records)
        made.train()

    if evaluated_before:
        evaluate()
    keep_unpacked(made)
    evaluate()
    ours = oracle.per_sample_gradients(made, PerSampleLoss(made), records)
    theirs = oracle.per_sample_gradients(other, PerSampleLoss(other), records)
    for got, wanted in zip(ours, theirs, strict=True):
        difference = oracle.flat(got).double() - oracle.flat(wanted)
        rounding = 5e-3 if evaluated_before else 1e-5  # packing has rounded the scales to bfloat16
        assert difference.norm() < rounding * oracle.flat(wanted).norm()


@pytest.mark.parametrize("kind", ["nf4", "nf4-bf16", "int8", "torchao-int8", "torchao-int8-bf16"])
def test_it_trains_with_a_self_check_and_saves_an_adapter_with_its_card(tmp_path: Path, kind: str) -> None:
    made = training.trainer(
        tmp_path / "out",
        model(kind, tmp_path / "base"),
        training.text("itself"),
        eval_dataset=training.text("itself", records=6, seed=1),
        eval_strategy="steps",
        eval_steps=1,
        max_steps=2,
        gradient_checkpointing=True,
        dp={"disjoint_data": True},
    )
    made.train()
    for module in made.model.modules():  # neither the self-check nor the evaluations have packed them
        assert not getattr(getattr(module, "weight", None), "quant_state", None) or not getattr(
            module.weight.quant_state, "packing_format_for_cpu", False
        )
    made.save_model()
    verdict = verify(tmp_path / "out")
    assert verdict.status == "holds" and verdict.statement["mechanism"]["peft"] == "LORA"


@pytest.mark.parametrize(("kind", "bits"), [("nf4", 4), ("int8", 8)])
def test_doctor_knows_the_size_of_a_layer(tmp_path: Path, kind: str, bits: int) -> None:
    made = model(kind, tmp_path)
    layer = made.base_model.model.model.layers[0].mlp.up_proj.base_layer
    state = getattr(layer.weight, "quant_state", None)
    stored = [layer.weight.data]
    if state is None:
        stored.append(layer.weight.SCB)
    else:
        stored += [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    plain = nn.Linear(layer.in_features, layer.out_features, bias=False)
    assert sum(x.numel() * x.element_size() for x in stored) == layer_bytes(plain, bits)
