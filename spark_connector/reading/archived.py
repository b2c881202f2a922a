"""A log whose trimmed entries are read from its archive: one log from the first index that was ever archived.

The archive is a Delta table (``dledger_core.archive``). The log has recorded its ranges, each with the digest of its
rows, so a range is read as a whole and compared before its first row leaves. Everything about the archived part of a
log, its bounds, positions, times and checks, comes from these records; without them the table is only a table.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import takewhile
from typing import Final

import pyarrow as pa

from dledger_core import (
    READ_SCHEMA,
    ArchivedRange,
    ArchiveState,
    DLedgerError,
    IndexOutOfRangeError,
    LogRange,
    UnreachableError,
)
from dledger_core.archive import FROM_LOG, ArchivedRows, ArchiveTable, range_with
from dledger_core.client import EntryCheck
from dledger_core.record import empty_batch
from spark_connector.errors import RetentionError
from spark_connector.options import DLedgerOptions
from spark_connector.planning import Range
from spark_connector.reading.logs import CATCH_UP_MS, Chunk, RecordInfo, ServerLog

__all__ = ["ArchivedLog"]

_AFTER_ALL: Final = (1 << 63) - 1


class ArchivedLog(ServerLog):
    """A log on servers, and its archive below their first index.

    Attributes:
        stored_index: the log's first stored index as this object has seen it; -1 before it has asked.
    """

    def __init__(self, options: DLedgerOptions, group: str, *, measuring: bool = False, log: str | None = None) -> None:
        super().__init__(options, group, measuring=measuring, log=log)
        self.stored_index = -1
        self._log = log
        self._state: ArchiveState | None = None
        self._ranges: list[ArchivedRange] = []
        self._window: Sequence[ArchivedRange] = ()
        self._rows: ArchivedRows | None = None

    def bounds(self, min_end: int = -1, wait_ms: int = CATCH_UP_MS) -> LogRange:
        """See ``Log``; the log begins where its archive does."""
        found = super().bounds(min_end, wait_ms)
        if found.log_uuid != self._log:  # recovered, or created again: its archive is another one
            self._log, self._ranges, self._window = found.log_uuid, [], ()
        self.stored_index = found.first_index
        while not self._ranges or self._ranges[-1].end < found.first_index:
            more = self._ask(self._ranges[-1].end if self._ranges else 0)
            if not more:
                # No archive, or one that was ended and does not reach the log: it is not used.
                return found
            # An archive that was ended and begun again starts elsewhere.
            self._ranges = [*(self._ranges if self._ranges and more[0].start == self._ranges[-1].end else ()), *more]
        return replace(found, first_index=min(found.first_index, self._ranges[0].start))

    def _first_stored(self) -> int:
        """Ask for the log's first stored index, with the client of the planned log."""
        return self._client.bounds(isolation=self._options.isolation).first_index

    def _is_stored(self, index: int) -> bool:
        """Whether the log has an index, as far as this object knows; an executor, which has no bounds, asks once."""
        # A node that hangs may have what the others have deleted: without this question a read of it would end with
        # UNREACHABLE after fetchRetryMs (test_trimmed_entries_are_read_while_a_node_hangs).
        if self.stored_index < 0:
            self.stored_index = self._first_stored()
        return index >= self.stored_index

    def _ask(self, start: int) -> Sequence[ArchivedRange]:
        """Return the ranges from the one with an index on, at most those of one response."""
        found = self._client.archived_ranges(start)
        self._state = found.archive
        return found.ranges

    def _range_of(self, index: int) -> ArchivedRange | None:
        """Return the range with an index; None if it was not archived."""
        found = range_with(self._ranges, index) or range_with(self._window, index)
        if found is None:  # an executor has no bounds, and asks for the ranges that it reads
            self._window = self._ask(index)
            found = range_with(self._window, index)
        return found

    def _trimmed_range(self, index: int, error: DLedgerError) -> ArchivedRange:
        """Return the range with an index that the log has trimmed meanwhile; raise ``error`` if it has another cause.

        Retention goes on while a query is planned and read, because nothing is pinned.
        """
        if isinstance(error, UnreachableError):  # a node that hangs may still have it
            first = self._first_stored()
        else:
            first = error.end if isinstance(error, RetentionError) else int(error.values.get("first_index", -1))
        found = self._range_of(index) if index < first else None
        if found is None:
            raise error
        self.stored_index = first
        return found

    def record(self, index: int) -> RecordInfo:
        """See ``Log``; within a range of the archive the check is unknown, and the position is an estimate."""
        found: ArchivedRange | None
        if self._is_stored(index):
            try:
                return super().record(index)
            except (IndexOutOfRangeError, UnreachableError) as error:
                found = self._trimmed_range(index, error)
        else:
            found = self._range_of(index)
            if found is None:
                raise IndexOutOfRangeError(f"index {index} is not stored", f"group {self.group!r}")
        count, size = found.end - found.start, found.nbytes
        position, end = (found.position + size * (at - found.start) // count for at in (index, index + 1))
        if index < found.end - 1:
            return RecordInfo(None, position, end, None)
        return RecordInfo(EntryCheck(found.term, found.check), position, end, _time_of(found))

    def split_points(self, part: Range, positions: Sequence[int]) -> Sequence[int]:
        """See ``Log``; the archive is divided between its ranges."""
        if part.start >= self.stored_index:
            try:
                return super().split_points(part, positions)
            except (IndexOutOfRangeError, UnreachableError) as error:
                # The same nodes had it a moment ago (test_entries_trimmed_while_they_are_planned_are_read).
                self._trimmed_range(part.start, error)
        borders = [(one.position, one.start) for one in self._ranges if part.start < one.start < part.end]
        borders = [(-1, part.start), *borders, (_AFTER_ALL, part.end)]
        return [min(borders, key=lambda border: abs(border[0] - goal))[1] for goal in positions]

    def index_at_time(self, timestamp_ms: int, bounds: LogRange) -> int:
        """See ``Log``."""
        found = self._archived.first(self._trimmed(), "timestamp", timestamp_ms)
        if found is not None:
            return found
        index = super().index_at_time(timestamp_ms, bounds)
        # The node that responded may have deleted more than the others, or since, and did not see these entries
        # (test_time_is_exact_where_one_node_has_trimmed_more).
        first = max(node.first_index for node in self._client.metadata().nodes)
        unseen, at = list[ArchivedRange](), self.stored_index
        while at < min(first, index) and (one := self._range_of(at)) is not None:
            unseen.append(one)
            at = one.end
        found = self._archived.first(unseen, "timestamp", timestamp_ms) if unseen else None
        return index if found is None else min(index, found)

    def index_at_term(self, term: int) -> int | None:
        """Return the first archived index with a row of a term or a later one; None if there is none."""
        return self._archived.first(self._trimmed(), "term", term)

    def _trimmed(self) -> Iterator[ArchivedRange]:
        """Yield the ranges that begin below the log."""
        return takewhile(lambda one: one.start < self.stored_index, self._ranges)

    def range_end(self, start: int, end: int, most: int) -> int:
        """Return the end of a micro-batch from ``start``: in the archive the end of a range, at least one.

        Args:
            start: its start.
            end: its end by the limits of the query.
            most: the end of what the query may read.
        """
        if end <= start or end >= min(self.stored_index, most):
            return end
        ends = [one.end for one in self._ranges]
        at = bisect_right(ends, end)
        if at and ends[at - 1] > start:
            return ends[at - 1]
        return min(ends[at], most) if at < len(ends) else end

    def pin(self, name: str, start: int, seconds: float) -> None:
        """See ``Log``; pins nothing if the log has an archive: what retention deletes is read there."""
        if self._state is None and seconds:
            self._window = self._ask(start)
        # A pin from before the archive was begun is released too.
        if self._state is None or not seconds:
            super().pin(name, start, seconds)

    def read(
        self,
        part: Range,
        start: int,
        replica: int = 0,
        max_bytes: int | None = None,
        columns: Sequence[str] | None = None,
    ) -> Chunk:
        """See ``Log``; entries that the log has trimmed are read from the archive, with all of their columns.

        Raises:
            ArchiveDamagedError: the table does not have the rows that the log has recorded.
        """
        self._use_log(part.log)
        found: ArchivedRange | None
        if self._is_stored(start):
            try:
                return super().read(part, start, replica, max_bytes, columns)
            except (RetentionError, UnreachableError) as error:
                found = self._trimmed_range(start, error)
        else:
            found = self._range_of(start)
            if found is None:
                raise RetentionError.of(part.group, start, self.stored_index, part.end)
        stop = min(found.end, part.end)
        if self._measuring:  # the lag needs the time of its first entry: that of the range is near enough
            return Chunk(self._sample(found, start), stop)
        return Chunk(*self._archived.part(found, start, stop, max_bytes or self._options.read_bytes()))

    @property
    def _archived(self) -> ArchivedRows:
        """Reads and verifies the ranges."""
        if self._rows is None:
            given, hint = self._options.archive or FROM_LOG, self._state.table if self._state is not None else ""
            table = ArchiveTable(hint if given == FROM_LOG else given, dict(self._options.archive_storage))
            self._rows = ArchivedRows(self.group, table)
        return self._rows

    def _sample(self, one: ArchivedRange, index: int) -> pa.RecordBatch:
        """Return a row in place of those from ``index`` on, with the time of the range; nothing if it has no rows."""
        if not one.rows:
            return empty_batch(READ_SCHEMA)
        row = {"index": index, "term": one.term, "position": self.record(index).position, "body": b""}
        return pa.RecordBatch.from_pylist([{**row, "timestamp": _time_of(one)}], READ_SCHEMA)


def _time_of(one: ArchivedRange) -> datetime | None:
    return datetime.fromtimestamp(one.last_time_ms / 1000, UTC) if one.last_time_ms else None
