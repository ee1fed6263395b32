"""privacy.json: the facts of a run, and everything that follows from them.

What a run did (its ledger, settings, software) is taken as it is. All claims are computed from that here, by one pure
function, so that anyone can compute them again: `hf-private verify` does.
"""

import json
import math
from dataclasses import replace
from decimal import ROUND_CEILING, Decimal
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from hf_private._validate import integer_at_least
from hf_private.accounting.budget import delta_curve, enforced_epsilon, epsilon
from hf_private.accounting.composition import best_of_epsilon
from hf_private.accounting.events import Event
from hf_private.accounting.risk import Risk, risk
from hf_private.methods.registry import describe_method

from .admissions import MORE_RECORDS, NOT_COVERED, OTHER_UNITS, admitted, caveats, not_private
from .stated_unit import group_size

STATEMENT = "privacy.json"
SCHEMA_VERSION = 1
TRADEOFF = 4  # every fourth point of the trade-off curve is stated
CURVE = tuple(step / 10 for step in range(1, 17))  # points of delta(epsilon), as multiples of the claimed epsilon

FACTS = ("settings", "runs", "ledger", "dataset", "tuning", "audit", "evaluation", "versions", "weights")


def schema() -> dict[str, Any]:
    """The JSON Schema of privacy.json.

    >>> schema()["properties"]["schema_version"]
    {'const': 1}
    """
    return json.loads(files("hf_private.spending").joinpath("privacy_schema.json").read_text())


def round_up(value: float) -> float:
    """Round up to two decimals, or to three significant digits where those are finer: a claim is never too small.

    >>> round_up(3.2999973), round_up(8.001), round_up(0.012341), round_up(2.0)
    (3.3, 8.01, 0.0124, 2.0)
    """
    if not math.isfinite(value) or value == 0:
        return value
    exact = Decimal(repr(float(value)))
    last = min(-2, exact.adjusted() - 2)
    return float(exact.quantize(Decimal(1).scaleb(last), rounding=ROUND_CEILING))


def build_statement(facts: dict[str, Any], weights: dict[str, str]) -> dict[str, Any]:
    """The whole statement of a run.

    Args:
        facts: What `DPTrainer.privacy_record` returns: `ledger`, `runs`, `settings`, `dataset`, and so on.
        weights: sha256 of each file of weights that the claim is about.
    """
    facts = {"tuning": {"runs": None, "law": None}, "audit": None, **facts}
    settings, dataset, runs = facts["settings"], facts["dataset"], facts["runs"]
    events = [Event.from_dict(event) for event in facts["ledger"]["events"]]
    reasons = not_private(events, runs)
    delta, group = settings["target_delta"], group_size(settings)
    report = epsilon(events, delta)
    spent = _spent(events, delta, group, facts["tuning"])
    if not reasons and math.isinf(spent):
        reasons = ["no accountant gives a finite epsilon"]
    claimed = math.inf if reasons else round_up(spent)
    noise = admitted(facts).get("noise", "secure")
    statement = {
        "schema_version": SCHEMA_VERSION,
        "private": not reasons,
        "not_private_because": reasons,
        "guarantee": {
            "epsilon": claimed,
            "delta": delta,
            "epsilon_unrounded": math.inf if reasons else spent,
            "accountants": {
                name: {"lower": low, "estimate": middle, "upper": up}
                for name, (low, middle, up) in sorted(report.bounds.items())
            },
            "curve": _curve(events, report.epsilon),
            "risk": None if reasons else _stated(statement_risk(facts)),
        },
        "privacy_unit": _privacy_unit(settings, dataset),
        "adjacency": "add-or-remove-one",
        "setting": "central: whoever trains is trusted, everybody who sees the result is not",
        "scope": {
            "base_model": facts.get("base_model"),
            "released": ["the weights in this folder", "all earlier checkpoints of the run", "epsilon"],
            "not_covered": [
                OTHER_UNITS if text == MORE_RECORDS and settings.get("unit_column") else text for text in NOT_COVERED
            ],
        },
        "mechanism": {
            "method": describe_method(settings, facts.get("peft"), runs[-1].get("method") if runs else None),
            "peft": facts.get("peft"),
            "optimizer": facts.get("optimizer"),
            **{name: settings[name] for name in ("objective",) if name in settings},
            "clip_norm": settings["clip_norm"],
            "clipping": settings["clipping"],
            "expected_batch_size": settings["expected_batch_size"],
            "steps": sum(event.steps for event in events),
            "phases": [
                {
                    "noise_multiplier": event.noise_multiplier,
                    "sample_rate": event.sample_rate,
                    "steps": event.steps,
                    "releases_per_step": len(event.releases),
                }
                for event in events
            ],
        },
        "sampling": {
            "declared": sorted({event.sampling for event in events}),
            "implemented": "poisson",
            "max_batch": None,
        },
        "accounting": {
            "library": "hf_private: the larger of PRV's upper bound and PLD",
            "enforced_by": settings["accountant"],
            "eps_error": report.eps_error,
            "delta_error": report.delta_error,
            "note": report.note,
        },
        "randomness": {
            "noise": noise,
            "cryptographic": noise == "secure",
            "keys": "fixed" if any(run.get("reproducible") for run in runs) else "drawn from the operating system",
            "floating_point": "noise is added in float64 and rounded to the parameter's type",
        },
        **{name: facts.get(name) for name in FACTS},
        "weights": weights,
    }
    statement["dataset"] = {**dataset, "num_records_is_public": True}
    statement["caveats"] = caveats(statement)
    return plain(statement)


def statement_risk(facts: dict[str, Any]) -> Risk:
    """Upper bounds on what an attacker can learn about one unit, from all runs that are charged."""
    events = [Event.from_dict(event) for event in facts["ledger"]["events"]]
    settings, tuning = facts["settings"], facts["tuning"]
    runs, law = tuning["runs"] or 1, tuning["law"] or "fixed"
    law = law if runs > 1 else "fixed"
    return risk(events, settings["target_delta"], group_size(settings), runs=runs, law=law)


def _stated(found: Risk) -> dict[str, Any]:
    """Attack rates with the trade-off curve that the card draws; all values are rounded up."""
    shown = [{"fpr": rate, "tpr": min(_ceil_digits(share, 4), 1.0)} for rate, share in found.curve[::TRADEOFF]]
    return {**found.to_dict(), "tradeoff": shown}


def rebuild(statement: dict[str, Any]) -> dict[str, Any]:
    """The statement that follows from the facts in `statement`: the same, unless a claim or a fact was changed."""
    facts = {name: statement[name] for name in FACTS if name != "weights"}
    facts["base_model"], facts["optimizer"] = statement["scope"]["base_model"], statement["mechanism"]["optimizer"]
    facts["peft"] = statement["mechanism"]["peft"]
    return build_statement(facts, statement["weights"])


def plain(value: Any) -> Any:
    """Replace what JSON cannot say: infinity becomes the string "inf".

    >>> plain({"epsilon": math.inf, "steps": (1, 2)})
    {'epsilon': 'inf', 'steps': [1, 2]}
    """
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def to_text(statement: dict[str, Any]) -> str:
    """The bytes of privacy.json, as text."""
    return json.dumps(statement, indent=2, allow_nan=False) + "\n"


def read_statement(folder: str | Path) -> dict[str, Any] | None:
    """The statement in a folder; None if there is none."""
    path = Path(folder, STATEMENT)
    return json.loads(path.read_text()) if path.is_file() else None


def statement_on_hub(repo: str, revision: str | None = None) -> Path | None:
    """The statement of a Hub repository; None if it has none, ConnectionError if that cannot be found out."""
    path = try_to_load_from_cache(repo, STATEMENT, revision=revision)
    if path is _CACHED_NO_EXIST:
        return None
    try:
        return Path(path if isinstance(path, str) else hf_hub_download(repo, STATEMENT, revision=revision))
    except LocalEntryNotFoundError as error:  # offline
        raise ConnectionError("the Hub cannot be reached") from error
    except EntryNotFoundError:
        return None
    except Exception as error:  # whatever the network and the server may do
        raise ConnectionError(str(error).splitlines()[0]) from error


def _privacy_unit(settings: dict[str, Any], dataset: dict[str, Any]) -> dict[str, Any]:
    """What epsilon is per: a record, a person with up to k records, or a value of a column."""
    k = settings["records_per_unit"]
    if settings.get("unit_column") is None:
        return {"unit": "record" if k == 1 else "person", "records_per_unit": k}
    return {
        "unit": "unit",
        "records_per_unit": k,
        "column": settings["unit_column"],
        "num_units": dataset["num_units"],
        "sampling": settings["unit_sampling"],
    }


def _spent(events: list[Event], delta: float, unit: int, tuning: dict[str, Any]) -> float:
    """Epsilon per privacy unit, with the runs that were tried and thrown away."""
    runs, law = tuning["runs"], tuning["law"]
    if runs is not None:
        integer_at_least(1, **{"tuning.runs": runs})  # 1.999 runs must not be charged as one
    if runs is None or runs == 1 or law == "fixed":
        events = [replace(event, steps=(runs or 1) * event.steps) for event in events]
        return enforced_epsilon(events, delta, records_per_unit=unit)
    return best_of_epsilon(events, delta, runs, law) if unit == 1 else math.inf


def _curve(events: list[Event], spent: float) -> list[dict[str, float]]:
    """delta(epsilon) per record, rounded up."""
    if not 0 < spent < math.inf:
        return []
    points = delta_curve(events, [round_up(spent * factor) for factor in CURVE])
    return [{"epsilon": eps, "delta": _ceil_digits(delta)} for eps, delta in points]


def _ceil_digits(value: float, digits: int = 3) -> float:
    if value <= 0:
        return 0.0
    exact = Decimal(repr(value))
    return float(exact.quantize(Decimal(1).scaleb(exact.adjusted() - digits + 1), rounding=ROUND_CEILING))
