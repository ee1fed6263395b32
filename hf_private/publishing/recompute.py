"""Checks of a statement against itself: its claims are recomputed from its facts, and its facts compared."""

import ctypes
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from hf_private.accounting.budget import delta_curve
from hf_private.accounting.events import Event
from hf_private.spending.stated_unit import draws_units, unit_of
from hf_private.spending.statement import STATEMENT, rebuild, round_up

from .findings import UNKNOWN, WRONG, Found
from .template_versions import in_own_words, is_known

TOLERANCE = 1e-3  # of an accountant's number, between machines
COMPUTED = ("guarantee.accountants", "guarantee.epsilon_", "guarantee.risk", "accounting.")
SETTINGS_OF_A_RUN = tuple(
    "clip_norm clipping gamma noise train_only carriers anchors log_nonprivate objective".split()
)


def check_epsilon(statement: dict[str, Any], time_limit: float) -> Found:
    """Everything that is claimed, recomputed from the steps in the statement."""
    claim = statement["guarantee"]
    if "inf" not in (claim["epsilon"], claim["epsilon_unrounded"]):
        expected = round_up(claim["epsilon_unrounded"])
        if claim["epsilon"] != expected:
            yield WRONG, f"`guarantee.epsilon` is {claim['epsilon']}, rounded up it is {expected}"
    known = is_known(statement)
    if not known:
        version = statement["versions"]["hf_private"]
        yield UNKNOWN, f"`versions.hf_private` is {version!r}: this version does not know the words of that one"
    try:
        found = _within(time_limit, lambda: list(_recompute(statement, known)))
    except TimeoutError:
        remedy = "raise the limit with `--time-limit`"
        yield UNKNOWN, f"`ledger.events` take more than {time_limit:g} s to recompute: {remedy}"
        return
    yield from found


def _recompute(statement: dict[str, Any], same_words: bool) -> Found:
    try:
        again = in_own_words(rebuild(statement))
    except (ValueError, KeyError, TypeError) as error:
        yield WRONG, f"the facts in {STATEMENT} make no sense: {error}"
        return
    if not same_words and "risk" not in statement["guarantee"]:  # attack rates are stated since 0.2.0
        again["guarantee"].pop("risk", None)
    for where, got, expected in differences(statement, again, same_words):
        if not where.startswith(("guarantee.curve", "weights")):
            yield WRONG, f"`{where}` is {got!r}, the facts give {expected!r}"
    yield from _check_curve(statement)


def _check_curve(statement: dict[str, Any]) -> Found:
    points = statement["guarantee"]["curve"]
    events = [Event.from_dict(event) for event in statement["ledger"]["events"]]
    if statement["private"] and len(points) < 2:
        yield WRONG, "`guarantee.curve` is missing"
    recomputed = delta_curve(events, [point["epsilon"] for point in points]) if points else []
    for point, (epsilon, delta) in zip(points, recomputed, strict=True):
        if not math.isclose(point["delta"], delta, rel_tol=0.02, abs_tol=1e-14):
            yield WRONG, f"`guarantee.curve` has delta {point['delta']} at epsilon {epsilon}, it is {delta:.3g}"


class Stopped(BaseException):
    """Ends a computation that takes too long. Accountants, which catch their own errors, do not catch it."""


def _within(seconds: float, compute: Callable[[], Any]) -> Any:
    """The result of `compute`, or TimeoutError once it has taken this many seconds of processor time.

    Files come from strangers, and a few numbers suffice to keep an accountant busy for hours. A running call of numpy
    cannot be interrupted, so the computation has its own thread, which ends after that call. Processor time, unlike
    time on the clock, does not depend on other programs: one file gets one verdict.
    """
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(compute())
        except BaseException as error:  # raised again below, or after a timeout of no interest
            errors.append(error)

    worker = threading.Thread(target=run)
    start = time.process_time()
    worker.start()
    while worker.is_alive():
        worker.join(timeout=0.02)
        if worker.is_alive() and time.process_time() - start > seconds:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident or 0), ctypes.py_object(Stopped))
            raise TimeoutError
    if errors:
        raise errors[0]
    return results[0]


def check_consistency(statement: dict[str, Any]) -> Found:
    """The facts of the runs against each other."""
    runs = statement["runs"]
    if statement["private"] and not runs:
        yield WRONG, "`runs` is empty: it does not say which run took the steps"
    for name in SETTINGS_OF_A_RUN:
        if runs and name in runs[-1] and runs[-1][name] != statement["settings"].get(name):
            got, ran = statement["settings"].get(name), runs[-1][name]
            yield WRONG, f"`settings.{name}` is {got!r}, the last run's is {ran!r}"
    number = statement["dataset"].get("num_units")
    if runs and runs[-1].get("num_units") != number:
        yield WRONG, f"`dataset.num_units` is {number}, the last run's is {runs[-1].get('num_units')}"
    for index, run in enumerate(runs):
        what = "units" if draws_units(run) else "records"
        count = run.get(f"num_{what}", statement["dataset"].get(f"num_{what}"))
        size, rate = run.get("expected_batch_size"), run.get("sample_rate")
        if count and size and rate and not math.isclose(size / count, rate, rel_tol=1e-9):
            yield WRONG, f"`runs[{index}].sample_rate` is {rate}, {size} of {count} {what} are {size / count:.6g}"
        if unit_of(run) != unit_of(statement["settings"]):
            yield WRONG, f"`runs[{index}].unit_column` and what belongs to it are not those of `settings`"
    planned = [(run["sample_rate"], run["noise_multiplier"]) for run in runs if run.get("sample_rate")]
    if statement["ledger"].get("continues") or not planned:  # runs of a base model are not listed here
        return
    for index, phase in enumerate(statement["mechanism"]["phases"]):
        rate, noise = phase["sample_rate"], phase["noise_multiplier"]
        if not any(math.isclose(rate, q) and math.isclose(noise, s, abs_tol=1e-12) for q, s in planned):
            got = f"noise multiplier {noise}, sample rate {rate}"
            yield WRONG, f"`mechanism.phases[{index}]` ({got}) is of none of the `runs`"


def differences(got: Any, expected: Any, same_words: bool, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Leaves in which two statements differ; accountants' numbers up to `TOLERANCE`, words only if `same_words`.

    A version whose words are unknown may also say more or less: lists of sentences are words.
    """
    if isinstance(got, dict) and isinstance(expected, dict):
        for key in {**got, **expected}:
            path = f"{where}.{key}" if where else key
            yield from differences(got.get(key), expected.get(key), same_words, path)
    elif isinstance(got, list) and isinstance(expected, list) and len(got) == len(expected):
        for index, (a, b) in enumerate(zip(got, expected, strict=True)):
            yield from differences(a, b, same_words, f"{where}[{index}]")
    elif isinstance(got, float) and isinstance(expected, float):
        computed = where.startswith(COMPUTED)
        slack = TOLERANCE if computed else 1e-12
        if where != "guarantee.epsilon" and not math.isclose(got, expected, rel_tol=slack):
            yield where, got, expected
    elif not same_words and _words(got) and _words(expected) and "inf" not in (got, expected):
        return
    elif got != expected:
        yield where, got, expected


def _words(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))
