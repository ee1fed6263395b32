"""Spending that is never forgotten: the ledger of an output folder, its copies in checkpoints, and what may still be
spent. On disk:

    output_dir/_dp/ledger.jsonl                 the truth: every step that ran
    output_dir/checkpoint-N/_dp/ledger.jsonl    the truth at the time of that checkpoint
    any saved model/privacy.json                the public record, which a fine-tune of that model continues
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers.utils import logging

from hf_private.accounting import budget as accounting
from hf_private.accounting.accountants import SECOND_OPINIONS
from hf_private.accounting.budget import BudgetExceeded, EpsilonReport
from hf_private.accounting.events import Event

from .inheritance import Heir
from .ledger import LedgerError, PrivacyLedger

logger = logging.get_logger(__name__)

LEDGER = Path("_dp", "ledger.jsonl")
NOT_PRIVATE = "NOT PRIVATE"
USELESS = 10  # times the noise that a fresh budget would ask for: nothing is learned


# ---- what is spent, and what may still be


class Spending(Heir):
    """What a folder's ledger has charged, and how many steps the budget still permits.

    Args:
        folder: Output folder of the run; the ledger is `_dp/ledger.jsonl` in it, and may not exist yet.
        target_delta: Delta at which epsilon is computed.
        target_epsilon: The budget; None permits any number of steps.
        writes: False on all ranks but the first, which count along.
    """

    def __init__(
        self,
        folder: str | Path,
        target_delta: float,
        *,
        target_epsilon: float | None = None,
        accountant: str = "prv",
        records_per_unit: int = 1,
        writes: bool = True,
    ) -> None:
        self.folder, self.writes = Path(folder), writes
        self.set_budget(target_epsilon, target_delta, accountant, records_per_unit)
        self.steps_left: int | None = None
        self._bound = math.inf  # what all steps of the run that is open were found to cost at most
        self._ledger: PrivacyLedger | None = None
        self._closed: PrivacyLedger | None = None
        self._resumes = False
        self._permitted: Event | None = None
        self._phase = 0

    def set_budget(
        self, target_epsilon: float | None, target_delta: float, accountant: str, records_per_unit: int
    ) -> None:
        """Set the budget, and how it is measured, for the runs to come."""
        self.target_epsilon, self.target_delta = target_epsilon, target_delta
        self.accountant, self.records_per_unit = accountant, records_per_unit

    @contextmanager
    def open(self, checkpoint: str | Path | None = None) -> Iterator[None]:
        """Hold the ledger for one `train()`; nobody else can write to it meanwhile.

        With a checkpoint, its copy of the ledger and the folder's are settled: the longer history holds, so that steps
        which ran after the checkpoint and were lost stay charged.
        """
        self._resumes, self.steps_left, self._permitted = checkpoint is not None, None, None
        self._bound = math.inf
        if not self.writes:
            yield
            return
        with PrivacyLedger(self.folder / LEDGER, create=checkpoint is None) as self._ledger:
            try:
                if checkpoint is not None:
                    self._ledger.reconcile(Path(checkpoint, LEDGER))
                yield
            finally:
                self._closed = self._ledger
                self._ledger = self._permitted = self.steps_left = None
                self._bound = math.inf

    @property
    def ledger(self) -> PrivacyLedger | None:
        """The ledger, open while `train()` runs and read from disk otherwise; None before the first run.

        If its folder has vanished since, it is what this process has in mind of it: what was trained can be saved.
        """
        path = self.folder / LEDGER
        if not self.writes and not path.is_file():
            raise LedgerError(f"{path} is not on this machine: the first rank keeps it. Ask there what was spent.")
        return self._ledger or (PrivacyLedger.read(path) if path.is_file() else self._closed)

    def save_copy(self, checkpoint: str | Path) -> None:
        """Copy the ledger, as it is now, into a checkpoint."""
        if self.writes:
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
        records = ledger.records if ledger else ()
        return [{k: v for k, v in record.items() if k != "kind"} for record in records if record["kind"] == "run"]

    @property
    def last_run(self) -> dict[str, Any]:
        """The settings of the run before; empty if there was none."""
        return (self.runs or [{}])[-1]

    # -- before the first step

    def plan(
        self,
        sample_rate: float,
        steps: int,
        releases: Callable[[float], tuple[float, ...]],
        noise_multiplier: float | None,
    ) -> float:
        """Fix the noise multiplier of this run and the number of steps it may take.

        A given noise multiplier is kept. Otherwise it is calibrated so that `steps` more steps stay in the budget; a
        resumed run keeps its noise if they do. Raises `BudgetExceeded` if none fits.
        """
        if noise_multiplier is None:
            kept = self.last_run.get("noise_multiplier") if self._resumes else None
            same_rate = self.last_run.get("sample_rate") == sample_rate
            if kept and same_rate and self.fits(Event(sample_rate, releases(kept), steps)):
                noise_multiplier = kept
            else:
                noise_multiplier = self._calibrate(sample_rate, steps)
                if kept:
                    logger.warning(
                        f"The remaining {steps} steps do not fit the budget with noise multiplier {kept}: it is"
                        f" raised to {noise_multiplier} for them."
                    )
        self._permitted = Event(sample_rate, releases(noise_multiplier))
        self.steps_left = None if self.target_epsilon is None else steps
        if self.writes and self.steps_left:
            if not self.fits(replace(self._permitted, steps=steps)):
                raise BudgetExceeded(f"{steps} steps with noise multiplier {noise_multiplier} do not fit the budget.")
            self._bound = self.target_epsilon
        return noise_multiplier

    def _calibrate(self, sample_rate: float, steps: int) -> float:
        def needed(spent: Sequence[Event]) -> float:
            budget = self.target_epsilon, self.target_delta, sample_rate, steps, self.accountant
            return accounting.calibrate(*budget, spent=spent, records_per_unit=self.records_per_unit)

        alone = needed(())
        if not self.events:
            return alone
        spent = f"Epsilon {self.epsilon():.4g} of `target_epsilon` {self.target_epsilon:g} is spent"
        by_whom = "by earlier runs in this folder, or by the model that this one starts from"
        try:
            noise_multiplier = needed(self.events)
        except BudgetExceeded:
            noise_multiplier = math.inf
        if noise_multiplier > USELESS * alone:
            raise BudgetExceeded(
                f"{spent}, {by_whom}: {steps} more steps would need the noise multiplier {noise_multiplier:g}, which"
                " drowns all they could learn. Keep what you have, raise `target_epsilon`, or begin anew: from an"
                " untrained model, in a new output_dir."
            )
        logger.warning(
            f"{spent}, {by_whom}. It counts here too: the noise multiplier is {noise_multiplier:.4g}, in a first run"
            f" it would be {alone:.4g}. For a fresh model take a new output_dir."
        )
        return noise_multiplier

    def record_run(self, settings: dict[str, Any]) -> None:
        """Record the settings of the run that `plan` has fixed."""
        if self.writes:
            self._ledger.record("run", {**settings, **self.noted})
            self._phase = len(self.runs)

    # -- at each step

    def charge(self, event: Event) -> None:
        """Write one step to the ledger, before anything of it is released; raise if the budget does not permit it."""
        if event != self._permitted:
            raise RuntimeError(f"The step is not the one that was planned: {event} instead of {self._permitted}.")
        if self.steps_left is not None:
            if self.steps_left < event.steps:
                raise BudgetExceeded("The privacy budget permits no further step. Nothing was released.")
            self.steps_left -= event.steps
        if self.writes:
            self._ledger.charge(event, phase=f"run {self._phase}")

    # -- what it amounts to

    @property
    def reproducible(self) -> bool:
        """Whether a run used a fixed key, which undoes its noise."""
        return any(run.get("reproducible") for run in self.runs)

    def fits(self, event: Event) -> bool:
        """Whether the budget permits `event` after all that was charged."""
        if self.target_epsilon is None:
            return True
        budget = self.target_epsilon, self.target_delta, event, self.events, self.accountant
        return accounting.steps_within(*budget, at_most=1, records_per_unit=self.records_per_unit) == 1

    def report(self) -> EpsilonReport:
        """What all charged steps cost, by all accountants."""
        report = accounting.epsilon(self.events, self.target_delta, self.accountant)
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
        if self.records_per_unit > 1:
            return accounting.group_epsilon(self.events, self.target_delta, self.records_per_unit)
        voices = (self.accountant, *SECOND_OPINIONS.get(self.accountant, ()))
        return max(accounting.epsilon_of(self.events, self.target_delta, voice) for voice in voices)

    def quick_epsilon(self) -> float:
        """A cheap upper bound on what all charged steps cost, for logs; a run's target is one, as `plan` has seen."""
        if self.reproducible:
            return math.inf
        k, events = self.records_per_unit, self.events
        if k > 1:  # whenever one of a person's records might be drawn, count all of them
            events = [
                replace(e, sample_rate=min(1.0, k * e.sample_rate), releases=tuple(s / k for s in e.releases))
                for e in events
            ]
        return min(accounting.quick_epsilon(events, self.target_delta), self._bound)

    def record(self) -> dict[str, Any]:
        """The ledger's facts for a card: its events, its hash chain's head, and every run's settings."""
        ledger = self.ledger
        return {
            "ledger": {
                "events": [event.to_dict() for event in self.events],
                "head": ledger.head if ledger else None,
                "length": ledger.length if ledger else 0,
                "continues": self.sources,
            },
            "runs": self.runs,
        }
