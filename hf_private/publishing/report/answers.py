"""The questions of NIST SP 800-226, answered from a statement."""

from dataclasses import dataclass
from typing import Any

from hf_private.publishing.section import phases_text, upper_bounds
from hf_private.spending.admissions import ADMISSIONS, admitted

TO_FILL_IN = "Not in the statement: fill in."


@dataclass(frozen=True)
class Answer:
    """A component of the pyramid, the question that it asks, and what the statement says; `open`: you have to add."""

    component: str
    question: str
    text: str
    open: bool = False


def answers(statement: dict[str, Any], claimed: bool) -> tuple[Answer, ...]:
    """One answer per component of the pyramid, from the top down.

    Args:
        claimed: whether the statement makes a claim that can be relied on.
    """
    return (
        Answer(
            "Privacy parameters",
            "How strong is the guarantee?",
            _parameters(statement) if claimed else "There is none that can be relied on.",
        ),
        Answer("Unit of privacy", "Whom does it protect?", _unit(statement) if claimed else "Nobody."),
        Answer("Algorithms and correctness", "How is it achieved?", _algorithm(statement)),
        Answer(
            "Utility",
            "Is the model accurate enough for its purpose?",
            "Metrics on the evaluation data are not part of the statement, and not covered by the guarantee.",
            open=True,
        ),
        Answer(
            "Bias",
            "Whom does the noise harm?",
            "Clipping and noise may cost small groups more accuracy than large ones (arXiv:1905.12101): measure it per"
            " group.",
            open=True,
        ),
        Answer(
            "Query model",
            "Does use of the model spend more?",
            "No. The model is one release: using it, however often, asks nothing of the training data. More training"
            " on the same data spends more."
            if claimed
            else "There is no budget: every use may reveal more.",
        ),
        Answer(
            "Trust model",
            "Who has to be trusted?",
            _trust(statement) if claimed else "Everybody who sees the model, as if they saw the training data.",
        ),
        Answer(
            "Side channels",
            "What else could leak?",
            _side_channels(statement) if claimed else "The model itself may leak.",
        ),
        Answer(
            "Security and access control",
            "Who can reach the raw data and the unfinished model?",
            "The ledger, the keys and everything before noise stay with whoever trained, and are not published with"
            " the model.",
            open=True,
        ),
        Answer("Data collection exposure", "How was the data collected and kept?", _data(statement), open=True),
    )


def number_of_units(statement: dict[str, Any]) -> int | None:
    """How many units delta is compared with; None if that is not stated."""
    return statement["dataset"].get("num_units") or statement["dataset"]["num_records"]


def _parameters(statement: dict[str, Any]) -> str:
    guarantee, tuning, n = statement["guarantee"], statement["tuning"], number_of_units(statement)
    bounds = upper_bounds(guarantee["accountants"])
    small = ""
    if n:
        small = f" Delta is {'below' if guarantee['delta'] < 1 / n else 'NOT below'} 1 / n = {1 / n:.2g}."
    drawn = "unit" if statement["privacy_unit"].get("sampling") == "units" else "record"
    tried = "is not recorded, and none of them is charged"
    if tuning["runs"]:
        tried = f"is {tuning['runs']:g} ({tuning['law']}), all charged"
    return (
        f"Epsilon = {guarantee['epsilon']} (rounded up) and delta = {guarantee['delta']}. Upper bounds of one run, per"
        f" {drawn}: {bounds}.{small} The number of runs that were tried {tried}."
    )


def _unit(statement: dict[str, Any]) -> str:
    unit = statement["privacy_unit"]
    k = unit["records_per_unit"]
    counted = "records"
    if unit.get("column"):
        counted = unit["sampling"]
        who = (
            f"One of the {unit['num_units']:,} values of the column `{unit['column']}`, with all its records; at most"
            f" {k} of them count in a step. People with several values are protected less."
        )
    elif k > 1:
        who = f"One person with up to {k} records. A person with more records is protected less."
    else:
        who = "One record. A person with several records is protected less."
    return f"{who} Neighbouring datasets differ by adding or removing one. The number of {counted} counts as public."


def _algorithm(statement: dict[str, Any]) -> str:
    mechanism, accounting = statement["mechanism"], statement["accounting"]
    return (
        f"{mechanism['method']}: {phases_text(mechanism['phases'])}. Clipping {mechanism['clipping']}, norm"
        f" {mechanism['clip_norm']}. Sampling {', '.join(statement['sampling']['declared']) or 'none'}. Optimizer"
        f" {mechanism['optimizer']}. Accounting: {accounting['library']}"
        f"{'; ' + accounting['note'] if accounting['note'] else ''}."
    )


def _trust(statement: dict[str, Any]) -> str:
    weak = admitted(statement)
    more = [ADMISSIONS[name] for name in ("ranks", "anchors", "disjoint_data") if name in weak]
    return " ".join((f"{statement['setting'][:1].upper()}{statement['setting'][1:]}.", *more))


def _side_channels(statement: dict[str, Any]) -> str:
    random = statement["randomness"]
    noise = "a cryptographic generator" if random["cryptographic"] else "a generator that is not cryptographic"
    logged = any(run.get("log_nonprivate") for run in statement["runs"])
    return (
        f"Noise from {noise}, keys {random['keys']}. Floating point: {random['floating_point']}; this is a mitigation,"
        f" not a proof. Losses without noise were {'LOGGED' if logged else 'not logged'}. The duration of training and"
        " the number of records are not hidden."
    )


def _data(statement: dict[str, Any]) -> str:
    data = statement["dataset"]
    return (
        f"Training data: {data['name'] or 'not named'}, {data['num_records'] or 'an unknown number of'} records."
        " Differential privacy protects what is published, not the data that was collected."
    )
