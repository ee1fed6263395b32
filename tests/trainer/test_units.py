"""DPTrainer with `unit_column`: draws, accounting, statement and card per unit; the column stays where it is."""

import json
import math
from collections import Counter
from pathlib import Path

import datasets
import pytest
import torch
from transformers import BertForSequenceClassification

from hf_private.accounting.budget import enforced_epsilon, epsilon
from hf_private.accounting.events import Event
from hf_private.cli.main import main
from hf_private.config import DPConfig
from hf_private.publishing.verify import verify
from hf_private.spending.ledger import LedgerError
from hf_private.spending.statement import round_up
from tests.support import training, zoo
from tests.support.training import KEY

COUNTS = (1, 2, 3, 5, 1, 1, 4, 2, 6, 1, 2, 12)  # records of each unit: 40
SECRET = "patient-of-ward-"
UNITS = {"unit_column": "who", "records_per_unit": 3, "expected_batch_size": 4}


def records(first="a"):
    """40 records of 12 units, in a mixed order."""
    names = [f"{SECRET}{first}{unit}" for unit, count in enumerate(COUNTS) for _ in range(count)]
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(1)).tolist()
    texts = training.text(seed=0 if first == "a" else 1)
    return [{**record, "who": names[i]} for record, i in zip(texts, order, strict=True)]


def trainer(folder, dp=None, **settings):
    return training.trainer(folder, dp=UNITS | (dp or {}), **{"records": records(), "key": KEY, **settings})


def trained(folder, **settings):
    made = trainer(folder, **settings)
    made.train()
    return training.weights(made.model)


# ---- what is trained


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_the_size_of_a_micro_batch_changes_nothing(tmp_path, rows):
    wanted = trained(tmp_path / "a", per_device_train_batch_size=8)
    got = trained(tmp_path / "b", per_device_train_batch_size=rows)
    assert (got - wanted).norm() <= 1e-5 * wanted.norm()
    tight = trained(tmp_path / "c", dp={"micro_batch_tokens": 20})
    assert (tight - wanted).norm() <= 1e-5 * wanted.norm()


METHODS = {
    "bk": {},
    "rgp": {"carriers": {"r": 2, "target_modules": "all-linear"}},
    "lsg": {"carriers": {"r": 2, "target_modules": "all-linear", "sparsity": 0.3}},
    "gep": {"anchors": {"k": 1, "num_anchors": 8, "groups": [".*"]}},
    "automatic": {"clipping": "automatic"},
    "per-layer": {"clipping": "per-layer"},
    "records": {"unit_sampling": "records"},
    "augmented": {"augmentations": 2},
}
PUBLIC = [{"input_ids": [9, 9, 5 + i, 7 + i, 6, 8], "labels": 0} for i in range(8)]


@pytest.mark.parametrize("name", METHODS)
def test_all_methods_and_clipping_styles_train(tmp_path, name):
    settings = {"anchor_dataset": PUBLIC} if name == "gep" else {}
    before = training.weights(zoo.small("bert"))
    one = trained(tmp_path / "one", dp=METHODS[name], **settings)
    other = trained(tmp_path / "other", dp=METHODS[name], per_device_train_batch_size=2, **settings)
    assert one.isfinite().all() and not torch.equal(one, before)
    assert (one - other).norm() <= 1e-5 * one.norm()


@pytest.mark.parametrize("kind", ["list", "dataset", "dataset, all columns", "list, all columns"])
def test_the_column_reaches_neither_model_nor_collator(tmp_path, kind):
    seen = set()

    class Watching(training.Padding):
        def __call__(self, rows):
            seen.update(name for row in rows for name in row)
            return super().__call__(rows)

    data = datasets.Dataset.from_list(records()) if "dataset" in kind else records()
    evaluation = records("other")[:6]
    evaluation = datasets.Dataset.from_list(evaluation) if "dataset" in kind else evaluation
    made = trainer(
        tmp_path,
        records=data,
        data_collator=Watching(),
        eval_dataset=evaluation,
        remove_unused_columns="all columns" not in kind,
    )
    made.train()
    made.evaluate()
    assert seen == {"input_ids", "labels"}
    assert (training.weights(made.model) - trained(tmp_path / "list")).norm() < 1e-6


def test_resuming_goes_on_with_the_draws_and_choices(tmp_path):
    wanted = trained(tmp_path / "whole", max_steps=6)
    half = trainer(tmp_path / "half", max_steps=6, save_strategy="steps", save_steps=3, callbacks=[training.Stop(3)])
    half.train()
    rest = trainer(tmp_path / "half", max_steps=6)
    rest.train(resume_from_checkpoint=True)
    assert (training.weights(rest.model) - wanted).norm() <= 1e-5 * wanted.norm()


def test_a_resumed_run_may_have_its_records_in_another_order(tmp_path):
    """It draws with a new key, from units that are read anew."""
    half = trainer(tmp_path, key=None, max_steps=6, save_strategy="steps", save_steps=3, callbacks=[training.Stop(3)])
    half.train()
    rest = trainer(tmp_path, key=None, records=records()[::-1], max_steps=6)
    rest.train(resume_from_checkpoint=True)
    assert training.steps(tmp_path) == 6
    assert all(event.sample_rate == 4 / 12 for event in training.ledger(tmp_path).events)


def test_one_unit_alone_trains_and_k_may_exceed_all_counts(tmp_path):
    alone = [{**record, "who": "me"} for record in training.text(records=5)]
    made = trainer(tmp_path, records=alone, dp={"records_per_unit": 100, "expected_batch_size": 1}, max_steps=1)
    made.train()
    (event,) = training.ledger(tmp_path).events
    assert event.sample_rate == 1 and made.num_units == 1


def test_a_step_looks_at_units_once_and_at_most_k_of_their_records(tmp_path):
    made = trainer(tmp_path, max_steps=30)
    loader = made.get_train_dataloader()
    assert loader.batch_sampler.sample_rate == 4 / 12 and len(loader) == 3
    names = [record["who"] for record in records()]
    most = 0
    for counter in range(30):
        rows = [row for unit in loader.batch_sampler.share(counter) for row in unit]
        assert len(set(rows)) == len(rows)
        most = max(most, *Counter(names[row] for row in rows).values(), 0)
    assert most == 3


def test_augmentations_pass_through_the_transform_each_time(tmp_path):
    calls = Counter()

    def transform(batch):
        calls.update(batch["id"])
        return {name: batch[name] for name in ("input_ids", "labels")}

    data = datasets.Dataset.from_list([{**record, "id": i} for i, record in enumerate(training.text())])
    made = training.trainer(
        tmp_path,
        records=data.with_transform(transform),
        dp={"augmentations": 3, "expected_batch_size": 4},
        key=KEY,
        max_steps=1,
        remove_unused_columns=False,
    )
    loader = made.get_train_dataloader()
    calls.clear()  # the collator's check has looked at some
    batch = next(batch for batch in loader if batch.size)  # a draw may be empty
    assert all(part.rows == part.total == 3 for part in batch.micro_batches)
    assert calls and all(count == 3 for count in calls.values())


# ---- what it costs, and what is said about it


def test_drawn_units_cost_what_records_of_a_dataset_of_units_cost(tmp_path):
    made = trainer(tmp_path, key=None)
    made.train()
    (event,) = training.ledger(tmp_path).events
    assert event == Event(4 / 12, (1.0,), 4)
    assert made.spending.records_per_unit == 1
    assert math.isclose(made.privacy_spent().epsilon, made.spending.epsilon(), rel_tol=0.01)


def test_drawn_records_cost_what_a_group_costs(tmp_path):
    made = trainer(tmp_path, key=None, dp={"unit_sampling": "records"})
    made.train()
    (event,) = training.ledger(tmp_path).events
    assert event == Event(4 / 40, (1.0,), 4)
    assert made.privacy_spent().epsilon == enforced_epsilon([event], 1e-5, records_per_unit=3)


@pytest.mark.parametrize("sampling", ["units", "records"])
def test_statement_and_card_name_the_unit_and_verify(tmp_path, sampling):
    made = trainer(tmp_path / "run", key=None, dp={"unit_sampling": sampling})
    made.train()
    made.save_model(tmp_path / "saved")
    statement = json.loads((tmp_path / "saved" / "privacy.json").read_text())
    assert statement["privacy_unit"] == {
        "unit": "unit",
        "records_per_unit": 3,
        "column": "who",
        "num_units": 12,
        "sampling": sampling,
    }
    card = (tmp_path / "saved" / "README.md").read_text()
    assert "per `who`; 12 units; at most 3 records of one in a step" in card
    assert f"4 {sampling} expected" in card
    verdict = verify(str(tmp_path / "saved"))
    assert verdict.code == 0, verdict.findings
    # how many records somebody has does not follow from public numbers
    assert (statement["dataset"]["num_records"] is None) == (sampling == "units")
    assert [run["num_records"] for run in statement["runs"]] == [None if sampling == "units" else 40]


@pytest.mark.parametrize("change", ["sampling", "column", "number", "k"])
def test_a_statement_that_says_another_unit_does_not_verify(tmp_path, change):
    made = trainer(tmp_path / "run", key=None, dp={"unit_sampling": "records"}, max_steps=1)
    made.train()
    made.save_model(tmp_path / "saved")
    path = tmp_path / "saved" / "privacy.json"
    statement = json.loads(path.read_text())
    if change == "sampling":
        statement["settings"]["unit_sampling"] = "units"
    elif change == "column":
        statement["settings"]["unit_column"] = "household"
    elif change == "number":
        statement["dataset"]["num_units"] = statement["privacy_unit"]["num_units"] = 400
    else:
        statement["settings"]["records_per_unit"] = statement["privacy_unit"]["records_per_unit"] = 1
    path.write_text(json.dumps(statement))
    found = [finding.message for finding in verify(str(tmp_path / "saved")).findings if finding.status == "wrong"]
    assert any("unit" in message for message in found), found


def test_no_id_is_in_any_file(tmp_path, caplog, capsys):
    made = trainer(tmp_path, key=None, eval_dataset=records("other")[:4], eval_strategy="steps", eval_steps=2)
    made.train()
    made.save_model()
    said = caplog.text + "".join(capsys.readouterr())
    assert SECRET not in said
    assert not [path for path in training.files(tmp_path) if SECRET.encode() in path.read_bytes()]


# ---- what is refused


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def test_a_unit_in_training_and_evaluation_is_refused(tmp_path):
    shared = [*records("other")[:5], {**records("other")[5], "who": records()[0]["who"]}]
    with pytest.raises(ValueError, match="`eval_dataset`.*row 5") as caught:
        trainer(tmp_path, eval_dataset=shared)
    assert SECRET not in str(caught.value)
    with pytest.raises(ValueError, match="`eval_dataset`"):
        trainer(tmp_path, eval_dataset={"one": records("other")[:5], "two": datasets.Dataset.from_list(shared)})
    made = trainer(tmp_path, eval_dataset=records("other")[:5])
    with pytest.raises(ValueError, match="`eval_dataset`"):
        made.evaluate(shared)
    with pytest.raises(ValueError, match="`eval_dataset`.*row 5"):
        made.evaluate(Stream(shared))
    trainer(tmp_path, eval_dataset=shared, dp={"disjoint_units": True}).evaluate()
    with pytest.raises(ValueError, match="`unit_column`") as caught:
        trainer(tmp_path, eval_dataset=training.text(records=4))
    assert "disjoint_units" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("then", "works"),
    [
        (UNITS, True),
        (UNITS | {"records_per_unit": 1}, True),  # the sensitivity to a unit does not depend on it
        (UNITS | {"unit_sampling": "records"}, False),
        (UNITS | {"unit_column": "labels_of_who"}, False),
        ({"expected_batch_size": 4}, False),
    ],
)
def test_a_model_is_continued_with_the_same_unit_only(tmp_path, then, works):
    data = [{**record, "labels_of_who": record["who"]} for record in records()]
    settings = {"key": None, "max_steps": 1, "records": data}
    first = trainer(tmp_path / "first", **settings)
    first.train()
    first.save_model(tmp_path / "saved")

    def again(folder, model=None, **dp):
        made = training.trainer(folder, model, dp=then | dp, **settings)
        made.train()
        return made

    def loaded():
        return BertForSequenceClassification.from_pretrained(tmp_path / "saved")

    if works:
        again(tmp_path / "first")
        made = again(tmp_path / "second", loaded())
        assert training.steps(tmp_path / "second") == 2
        made.save_model(tmp_path / "third")
        verdict = verify(str(tmp_path / "third"))
        assert verdict.code == 0, verdict.findings
        return
    with pytest.raises(LedgerError, match="`unit_column`"):
        again(tmp_path / "first")  # the same folder
    with pytest.raises(LedgerError, match="`unit_column`"):
        again(tmp_path / "second", loaded())
    with pytest.raises(LedgerError, match="`unit_column`"):
        again(tmp_path / "third", first.model)
    again(tmp_path / "fourth", loaded(), disjoint_data=True)
    assert training.steps(tmp_path / "fourth") == 1


OTHERS = {
    "records": {"expected_batch_size": 4},
    "stated": {"expected_batch_size": 4, "records_per_unit": 3},
    "units": UNITS,
    "other column": UNITS | {"unit_column": "labels_of_who"},
    "drawn records": UNITS | {"unit_sampling": "records"},
    "drawn records, k = 2": UNITS | {"unit_sampling": "records", "records_per_unit": 2},
}


@pytest.mark.parametrize("first", ["records", "stated", "units", "drawn records"])
def test_a_model_is_never_continued_with_another_unit(tmp_path, first):
    """From each unit to each other one. Without a column, a larger k prices all that was spent as a group."""
    data = [{**record, "labels_of_who": record["who"]} for record in records()]
    settings = {"max_steps": 1, "records": data}
    made = training.trainer(tmp_path / "first", dp=OTHERS[first], **settings)
    made.train()
    made.save_model(tmp_path / "saved")
    for name, dp in OTHERS.items():
        model = BertForSequenceClassification.from_pretrained(tmp_path / "saved")
        again = training.trainer(tmp_path / name, model, dp=dp, **settings)
        if name == first or {name, first} == {"records", "stated"}:
            again.train()
            k = 1 if name in ("units", "other column") else dp.get("records_per_unit", 1)
            events = training.ledger(tmp_path / name).events
            assert sum(event.steps for event in events) == 2
            assert again.privacy_spent().epsilon >= enforced_epsilon(events, 1e-5, "rdp", k) * (1 - 1e-6)
            continue
        with pytest.raises(LedgerError, match="`unit_column`"):
            again.train()
        assert not (tmp_path / name / "_dp" / "ledger.jsonl").exists(), "refused before anything is charged"


def test_a_batch_larger_than_the_number_of_units_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`expected_batch_size`"):
        trainer(tmp_path, dp={"expected_batch_size": 13})
    trainer(tmp_path, dp={"expected_batch_size": 13, "unit_sampling": "records"})


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"unit_column": "who\n| epsilon"}, "unit_column"),
        ({"unit_column": ""}, "unit_column"),
        ({"unit_column": "who", "unit_sampling": "people"}, "unit_sampling"),
        ({"unit_sampling": "records"}, "unit_sampling"),
        ({"disjoint_units": True}, "disjoint_units"),
        ({"unit_column": "who", "disjoint_units": "yes"}, "disjoint_units"),
        ({"augmentations": 0}, "augmentations"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        DPConfig(noise_multiplier=1.0, **settings)


def released(tmp_path, runs):
    """The folders of one-step runs, by name."""
    for name, dp in runs.items():
        made = training.trainer(tmp_path / f"run {name}", dp=dp, records=records(), max_steps=1)
        made.train()
        made.save_model(tmp_path / name)
    return {name: str(tmp_path / name) for name in runs}


def events_of(*places):
    statements = [json.loads((Path(place) / "privacy.json").read_text()) for place in places]
    return [Event.from_dict(event) for statement in statements for event in statement["ledger"]["events"]]


def test_releases_compose_per_unit_if_all_draw_the_same_unit(tmp_path, capsys):
    runs = {
        "units": UNITS,
        "again": UNITS | {"records_per_unit": 1},
        "group": UNITS | {"unit_sampling": "records"},
        "records": {"expected_batch_size": 4},
    }
    places = released(tmp_path, runs)
    capsys.readouterr()
    main(["compose", places["units"], places["again"], "--json"])
    found = json.loads(capsys.readouterr().out)
    events = events_of(places["units"], places["again"])
    assert all(event.sample_rate == 4 / 12 for event in events)
    assert found["epsilon"] == round_up(epsilon(events, found["delta"]).epsilon)
    for others in (["units", "records"], ["records", "units"], ["units", "group"], ["group", "records"]):
        with pytest.raises(SystemExit):
            main(["compose", *(places[name] for name in others)])
        assert "unit" in capsys.readouterr().err


def test_releases_of_groups_compose_as_groups(tmp_path, capsys):
    drawn = UNITS | {"unit_sampling": "records"}
    stated = {"expected_batch_size": 4, "records_per_unit": 3}
    runs = {"one": drawn, "two": drawn, "other k": drawn | {"records_per_unit": 2}, "stated": stated, "again": stated}
    places = released(tmp_path, runs)
    for pair in (["one", "two"], ["stated", "again"]):
        capsys.readouterr()
        main(["compose", *(places[name] for name in pair), "--json"])
        found = json.loads(capsys.readouterr().out)
        events = events_of(*(places[name] for name in pair))
        assert found["epsilon"] == round_up(enforced_epsilon(events, found["delta"], records_per_unit=3))
        assert found["records_per_unit"] == 3
        assert found["epsilon"] > 1.5 * epsilon(events, found["delta"]).epsilon
    for others in (["one", "other k"], ["one", "stated"]):
        with pytest.raises(SystemExit):
            main(["compose", *(places[name] for name in others)])
        assert "unit" in capsys.readouterr().err
