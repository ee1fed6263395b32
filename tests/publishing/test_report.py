"""The report for a privacy officer: what it says follows from the statement, and a stranger's text stays text."""

import base64
import copy
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
import yaml

from hf_private.accounting.events import Event
from hf_private.accounting.risk import risk
from hf_private.publishing.pictures import budget_svg, tradeoff_svg
from hf_private.publishing.report.content import Joint, Report, build_report, statement_risk
from hf_private.publishing.report.cyclonedx import to_cyclonedx
from hf_private.publishing.report.history import MOST_PHASES, history
from hf_private.publishing.report.markdown import to_markdown
from hf_private.publishing.report.page import to_html
from hf_private.publishing.report.registry import FILL_IN, to_registry, to_yaml
from hf_private.publishing.verify import Finding, Verdict, verify
from hf_private.spending.statement import build_statement, rebuild
from tests.support.card_facts import event, facts

CARDS = Path(__file__).parents[2] / "model_cards"
HOLDS = Verdict((Finding("epsilon", "holds", "it is what it is"),))


def statement(events: list[dict] | None = None, run: dict | None = None, **settings: Any) -> dict[str, Any]:
    return build_statement(facts(events, run, **settings), {"model.safetensors": "ab" * 32})


def report_on(given: dict[str, Any], verdict: Verdict = HOLDS, joint: Joint | None = None) -> Report:
    return build_report(given, verdict, "some-model", "2026-11-18", joint)


def card_report(name: str) -> Report:
    given = json.loads((CARDS / name / "privacy.json").read_text())
    return build_report(given, verify(str(CARDS / name)), name, "2026-11-18")


class Tags(HTMLParser):
    """Checks that tags are closed in order, and collects tags, attributes and text."""

    VOID = {"meta", "br", "circle", "path"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def banner(html: str) -> str:
    match = re.search(r'class="banner (\w+)"', html)
    assert match
    return match[1]


# ---- what it says


@pytest.fixture(scope="module", params=["sst2_bk", "digits_rgp"])
def private_card(request: pytest.FixtureRequest) -> Report:
    return card_report(request.param)


def test_report_of_a_published_card(private_card: Report) -> None:
    given = private_card.statement
    events = [Event.from_dict(one) for one in given["ledger"]["events"]]
    expected = risk(events, given["guarantee"]["delta"])
    assert private_card.status == "private"
    assert private_card.risk == expected
    text, html = to_markdown(private_card), to_html(private_card)
    assert banner(html) == "good"
    for words in (text, Tags(html).text):
        assert f"epsilon = {given['guarantee']['epsilon']}, delta = {given['guarantee']['delta']}" in words
        assert f"{math.ceil(1000 * expected.accuracy) / 10:.1f} %" in words
        assert given["ledger"]["head"] in words and given["weights"]["model.safetensors"] in words
    components = [one.component for section in private_card.sections for one in section.answers]
    assert components == [
        "Privacy parameters",
        "Unit of privacy",
        "Algorithms and correctness",
        "Utility",
        "Bias",
        "Query model",
        "Trust model",
        "Side channels",
        "Security and access control",
        "Data collection exposure",
    ]


def test_golden_attack_rates_are_shown() -> None:
    text = to_markdown(card_report("sst2_bk"))
    assert "65.2 %" in text and "10.3 %" in text and "30.3 %" in text
    assert "99.97" not in text, "epsilon alone turned into odds"


@pytest.mark.parametrize(
    "given",
    [
        json.loads((CARDS / "digits_np" / "privacy.json").read_text()),
        statement(run={"reproducible": True}),
        statement(run={"log_nonprivate": True}, log_nonprivate=True),
    ],
    ids=["no noise", "fixed key", "losses logged"],
)
def test_not_private_is_said_in_red_and_nothing_is_claimed(given: dict[str, Any]) -> None:
    report = report_on(given)
    html = to_html(report)
    assert report.status == "not private" and report.risk is None
    assert banner(html) == "bad" and report.headline.startswith("NOT PRIVATE")
    assert all(reason in Tags(html).text for reason in given["not_private_because"])
    assert "<svg" not in html
    for text in (html, to_markdown(report)):
        assert "at most" not in text and "is protected less. Neighbouring" not in text
    properties = {one["name"]: one["value"] for one in to_cyclonedx(report)["components"][0]["properties"]}
    assert properties["hf_private:private"] == "false" and properties["hf_private:epsilon"] == "inf"
    assert "quantitativeAnalysis" not in to_cyclonedx(report)["components"][0]["modelCard"]


def test_a_wrong_claim_is_said_in_red() -> None:
    found = Verdict((Finding("epsilon", "wrong", "`guarantee.epsilon` is 0.1, it is 0.31"),))
    report = report_on(statement(), found)
    assert report.status == "wrong" and report.risk is None and banner(to_html(report)) == "bad"
    assert "it is 0.31" in Tags(to_html(report)).text
    with pytest.raises(ValueError, match="registry"):
        to_registry(report)


def test_what_could_not_be_checked_is_in_the_banner() -> None:
    report = report_on(statement(), Verdict((Finding("weights", "cannot tell", "`model.safetensors` is missing"),)))
    assert report.status == "private" and "`model.safetensors` is missing" in report.reasons[0]


def test_tuning_and_groups_are_charged_in_the_attack_rates() -> None:
    alone = statement_risk(statement()).advantage
    tuned = rebuild(statement() | {"tuning": {"runs": 4, "law": "fixed"}})
    assert statement_risk(tuned).advantage > 1.5 * alone
    chosen = statement_risk(rebuild(statement() | {"tuning": {"runs": 4, "law": "geometric"}}))
    assert chosen.advantage > alone and "geometric" in chosen.note
    assert "geometric" in to_markdown(report_on(rebuild(statement() | {"tuning": {"runs": 4, "law": "geometric"}})))
    person = statement(records_per_unit=3, run={"records_per_unit": 3})
    assert statement_risk(person).advantage > 2 * alone
    assert "person with up to 3 records" in report_on(person).headline


def test_lineage_names_what_is_continued_and_other_releases() -> None:
    given = statement()
    given["ledger"]["continues"] = [{"head": "cd" * 32, "length": 7}]
    given["runs"][0]["set_aside"] = [{"unknown": True}]
    joint = Joint((("some-model", "0.31", "1e-05", "10"), ("other", "0.31", "1e-05", "10")), 0.45, 1e-5, None)
    text = to_markdown(report_on(given, joint=joint))
    assert "cdcdcdcdcdcdcdcd (7 lines)" in text and "on other records: 1" in text
    assert "All of them together: epsilon = 0.45" in text and "| other | 0.31" in text
    worse = Joint(joint.releases, math.inf, 1e-5, None)
    assert "All of them together: NOT PRIVATE" in to_markdown(report_on(given, joint=worse))


# ---- budget over time


def test_history_ends_with_the_claim() -> None:
    given = statement([event(4.0, 10), event(3.0, 20, q=0.05)])
    first, second = history(given)
    assert second.epsilon == pytest.approx(given["guarantee"]["epsilon_unrounded"], rel=1e-9)
    alone = statement([event(4.0, 10)])["guarantee"]["epsilon_unrounded"]
    assert first.epsilon == pytest.approx(alone, rel=1e-9) and first.epsilon < second.epsilon
    steps, epsilons = zip(*(first.points + second.points), strict=True)
    assert steps[0] == 0 and steps[-1] == 30 and list(steps) == sorted(steps)
    assert list(epsilons) == sorted(epsilons)


def test_history_is_per_person() -> None:
    given = statement(records_per_unit=3, run={"records_per_unit": 3})
    assert history(given)[-1].epsilon == pytest.approx(given["guarantee"]["epsilon_unrounded"], rel=1e-9)


def test_too_many_phases_are_not_drawn() -> None:
    given = statement()
    given["ledger"]["events"] = [event(4.0 + i, 1) for i in range(MOST_PHASES + 1)]
    assert history(given) == ()
    assert "many phases" in to_markdown(report_on(given))


# ---- how it looks


def test_html_is_self_contained(private_card: Report) -> None:
    html = to_html(private_card)
    tags = Tags(html)
    assert not {"script", "link", "img", "iframe", "object", "a"} & {tag for tag, _ in tags.seen}
    for _, attributes in tags.seen:
        assert not {"src", "href", "onload", "onclick", "style"} & attributes.keys()
    assert "url(" not in html and "@import" not in html
    assert "default-src 'none'" in html
    assert "prefers-color-scheme:dark" in html and "@media print" in html


HOSTILE = "<script>alert(1)</script> | `x` [a](http://b)\n# heading"


def test_text_of_a_statement_stays_text() -> None:
    given = statement()
    given["dataset"]["name"] = given["scope"]["base_model"] = given["mechanism"]["method"] = HOSTILE
    given["caveats"], given["audit"], given["versions"]["torch"] = [HOSTILE], {"mia": HOSTILE}, HOSTILE
    verdict = Verdict((Finding("card", "holds", HOSTILE),))
    report = build_report(given, verdict, HOSTILE, HOSTILE)
    html, text = to_html(report), to_markdown(report)
    assert "<script" not in html and HOSTILE.split("\n")[0] in Tags(html).text
    assert "<script" not in text and not re.search(r"(?<!\\)\]\(http", text)
    assert [line for line in text.splitlines() if line.startswith("# ")] == [text.splitlines()[0]]
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables} <= {4, 5, 7}
    assert yaml.safe_load(to_yaml(to_registry(report))) == to_registry(report)


def test_tradeoff_picture_shows_the_bound_above_chance(private_card: Report) -> None:
    found = private_card.risk
    assert found is not None
    svg = ElementTree.fromstring(tradeoff_svg(found.curve, found.tpr))
    space = "{http://www.w3.org/2000/svg}"
    paths = {path.get("class"): path.get("d", "") for path in svg.iter(f"{space}path") if path.get("class") != "grid"}

    def points(path: str) -> list[tuple[float, float]]:
        return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", path)]

    (left, bottom), (right, top) = points(paths["chance"])
    line = points(paths["line"])
    assert len(line) == len(found.curve) and line[0][0] == left and line[-1] == (right, top)
    for x, y in line[:-1]:
        assert y <= bottom + (x - left) / (right - left) * (top - bottom)
    assert [y for _, y in line] == sorted((y for _, y in line), reverse=True)
    for x, y in points(paths["line"])[::10]:  # back from the picture to the rates
        rate, share = (10 ** (5 * ((v - a) / (b - a) - 1)) for v, a, b in ((x, left, right), (y, bottom, top)))
        expected = min(found.curve, key=lambda point: abs(math.log(point[0] / rate)))[1]
        assert share == pytest.approx(expected, rel=0.01)
    labels = [text.text for text in svg.iter(f"{space}text") if text.get("class") == "bound"]
    assert labels == [f"≤ {math.ceil(1000 * share) / 10:.1f} %" for share in found.tpr.values()]


def test_budget_picture_is_rounded_up_and_inside() -> None:
    svg = budget_svg([[(0, 0.0), (10, 1.001)], [(10, 1.001), (30, 1.999)]], 2.0)
    ElementTree.fromstring(svg)
    assert ">1.01<" in svg and ">2.00<" in svg and "budget 2" in svg


# ---- the registry: fields of schemas/deployments-schema.yaml of opendp/deployments-registry-data, commit 057e5d8

TEXT = {"type": "string", "minLength": 1}


def closed(required: str = "", **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": required.split(), "properties": properties}


def texts(names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), TEXT)


DATE = {"type": "string", "pattern": r"^\d{4}-\d\d-\d\d$"}
CURATOR = closed(
    "data_curator_name data_curator_type",
    data_curator_name=TEXT,
    data_curator_type={"enum": ["Government", "Industry", "Nonprofit"]},
)
REGISTRY = closed(
    "url_slug deployment",
    url_slug=TEXT,
    deployment=closed(
        "basic administrative",
        basic=closed(
            "name data_curators description intended_use data_product_type data_product_region publication_date",
            **texts("name description intended_use data_product_region"),
            data_curators={"type": "array", "minItems": 1, "items": CURATOR},
            data_product_type={"const": "Machine learning model"},
            publication_date=DATE,
        ),
        dp_variant=closed(variant_name={"const": "Approximate DP"}, **texts("data_domain unprotected_quantities")),
        privacy_loss=closed(
            **texts("privacy_unit privacy_unit_details privacy_parameters_details"),
            number_of_privacy_units={"type": "integer"},
            privacy_parameters=closed(epsilon={"type": "number"}, delta={"type": "number"}),
        ),
        deployment_model=closed(
            **texts("model_name_details trust_assumptions actors release_type_details"),
            model_name={"enum": ["Local", "Central", "Shuffle", "Federated", "Varies"]},
            release_type={"enum": ["One release", "Many releases"]},
            data_source_type={"enum": ["Static", "Dynamic"]},
            access_type={"enum": ["Interactive", "Non-interactive"]},
        ),
        implementation=closed(
            **texts(
                "preprocessing_and_hyperparameter_tuning mechanisms composition post_processing justification utility"
                " additional_information"
            )
        ),
        administrative=closed(
            "status registry_authors tier",
            status={"const": "Draft"},
            registry_authors={"type": "array", "minItems": 1, "items": TEXT},
            tier={"enum": [1, 2, 3]},
        ),
    ),
)


def test_registry_entry_has_the_published_fields(private_card: Report) -> None:
    entry = to_registry(private_card)
    jsonschema.validate(entry, REGISTRY)
    read = yaml.safe_load(to_yaml(entry))
    assert read == entry, "a date or a number must not change its type in YAML"
    guarantee = private_card.statement["guarantee"]
    loss = entry["deployment"]["privacy_loss"]
    assert loss["privacy_parameters"] == {name: guarantee[name] for name in ("epsilon", "delta")}
    assert loss["number_of_privacy_units"] == private_card.statement["dataset"]["num_records"]
    assert to_yaml(entry).count(FILL_IN) >= 5


def test_registry_does_not_count_people_that_it_does_not_know() -> None:
    entry = to_registry(report_on(statement(records_per_unit=3, run={"records_per_unit": 3})))
    jsonschema.validate(entry, REGISTRY)
    assert "number_of_privacy_units" not in entry["deployment"]["privacy_loss"]


def test_a_report_names_the_unit_of_a_column() -> None:
    unit = {"unit_column": "patient", "unit_sampling": "units", "records_per_unit": 8, "disjoint_units": False}
    given = facts(run={**unit, "num_units": 5000, "num_records": None}, **unit)
    given["dataset"] |= {"num_units": 5000, "num_records": None}
    report = report_on(build_statement(given, {}))
    assert "per `patient`" in report.headline and "person" not in to_markdown(report)
    assert "5,000 values of the column \\`patient\\`" in to_markdown(report)
    loss = to_registry(report)["deployment"]["privacy_loss"]
    assert loss["privacy_unit"] == "Unit-level (patient)" and loss["number_of_privacy_units"] == 5000


def test_registry_refuses_a_model_that_is_not_private() -> None:
    with pytest.raises(ValueError, match="registry"):
        to_registry(card_report("digits_np"))


# ---- CycloneDX 1.6: the parts of its schema that a model card uses

STRINGS = {"type": "array", "items": {"type": "string"}}
METRIC = closed(type=TEXT, value=TEXT)
IMAGE = closed("content", contentType=TEXT, encoding={"const": "base64"}, content=TEXT)
NAMED = {"type": "object", "required": ["type", "name"]}
MODEL_CARD = closed(
    **{"bom-ref": TEXT},
    modelParameters=closed(datasets={"type": "array", "items": closed(ref=TEXT)}),
    quantitativeAnalysis=closed(
        performanceMetrics={"type": "array", "items": METRIC},
        graphics=closed(description=TEXT, collection={"type": "array", "items": closed(name=TEXT, image=IMAGE)}),
    ),
    considerations=closed(
        technicalLimitations=STRINGS,
        ethicalConsiderations={"type": "array", "items": closed(name=TEXT, mitigationStrategy=TEXT)},
    ),
)
HASH = closed("alg content", alg={"const": "SHA-256"}, content={"type": "string", "pattern": "^[a-f0-9]{64}$"})
FILE = closed("type name", **{"bom-ref": TEXT}, type={"const": "file"}, name=TEXT, hashes={"items": HASH})
MODEL = closed(
    "type name modelCard",
    **{"bom-ref": TEXT},
    type={"const": "machine-learning-model"},
    name=TEXT,
    description=TEXT,
    modelCard=MODEL_CARD,
    pedigree=closed(ancestors={"type": "array", "items": NAMED}),
    components={"type": "array", "items": FILE},
    properties={"type": "array", "items": closed("name", name=TEXT, value=TEXT)},
)
BOM = closed(
    "bomFormat specVersion version components",
    **{"$schema": {"const": "http://cyclonedx.org/schema/bom-1.6.schema.json"}},
    bomFormat={"const": "CycloneDX"},
    specVersion={"const": "1.6"},
    serialNumber={"pattern": "^urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"},
    version={"const": 1},
    metadata=closed(timestamp={"pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"}, tools={"type": "object"}),
    components={"type": "array", "prefixItems": [MODEL, NAMED], "items": False},
)


@pytest.mark.parametrize("card", ["sst2_bk", "digits_rgp", "digits_np"])
def test_cyclonedx_has_the_published_structure(card: str) -> None:
    report = card_report(card)
    bom = to_cyclonedx(report)
    jsonschema.validate(bom, BOM, jsonschema.Draft202012Validator)
    references = re.findall(r'"bom-ref": "([^"]+)"', json.dumps(bom))
    assert len(references) == len(set(references)), "every bom-ref must be unique"
    assert bom["components"][0]["modelCard"]["modelParameters"]["datasets"][0]["ref"] in references
    if report.risk:
        analysis = bom["components"][0]["modelCard"]["quantitativeAnalysis"]
        metrics = {one["type"]: one["value"] for one in analysis["performanceMetrics"]}
        assert metrics["membership inference: largest advantage"] == str(report.risk.to_dict()["advantage"])
        ElementTree.fromstring(base64.b64decode(analysis["graphics"]["collection"][0]["image"]["content"]))


def test_the_structure_tests_can_fail() -> None:
    report = report_on(statement())
    bom, entry = to_cyclonedx(report), copy.deepcopy(to_registry(report))
    bom["components"][0]["modelCard"]["epsilon"] = 8
    entry["deployment"]["basic"]["publication_date"] = 2026
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(bom, BOM, jsonschema.Draft202012Validator)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(entry, REGISTRY)
