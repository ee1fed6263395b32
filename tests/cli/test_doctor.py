"""`hf-private doctor`: it says what the engine would do, and its dry run counts what a real one costs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
)

from hf_private.cli.doctor import dryrun, models, quantised
from hf_private.cli.doctor.variants import compare
from hf_private.cli.main import main
from hf_private.gradients.bookkeeper import trainable
from hf_private.gradients.coverage import coverage, without
from hf_private.gradients.method import Full
from hf_private.mechanism.clipping import Clipping
from hf_private.mechanism.noise import NoiseSource
from hf_private.mechanism.step import Mechanism
from hf_private.methods.carriers.config import CarrierConfig
from hf_private.methods.registry import resolve_method
from hf_private.tasks.losses import PerSampleLoss
from hf_private.tasks.synthetic import synthetic_batch
from tests.gradients.test_refusals import Multiply
from tests.support import zoo


def saved(folder: Path, name: str = "bert", **changes: Any) -> str:
    """A folder with the config of a model of the zoo."""
    zoo.config(name, **changes).save_pretrained(folder)
    return str(folder)


def bert() -> BertForSequenceClassification:
    return BertForSequenceClassification(zoo.config("bert"))


def report(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, dict]:
    code = main(["doctor", *arguments, "--batch", "3", "--length", "9", "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_units_cost_what_their_rows_cost_as_one_gradient(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    found = {}
    for k in ("1", "3"):
        assert report(capsys, saved(tmp_path), "--records-per-unit", k)[0] == 0
        found = {**found, k: report(capsys, saved(tmp_path), "--records-per-unit", k)[1]}
    methods = {k: found[k]["methods"] for k in found}
    assert found["3"]["micro_batch"]["records_per_unit"] == 3
    assert methods["1"]["plain training"] == methods["3"]["plain training"]
    assert methods["1"]["BK"]["flops"] != methods["3"]["BK"]["flops"]
    assert methods["3"]["BK"]["noised"] == methods["1"]["BK"]["noised"]
    with pytest.raises(SystemExit):
        main(["doctor", saved(tmp_path), "--batch", "8", "--records-per-unit", "3"])
    assert "--batch" in capsys.readouterr().err


def test_layerwise_decisions_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Width 16, MLP of width 24: by 1.6 T (p + d) >= pd from T = 5 and 6 on, by 2 T^2 >= pd from 12 and 14."""
    folder = saved(tmp_path)
    found = {}
    for length in (4, 5, 6, 11, 12, 13, 14):
        assert main(["doctor", folder, "--batch", "2", "--length", str(length), "--json"]) == 0
        layerwise = json.loads(capsys.readouterr().out)["methods"]["BK"]["layerwise"]
        found[length] = (layerwise["formed"], layerwise["formed_by_paper"])
    square, wide = 2 * 4, 2 * 2  # two layers; pooler and classifier see one position
    assert layerwise["weights"] == square + wide + 2
    square_formed, all_formed = (square, 0), (square + wide, 0)
    assert found == {
        4: (0, 0), 5: square_formed, 6: all_formed, 11: all_formed, 12: (square + wide, square),
        13: (square + wide, square), 14: (square + wide, square + wide),
    }  # fmt: skip
    assert main(["doctor", folder, "--batch", "2", "--length", "13"]) == 0
    assert "of 14 linear weights at this length" in capsys.readouterr().out


def test_every_parameter_of_bert_is_covered(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    code, found = report(capsys, saved(tmp_path), "--carriers", "r=2")
    model = bert()
    assert code == 0
    assert [entry["name"] for entry in found["parameters"]] == [name for name, _ in model.named_parameters()]
    assert found["numbers"] == {"covered": sum(p.numel() for p in model.parameters()), "frozen": 0, "refused": 0}
    rules = {entry["name"]: entry["note"] for entry in found["parameters"]}
    assert rules["bert.embeddings.word_embeddings.weight"] == "Embedding"
    assert rules["classifier.bias"] == "Linear"
    assert [*found["methods"]][:2] == ["plain training", "BK"] and "BK on LoRA r=2" in found["methods"]
    assert found["methods"]["RGP r=2"]["flops"] < found["methods"]["plain training"]["flops"]


def test_a_model_for_short_records_is_examined_at_its_own_length(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = saved(tmp_path, max_position_embeddings=20)
    assert main(["doctor", folder, "--carriers", "r=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["micro_batch"]["length"] == 20
    with pytest.raises(SystemExit):
        main(["doctor", folder, "--length", "64"])
    assert "records of 64 tokens" in capsys.readouterr().err


def test_a_base_of_few_bits_is_priced(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = saved(tmp_path, "llama", hidden_size=256, intermediate_size=1024, head_dim=128)
    totals = {}
    for bits in (4, 8):
        _, found = report(capsys, folder, "--bits", str(bits))
        totals[bits] = found["methods"][f"BK on LoRA r=8, {bits} bits"]["total_bytes"]
        lora = found["methods"]["BK on LoRA r=8"]["total_bytes"]
    model = AutoModelForCausalLM.from_config(
        zoo.config("llama", hidden_size=256, intermediate_size=1024, head_dim=128)
    )
    linear = sum(layer.weight.numel() for layer in quantised.quantised_layers(model))
    assert 0.45 * linear < totals[8] - totals[4] < 0.5 * linear, "half a byte for each entry, but for the scales"
    assert totals[8] < lora - 2.5 * linear, "a byte instead of four"
    assert main(["doctor", folder, "--bits", "8", "--memory", str(lora / 1e9), "--length", "9", "--batch", "3"]) == 0
    fits = capsys.readouterr().out.partition("fit: ")[2].partition(".")[0].split("; ")
    assert {"BK on LoRA r=8", "BK on LoRA r=8, 8 bits"} <= set(fits) and "BK" not in fits


def test_tied_weight_shows_both_rules(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    _, found = report(capsys, saved(tmp_path, "gpt2"))
    assert found["parameters"][0]["note"] == "Embedding + Linear"


def test_refused_kinds_are_named_and_the_rest_is_examined(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = saved(tmp_path, "resnet")
    code, found = report(capsys, folder)
    status = {entry["name"]: entry["status"] for entry in found["parameters"]}
    assert code == 1
    assert {status[name] for name in status if "normalization" in name} == {"refused"}
    assert {status[name] for name in status if "normalization" not in name} == {"covered"}
    assert main(["doctor", folder, "--batch", "3"]) == 1
    err = capsys.readouterr().err
    assert "BatchNorm2d" in err
    assert "GroupNorm" in err, "a refusal comes with its remedy"


def test_a_folder_with_an_adapter_is_read(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    base = saved(tmp_path / "base")
    model = bert()
    model.name_or_path = base
    get_peft_model(model, LoraConfig(r=2, task_type="SEQ_CLS")).save_pretrained(tmp_path / "adapter")
    code, found = report(capsys, str(tmp_path / "adapter"))
    covered = {entry["name"] for entry in found["parameters"] if entry["status"] == "covered"}
    assert code == 0
    assert covered
    assert all("lora_" in name or "classifier" in name for name in covered)
    assert [*found["methods"]] == ["plain training", "BK"]


class Twice(nn.Module):
    """Two different uses that no rule covers, and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.left = nn.Parameter(torch.randn(3, 3))
        self.right = nn.Parameter(torch.randn(3, 3))
        self.idle = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return Multiply.apply(self.second(Multiply.apply(self.first(x), self.left)), 2 * self.right)


def test_all_refusals_are_found_at_once() -> None:
    model, x = Twice(), torch.randn(4, 3)
    status = {entry.name: entry.status for entry in coverage(model, lambda: model(x).sum(1))}
    assert {name for name, was in status.items() if was == "refused"} == {"left", "right", "idle.weight", "idle.bias"}
    fresh = Twice()
    assert set(trainable(without(fresh, coverage(model, lambda: model(x).sum(1))))) < set(
        dict(fresh.named_parameters())
    )


@pytest.mark.parametrize("private", [False, True], ids=["plain", "BK"])
def test_dry_run_counts_what_a_real_run_costs(private: bool) -> None:
    costs = []
    for device in ("meta", "cpu"):
        with torch.device(device):
            model = bert()
        batch = models.inputs(model, 3, 9, device, mask=False)
        method = Full()
        method.attach(trainable(model))

        def step(model=model, batch=batch, method=method) -> None:
            if private:
                dryrun.private_step(model, lambda: models.losses(model, batch), method)
            else:
                dryrun.plain_step(model, lambda: models.losses(model, batch))

        step()  # the first batch of a model is measured by a second backward pass
        costs.append(dryrun.measure(step))
    assert costs[0].flops == costs[1].flops
    assert costs[0].peak_bytes == pytest.approx(costs[1].peak_bytes, rel=0.02)


LARGE = {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 300, "max_position_embeddings": 64}
LARGE_ENOUGH = {  # so that activations, sums and weights all count
    "bert": LARGE | {"intermediate_size": 256},
    "gpt2": LARGE,
    "llama": LARGE | {"intermediate_size": 160, "head_dim": 32, "num_key_value_heads": 2},
}

PRESETS = {  # of `train_only`: GPT-2's head is its embedding, and Llama has no biases
    "bert": ("bias", "head", "upper-half"),
    "gpt2": ("bias",),
    "llama": ("head", "upper-half"),
}


@pytest.mark.parametrize("family", LARGE_ENOUGH)
def test_estimates_hold_for_whole_steps_of_the_mechanism(family: str) -> None:
    """Memory of a logical step within 10 %, and operations of a micro-batch within 2 %, by method."""
    config = zoo.config(family, **LARGE_ENOUGH[family])
    factory = AutoModelForSequenceClassification if family == "bert" else AutoModelForCausalLM

    def build(device: str = "cpu") -> nn.Module:
        with torch.device(device):
            return factory.from_config(config).eval()

    empty = models.inputs(build("meta"), 4, 48, "meta", mask=False)
    rows = compare(lambda: build("meta"), lambda model: models.losses(model, empty), {"r": 4, "sparsity": 0.3})
    assert [row.method for row in rows] == [
        "plain training",
        "BK",
        *(f"BK, train_only={preset}" for preset in PRESETS[family]),
        "BK on LoRA r=4",
        "BK on LoRA r=4, train_only=lora-B",
        "RGP r=4",
        "LSG r=4 sparsity=0.3",
    ]
    for row in rows:
        model = build()
        carriers = {"RGP": CarrierConfig(r=4), "LSG": CarrierConfig(r=4, sparsity=0.3)}.get(row.method[:3])
        if "LoRA" in row.method:
            model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        batch = synthetic_batch(model, 4, 48)
        batch["attention_mask"].fill_(1)
        preset = row.method.partition("train_only=")[2] or None
        loss, method = PerSampleLoss(model), resolve_method(carriers, model, train_only=preset)
        private = Mechanism(
            model, loss, method=method, clipping=Clipping(), noise=NoiseSource(), noise_multiplier=0.0,
            sample_rate=0.1, expected_batch_size=8, charge=lambda event: None,
        )  # fmt: skip

        def step(n: int, row=row, model=model, private=private, loss=loss, batch=batch) -> None:
            if row.method != "plain training":
                private.step([batch] * n)
            for _ in range(n if row.method == "plain training" else 0):
                loss(model, batch).sum().backward()

        step(1)  # the first batch of a model is measured by a second backward pass
        costs = []
        for n in (2, 3):
            with sdpa_kernel(SDPBackend.MATH):  # what the meta device runs: attention that keeps its probabilities
                costs.append(dryrun.measure(lambda n=n: step(n)))
            model.zero_grad()
        sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in model.parameters()]
        beside = row.total_bytes - sum(size for size, _ in sizes) - 2 * sum(size for size, trained in sizes if trained)
        assert costs[1].flops - costs[0].flops == pytest.approx(row.flops, rel=0.02), row.method
        if "train_only=head" in row.method:  # the peak is the sum, where only a CPU looks whether a record is dropped
            assert costs[1].peak_bytes <= 1.1 * beside, row.method
        else:
            assert costs[1].peak_bytes == pytest.approx(beside, rel=0.1), row.method


def test_peak_memory_sees_the_peak_and_forgets_what_is_freed() -> None:
    weight = torch.ones(1000)
    with dryrun.PeakMemory() as memory:
        view = weight.view(10, 100)  # nothing new
        assert memory.live == 0
        big = torch.ones(5000)
        del big
        small = view + 1
    assert (memory.live, memory.peak) == (4000, 20000)
    assert small.shape == (10, 100)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["./nowhere"], ["MODEL", "nowhere", "config.json"]),
        (
            ["{folder}", "--task", "image-classification"],
            ["--task", "image-classification", "sequence-classification"],
        ),
        (["{folder}", "--carriers", "r=99"], ["--carriers", "99", "at most"]),
        (["{folder}", "--carriers", "rank=3"], ["--carriers", "rank=3", "r, sparsity"]),
        (["{folder}", "--carriers", "sparsity=1"], ["--carriers", "sparsity", "'1'", ">= 0 and < 1"]),
    ],
)
def test_wrong_request_is_one_line(
    arguments: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = saved(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["doctor", *(argument.format(folder=folder) for argument in arguments)])
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert err.count("\n") == 1
    assert all(word in err for word in words), err
