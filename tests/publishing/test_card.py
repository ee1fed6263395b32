"""The card: a record that follows from facts, numbers never too small, a section that survives its neighbours."""

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
from huggingface_hub import ModelCard
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from hf_private import __version__
from hf_private.accounting.composition import best_of_epsilon
from hf_private.accounting.events import Event
from hf_private.accounting.risk import risk
from hf_private.publishing.card import CARD, render_card, split_card, weight_hashes, write_card
from hf_private.publishing.curve import CURVE_FILE
from hf_private.publishing.rounding import percent
from hf_private.publishing.schema import violations
from hf_private.publishing.section import TAGS, card_tags, render_section
from hf_private.publishing.template_versions import in_own_words
from hf_private.spending.statement import STATEMENT, build_statement, read_statement, rebuild, round_up, schema
from tests.support import zoo
from tests.support.card_facts import event, facts, saved_model

G3 = {"sigma": 1.253827, "steps": 680, "q": 2000 / 67349}

TRAINERS_CARD = """---
library_name: transformers
license: mit
base_model: prajjwal1/bert-tiny
tags:
- generated_from_trainer
model-index:
- name: out
  results: []
---

# out

This model is a fine-tuned version of bert on an unknown dataset.
It achieves the following results on the evaluation set:
- Loss: 0.6931
- Accuracy: 0.5000
- Epsilon: 0.1234

## Model description

More information needed

## Training procedure

The following hyperparameters were used during training:
- learning_rate: 5e-05
- seed: 42
- optimizer: Use adamw_torch_fused with betas=(0.9,0.999) and epsilon=1e-08 and optimizer_args=No additional arguments

### Training results

| Training Loss | Epoch | Step | Validation Loss | Accuracy |        |
|:-------------:|:-----:|:----:|:---------------:|:--------:|:------:|
| 0.4321        | 1.0   | 5    | 0.6931          | 0.5000   | 0.1234 |

### Framework versions
"""


@given(st.floats(1e-9, 1e4))
def test_epsilon_is_rounded_up_and_not_far(value: float) -> None:
    rounded = round_up(value)
    assert rounded >= value
    assert rounded <= value + 0.01 + 1e-9
    assert rounded <= value * 1.0101 or value >= 1
    assert len(f"{rounded:.12g}") <= 14
    assert round_up(rounded) == rounded


def test_golden_run_is_claimed_as_computed() -> None:
    built = build_statement(facts([event(**G3)]), {})
    assert built["guarantee"]["epsilon"] == 3.3
    assert built["guarantee"]["accountants"]["pld"]["upper"] == pytest.approx(3.2897949, abs=1e-4)
    curve = {point["epsilon"]: point["delta"] for point in built["guarantee"]["curve"]}
    assert 9e-6 < curve[3.3] <= 1e-5, "the claimed pair lies on the curve"
    assert list(curve.values()) == sorted(curve.values(), reverse=True)


def runs() -> list:
    lsg = {"r": 8, "sparsity": 0.3, "target_modules": "all-linear"}
    return [
        pytest.param(facts(), True, id="BK"),
        pytest.param(facts(carriers={"r": 8}), True, id="RGP"),
        pytest.param(facts(carriers=lsg), True, id="LSG"),
        pytest.param(facts([event(releases=2)], anchors={"k": 20, "residual": True}), True, id="GEP"),
        pytest.param(facts([event(), event(2.0, 3)]), True, id="two phases"),
        pytest.param(facts(clip_norm="inf", noise_multiplier=0.0, events=[event(0.0)]), False, id="no noise"),
        pytest.param(facts(run={"reproducible": True}), False, id="fixed key"),
        pytest.param(facts(run={"log_nonprivate": True}), False, id="log_nonprivate"),
        pytest.param(facts([{**event(), "sampling": "shuffle"}]), False, id="shuffled"),
    ]


@pytest.mark.parametrize(("given_facts", "private"), runs())
def test_record_and_card_of_every_kind_of_run(given_facts: dict, private: bool, tmp_path: Path) -> None:
    folder = saved_model(tmp_path, given_facts)
    built = read_statement(folder)
    jsonschema.validate(built, schema())
    assert list(violations(built, schema())) == []
    assert in_own_words(rebuild(built)) == built
    assert built["private"] is private
    assert (built["guarantee"]["epsilon"] == "inf") is not private
    assert built["weights"] == weight_hashes(folder)
    card = ModelCard.load(folder / CARD)
    block, text = card.data["differential_privacy"], card.text
    assert block["epsilon"] == built["guarantee"]["epsilon"]
    assert ({*TAGS} <= {*card.data.tags}) is private
    assert (CURVE_FILE in text) is private is (folder / CURVE_FILE).is_file()
    assert text.strip().split("\n")[1].startswith("> [!CAUTION]") is not private
    assert built["mechanism"]["method"] in text
    assert card.data.base_model == "FacebookAI/roberta-base" and "`nyu-mll/glue`" in text
    assert card.data.datasets == ["nyu-mll/glue"]


def test_gep_is_charged_for_both_parts_on_one_sample() -> None:
    one, two = (build_statement(facts([event(releases=n)]), {}) for n in (1, 2))
    assert two["guarantee"]["epsilon"] == one["guarantee"]["epsilon"]
    naive = build_statement(facts([{**event(), "releases": [4.0, 4.0]}]), {})
    assert naive["guarantee"]["epsilon"] > 1.3 * one["guarantee"]["epsilon"]


@pytest.mark.parametrize(("epsilon", "percent"), [(0.0, "50.01"), (1.0, "73.11"), (3.3, "96.45"), (8.0, "99.97")])
def test_plain_words_give_the_best_guess(epsilon: float, percent: str) -> None:
    built = build_statement(facts(), {})
    built["guarantee"] |= {"epsilon": epsilon, "delta": 1e-9}
    assert f"right at most {percent} % of the time" in render_section(built)


def test_no_finite_epsilon_is_not_private() -> None:
    """A charge that nobody can compute is no claim: a random number of runs, for people with several records."""
    built = build_statement(facts(records_per_unit=2) | {"tuning": {"runs": 5, "law": "geometric"}}, {})
    assert built["not_private_because"] == ["no accountant gives a finite epsilon"]
    assert built["private"] is False and built["guarantee"]["epsilon"] == "inf"


def test_a_saved_model_without_a_step_claims_nothing() -> None:
    built = build_statement({**facts(), "ledger": {"events": [], "head": None, "length": 0}, "runs": []}, {})
    assert built["not_private_because"] == ["no private step is recorded"]
    assert built["guarantee"]["epsilon"] == "inf"
    assert "NOT PRIVATE" in render_card(built)


def test_people_with_several_records_pay_more() -> None:
    one, two = (build_statement(facts(records_per_unit=k), {}) for k in (1, 2))
    assert two["guarantee"]["epsilon"] > 1.8 * one["guarantee"]["epsilon"]
    assert "person with up to 2 records" in render_section(two)


@pytest.mark.parametrize(
    ("runs", "law", "golden"), [(10, "geometric", 6.69), (10, "logarithmic", 5.80), (2, "fixed", 4.772)]
)
def test_tuning_is_charged(runs: int, law: str, golden: float) -> None:
    built = build_statement({**facts([event(**G3)]), "tuning": {"runs": runs, "law": law}}, {})
    assert built["guarantee"]["epsilon"] == pytest.approx(golden, abs=0.03)
    assert f"{runs} runs ({law}), charged" in render_section(built)
    assert not any("not recorded how many runs" in line for line in built["caveats"])


def test_best_of_many_runs_agrees_with_dp_accounting() -> None:
    import dp_accounting as dp

    events = [Event(0.02, (1.2,), 300), Event(0.01, (2.0,), 100)]
    for mean, law, shape in ((5, "geometric", 1), (100, "geometric", 1), (10, "logarithmic", 0)):
        accountant = dp.rdp.RdpAccountant(orders=list(range(2, 65)))
        steps = [
            (dp.PoissonSampledDpEvent(e.sample_rate, dp.GaussianDpEvent(e.noise_multiplier)), e.steps) for e in events
        ]
        single = dp.ComposedDpEvent([dp.SelfComposedDpEvent(step, n) for step, n in steps])
        accountant.compose(dp.dp_event.RepeatAndSelectDpEvent(single, mean, shape))
        theirs = accountant.get_epsilon(1e-5)
        assert best_of_epsilon(events, 1e-5, mean, law) == pytest.approx(theirs, rel=2e-2)
        assert best_of_epsilon(events, 1e-5, mean, law) <= theirs + 1e-9, "more orders can only be tighter"
    assert best_of_epsilon([Event(0.1, (0.0,), 1)], 1e-5, 10) == math.inf
    with pytest.raises(ValueError, match="`runs`.*got 1"):
        best_of_epsilon(events, 1e-5, 1)


# ---- README.md, which others write too


def test_trainers_card_keeps_its_words_and_loses_what_is_not_private() -> None:
    built = build_statement(facts(), {})
    text = render_card(built, TRAINERS_CARD)
    assert "seed" not in text and "42" not in ModelCard(text).text.split("hf-private: end")[1]
    assert "Training Loss" not in text and "0.4321" not in text and "0.1234" not in text
    assert "| Epoch | Step | Validation Loss | Accuracy |" in text
    assert "| 1.0   | 5    | 0.6931          | 0.5000   |" in text
    assert "- learning_rate: 5e-05" in text and "- Accuracy: 0.5000" in text
    data = ModelCard(text).data
    assert data.license == "mit" and data.base_model == "prajjwal1/bert-tiny"
    assert data.tags == ["generated_from_trainer", *card_tags(built)]
    assert text.index("# out") < text.index("## Privacy") < text.index("## Model description")


def test_writing_again_changes_nothing_and_a_new_state_replaces_the_old() -> None:
    private, not_private = build_statement(facts(), {}), build_statement(facts(run={"reproducible": True}), {})
    once = render_card(private, TRAINERS_CARD)
    assert render_card(private, once) == once
    warned = render_card(not_private, once)
    assert warned.count("[!CAUTION]") == 1 and "differential-privacy" not in warned
    assert render_card(private, warned) == once


def test_survives_pefts_own_card_writing(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(zoo.small("bert"), LoraConfig(r=2, target_modules=["query"]))
    model.save_pretrained(tmp_path)
    given_facts = facts() | {"peft": "LORA"}
    write_card(tmp_path, given_facts)
    section = split_card((tmp_path / CARD).read_text()).section
    assert "on a LoRA adapter" in section
    model.save_pretrained(tmp_path)  # PEFT reloads the card and sets tags of its own
    write_card(tmp_path, given_facts)
    text = (tmp_path / CARD).read_text()
    assert split_card(text).section == section and text.count("## Privacy") == 1
    assert {*TAGS, "lora"} <= {*ModelCard(text).data.tags}
    assert "adapter_model.safetensors" in read_statement(tmp_path)["weights"]


def test_no_paths_of_this_machine(tmp_path: Path) -> None:
    given_facts = facts() | {"base_model": str(tmp_path)}
    card = TRAINERS_CARD.replace("prajjwal1/bert-tiny", str(tmp_path))
    card = card.replace("- generated_from_trainer", f"- base_model:adapter:{tmp_path}")
    (tmp_path / CARD).write_text(card)
    write_card(tmp_path, given_facts)
    assert str(tmp_path) not in (tmp_path / CARD).read_text() + (tmp_path / STATEMENT).read_text()
    assert read_statement(tmp_path)["scope"]["base_model"] == tmp_path.name


def test_what_others_recorded_is_kept(tmp_path: Path) -> None:
    folder = saved_model(tmp_path)
    changed = read_statement(folder) | {"tuning": {"runs": 3, "law": "fixed"}, "audit": {"epsilon_lower_bound": 0.1}}
    (folder / STATEMENT).write_text(json.dumps(changed))
    write_card(folder, facts())
    assert read_statement(folder)["tuning"] == {"runs": 3, "law": "fixed"}
    assert "epsilon_lower_bound 0.1" in (folder / CARD).read_text()


@pytest.mark.parametrize(("version", "tables"), [("0.1.0", 2), (__version__, 1)])
def test_card_is_valid_markdown_with_links_that_resolve(version: str, tables: int, tmp_path: Path) -> None:
    given_facts = facts()
    folder = saved_model(tmp_path, given_facts | {"versions": given_facts["versions"] | {"hf_private": version}})
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(split_card((folder / CARD).read_text()).section)
    inline = [child for token in tokens for child in token.children or ()]
    targets = [
        child.attrs.get("href") or child.attrs.get("src") for child in inline if child.type in ("link_open", "image")
    ]
    assert targets and all((folder / target).is_file() for target in targets)
    assert [token.type for token in tokens].count("table_open") == tables
    ElementTree.fromstring((folder / CURVE_FILE).read_text())


def test_the_picture_is_that_of_the_stated_trade_off_against_chance(tmp_path: Path) -> None:
    given = facts()
    given["versions"] = {**given["versions"], "hf_private": __version__}
    folder = saved_model(tmp_path, given)
    stated = (read_statement(folder) or {})["guarantee"]["risk"]
    bounds = risk([Event.from_dict(one) for one in given["ledger"]["events"]], given["settings"]["target_delta"])
    curve = dict(bounds.curve)
    for point in stated["tradeoff"]:
        assert curve[point["fpr"]] <= point["tpr"] <= min(1.001 * curve[point["fpr"]], 1.0)
    assert [stated["tradeoff"][i]["fpr"] for i in (0, -1)] == [1e-5, 1.0]
    picture = ElementTree.fromstring((folder / CURVE_FILE).read_text())
    texts = [element.text or "" for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    for found in stated["tpr_at_fpr"].values():
        assert f"≤ {percent(found)}" in texts
    assert "guessing at random" in texts and "prefers-color-scheme:dark" in (folder / CURVE_FILE).read_text()
    page = picture.find("{http://www.w3.org/2000/svg}rect")
    assert page is not None and page.get("class") == "page", "it does not rely on the page that shows it"


def test_warnings_are_in_the_record() -> None:
    weak = build_statement(facts([event(0.7, 40, 0.3)], target_delta=1e-3), {})
    text = " ".join(weak["caveats"])
    assert "above 10" in text and "not below 1 / 5000" in text and "how many runs" in text
    fast = build_statement(facts(noise="fast"), {})
    assert "not cryptographic" in " ".join(fast["caveats"])
    unchecked = build_statement(facts(run={"base_model_unchecked": True}), {})
    assert "could not be looked up" in " ".join(unchecked["caveats"])


@pytest.mark.parametrize("earlier", ["run", "base"])
def test_a_phase_does_not_hide_what_an_earlier_one_had_to_admit(earlier: str) -> None:
    """The settings are the last run's; an earlier run of the ledger, or the base model's, used weaker noise."""
    given, weak = facts(), {"noise": "fast", "disjoint_data": True}
    if earlier == "run":
        given["runs"].insert(0, {**given["runs"][0], **weak})
    else:
        given["ledger"]["continues"] = [{"head": "cd" * 32, "length": 3, **weak}]
    record = build_statement(given, {})
    assert record["randomness"]["noise"] == "fast" and record["randomness"]["cryptographic"] is False
    text = " ".join(record["caveats"])
    assert "not cryptographic" in text and "was stated, and not checked" in text
    assert "not cryptographic" not in " ".join(build_statement(facts(), {})["caveats"])


# ---- the schema


BUILT = build_statement(facts(), {"model.safetensors": "0" * 64})


def test_schema_names_every_field() -> None:
    assert {*schema()["properties"]} == {*BUILT}
