"""The entries around an audit's finding, read again from the replica that it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .log_sample import Log, open_log
from .note import Note

__all__ = ["Replay", "replay"]


@dataclass(frozen=True, slots=True)
class Replay:
    """Entries around a finding, and the damage that reading them finds.

    Attributes:
        log: the entries; a ``Log`` of this range alone.
    """

    log: Log

    def __repr__(self) -> str:
        return f"{self.log!r}\n{self.log.head()!r}"

    def _repr_html_(self) -> str:
        return f"{self.log._repr_html_()}{self.log.head()._repr_html_()}"


def replay(summary: Mapping[str, Any], number: int = 0, replica: str | None = None, around: int = 3) -> Replay | Note:
    """Read the entries around the start of a finding again, from one replica.

    Args:
        summary: of an audit.
        number: of the finding, in the order of the summary.
        replica: name of the replica; None = the first that the finding names.
        around: number of entries before and after the first one.

    Raises:
        DLedgerError: the replica cannot be read.
    """
    if not summary["findings"]:
        return Note("The audit has no findings.")
    finding = summary["findings"][number]
    name = replica or finding["replica"].split(",")[0]
    found = next((one for one in summary["replicas"] if (one["name"], one["group"]) == (name, finding["group"])), None)
    if found is None or found["kind"] not in ("node", "store"):
        return Note(f"Replica {name} has no indexes to read; 'dledger dump' reads a CommitLog by position.")
    index = int(finding.get("index", finding["start"]))
    start, end = max(0, index - around), index + around + 1
    return Replay(open_log(found["where"], finding["group"], start=start, end=end))
