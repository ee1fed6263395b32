"""Every recipe runs, with every method, from local files; every YAML file says what its recipe understands."""

import csv
import json
import math
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import data
import e2e
import epoch_time
import evaluate
import glue
import numpy as np
import options
import pretrain_tiny
import public_text
import pytest
import sweep
import synthesize
import torch
import twin
import vision
import yaml
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from hf_private import DPConfig, verify
from tests.support import zoo

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
CPU2 = RECIPES / "accelerate/cpu2.yaml"
WORDS = "a the film story plot is was not very good bad dull bright and of".split()
BASE = [
    "--max_steps", "2", "--expected_batch_size", "16", "--per_device_train_batch_size", "8", "--report_to", "none",
    "--save_strategy", "no", "--disable_tqdm", "true", "--use_cpu", "true",
]  # fmt: skip
PRIVATE = ["--noise_multiplier", "1.0", "--accountant", "rdp"]
SMALL = {
    "carriers": '{"r": 2}',
    "anchors": '{"k": 4, "num_anchors": 8, "target_modules": ["classifier"]}',
}
OTHERS = ("sft_sgd", "paired_sst2", "paired_small", "ablation_sst2", "ablation_digits")  # not read by options.py
CONFIGS = sorted(path for path in (RECIPES / "configs").glob("*.yaml") if path.stem not in OTHERS)
TABLES = [path for path in CONFIGS if path.stem.startswith("sweep")]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Data and models, made up and tiny: sst2/, e2e/, bert/, gpt2/."""
    folder, draw = tmp_path_factory.mktemp("recipes"), random.Random(0)
    for name, count, first in (("train", 60, 100), ("dev", 12, 0)):
        (folder / "sst2").mkdir(exist_ok=True)
        rows = [f'{i % 2}\t{" ".join(draw.choices(WORDS, k=draw.randint(3, 9)))} "' for i in range(count)]
        (folder / f"sst2/{name}.tsv").write_text("\n".join(["label\tsentence", *rows]) + "\n")
        (folder / "e2e").mkdir(exist_ok=True)
        with open(folder / f"e2e/{name}set.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["mr", "ref"])
            writer.writerows(
                [f"name[The Fox {fox}], food[fish]", f"Fox {fox}, {draw.choice(WORDS)}, serves fish."]
                for fox in (first + i // 3 for i in range(count))
            )
    make_bert(folder / "bert")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain_tiny, "python_documentation", lambda: ["Return the length of an object."] * 20)
        size = ["--layers", "1", "--width", "64", "--vocabulary", "300", "--sentences", "100", "--max_steps", "2"]
        small = ["--per_device_train_batch_size", "2", "--disable_tqdm", "true", "--use_cpu", "true"]
        pretrain_tiny.main([*size, *small, "--output_dir", str(folder / "gpt2")])
        again = [*size, *small, "--output_dir", str(folder / "gpt2_again"), "--save_steps", "1"]
        pretrain_tiny.main([*again, "--save_total_limit", "2"])
        shutil.rmtree(folder / "gpt2_again" / "checkpoint-2")  # as if it was stopped after one step
        pretrain_tiny.main(again)
    return folder


def make_bert(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(special + WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    size = {"hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 32}
    zoo.small("bert", vocab_size=len(special + WORDS), **size).save_pretrained(folder)


def arguments(recipe: str, method: str, files: Path, output: Path) -> list[str]:
    """The command line of a tiny run."""
    kind = next(iter(options.METHODS[method]), None)
    nested = [f"--{kind}", SMALL[kind]] if kind else []
    if method == "sparse":
        nested = ["--carriers", '{"r": null, "sparsity": 0.5}']
    own = {
        "glue": ["--model_name_or_path", str(files / "bert"), "--max_length", "16", "--data_dir", str(files)],
        "e2e": [
            "--model_name_or_path", str(files / "gpt2"), "--data_dir", str(files), "--max_length", "64",
            "--num_beams", "2", "--max_new_tokens", "4", "--max_meanings", "2",
        ],
        "vision": ["--max_train_records", "60", "--max_eval_records", "20"],
    }[recipe]  # fmt: skip
    budget = [] if method == "np" else PRIVATE
    return [*BASE, *budget, *own, *nested, "--method", method, "--rank", "2", "--output_dir", str(output)]


def check(folder: Path, method: str, metrics: set[str]) -> None:
    """A run left its scores, and a card whose claim holds (or none, if it is not private)."""
    results = json.loads((folder / "results.json").read_text())
    assert results["steps"] == 2 and results["method"] == method
    assert metrics <= results["metrics"].keys()
    if method == "np":
        assert results["epsilon"] is None
        assert "NOT PRIVATE" in (folder / "README.md").read_text()
    else:
        assert 0 < results["epsilon"] < 50
        assert verify(str(folder)).code == 0, verify(str(folder)).findings
    record = json.loads((folder / "privacy.json").read_text())
    assert record["dataset"]["name"], "the card names the data"
    assert method not in ("gep", "b-gep") or record["settings"]["anchors"]["dataset_name"]


# ---- runs


@pytest.mark.parametrize("method", options.METHODS)
def test_glue_runs_every_method(method, files, tmp_path):
    glue.main(arguments("glue", method, files, tmp_path))
    check(tmp_path, method, {"eval_accuracy"})


def test_the_twin_has_the_settings_but_neither_noise_nor_records(files, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(twin, "HELD_OUT", 40)
    line = arguments("glue", "lora", files, tmp_path)
    results = glue.main([*line, "--twin", "made-up", "--max_train_records", "30"])
    _, private, _ = options.parse(glue.GlueOptions, None, line)
    expected = twin.without_noise(private).to_dict()
    assert expected == {**private.to_dict(), "target_epsilon": None, "noise_multiplier": 0.0}
    assert expected.items() >= {k: v for k, v in results["dp_config"].items() if k != "expected_batch_size"}.items()
    record = json.loads((tmp_path / "privacy.json").read_text())
    assert record["dataset"]["name"] == "made-up" and record["dataset"]["num_records"] == 30
    assert not record["private"] and "most frequent class" in capsys.readouterr().out


def test_what_the_twins_accuracy_means():
    labels = [0] * 5 + [1] * 5
    assert "learning rate" in twin.verdict(0.55, labels) and "too loud" in twin.verdict(0.8, labels)


@pytest.mark.parametrize("text", [None, "not JSON", '{"sentence": "a", "label": 0}', '{"text": "a"}\n' * 20])
def test_a_file_that_is_no_twins_data_is_named(text, tmp_path):
    path = tmp_path / "public.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match="`--twin` must be `made-up` or a file.*columns sentence, label.*got"):
        twin.records(str(path), 30, ("sentence",), 2)


def test_twins_of_a_public_file_are_scored_on_other_records(tmp_path):
    rows = [{"sentence": f"a {i % 40}", "label": str(i % 2)} for i in range(100)]
    (tmp_path / "public.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    train, test = twin.records(str(tmp_path / "public.jsonl"), 30, ("sentence",), 2)
    assert len(train) == 30 and len(test) > 0 and not {*train["sentence"]} & {*test["sentence"]}


@pytest.mark.parametrize("method", ["np", "lora", "lsg"])
def test_e2e_trains_and_generates(method, files, tmp_path):
    e2e.main(arguments("e2e", method, files, tmp_path))
    check(tmp_path, method, {"eval_perplexity", "eval_bleu", "eval_rouge_l", "eval_nist", "eval_cider"})
    texts = [json.loads(line) for line in (tmp_path / "generated.jsonl").read_text().splitlines()]
    assert [text["mr"] for text in texts] == ["name[The Fox 0], food[fish]", "name[The Fox 1], food[fish]"]


def test_lora_can_train_embeddings_beside_its_adapters(files, tmp_path):
    e2e.main([*arguments("e2e", "lora", files, tmp_path), "--modules_to_save", "wte", "lm_head"])
    check(tmp_path, "lora", {"eval_perplexity"})
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert {name.split(".")[-2] for name in saved if "lora" not in name} == {"wte", "lm_head"}
    before = load_file(files / "gpt2/model.safetensors")["transformer.wte.weight"]
    for name in ("wte", "lm_head"):
        after = next(tensor for key, tensor in saved.items() if f"{name}." in key)
        assert after.shape == before.shape and not torch.equal(after, before)


@pytest.mark.parametrize("method", ["bk", "rgp", "gep"])
def test_vision_trains_a_vit(method, files, tmp_path):
    vision.main(arguments("vision", method, files, tmp_path))
    check(tmp_path, method, {"eval_accuracy"})


def test_vision_trains_a_wide_resnet_from_a_file(files, tmp_path):
    draw = np.random.default_rng(0)
    for split, count in (("train", 40), ("test", 10)):
        images = draw.integers(0, 255, (count, 8, 8, 3), dtype=np.uint8)
        np.savez(tmp_path / f"{split}.npz", images=images, labels=np.arange(count) % 10)
    carriers = '{"r": 2, "target_modules": ".*conv.*", "modules_to_save": ["norm1", "norm2", "norm"]}'
    run = ["--task", "cifar10", "--model_name_or_path", "wrn10-1", "--carriers", carriers, "--augment", "true"]
    own = ["--data_dir", str(tmp_path), "--output_dir", str(tmp_path / "out"), "--method", "lsg"]
    vision.main([*BASE, *PRIVATE, *run, *own])
    check(tmp_path / "out", "lsg", {"eval_accuracy"})


LAUNCHED = {"glue": "bk", "e2e": "rgp", "vision": "lsg"}


def test_recipes_run_under_accelerate_launch_on_two_ranks(files, tmp_path):
    lines = {recipe: arguments(recipe, method, files, tmp_path / recipe) for recipe, method in LAUNCHED.items()}
    (tmp_path / "all.py").write_text(  # one process for all three: most of the time goes into imports
        f"import runpy, sys\nsys.path.insert(0, {str(RECIPES)!r})\nfor name, line in {lines!r}.items():\n"
        f"    sys.argv = [name, *line]\n    runpy.run_path({str(RECIPES)!r} + f'/{{name}}.py', run_name='__main__')\n"
    )
    run = subprocess.run(
        [sys.executable, *"-m accelerate.commands.launch --config_file".split(), str(CPU2), str(tmp_path / "all.py")],
        capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    for recipe, method in LAUNCHED.items():
        check(tmp_path / recipe, method, set())


def test_the_small_gpt2_is_the_same_every_time_and_after_an_interruption(files):
    first, second = ((files / name / "model.safetensors").read_bytes() for name in ("gpt2", "gpt2_again"))
    assert first == second
    card = (files / "gpt2/README.md").read_text()
    assert "templates" in card and "Python" in card


def test_epoch_time_compares_with_the_stock_trainer(files, tmp_path):
    own = ["--methods", "bk", "--repeats", "1", "--results", str(tmp_path / "times")]
    run = ["--model_name_or_path", str(files / "bert"), "--max_length", "16", "--data_dir", str(files)]
    epoch_time.main([*own, *run, *BASE[:6], "--report_to", "none", "--use_cpu", "true", "--noise_multiplier", "1.0"])
    times = json.loads((tmp_path / "times.json").read_text())["seconds_per_1000_records"]
    assert times["stock"][0] > 0 and times["bk"][0] > 0
    assert "| stock |" in (tmp_path / "times.md").read_text()


# ---- settings


def options_class(path: Path) -> type:
    name = yaml.safe_load(path.read_text())
    if name.get("task") in vision.TASKS:
        return vision.VisionOptions
    if path.stem.startswith("synthesize"):
        return synthesize.SynthesisOptions
    return e2e.E2EOptions if path.stem.startswith("e2e") else glue.GlueOptions


@pytest.mark.parametrize("path", [path for path in CONFIGS if path not in TABLES], ids=lambda path: path.stem)
def test_every_config_is_understood_for_every_method(path, tmp_path):
    for method in options.METHODS:
        own, dp_config, args = options.parse(
            options_class(path), None, ["--config", str(path), "--method", method, "--output_dir", str(tmp_path)]
        )
        assert own.method == method
        assert dp_config.is_private == (method != "np")
        assert (dp_config.carriers is not None) == ("carriers" in options.METHODS[method])
        assert (dp_config.anchors is not None) == ("anchors" in options.METHODS[method])
        assert args.learning_rate > 0 and dp_config.expected_batch_size
    assert path.read_text().startswith("#") and f"{path.name}" in path.read_text().split("task:")[0]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_sweep_names_files_and_settings_that_exist(path):
    table = sweep.Sweep(str(path))
    for file in (f"recipes/{table.plan['recipe']}", table.plan["config"], table.plan.get("beside", "README.md")):
        assert (ROOT / file).is_file()
    tuned = table.tuning()
    cells = [*tuned, *table.table(tuned)]
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        settings = table.settings(cell) | {"config": str(ROOT / table.plan["config"]), "output_dir": cell.name}
        line = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
        own, dp_config, _ = options.parse(options_class(ROOT / table.plan["config"]), None, line)
        assert own.method == cell.method
        assert dp_config.target_epsilon == (cell.epsilon and float(cell.epsilon))


def test_the_command_line_wins_over_the_file_and_the_file_over_the_method(tmp_path):
    path = tmp_path / "some.yaml"
    path.write_text(
        "method: lsg\nlearning_rate: 1e-3\ntarget_epsilon: 8\ncarriers: {r: 4}\n"
        "by_method:\n  lsg: {carriers: {sparsity: 0.5}, clip_norm: 2}\n  bk: {learning_rate: 7.0e-4}\n"
    )

    def parse(*argv: str) -> tuple[options.RecipeOptions, DPConfig, object]:
        return options.parse(glue.GlueOptions, None, ["--config", str(path), "--output_dir", "x", *argv])

    _, dp_config, args = parse()
    assert (dp_config.carriers.r, dp_config.carriers.sparsity, dp_config.clip_norm) == (4, 0.5, 2)
    assert args.learning_rate == 1e-3
    _, dp_config, args = parse("--carriers", '{"r": 2}', "--learning_rate", "0.5", "--noise_multiplier", "2")
    assert (dp_config.carriers.r, dp_config.carriers.sparsity, args.learning_rate) == (2, 0.5, 0.5)
    assert (dp_config.target_epsilon, dp_config.noise_multiplier) == (None, 2.0)
    _, dp_config, args = parse("--method", "bk")
    assert dp_config.carriers is None and args.learning_rate == 7e-4
    _, dp_config, _ = parse("--nonprivate")
    assert dp_config.carriers.r == 4 and dp_config.noise_multiplier == 0 and math.isinf(dp_config.clip_norm)


def test_mistakes_in_settings_are_named(tmp_path):
    path = tmp_path / "some.yaml"
    path.write_text("target_epsilon: 8\nlerning_rate: 1\n")
    with pytest.raises(ValueError, match="lerning_rate"):
        options.parse(glue.GlueOptions, None, ["--config", str(path)])
    with pytest.raises(ValueError, match="`method`.*rpg"):
        options.parse(glue.GlueOptions, None, ["--method", "rpg"])
    with pytest.raises(ValueError, match="--method bk"):
        options.parse(glue.GlueOptions, None, ["--method", "bk", "--carriers", '{"r": 2}'])
    with pytest.raises(ValueError, match="--leraning_rate"):
        options.parse(glue.GlueOptions, None, ["--target_epsilon", "8", "--leraning_rate", "1"])
    with pytest.raises(ValueError, match="`--carriers`.*r=4"):
        options.parse(glue.GlueOptions, None, ["--method", "rgp", "--carriers", "r=4"])
    with pytest.raises(ValueError, match="`--target_epsilon`"):
        options.parse(glue.GlueOptions, None, [])
    with pytest.raises(ValueError, match="`--output_dir`"):
        options.parse(glue.GlueOptions, None, ["--target_epsilon", "8"])
    path.write_text("by_method: {lgs: {}}\n")
    with pytest.raises(ValueError, match="some.yaml.*`by_method`.*lgs"):
        options.parse(glue.GlueOptions, None, ["--config", str(path)])
    path.write_text("a: [")
    for config in (path, tmp_path / "none.yaml"):
        with pytest.raises(ValueError, match=f"`--config`.*{config.name}"):
            options.parse(glue.GlueOptions, None, ["--config", str(config)])


# ---- data


def test_missing_data_says_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_PRIVATE_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=rf"train.*{tmp_path.name}.*HF_PRIVATE_DATA"):
        data.load("sst2", "train", str(tmp_path), ("train",), ("nyu-mll/glue", "sst2"), "train")
    with pytest.raises(FileNotFoundError, match="`--data_dir`"):
        data.load("sst2", "train", None, ("train",), ("nyu-mll/glue", "sst2"), "train")


def test_wrong_columns_labels_and_models_are_named(tmp_path):
    for split in ("train", "dev"):
        (tmp_path / f"{split}.tsv").write_text("target\ttext\n1\tgood\n")
    line = ["--target_epsilon", "8", "--output_dir", str(tmp_path), "--data_dir", str(tmp_path)]
    options_, *_ = options.parse(glue.GlueOptions, None, line)
    with pytest.raises(ValueError, match="train.tsv.*`sentence`"):
        glue.load_data(options_, None)
    rows = data.Dataset.from_list([{"sentence": "good", "label": "yes"}])
    with pytest.raises(ValueError, match="`label`.*'yes'"):
        glue.tokenized(rows, glue.TASKS["sst2"], None, 8)
    with pytest.raises(FileNotFoundError, match="outputs/gpt2_tiny.*recipes/pretrain_tiny.py"):
        data.model_path("outputs/gpt2_tiny")


def test_e2e_is_read_from_the_hubs_conversion(files, tmp_path, monkeypatch):
    """The repository itself holds a script, which `datasets` refuses, and its columns have other names."""
    asked = []

    def load_dataset(name: str, *, split: str, revision: str) -> data.Dataset:
        asked.append((name, split, revision))
        records = data.read(files / "e2e" / {"train": "trainset.csv", "validation": "devset.csv"}[split])
        rows = [{"meaning_representation": record["mr"], "human_reference": record["ref"]} for record in records]
        return data.Dataset.from_list(rows, info=data.DatasetInfo(dataset_name="e2e_nlg"))

    monkeypatch.delenv("HF_PRIVATE_DATA", raising=False)
    monkeypatch.setattr(data, "load_dataset", load_dataset)
    line = arguments("e2e", "rgp", files, tmp_path)
    at = line.index("--data_dir")
    e2e.main(line[:at] + line[at + 2 :])
    check(tmp_path, "rgp", {"eval_perplexity", "eval_bleu"})
    hub = "tuetschek/e2e_nlg", "refs/convert/parquet"
    assert asked == [(hub[0], split, hub[1]) for split in ("train", "validation")]


def test_local_files_in_every_format_give_the_same_records(tmp_path):
    records = [{"label": "1", "sentence": 'he said " ,'}, {"label": "0", "sentence": "x"}]
    (tmp_path / "a.tsv").write_text("label\tsentence\n" + "".join(f"{r['label']}\t{r['sentence']}\n" for r in records))
    (tmp_path / "a.csv").write_text('sentence,label\n"he said "" ,",1\nx,0\n')
    (tmp_path / "a.json").write_text(json.dumps(records))
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n\n")
    for ending in data.ENDINGS:
        assert data.read(tmp_path / f"a{ending}") == records, ending


def test_held_out_records_are_not_trained_on():
    from datasets import Dataset

    train, dev = Dataset.from_dict({"x": list(range(50))}), Dataset.from_dict({"x": [99]})
    rest, held = data.split_off(train, dev, holdout=10)
    assert sorted([*rest["x"], *held["x"]]) == list(range(50)) and len(held) == 10
    assert data.split_off(train, dev, holdout=10)[1]["x"] == held["x"]
    assert data.split_off(train, dev)[1]["x"] == [99]


def test_public_text_is_deterministic_and_long_enough():
    assert public_text.public_sentences(50) == public_text.public_sentences(50)
    assert not any("{" in sentence for sentence in public_text.public_sentences(500))
    assert sum(map(len, public_text.python_documentation())) > 200_000


def test_the_loss_counts_the_text_only(files):
    from datasets import Dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(files / "gpt2")
    assert e2e.prompt("name[The Fox], food[fish]") == "name : The Fox | food : fish ||"
    row = e2e.tokenized(Dataset.from_list([{"mr": "name[Fox]", "ref": "Fine."}]), tokenizer, 64)[0]
    text = [token for token in row["labels"] if token != -100]
    assert tokenizer.decode(text) == " Fine." + tokenizer.eos_token
    assert tokenizer.decode(row["input_ids"]) == "name : Fox || Fine." + tokenizer.eos_token


# ---- scores


def test_accuracy_and_f1():
    accuracy, f1 = (evaluate.load(str(RECIPES / "metrics" / name)) for name in ("accuracy", "f1"))
    assert accuracy.compute(predictions=[1, 0, 1, 1], references=[1, 0, 0, 1]) == {"accuracy": 0.75}
    assert f1.compute(predictions=[1, 0, 1, 1], references=[1, 0, 0, 1]) == {"f1": pytest.approx(0.8)}
    assert f1.compute(predictions=[0], references=[0]) == {"f1": 0.0}


def test_texts_are_scored_against_all_their_references():
    nlg = evaluate.load(str(RECIPES / "metrics" / "nlg"))
    references = [["the fox serves very good fish", "good fish at the fox"], ["this is a cheap bar by the river"]]
    exact = nlg.compute(predictions=[references[0][0], references[1][0]], references=references)
    assert exact["bleu"] == pytest.approx(100) and exact["rouge_l"] == pytest.approx(100)
    second = nlg.compute(predictions=["good fish at the fox", references[1][0]], references=references)
    assert second["rouge_l"] == pytest.approx(100)  # the best reference counts, not the first
    wrong = nlg.compute(predictions=["nothing of it", "nor here"], references=references)
    assert all(wrong[name] < exact[name] / 10 for name in ("bleu", "rouge_l", "nist", "cider"))
