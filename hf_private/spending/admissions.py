"""What limits the claim of a statement, in words: what it does not cover, why it is none, and what was only stated."""

import math
from typing import Any

from hf_private.accounting.events import Event

MORE_RECORDS = "people who contributed more records than the privacy unit says"
OTHER_UNITS = "people whose records have several values of the unit's column, or share a record with others"
NOT_COVERED = (
    "what the base model and the tokenizer were trained on",
    "the evaluation data, and the metrics measured on it",
    "settings that were chosen by looking at results on the private data, unless charged under `tuning`",
    MORE_RECORDS,
    "the size of the training set, which is treated as public",
    "how long training took, which its logs and the times of its files show",
)
# Statements of 0.1.0 contain these sentences, and `verify` compares them word for word: do not change them.
ADMISSIONS = {  # by name of the setting; they also hold for models that are made from the weights
    "disjoint_data": "It was stated, and not checked, that the base model was privately trained on other records.",
    "base_model_unchecked": (
        "Whether the base model was privately trained before could not be looked up; nothing is charged."
    ),
    "adapter_unchecked": (
        "An adapter's past cannot be seen: its weights do not show whether it was privately trained before, and nobody"
        " has named a record of it; nothing is charged."
    ),
    "anchors": "That the data of GEP's subspace is public was stated; only shared rows were looked for.",
    "public_carriers": "That the data of the carriers is public was stated; only shared rows were looked for.",
    "ranks": (
        "It was trained on several ranks: all of them, and the network between them, are trusted with the keys and"
        " with sums before noise."
    ),
    "post_processing": (
        "The weights were changed after private steps. It was stated, and not checked, that no training data was used"
        " for that."
    ),
    "chooses_model": "The checkpoint was chosen by metrics on the evaluation data, which is not covered.",
}
POST_PROCESSING = {  # what may be declared of weights that differ from those that a run has left
    "average": "an average of weights that the run has released",
    "dtype": "a conversion to another data type",
    "merge": "an adapter that was merged into its base model",
    "quantization": "quantisation",
}


def not_private(events: list[Event], runs: list[dict[str, Any]]) -> list[str]:
    """Why a run claims no privacy; empty if it does."""
    reasons = []
    if not any(event.steps for event in events):
        reasons.append("no private step is recorded")
    if any(event.steps and event.noise_multiplier == 0 for event in events):
        reasons.append("steps were taken without noise")
    if any(event.sampling != "poisson" for event in events):
        reasons.append("batches were not drawn by Poisson sampling, the only one with a known price here")
    if any(run.get("reproducible") for run in runs):
        reasons.append("noise and batches came from a fixed key: whoever has it can take the noise away again")
    if any(run.get("log_nonprivate") for run in runs):
        reasons.append("training losses were logged without noise (`log_nonprivate`)")
    return reasons


def caveats(statement: dict[str, Any]) -> list[str]:
    """What weakens a claim, or is easily misunderstood about it."""
    found, guarantee = [], statement["guarantee"]
    n = statement["dataset"].get("num_units") or statement["dataset"]["num_records"]
    if 10 < float(guarantee["epsilon"]) < math.inf:
        found.append("Epsilon is above 10: the formal guarantee is weak, whatever attacks achieve today.")
    if n and guarantee["delta"] >= 1 / n:
        what = "record" if statement["privacy_unit"]["unit"] != "unit" else "unit"
        found.append(f"Delta is not below 1 / {n}: publishing one {what} at random would satisfy it.")
    if statement["tuning"]["runs"] is None:
        found.append("It is not recorded how many runs were tried before this one; none of them is charged.")
    if statement["privacy_unit"]["unit"] == "record":
        found.append("The unit is one record: a person with several records is protected less.")
    if statement["randomness"]["noise"] != "secure":
        found.append("The noise came from a generator that is not cryptographic.")
    weak = admitted(statement)
    found += [text for name, text in ADMISSIONS.items() if name in weak]
    found += [
        f"Stated change: {text}." for kind, text in POST_PROCESSING.items() if kind in weak.get("post_processing", ())
    ]
    return found


def admitted(statement: dict[str, Any]) -> dict[str, Any]:
    """Settings that weaken the claim of a statement, in its own runs and in all that they continue."""
    settings, evaluation = statement.get("settings") or {}, statement.get("evaluation") or {}
    last = {"chooses_model": evaluation.get("chooses_model")} | {
        name: settings[name] for name in ("anchors", "carriers", "noise", "post_processing") if name in settings
    }
    found: dict[str, Any] = {}
    declared: set[str] = set()
    for one in (*(statement.get("runs") or ()), *(statement["ledger"].get("continues") or ()), last):
        weak = {name: one[name] for name in ADMISSIONS if one.get(name) and name != "ranks"}
        if isinstance(one.get("ranks"), int) and one["ranks"] > 1:
            weak["ranks"] = one["ranks"]
        carriers = one.get("carriers")
        if isinstance(carriers, dict) and carriers.get("source") == "public":
            weak["public_carriers"] = True
        if one.get("noise", "secure") != "secure":  # a generator that is not cryptographic counts for all
            weak["noise"] = one["noise"]
        declared.update(one.get("post_processing") or ())
        found = {**weak, **found}
    if declared:
        found["post_processing"] = sorted(declared)
    return found
