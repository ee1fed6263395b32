"""Content of a report as plain data: a pure function of the statement and the findings of `verify`."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_private.accounting.risk import Risk
from hf_private.publishing.pictures import budget_svg, tradeoff_svg
from hf_private.publishing.rounding import decimals, percent
from hf_private.publishing.section import unit_name
from hf_private.publishing.verify import HOLDS, SCOPE, UNKNOWN, WRONG, Verdict
from hf_private.spending.statement import statement_risk, to_text

from .answers import Answer, answers, number_of_units
from .history import Phase, history

PRIORS = (0.01, 0.1)  # at which the accuracy of the best guess is given, besides even odds
NOT_PRIVATE, CLAIM_WRONG, PRIVATE = "not private", "wrong", "private"


@dataclass(frozen=True)
class Section:
    """One part of a report. All texts are plain; the renderers escape them."""

    title: str
    paragraphs: tuple[str, ...] = ()
    answers: tuple[Answer, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    bullets: tuple[str, ...] = ()
    picture: str | None = None  # SVG


@dataclass(frozen=True)
class Joint:
    """Joint cost of several releases on the same records; `releases` are (name, epsilon, delta, steps)."""

    releases: tuple[tuple[str, str, str, str], ...]
    epsilon: float
    delta: float
    risk: Risk | None


@dataclass(frozen=True)
class Report:
    """A report, ready to be rendered.

    Attributes:
        status: "private", "not private" (by its own statement), or "wrong" (the claim does not follow from it).
        reasons: why it is not private or wrong, or what could not be checked.
        figures: (label, value, explanation), for the first look.
        risk: None if no attack is excluded.
    """

    name: str
    date: str
    status: str
    headline: str
    reasons: tuple[str, ...]
    figures: tuple[tuple[str, str, str], ...]
    sections: tuple[Section, ...]
    risk: Risk | None
    statement: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """JSON form, without the pictures."""
        return {
            "name": self.name,
            "date": self.date,
            "status": self.status,
            "headline": self.headline,
            "reasons": list(self.reasons),
            "epsilon": self.statement["guarantee"]["epsilon"],
            "delta": self.statement["guarantee"]["delta"],
            "risk": self.risk and self.risk.to_dict(),
            "statement_sha256": sha256(self.statement),
            "sections": [
                {
                    "title": section.title,
                    "paragraphs": list(section.paragraphs),
                    "answers": [
                        {
                            "component": one.component,
                            "question": one.question,
                            "answer": one.text,
                            "to_be_filled_in": one.open,
                        }
                        for one in section.answers
                    ],
                    "rows": [dict(zip(section.columns, row, strict=True)) for row in section.rows],
                    "bullets": list(section.bullets),
                }
                for section in self.sections
            ],
        }


def build_report(
    statement: dict[str, Any], verdict: Verdict, name: str, date: str, joint: Joint | None = None
) -> Report:
    """The report on one model.

    Args:
        statement: of the model, valid by its schema.
        verdict: what `verify` says of the model.
        name: of the model; not a path.
        date: of the report.
        joint: cost of this and other releases on the same records.
    """
    guarantee, private = statement["guarantee"], statement["private"]
    wrong = tuple(finding.message for finding in verdict.findings if finding.status == WRONG)
    if not private:
        status, headline = NOT_PRIVATE, "NOT PRIVATE. This model has no privacy guarantee."
        reasons = tuple(statement["not_private_because"])
    elif wrong:
        status, headline, reasons = CLAIM_WRONG, "THE PRIVACY CLAIM IS WRONG. Do not rely on this model's card.", wrong
    else:
        status = PRIVATE
        reasons = tuple(
            f"Not checked: {finding.message}." for finding in verdict.findings if finding.status == UNKNOWN
        )
        headline = (
            f"Differentially private: epsilon = {guarantee['epsilon']}, delta = {guarantee['delta']}, per"
            f" {unit(statement)}."
        )
    found = statement_risk(statement) if status == PRIVATE else None
    phases = history(statement) if status == PRIVATE else None
    return Report(
        name=name,
        date=date,
        status=status,
        headline=headline,
        reasons=reasons,
        figures=_figures(statement, found),
        sections=(
            _meaning(statement, found),
            Section(
                "Questions of NIST SP 800-226",
                (
                    "The components of the differential privacy pyramid in NIST SP 800-226, Guidelines for Evaluating"
                    " Differential Privacy Guarantees, from the strength of the guarantee down to what it rests on."
                    " Their names follow figure 1 and part III of the public draft (December 2023) and a summary of"
                    " the final text (March 2025), with which they were not compared word for word; the questions are"
                    " ours. Answers follow from the statement. What it cannot know is left open for you.",
                ),
                answers=answers(statement, status == PRIVATE),
            ),
            Section(
                "What is not covered",
                bullets=tuple(statement["scope"]["not_covered"]) if status == PRIVATE else ("everything",),
            ),
            Section("Caveats", bullets=tuple(statement["caveats"]) or ("None beyond the above.",)),
            _budget(statement, phases),
            _lineage(statement, joint),
            _evidence(statement, verdict),
        ),
        risk=found,
        statement=statement,
    )


def unit(statement: Mapping[str, Any]) -> str:
    """Whom the guarantee protects."""
    return unit_name(statement["privacy_unit"])


def sha256(statement: dict[str, Any]) -> str:
    """Hash of privacy.json as hf_private writes it."""
    return hashlib.sha256(to_text(statement).encode()).hexdigest()


def _figures(statement: dict[str, Any], found: Risk | None) -> tuple[tuple[str, str, str], ...]:
    guarantee = statement["guarantee"]
    if found is None:
        return (("epsilon", "none", "no bound is claimed"), ("best attack", "100 %", "nothing is excluded"))
    return (
        ("epsilon", str(guarantee["epsilon"]), f"rounded up, per {unit(statement)}"),
        ("delta", f"{guarantee['delta']:g}", _against_n(statement)),
        ("best attack's accuracy", f"≤ {percent(found.accuracy)}", "at even odds; 50 % is chance"),
        ("members found", f"≤ {percent(found.tpr[0.01])}", "at 1 % false alarms"),
    )


def _against_n(statement: dict[str, Any]) -> str:
    n = number_of_units(statement)
    return f"1 / n is {1 / n:.2g}" if n else "number of records not stated"


def _meaning(statement: dict[str, Any], found: Risk | None) -> Section:
    title = "What an attacker can learn"
    if found is None:
        return Section(
            title,
            (
                "No attack is excluded: whoever sees this model may be able to tell with certainty who was in its"
                " training data, and to read parts of that data. Treat the model, and everything that came out of its"
                " training, as you treat the training data.",
            ),
        )
    rows = [
        ("Accuracy of the best guess, members and others equally likely", percent(found.accuracy), "50 %"),
        ("Advantage: members found minus false alarms", percent(found.advantage), "0 %"),
        *(
            (f"Members found at {100 * rate:g} % false alarms", percent(share), f"{100 * rate:g} %")
            for rate, share in found.tpr.items()
        ),
        *(
            (
                f"Accuracy of the best guess, {100 * prior:g} % are members",
                percent(found.bayes_accuracy(prior)),
                f"{100 * (1 - prior):g} %",
            )
            for prior in PRIORS
        ),
    ]
    return Section(
        title,
        (
            f"Take any one {unit(statement)} out of the training data, or put one in. How well can somebody who sees"
            " the model tell which of the two happened? These are upper bounds over all attacks, with any other"
            " knowledge and any amount of computing, computed from the privacy profile of the recorded steps.",
            f"As a Gaussian mechanism: {found.gaussian}. Accountant: {found.accountant.upper()}."
            + (f" Note: {found.note}." if found.note else ""),
        ),
        columns=("attack", "at most", "without the model"),
        rows=tuple(rows),
        picture=tradeoff_svg(found.curve, found.tpr),
    )


def _budget(statement: dict[str, Any], phases: tuple[Phase, ...] | None) -> Section:
    title, target = "Budget over time", statement["settings"].get("target_epsilon")
    if not phases:
        why = "there are many phases" if phases is not None else "there is no epsilon that can be relied on"
        return Section(title, (f"Not shown, because {why}.",))
    paragraphs = [
        "Epsilon after each phase, all earlier steps on the same records included. A phase is all steps with the same"
        " settings; phases are in the order of their first steps.",
    ]
    if statement["tuning"]["runs"] and statement["tuning"]["runs"] > 1:
        paragraphs.append("These numbers are of this run alone; the claim also charges the runs tried before it.")
    total = 0
    rows = []
    for number, phase in enumerate(phases, start=1):
        total += phase.event.steps
        rows.append(
            (
                str(number),
                f"{phase.event.steps:,}",
                f"{phase.event.noise_multiplier:.6g}",
                f"{phase.event.sample_rate:.6g}",
                f"{total:,}",
                decimals(phase.epsilon, 4),
            )
        )
    budget = float(target) if isinstance(target, int | float) else None
    return Section(
        title,
        tuple(paragraphs),
        columns=("phase", "steps", "noise multiplier", "sample rate", "steps so far", "epsilon so far"),
        rows=tuple(rows),
        picture=budget_svg([phase.points for phase in phases], budget),
    )


def _lineage(statement: dict[str, Any], joint: Joint | None) -> Section:
    base, sources = statement["scope"]["base_model"], statement["ledger"].get("continues") or ()
    paragraphs = [f"Base model: {base or 'not named'}. What it was trained on is not covered by this statement."]
    if sources:
        heads = ", ".join(
            f"{str(one.get('head'))[:16]} ({one.get('length')} lines)" for one in sources if isinstance(one, dict)
        )
        paragraphs.append(
            f"Earlier private training whose steps are included in epsilon: {len(sources)}. Ledger heads: {heads}."
        )
    else:
        paragraphs.append("No earlier private training on these records is included.")
    aside = sum(len(run.get("set_aside") or ()) for run in statement["runs"])
    if aside:
        paragraphs.append(
            f"Earlier private training that is not included, because it was stated to be on other records: {aside}."
        )
    if joint is None:
        paragraphs.append(
            "Other releases on the same records add up. None was named for this report: name them with --also."
        )
        return Section("Lineage and other releases", tuple(paragraphs))
    together = (
        f"All of them together: epsilon = {joint.epsilon}, delta = {joint.delta}."
        if math.isfinite(joint.epsilon)
        else "All of them together: NOT PRIVATE, because one of them is not."
    )
    paragraphs.append(f"{together} {joint.risk or ''}".strip())
    columns = ("release on the same records", "epsilon", "delta", "steps")
    return Section("Lineage and other releases", tuple(paragraphs), columns=columns, rows=joint.releases)


def _evidence(statement: dict[str, Any], verdict: Verdict) -> Section:
    ledger, audit = statement["ledger"], statement["audit"]
    conclusion = {
        HOLDS: f"hf-private verify: the claim holds. {SCOPE}",
        UNKNOWN: "hf-private verify: no check failed, but not everything could be checked. See below.",
        WRONG: "hf-private verify: the claim does not hold."
        if statement["private"]
        else "hf-private verify: NOT PRIVATE, by its own statement.",
    }
    audited = ", ".join(f"{name} {value}" for name, value in (audit or {}).items())
    versions = ", ".join(f"{name} {version}" for name, version in statement["versions"].items())
    return Section(
        "Evidence",
        (
            conclusion[verdict.status],
            f"Audit by attacks: {audited or 'none attached'}. An audit finds mistakes; it does not prove privacy.",
        ),
        columns=("check", "result", "what was found"),
        rows=tuple((finding.check, finding.status, finding.message) for finding in verdict.findings),
        bullets=(
            f"Statement: privacy.json, sha256 {sha256(statement)}",
            f"Ledger: {ledger['length']} lines, head {ledger['head'] or 'none'}; it stays with whoever trained",
            *(f"Weights: {name}, sha256 {digest}" for name, digest in statement["weights"].items()),
            f"Made with {versions}",
        ),
    )
