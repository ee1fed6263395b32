"""A trainer whose model has a past: a run takes over what the weights have cost, a card is for its own weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from transformers.utils import logging

from hf_private.config import DPConfig
from hf_private.distributed.ranks import Ranks
from hf_private.spending.inheritance import debt_of
from hf_private.spending.ledger import LedgerError
from hf_private.spending.lineage import mark, past_of
from hf_private.spending.memory import all_in, remember, remembered
from hf_private.spending.spending import Spending

from .publishing import PublishingTrainer

logger = logging.get_logger(__name__)


class ContinuingTrainer(PublishingTrainer):
    """Trainer whose model may have a past, and gets one."""

    dp_config: DPConfig
    continues: str | Path | None
    spending: Spending
    ranks: Ranks
    _in_run = _loaded = _changed = False

    @contextmanager
    def _remembering(self) -> Iterator[None]:
        """One `train()`: in whatever way it ends, what the weights have cost by then is kept in mind."""
        self._in_run, self._loaded, self._changed = True, False, False
        try:
            yield
        finally:
            self._in_run = False
            if self._loaded or self._changed:  # a run that was refused has changed nothing: it is refused again
                remember(self.model, self.spending, begun=self._changed)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._loaded = True

    def _mark_changed(self, model: nn.Module) -> None:
        """Called at each step, not sooner: a run that failed before its first step has changed nothing."""
        mark(model)
        self._changed = True

    def _inherit(self) -> None:
        """Charge what the weights have cost before, or write down that it is not to be charged; on the first rank."""
        named = self.continues is not None
        if not self.dp_config.disjoint_data:
            self.spending.inherit(*past_of(self.model, self.continues, known=self._loaded), named=named)
            return
        try:
            past = past_of(self.model, self.continues, known=self._loaded)
        except (LedgerError, OSError):  # it was stated that it does not matter
            self.spending.set_aside(None)
        else:
            self.spending.set_aside(*past)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save a model that `from_pretrained` loads, with its card; all ranks call it.

        Nothing is written if the output folder's ledger does not have all that the weights have cost.
        """
        # a run, and what it leaves, is never stopped here: its ledger has taken over all there was
        if not self._in_run and not all_in(self.spending, self.model):
            self.ranks.run_on_first(self._check_past)
        super().save_model(output_dir, _internal_call)

    def _check_past(self) -> None:
        """Refuse to write this ledger's card for weights that have cost more."""
        records = remembered(self.model)
        if not records and not self.dp_config.disjoint_data:
            records = past_of(self.model, self.continues).records
        for debt in map(debt_of, records):
            if not self.spending.has(debt):
                steps = sum(event["steps"] for event in debt["events"])
                raise LedgerError(
                    f"The model has been trained elsewhere: {steps} private steps of the ledger with head"
                    f" {debt['head'][:16]} are not all in that of {str(self.spending.folder)!r}. A card from here"
                    " would claim less than the weights have cost, so nothing was saved. Save the model with the"
                    " trainer that has trained it last, or train it here first, which takes over what it has cost."
                )

    def _tuning(self) -> dict[str, Any]:
        """The runs that were tried before, for the card: they count wherever the weights are saved."""
        try:
            tuning = self.spending.tuning
        except LedgerError as error:  # no reason to lose what was trained
            logger.warning(str(error))
            return {}
        return {"tuning": tuning} if tuning else {}
