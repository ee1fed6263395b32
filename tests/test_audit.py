"""The attacks: golden values, bounds that hold as often as they say, models that leak and models that do not."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from card_facts import facts, saved_model
from scipy import stats
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from hf_private import audit
from hf_private.audit_canaries import CanaryTrainer, audit_run, small_task
from hf_private.audit_mia import read_records
from hf_private.audit_step import audit_step
from hf_private.bookkeeping import BookKeeper
from hf_private.cards import CARD, write_card
from hf_private.cli import main
from hf_private.clipping import Clipping
from hf_private.losses import PerSampleLoss
from hf_private.noise import NoiseSource
from hf_private.record import read_record
from hf_private.trainer import DPTrainer
from hf_private.verification import verify

# ---- one run


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct", "delta", "epsilon"),
    [
        (1000, 100, 100, 1e-5, 3.465376),
        (1000, 100, 95, 1e-5, 2.165176),
        (1000, 200, 180, 1e-5, 1.796285),
        (1000, 1000, 600, 1e-5, 0.297227),
        (1000, 1000, 500, 1e-5, 0.0),
        (500, 50, 50, 1e-5, 2.770507),
        (200, 40, 40, 1e-5, 2.548240),
        (2000, 200, 200, 1e-5, 4.139242),
        (5000, 500, 500, 1e-5, 4.977758),
        (1000, 100, 100, 0.0, 3.492965),
    ],
)
def test_one_run_golden_values(canaries: int, guesses: int, correct: int, delta: float, epsilon: float) -> None:
    assert audit.one_run_epsilon(canaries, guesses, correct, delta) == pytest.approx(epsilon, abs=1e-6)


def test_one_run_without_delta_is_a_binomial_tail() -> None:
    """With delta = 0 the bound is the Clopper-Pearson bound of the rate of right guesses, as log odds."""
    low = stats.binomtest(90, 100).proportion_ci(0.90, "exact").low  # one-sided at 95 %
    assert audit.one_run_epsilon(300, 100, 90, 0.0) == pytest.approx(np.log(low / (1 - low)), abs=1e-6)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_a_private_run_is_rarely_accused_and_a_worse_one_often(epsilon: float) -> None:
    """Randomised response at epsilon, the worst case of the theorem; the control answers at three times that."""
    generator, accused = np.random.default_rng(0), {}
    for actual in (epsilon, 3 * epsilon):
        accused[actual] = 0
        for _ in range(200):
            coins = generator.random(400) < 0.5
            truthful = generator.random(400) < 1 / (1 + np.exp(-actual))
            scores = np.where(truthful == coins, 1.0, 0.0) + 1e-3 * generator.random(400)
            accused[actual] += audit.guess_coins(scores, coins, 1e-6).contradicts(epsilon)
    assert accused[epsilon] <= 20  # 5 % of 200 are 10; 20 has probability 0.002
    assert accused[3 * epsilon] > 100


def test_guesses_are_fixed_in_advance_and_split_evenly() -> None:
    coins = np.array([True] * 50 + [False] * 50)
    found = audit.guess_coins(np.arange(100.0)[::-1], coins, 1e-5, guesses=20)
    assert (found.guesses, found.correct, found.highest) == (20, 20, found.epsilon)
    assert audit.guess_coins(np.arange(100.0), coins, 1e-5, guesses=20).correct == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((100, 200, 10, 1e-5), "guesses"),
        ((100, 50, 60, 1e-5), "correct"),
        ((0, 1, 1, 1e-5), "canaries"),
        ((100, 50, 40, 1.0), "delta"),
    ],
)
def test_wrong_counts_are_named(arguments: tuple, named: str) -> None:
    with pytest.raises(ValueError, match=f"`{named}`"):
        audit.one_run_epsilon(*arguments)


# ---- membership inference: the arithmetic


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (3, 10), (10, 10), (520, 1000)])
def test_clopper_pearson(successes: int, trials: int) -> None:
    exact = stats.binomtest(successes, trials).proportion_ci(0.95, "exact")
    assert audit.clopper_pearson(successes, trials) == pytest.approx((exact.low, exact.high), abs=1e-12)


def test_auc_and_rates_by_counting() -> None:
    generator = np.random.default_rng(1)
    members, others = generator.integers(0, 9, 40) + 2.0, generator.integers(0, 9, 60) + 0.0
    pairs = members[:, None] - others
    assert audit.auc(members, others) == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean())
    wanted = max((members >= t).mean() for t in range(20) if (others >= t).mean() <= 0.1)
    assert audit.tpr_at(members, others, 0.1) == pytest.approx(wanted)
    false, true = audit.roc(members, others)
    assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1) and (np.diff(true) >= 0).all()


def test_equal_scores_are_near_one_half_as_often_as_the_interval_says() -> None:
    """The threshold comes from the other half: with one's own it would find what is not there (the control)."""
    generator, outside, own = np.random.default_rng(2), 0, []
    for seed in range(200):
        members, others = generator.normal(size=(2, 60))
        found = audit.infer_membership(members, others, 1e-5, seed)
        outside += not found.interval[0] <= 0.5 <= found.interval[1]
        thresholds = np.concatenate([members, others])
        own.append(max(((members >= t).mean() + (others < t).mean()) / 2 for t in thresholds))
    assert outside <= 20
    assert np.mean(own) > 0.55


@pytest.mark.parametrize("side", [1, -1])
def test_the_bound_of_epsilon_holds_and_is_not_empty(side: int) -> None:
    """Members score above 0 with e^eps / (1 + e^eps), others with the opposite: epsilon is 2, either way round."""
    generator, bounds = np.random.default_rng(3), []
    for _ in range(100):
        right = generator.random((2, 1000)) < 1 / (1 + np.exp(-2.0))
        members, others = np.where(right[0], 1.0, -1.0), np.where(right[1], -1.0, 1.0)
        bounds.append(audit.infer_membership(members, others, 1e-6, confidence=0.95).epsilon)
    assert np.mean(np.array(bounds) > 2.0) <= 0.1
    assert np.median(bounds) > 1.4


def test_too_few_records_and_broken_losses_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 4 records each, got 3"):
        audit.infer_membership(np.zeros(3), np.zeros(9), 1e-5)
    with pytest.raises(ValueError, match="`others` must have finite"):
        audit.infer_membership(np.zeros(9), np.full(9, np.nan), 1e-5)


# ---- membership inference: models

WORDS = [f"w{i}" for i in range(40)]


def texts(count: int, seed: int) -> list[tuple[str, int]]:
    """Random sentences with random labels: nothing can be learned about them but themselves."""
    generator = np.random.default_rng(seed)
    return [(" ".join(generator.choice(WORDS, 6)), int(generator.integers(2))) for _ in range(count)]


def write_tsv(path: Path, rows: list[tuple[str, int]]) -> str:
    path.write_text("text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows))
    return str(path)


def saved(folder: Path, model: Any, rows: list[tuple[str, int]], steps: int) -> str:
    """A model, trained without privacy on some rows, with its tokenizer."""
    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, **{w: i + 2 for i, w in enumerate(WORDS)}}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    batch = dict(tokenizer([text for text, _ in rows], padding=True, return_tensors="pt"))
    batch.pop("token_type_ids", None)
    language = isinstance(model, GPT2LMHeadModel)
    batch["labels"] = batch["input_ids"] if language else torch.tensor([label for _, label in rows])
    optimizer, loss = torch.optim.Adam(model.parameters(), 3e-3), PerSampleLoss(model)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model, batch).mean().backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments: the two files."""
    folder = tmp_path_factory.mktemp("data")
    train, test = (write_tsv(folder / f"{seed}.tsv", texts(120, seed)) for seed in (0, 1))
    return ["--members", train, "--others", test]


def small_bert() -> Any:
    return tiny.bert(hidden_size=32, intermediate_size=64)


def test_an_overfitted_classifier_is_found_and_an_untrained_one_is_not(
    tmp_path: Path, members: list[str], capsys: pytest.CaptureFixture
) -> None:
    leaky = saved(tmp_path / "leaky", small_bert(), texts(120, 0), steps=60)
    fresh = saved(tmp_path / "fresh", small_bert(), texts(120, 0), steps=0)
    plot = tmp_path / "roc.png"
    assert main(["audit", "mia", fresh, *members, "--compare", leaky, "--plot", str(plot), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["models"]
    assert found[leaky]["interval"][0] > 0.6 and found[leaky]["auc"] > 0.7 and found[leaky]["epsilon"] > 0.1
    assert found[fresh]["interval"][0] < 0.5 < found[fresh]["interval"][1]
    assert found[fresh]["epsilon"] == 0 and found[fresh]["claimed_epsilon"] == "inf"
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_a_language_model_that_knows_its_texts(
    tmp_path: Path, members: list[str], capsys: pytest.CaptureFixture
) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=2, n_layer=1, vocab_size=42, n_positions=16))
    leaky = saved(tmp_path / "lm", model, texts(120, 0), steps=60)
    assert main(["audit", "mia", leaky, *members]) == 0
    assert "Membership inference" in capsys.readouterr().out
    assert main(["audit", "mia", leaky, *members, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"][leaky]["interval"][0] > 0.55


def test_attached_to_the_card_and_a_contradicted_claim(
    tmp_path: Path, members: list[str], capsys: pytest.CaptureFixture
) -> None:
    folder = saved(tmp_path / "claims", small_bert(), texts(120, 0), steps=60)
    write_card(folder, facts())  # epsilon 0.309: not of this model
    assert main(["audit", "mia", folder, *members, "--attach"]) == 1
    out, err = capsys.readouterr()
    assert "contradicted" in out and "without noise" in err
    attached = read_record(folder)["audit"]
    assert attached["mia_success"] > 0.6 and attached["mia_is_private"] is False
    assert "mia_auc" in Path(folder, CARD).read_text()
    assert verify(folder).code == 0, "the record and its card stay consistent"


SCRIPT = """
from hf_private.audit_canaries import small_task

def make(trainer_class, folder):
    made = small_task(trainer_class, folder, accountant="rdp", target_epsilon=0.5, expected_batch_size=60)
    made.args.max_steps = 3
    return made
"""


@pytest.mark.parametrize("attack", ["canaries", "step"])
def test_a_runs_audit_is_attached_to_its_models_card(
    tmp_path: Path, capsys: pytest.CaptureFixture, attack: str
) -> None:
    folder, script = str(saved_model(tmp_path / "model")), tmp_path / "my_run.py"
    script.write_text(SCRIPT)
    size = {"canaries": ["--canaries", "20"], "step": ["--records", "3"]}[attack]
    assert main(["audit", attack, f"{script}:make", *size, "--attach", folder, "--json"]) == 0
    json.loads(capsys.readouterr().out)
    attached = read_record(folder)["audit"]
    wanted = {
        "canaries": {"canaries_canaries": 20, "canaries_contradicted": False, "canaries_steps": 3},
        "step": {"step_holds": True, "step_records": 3, "step_coupled_pairs": 0, "step_is_private": False},
    }[attack]
    assert wanted.items() <= attached.items()
    assert all(name in Path(folder, CARD).read_text() for name in wanted)
    assert verify(folder).code == 0, "the record and its card stay consistent"
    for arguments, words in (
        ([f"{script}:make", "--attach", str(tmp_path)], "a privacy.json"),
        (["--attach", folder], "RUN"),
    ):
        with pytest.raises(SystemExit):
            main(["audit", attack, *arguments])
        assert words in capsys.readouterr().err, "before the attack, not after it"


def test_files_of_records(tmp_path: Path) -> None:
    files = {
        "a.tsv": 'sentence\tlabel\nsay "hi\t1\n',
        "a.csv": 'label,text\n1,"say ""hi"\n',
        "a.json": json.dumps([{"text": 'say "hi', "label": 1}]),
        "a.jsonl": json.dumps({"text": 'say "hi', "label": 1}) + "\n\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        assert read_records(tmp_path / name) == [('say "hi', None, "1")]
    wrong = {"b.txt": "x", "b.json": "{", "c.json": "[1]", "c.tsv": "words\nx\n", "none.tsv": None}
    for name, content in wrong.items():
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=name):
            read_records(tmp_path / name)


# ---- canaries

FEW = {"accountant": "rdp", "target_epsilon": 0.5, "expected_batch_size": 60}


def short_run(trainer_class: Any, folder: str) -> DPTrainer:
    made = small_task(trainer_class, folder, **FEW)
    made.args.max_steps = 30
    return made


def test_a_canary_is_clipped_on_its_own_axis_and_a_silent_one_is_nowhere(tmp_path: Path) -> None:
    coins = np.array([True, False] * 5)
    made = short_run(lambda *a, **k: CanaryTrainer(*a, coins=coins, **k), str(tmp_path))
    made.check_canaries()
    records = [made.train_dataset[n] for n in range(100, 104)]  # two of them in, two silent
    batch = made.get_train_dataloader().collate_fn(records).micro_batches[0]
    with BookKeeper(made.model) as book:
        book.backward(PerSampleLoss(made.model)(made.model, batch))
        norms, axes = book.norms(), book.records()["canaries.axes.weight"].dense()[:, :, 0]
    assert norms.tolist() == pytest.approx([10, 0, 10, 0])
    assert [axis.nonzero().tolist() for axis in axes] == [[[1]], [], [[3]], []]
    assert (axes.sum(1)[[0, 2]] > 0).all()
    assert len(made.train_dataset) == 110, "the number of records does not tell the coins"


@pytest.mark.parametrize("carriers", [None, {"r": 2}])
def test_a_run_without_noise_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carriers: dict | None) -> None:
    monkeypatch.setattr(NoiseSource, "add_", lambda self, step, sums, stds, offsets=None: None)
    monkeypatch.setattr("hf_private.trainer.check_gradients", lambda *_: None)
    monkeypatch.setitem(FEW, "carriers", carriers)
    report = audit_run(short_run, str(tmp_path), canaries=300)
    assert report.found.epsilon > 1 and report.claimed <= 0.5 and report.contradicted


def test_the_command_audits_a_function(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    script = tmp_path / "my_run.py"
    script.write_text(
        "from hf_private.audit_canaries import small_task\n\n\n"
        "def make(trainer_class, folder):\n"
        f"    made = small_task(trainer_class, folder, **{FEW!r})\n"
        "    made.args.max_steps = 20\n    return made\n"
    )
    assert main(["audit", "canaries", f"{script}:make", "--canaries", "100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["contradicted"] is False and found["steps"] == 20 and found["claimed_epsilon"] <= 0.5
    with pytest.raises(SystemExit):
        main(["audit", "canaries", f"{script}:other"])
    assert "must name a function" in capsys.readouterr().err


def test_a_function_that_ignores_the_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="with the class that it is given"):
        audit_run(lambda _, folder: small_task(DPTrainer, folder), str(tmp_path), canaries=20)


# ---- one step


@pytest.mark.parametrize("method", [{}, {"carriers": {"r": 2}}, {"clipping": "per-layer"}, {"clipping": "automatic"}])
def test_a_right_step_has_the_sensitivity_that_the_noise_covers(tmp_path: Path, method: dict) -> None:
    made = tiny.trainer(tmp_path, dp={"clip_norm": 0.01, **method}, per_device_train_batch_size=3)
    report = audit_step(made, records=6)
    assert report.holds, report
    assert report.sensitivity <= 0.01 * (1 + 1e-3)
    if "clipping" not in method:
        assert report.sensitivity > 0.009, "gradients far above the clip norm use it up"


def coupled_loss(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """A mean over the batch's labelled records in disguise: the right shape, and every record feels the others."""
    losses = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="none")
    return losses * (1 + labels.float().sum())


def test_records_that_meet_in_the_loss_are_named(tmp_path: Path) -> None:
    report = audit_step(tiny.trainer(tmp_path, per_sample_loss=coupled_loss), records=5)
    removed = {pair[0] for pair in report.coupled}
    assert not report.holds and removed == {1, 3}, "records of label 1 change everybody's loss"


def test_clipping_that_does_not_clip_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clipping, "_factor", lambda self, sq_norm, clip_norm: torch.ones_like(sq_norm))
    report = audit_step(tiny.trainer(tmp_path, dp={"clip_norm": 0.01}), records=4)
    assert report.sensitivity > 0.02 and not report.holds


def test_uncovered_parameters_and_random_collators_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    class Noisy(tiny.Padding):
        def __call__(self, records: list) -> dict[str, torch.Tensor]:
            batch = super().__call__(records)
            batch["input_ids"] = torch.where(
                torch.rand(batch["input_ids"].shape) < 0.3, torch.tensor(4), batch["input_ids"]
            )
            return batch

    model = tiny.bert()
    model.unused = torch.nn.Linear(3, 3)
    report = audit_step(tiny.trainer(tmp_path, model=model, data_collator=Noisy()), records=4)
    assert {entry.name for entry in report.uncovered} == {"unused.weight", "unused.bias"}
    assert report.random_collator and not report.coupled and report.sensitivity <= 1.001
    assert main(["audit", "step", "--records", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["holds"] is True


# ---- the command line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["audit"], ["ATTACK"]),
        (["audit", "lira"], ["ATTACK", "'mia', 'canaries', 'step'", "lira"]),
        (["audit", "mia", "m", "--members", "a.tsv"], ["--others"]),
        (["audit", "mia", "m", "--members", "nowhere.tsv", "--others", "b.tsv"], ["nowhere.tsv"]),
        (
            ["audit", "mia", "m", "--members", "a", "--others", "b", "--delta", "2"],
            ["--delta", "between 0 and 1", "2"],
        ),
        (["audit", "canaries", "--canaries", "3"], ["--canaries", "a whole number >= 10", "3"]),
        (["audit", "canaries", "nowhere.py:f"], ["RUN", "FILE.py:FUNCTION", "nowhere.py:f"]),
        (["audit", "step", "--records", "1"], ["--records", "a whole number >= 2", "1"]),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1
    assert all(word in err for word in words)


# ---- the whole thing, in minutes


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0, 0.1])
def test_a_broken_trainer_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    """No noise, or a tenth of it: the small run at epsilon 1 is accused."""
    add = NoiseSource.add_

    def less(self: NoiseSource, step: int, sums: dict, stds: dict, offsets: dict | None = None) -> None:
        add(self, step, sums, {block: scale * std for block, std in stds.items()}, offsets)

    monkeypatch.setattr(NoiseSource, "add_", less)
    report = audit_run(small_task, str(tmp_path), canaries=1000)
    assert report.contradicted and report.found.epsilon > 2


@pytest.mark.slow
def test_a_right_trainer_is_not_accused_in_twenty_runs(tmp_path: Path) -> None:
    bounds = [audit_run(small_task, str(tmp_path / str(run)), canaries=1000) for run in range(20)]
    accused = sum(report.contradicted for report in bounds)
    assert accused == 0, f"{accused} of 20 accused"  # at 95 % one would be allowed; the bound is not tight
