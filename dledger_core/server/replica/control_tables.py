"""Control entries between the log and the tables: staged, perhaps truncated, applied when committed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from dledger_core.errors import invariant
from dledger_core.ids import NO_INDEX, Index
from dledger_core.raft import Batch
from dledger_core.record import HEADER_BYTES, MAGIC_CONTROL, records_of
from dledger_core.storage import CommitLog
from dledger_core.storage.tables.tables import LogTables


@dataclass(frozen=True, slots=True)
class _Control:
    """A control entry that is staged and waits for its commit."""

    index: Index
    time_ms: int
    body: bytes


class Controls:
    """The tables of one replica, and the control entries that are not applied to them yet.

    Attributes:
        tables: the state as of the committed entries.
    """

    def __init__(self, log: CommitLog) -> None:
        self.tables = log.load_tables()
        self._waiting: deque[_Control] = deque()
        start, end = Index(max(self.tables.applied_index + 1, log.first_index())), log.last_index() + 1
        for index, time_ms, body in log.control_entries(start, Index(end)):
            self._waiting.append(_Control(index, time_ms, body))

    def stage(self, batch: Batch) -> None:
        """Record the control entry at the start of a staged batch, if there is one."""
        records = records_of(batch)
        header = records.first
        if header.magic == MAGIC_CONTROL:
            body = bytes(memoryview(records.data)[HEADER_BYTES : header.size])
            # Not the tables' applied index: those of a snapshot may already include entries that follow it.
            last = self._waiting[-1].index if self._waiting else NO_INDEX
            invariant(header.index > last, "a control entry is staged out of order", index=header.index, last=last)
            self._waiting.append(_Control(Index(header.index), header.time_ms, body))

    def truncate(self, index: Index) -> None:
        """Discard staged entries from ``index`` on."""
        while self._waiting and self._waiting[-1].index >= index:
            self._waiting.pop()

    def apply(self, commit_index: Index) -> None:
        """Apply the committed entries to the tables."""
        while self._waiting and self._waiting[0].index <= commit_index:
            entry = self._waiting.popleft()
            self.tables.apply(entry.index, entry.time_ms, entry.body)

    def restart(self, tables: LogTables) -> None:
        """Replace the tables after a snapshot install."""
        self._waiting.clear()
        self.tables = tables
