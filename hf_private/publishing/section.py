"""The parts of a model card that follow from its statement: privacy section, warning, curve and metadata.

All functions here are pure, so that `verify` can render the parts again and compare.
"""

import hashlib
import math
from string import Template
from typing import Any

from hf_private.spending.statement import STATEMENT, to_text

from .curve import curve_svg
from .pictures import tradeoff_svg
from .template_versions import template

TAGS = ("differential-privacy", "differential_privacy", "dp-sgd")
SHOWN = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4)  # rows of 0.1.0's table of delta(epsilon), as multiples of epsilon


def render_section(statement: dict[str, Any]) -> str:
    """The privacy section of a card, in the words of the statement's version."""
    name = "card.md" if statement["private"] else "card_not_private.md"
    return Template(template(statement, name)).substitute(template_fields(statement))


def render_caution(statement: dict[str, Any]) -> str:
    """The warning at the top of a card that claims no privacy; empty otherwise."""
    if statement["private"]:
        return ""
    return Template(template(statement, "caution.md")).substitute(template_fields(statement)).strip("\n")


def render_curve(statement: dict[str, Any]) -> str | None:
    """The picture of what attacks can find, in 0.1.0 of delta(epsilon); None for a run that is not private."""
    guarantee = statement["guarantee"]
    if not statement["private"] or not guarantee["curve"]:
        return None
    if risk := guarantee.get("risk"):
        marked = {float(rate): found for rate, found in risk["tpr_at_fpr"].items()}
        return tradeoff_svg([(point["fpr"], point["tpr"]) for point in risk["tradeoff"]], marked, alone=True) + "\n"
    bounds = guarantee["accountants"]
    epsilon = bounds["prv" if "prv" in bounds else "pld"]["upper"]
    return curve_svg(guarantee["curve"], epsilon, guarantee["delta"])


def yaml_block(statement: dict[str, Any]) -> dict[str, Any]:
    """The card's `differential_privacy` metadata."""
    guarantee = statement["guarantee"]
    mechanism = statement["mechanism"]
    phases = mechanism["phases"]
    return {
        "private": statement["private"],
        "epsilon": guarantee["epsilon"],
        "delta": guarantee["delta"],
        "unit": statement["privacy_unit"]["unit"],
        "records_per_unit": statement["privacy_unit"]["records_per_unit"],
        "adjacency": statement["adjacency"],
        "sampling": ", ".join(statement["sampling"]["declared"]),
        "method": mechanism["method"],
        "clip_norm": mechanism["clip_norm"],
        "noise_multiplier": [phase["noise_multiplier"] for phase in phases],
        "sample_rate": [phase["sample_rate"] for phase in phases],
        "steps": [phase["steps"] for phase in phases],
        "record": STATEMENT,
        "record_sha256": hashlib.sha256(to_text(statement).encode()).hexdigest(),
    } | {
        f"unit_{name}": statement["privacy_unit"][name]
        for name in ("column", "sampling")
        if name in statement["privacy_unit"]
    }


def card_tags(statement: dict[str, Any]) -> list[str]:
    """Tags of a card; only a private run gets those that say so."""
    return ["hf_private", *(TAGS if statement["private"] else ())]


def template_fields(statement: dict[str, Any]) -> dict[str, str]:
    """Values of the placeholders of all templates."""
    guarantee = statement["guarantee"]
    mechanism = statement["mechanism"]
    dataset = statement["dataset"]
    ledger = statement["ledger"]
    randomness = statement["randomness"]
    note = statement["accounting"]["note"]
    unit = statement["privacy_unit"]
    alone = unit["records_per_unit"] == 1 or unit.get("sampling") == "units"  # the accountants' numbers are per unit
    in_line = {
        "epsilon": guarantee["epsilon"],
        "delta": guarantee["delta"],
        "unit": unit_name(unit),
        "drawn": "units" if unit.get("sampling") == "units" else "records",
        "size": f"{unit['num_units']:,} units"
        if unit.get("sampling") == "units"
        else f"{dataset['num_records']} records",
        "odds": _best_guess(guarantee),
        **_attacks(guarantee.get("risk") or {}),
        "reasons": "; ".join(statement["not_private_because"]),
        "method": mechanism["method"],
        "phases": phases_text(mechanism["phases"]),
        "clipping": mechanism["clipping"],
        "clip_norm": mechanism["clip_norm"],
        "batch_size": mechanism["expected_batch_size"],
        "optimizer": mechanism["optimizer"],
        "accountants": upper_bounds(guarantee["accountants"]),
        "note": note or "none failed",
        "accountant_failures": f"; {note}" if note else "",
        "keys": randomness["keys"],
        "noise": "cryptographic" if randomness["cryptographic"] else "not cryptographic",
        "data": _code(dataset["name"]),
        "num_records": dataset["num_records"],
        "base_model": _code(statement["scope"]["base_model"]),
        "tuning": _tuning(statement["tuning"]),
        "audit": _audit(statement["audit"] or {}),
        "audit_values": ", ".join(f"{name} {value}" for name, value in (statement["audit"] or {}).items()) or "none",
        "ledger_length": ledger["length"],
        "ledger_head": _code((ledger["head"] or "")[:16]),
        "versions": ", ".join(f"{name} {version}" for name, version in statement["versions"].items()),
        "curve_note": "" if alone and not statement["tuning"]["runs"] else ", of this run alone",
    }
    blocks = {
        "unit_row": _unit_row(unit),
        "objective_row": _objective_row(mechanism.get("objective")),
        "quoted_reasons": "\n".join(f"> - {reason}" for reason in statement["not_private_because"]),
        "not_covered": _bullets(statement["scope"]["not_covered"]),
        "caveats": _bullets(statement["caveats"] or ["Nothing beyond the above."]),
        "curve_table": _curve_table(guarantee["curve"]),
    }
    return {name: _cell(value) for name, value in in_line.items()} | blocks


def unit_name(unit: dict[str, Any]) -> str:
    """The privacy unit as a noun, from a statement's `privacy_unit`."""
    if unit.get("column"):
        return f"`{unit['column']}`"
    k = unit["records_per_unit"]
    return "record" if k == 1 else f"person with up to {k} records"


def _unit_row(unit: dict[str, Any]) -> str:
    """A row of the table for a unit that a column names; empty otherwise."""
    if not unit.get("column"):
        return ""
    k = unit["records_per_unit"]
    most = f"at most {k} record{'' if k == 1 else 's'} of one in a step; {unit['sampling']} are drawn"
    return f"\n| Privacy unit | per `{unit['column']}`; {unit['num_units']:,} units; {most} |"


def _objective_row(objective: str | None) -> str:
    """A row of the table for an objective that has a name; empty otherwise."""
    return "" if objective is None else f"\n| Objective | {_cell(objective)} |"


def _cell(value: Any) -> str:
    """A value as it stands in a table: on one line, without column separators."""
    return " ".join(str(value).replace("|", "/").split())


def phases_text(phases: list[dict[str, Any]]) -> str:
    ran = [
        f"{phase['steps']} steps, noise multiplier {phase['noise_multiplier']:.6g},"
        f" sample rate {phase['sample_rate']:.6g}"
        for phase in phases
    ]
    return "; ".join(ran) or "nothing"


def upper_bounds(accountants: dict[str, dict[str, Any]]) -> str:
    return ", ".join(f"{name.upper()} {_short(bound['upper'])}" for name, bound in sorted(accountants.items()))


def _tuning(tuning: dict[str, Any]) -> str:
    if not tuning["runs"]:
        return "not recorded"
    return f"{tuning['runs']:g} runs ({tuning['law']}), charged"


def _audit(audit: dict[str, Any]) -> str:
    """Results of attacks. Their epsilons are lower bounds, not guarantees."""
    found = []
    if "mia_epsilon" in audit:
        found.append(
            f"membership inference on {audit.get('mia_records')} records of each kind, AUC {audit.get('mia_auc')},"
            f" suggests epsilon >= {audit['mia_epsilon']} (measured without noise)"
        )
    if "canaries_epsilon" in audit:
        found.append(
            f"{audit.get('canaries_canaries')} canaries, {audit.get('canaries_correct')} of"
            f" {audit.get('canaries_guesses')} guesses correct, show epsilon >= {audit['canaries_epsilon']}"
        )
    if "step_holds" in audit:
        outcome = "no violation" if audit["step_holds"] is True else "VIOLATION"
        drawn = f"{audit.get('step_records')} {'units' if audit.get('step_of_units') is True else 'records'}"
        found.append(f"one step on {drawn}, {outcome} found (measured without noise)")
    return "; ".join(found) or "none"


def _attacks(risk: dict[str, Any]) -> dict[str, str]:
    """The attack rates of a statement, in percent. They are rounded up already."""
    if not risk:
        return dict.fromkeys(("accuracy", "found_1", "found_01", "mu"), "not stated")
    found = risk["tpr_at_fpr"]
    return {
        "accuracy": f"{100 * risk['accuracy']:.4g}",
        "found_1": f"{100 * found['0.01']:.4g}",
        "found_01": f"{100 * found['0.001']:.4g}",
        "mu": f"{risk['mu']} for epsilon up to {_up_to(risk['mu_up_to_epsilon'])}",
    }


def _up_to(epsilon: float | str | None) -> str:
    return f"{math.floor(100 * epsilon) / 100:g}" if isinstance(epsilon, float | int) else str(epsilon)


def _best_guess(guarantee: dict[str, Any]) -> str:
    """Accuracy of the best membership test, in percent: (e^eps + delta) / (e^eps + 1), rounded up."""
    inverse = math.exp(-float(guarantee["epsilon"]))
    share = (1 + inverse * guarantee["delta"]) / (1 + inverse)
    return f"{math.ceil(10000 * share) / 100:g}"


def _curve_table(points: list[dict[str, float]]) -> str:
    by_factor = {round((index + 1) / 10, 1): point for index, point in enumerate(points)}
    shown = [by_factor[factor] for factor in SHOWN if factor in by_factor]
    rows = "\n".join(f"| {point['epsilon']:g} | {point['delta']:.2e} |" for point in shown)
    return f"| epsilon | delta |\n| ---: | ---: |\n{rows}"


def _bullets(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4f}"


def _code(text: str | None) -> str:
    return f"`{text}`" if text else "not named"
