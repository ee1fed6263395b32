"""Results of checks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hf_private._html import table

HOLDS, WRONG, UNKNOWN, WARNING = "holds", "wrong", "cannot tell", "warning"
CODES = {HOLDS: 0, WRONG: 1, UNKNOWN: 2}

Found = Iterator[tuple[str, str]]  # (status, message) of everything that is not as it should be


@dataclass(frozen=True)
class Finding:
    """Result of one check: `status` is "holds", "wrong", "cannot tell" or "warning"."""

    check: str
    status: str
    message: str


@dataclass(frozen=True)
class Verdict:
    """All findings about one model, and its statement if it could be read."""

    findings: tuple[Finding, ...]
    statement: dict[str, Any] | None = None

    @property
    def status(self) -> str:
        """The worst of all findings: "wrong", then "cannot tell", then "holds"."""
        found = {finding.status for finding in self.findings}
        return next((status for status in (WRONG, UNKNOWN) if status in found), HOLDS)

    @property
    def code(self) -> int:
        """Exit code: 0 the claim holds, 1 it does not, 2 cannot tell."""
        return CODES[self.status]

    def _repr_html_(self) -> str:
        """The findings as a table, for Jupyter."""
        rows = [(finding.check, finding.status, finding.message) for finding in self.findings]
        return table(f"The claim: {self.status}", rows)
