"""Spending that is never forgotten: the ledger of an output folder, its copies in checkpoints, and what may still be
spent. On disk:

    output_dir/_dp/ledger.jsonl                 every step that ran
    output_dir/checkpoint-N/_dp/ledger.jsonl    a copy at the time of that checkpoint
    any saved model/privacy.json                the statement, which a fine-tune of that model continues
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils import logging

from hf_private.accounting import budget as accounting
from hf_private.accounting.budget import BudgetExceeded, EpsilonReport
from hf_private.accounting.events import Event
from hf_private.accounting.risk import risk
from hf_private.accounting.schedule import epsilon_schedule

from .costs import NO_PAST, UNKNOWN, Cost, Past, all_costs, sources, take_over, times_missing
from .ledger import LedgerError, PrivacyLedger
from .limits import Limit, limit_of
from .run import Plan, Run
from .statement import STATEMENT, read_statement

logger = logging.get_logger(__name__)

LEDGER = Path("_dp", "ledger.jsonl")
NOT_PRIVATE = "NOT PRIVATE"
USELESS = 10  # times the noise that a fresh budget would need: nothing is learned
UNPROTECTED = Event(1.0, (0.0,))  # a step on all records without noise


class Spending:
    """What a folder's ledger has charged, and how many steps the budget still permits.

    Args:
        folder: Output folder of the run; the ledger is `_dp/ledger.jsonl` in it, and may not exist yet.
        target_delta: Delta at which epsilon is computed.
        target_epsilon: The budget, or instead of it
        target_risk: the largest advantage of an attacker. Without either, any number of steps is permitted.
        writes: False on all ranks but the first, which count along.
    """

    def __init__(
        self,
        folder: str | Path,
        target_delta: float,
        *,
        target_epsilon: float | None = None,
        target_risk: float | None = None,
        accountant: str = "prv",
        records_per_unit: int = 1,
        writes: bool = True,
    ) -> None:
        self.folder = Path(folder)
        self.writes = writes
        self.run: Run | None = None
        self._closed: PrivacyLedger | None = None
        self.set_budget(target_epsilon, target_risk, target_delta, accountant, records_per_unit)

    def set_budget(
        self,
        target_epsilon: float | None,
        target_risk: float | None,
        target_delta: float,
        accountant: str,
        records_per_unit: int,
    ) -> None:
        """Set the budget, and how it is measured, for the runs to come."""
        self.limit = limit_of(target_epsilon, target_risk, target_delta, accountant, records_per_unit)
        self.target_delta = target_delta
        self.accountant = accountant
        self.records_per_unit = records_per_unit

    # -- one run

    @contextmanager
    def open(
        self,
        sample_rate: float,
        steps: int,
        releases: Callable[[float], tuple[float, ...]],
        noise_multiplier: float | None = None,
        *,
        settings: dict[str, Any] | None = None,
        past: Past | None = NO_PAST,
        disjoint_data: bool = False,
        checkpoint: str | Path | None = None,
    ) -> Iterator[Run]:
        """Open the ledger for one run, whose plan is fixed here. No other process can write to it meanwhile.

        Args:
            steps: How many steps the run takes.
            releases: Noise multiplier -> those of the releases that a step makes.
            noise_multiplier: None calibrates it so that `steps` more steps stay in the budget; a resumed run keeps its
                noise if they do. Raises `BudgetExceeded` if they cannot.
            settings: Written to the ledger as the line of this run.
            past: What the weights have cost before; None if that was not found.
            disjoint_data: Do not charge the past, but list it in the line of this run.
            checkpoint: Resume from it. The longer of its copy of the ledger and the folder's ledger holds, so that
                steps which ran after the checkpoint and were lost stay charged.
        """
        with PrivacyLedger(self.folder / LEDGER, create=checkpoint is None) as ledger:
            self._closed = ledger
            if checkpoint is not None:
                ledger.reconcile(Path(checkpoint, LEDGER))
            noted: dict[str, Any] = dict.fromkeys(past.unchecked if past else (), True)
            if past is not None and not disjoint_data:
                take_over(ledger, past, self.tuning)
            else:
                left_out = self._left_out(past)
                noted |= {"set_aside": left_out} if left_out else {}
            plan = self._plan(sample_rate, steps, releases, noise_multiplier, resumes=checkpoint is not None)
            planned = {"noise_multiplier": plan.noise_multiplier, "sample_rate": sample_rate, "planned_steps": steps}
            ledger.add_line("run", {**(settings or {}), **planned, **noted})
            schedule = partial(
                epsilon_schedule,
                plan.event,
                steps,
                ledger.events,
                delta=self.target_delta,
                accountant=self.accountant,
                records_per_unit=self.records_per_unit,
            )
            with self._running(Run(plan, ledger, len(self.runs), schedule)) as run:
                yield run

    @contextmanager
    def follow(self, plan: Plan) -> Iterator[Run]:
        """Count along with the first rank's run, on another rank."""
        with self._running(Run(plan)) as run:
            yield run

    @contextmanager
    def _running(self, run: Run) -> Iterator[Run]:
        self.run = run
        try:
            yield run
        finally:
            self.run = None

    def reconcile(self, checkpoint: str | Path) -> None:
        """Let the longer of the folder's ledger and a checkpoint's copy hold."""
        with PrivacyLedger(self.folder / LEDGER, create=False) as ledger:
            ledger.reconcile(Path(checkpoint, LEDGER))

    def _plan(
        self,
        sample_rate: float,
        steps: int,
        releases: Callable[[float], tuple[float, ...]],
        noise_multiplier: float | None,
        resumes: bool,
    ) -> Plan:
        if noise_multiplier is None:
            kept = self.last_run.get("noise_multiplier") if resumes else None
            same_rate = self.last_run.get("sample_rate") == sample_rate
            assert self.limit is not None, "DPConfig has either a budget or a noise multiplier"
            if kept and same_rate and self.limit.allows(Event(sample_rate, releases(kept), steps), self.events):
                noise_multiplier = float(kept)
            else:
                noise_multiplier = self._calibrate(self.limit, sample_rate, steps)
                if kept:
                    logger.warning(
                        f"The remaining {steps} steps do not fit the budget with noise multiplier {kept}: it is"
                        f" raised to {noise_multiplier} for them."
                    )
        event = Event(sample_rate, releases(noise_multiplier))
        if steps and not self.fits(replace(event, steps=steps)):
            raise BudgetExceeded(f"{steps} steps with noise multiplier {noise_multiplier} do not fit the budget.")
        return Plan(event, noise_multiplier, steps, None if self.limit is None else steps)

    def _calibrate(self, limit: Limit, sample_rate: float, steps: int) -> float:
        alone = limit.noise(sample_rate, steps)
        if not self.events:
            return alone
        spent = limit.spent(self.events)
        by_whom = "by earlier runs in this folder, or by the model that this one starts from"
        try:
            noise_multiplier = limit.noise(sample_rate, steps, self.events)
        except BudgetExceeded:
            noise_multiplier = math.inf
        if noise_multiplier > USELESS * alone:
            raise BudgetExceeded(
                f"The budget in this folder is used up: {spent} is spent, {by_whom}. {steps} more steps would need so"
                f" much noise that they learn nothing. Keep the model that you have, raise `{limit.name}`, or start"
                " from an untrained model in a new output_dir."
            )
        logger.warning(
            f"{spent[0].upper()}{spent[1:]} is spent, {by_whom}. It counts here too: the noise"
            f" multiplier is {noise_multiplier:.4g}; in a first run it would be {alone:.4g}. For a fresh model use a"
            " new output_dir."
        )
        return noise_multiplier

    def _left_out(self, past: Past | None) -> list[Cost]:
        """The costs of a past that this ledger does not have."""
        if past is None:
            return [UNKNOWN]
        found = [cost for statement in past.statements for cost in all_costs(statement)]
        return [cost for cost in found if cost == UNKNOWN or not self.has(cost)]

    # -- what the ledger holds

    @property
    def ledger(self) -> PrivacyLedger | None:
        """The ledger, open while a run lasts and read from disk otherwise; None before the first run.

        If its folder has vanished since, it is the copy in memory: a trained model can still be saved.
        """
        path = self.folder / LEDGER
        if not self.writes and not path.is_file():
            raise LedgerError(f"{path} is not on this machine: rank 0 keeps it. Call this on rank 0.")
        if self.run is not None and self.run.ledger is not None:
            return self.run.ledger
        if not path.is_file():
            return self._closed
        found = PrivacyLedger.read(path)
        if self._closed is not None and not found.contains(self._closed.length, self._closed.head):
            raise LedgerError(
                f"{path} does not have the steps of the run that has just ended: it was replaced, as by a backup. Put"
                " back the copy of the latest checkpoint."
            )
        return found

    def save_copy(self, checkpoint: str | Path) -> None:
        """Copy the ledger, as it is now, into a checkpoint."""
        if self.writes:
            assert self.ledger is not None, "a checkpoint is saved in a run"
            self.ledger.save_copy(Path(checkpoint, LEDGER))

    @property
    def events(self) -> tuple[Event, ...]:
        """All that was charged, compacted."""
        ledger = self.ledger
        return ledger.events if ledger else ()

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The settings of every run so far."""
        ledger = self.ledger
        lines = ledger.lines if ledger else ()
        return [{k: v for k, v in line.items() if k != "kind"} for line in lines if line["kind"] == "run"]

    @property
    def last_run(self) -> dict[str, Any]:
        """The settings of the run before; empty if there was none."""
        return (self.runs or [{}])[-1]

    @property
    def tuning(self) -> dict[str, Any] | None:
        """The runs that were tried before, as the folder's statement has them; None if it has none."""
        try:
            tuning = (read_statement(self.folder) or {}).get("tuning") or {}
        except ValueError as error:
            raise LedgerError(
                f"{STATEMENT} of {str(self.folder)!r} cannot be read ({error}), so it is not known what tuning has"
                " cost. Repair or remove it."
            ) from error
        return tuning if tuning.get("runs") else None

    def has(self, cost: Cost) -> bool:
        """Whether all of a cost is in this ledger, or in its folder's statement."""
        try:
            return not times_missing(cost, self.ledger, self.tuning)
        except LedgerError:  # it cannot be charged at all
            return False

    # -- what it amounts to

    @property
    def reproducible(self) -> bool:
        """Whether a run used a fixed key, which undoes its noise."""
        return any(run.get("reproducible") for run in self.runs)

    def fits(self, event: Event) -> bool:
        """Whether the budget permits `event` after all that was charged."""
        return self.limit is None or self.limit.allows(event, self.events)

    def report(self) -> EpsilonReport:
        """What all charged steps cost, by all accountants, and what an attacker can learn from them."""
        report = accounting.epsilon(self.events, self.target_delta, self.accountant)
        events = (UNPROTECTED,) if self.reproducible else self.events
        report = replace(report, risk=risk(events, self.target_delta, self.records_per_unit))
        if self.reproducible:
            report = replace(report, epsilon=math.inf, note="a fixed key was used, which undoes the noise")
        elif self.records_per_unit > 1:
            note = f"epsilon is for a person with {self.records_per_unit} records, the bounds are for one"
            report = replace(report, epsilon=self.epsilon(), note=note)
        return replace(report, note=f"{NOT_PRIVATE}: {report.note}") if math.isinf(report.epsilon) else report

    def epsilon(self) -> float:
        """What all charged steps cost, by the accountant that enforces the budget."""
        if self.reproducible:
            return math.inf
        return accounting.enforced_epsilon(self.events, self.target_delta, self.accountant, self.records_per_unit)

    def live_epsilon(self) -> float:
        """The same for logs: while a run lasts, from its schedule, which is never below and costs nothing per step."""
        planned = None if self.run is None or self.reproducible else self.run.epsilon()
        return self.epsilon() if planned is None else planned

    def statement(self) -> dict[str, Any]:
        """The ledger's part of a statement: its events, its hash chain's head, and every run's settings."""
        ledger = self.ledger
        return {
            "ledger": {
                "events": [event.to_dict() for event in self.events],
                "head": ledger.head if ledger else None,
                "length": ledger.length if ledger else 0,
                "continues": sources(ledger),
            },
            "runs": self.runs,
        }
