"""The archive on the leader: cut the log into ranges, prove that a table has their rows, record what is proved.

A job names the digest of a range's rows in its table. The leader computes the digest of its own rows, from its files,
and appends an entry that records the range only if the two are equal: it believes nothing that the job says. The entry
counts only if the range starts where the archive ends when the entry is applied (``ArchiveTable.apply``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any, Final, NoReturn

from dledger_core.bootstrap import ARCHIVE_VERSION
from dledger_core.client.archive import check_uri
from dledger_core.client.position import check_of_last
from dledger_core.config import Limits
from dledger_core.control import ArchivedRange
from dledger_core.digest import RowsDigest, RowsHasher
from dledger_core.errors import ArchiveRefusedError, DLedgerError
from dledger_core.ids import Index
from dledger_core.net.messages import ARCHIVE_RANGES_MAX, ProveRequest, RangesRequest, RangesResponse
from dledger_core.record import ProposedBatch, data_entries
from dledger_core.server.replica.replica import Replica
from dledger_core.server.services.appends import Append, AppendedRange, Appends, AppendState, Reply
from dledger_core.server.services.membership import Membership
from dledger_core.storage import CommitLog
from dledger_core.storage.tables.archived import ArchiveTable

RANGE_BYTES: Final = 64 << 20
"""Bytes of the log in a full range."""
RANGE_ENTRIES: Final = 1 << 20
"""Indexes in a full range."""
CLOSED_MS: Final = 3_600_000
"""Log time after which a range is closed that is not full."""
_READ_BYTES: Final = 512 << 10
_PAUSE: Final = 4
"""Pause after each part, as a multiple of its time: without it appends waited 2.4 times as long while a range was read
(``benchmarks/bench_archive.py``)."""
_PIN: Final = "archive"
_PIN_MS: Final = 600_000
"""Longer than the proof of the first range takes."""

_LOG = logging.getLogger(__name__)


class _Proof(Append):
    """The record of a range that is proved."""

    __slots__ = ("archive", "range")

    def __init__(self, archive: Archive, found: ArchivedRange, table: str, reply: Reply) -> None:
        fields: dict[str, Any] = {"k": "archived", "r": found.row(), "u": table}
        if not archive.table.is_active:
            fields["b"] = True
        payload = ProposedBatch(control=archive.replica.pack_control(fields))
        super().__init__(archive.appends, payload, reply)
        self.archive = archive
        self.range = found

    def proceed(self) -> None:
        """Propose it if it would count by the committed entries."""
        if self.range.start != self.archive.next_start:
            self.archive.refuse_start(self.range.start)
        self.appends.propose_alone(self)

    def settle(self, outcome: AppendedRange | DLedgerError) -> None:
        """Fail if another entry came first: the table decides."""
        is_committed = self.state is AppendState.PROPOSED and isinstance(outcome, AppendedRange)
        if is_committed and self.range not in self.archive.table.containing(self.range.start, most=1):
            outcome = self.archive.not_next(self.range.start)
        super().settle(outcome)


class _End(Append):
    """The end of the archive."""

    __slots__ = ("archive",)

    def __init__(self, archive: Archive, reply: Reply) -> None:
        payload = ProposedBatch(control=archive.replica.pack_control({"k": "archive-end"}))
        super().__init__(archive.appends, payload, reply)
        self.archive = archive

    def proceed(self) -> None:
        """Propose it if there is an archive."""
        if self.archive.table.is_active:
            self.appends.propose_alone(self)
        else:
            self.settle(self.appends.now())


class Archive:
    """The archive service of one replica; lives on the node's event loop, disk work in ``executor``.

    Args:
        appends: the replica's appends.
        membership: raises the group's version.
        executor: threads that read.
        limits: the node's limits.
        range_bytes: bytes of the log in a full range.
        range_entries: indexes in a full range.

    Attributes:
        replica: the replica.
    """

    def __init__(
        self,
        appends: Appends,
        membership: Membership,
        executor: Executor | None,
        limits: Limits,
        range_bytes: int = RANGE_BYTES,
        range_entries: int = RANGE_ENTRIES,
    ) -> None:
        self.appends = appends
        self.replica: Replica = appends.replica
        self._membership = membership
        self._executor = executor
        self._range_bytes = range_bytes
        self._range_entries = range_entries
        self._log_time_ms = int(limits.log_time_s * 1000)

    @property
    def table(self) -> ArchiveTable:
        """The recorded ranges, as of the committed entries; a snapshot install replaces the table."""
        return self.replica.tables.archive

    @property
    def next_start(self) -> int:
        """Start of the next range: the end of the archive, or this log's first index."""
        return self.table.end if self.table.is_active else self.replica.raft.first_index

    # --- requests ------------------------------------------------------------------------------------------------

    async def ranges(self, request: RangesRequest) -> RangesResponse:
        """Cut what the archive lacks; raise ArchiveRefusedError, or NotLeaderError."""
        await self.ready()
        self._check_members()
        start = self.next_start if request.start < 0 else request.start
        self._check_stored(start)
        end = self.replica.visible_end
        is_closed = request.until is not None
        if request.until is not None:
            end = min(end, Index(request.until))
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._executor, self._cut, start, end, is_closed)
        return RangesResponse(ranges=found, start=start, visible_end=self.replica.visible_end)

    async def prove(self, request: ProveRequest, who: str) -> tuple[bool, int]:
        """Compare the digest of a range with the log, and record the range if it is the same.

        Returns:
            Whether it is, and the number of the log's rows.

        Raises:
            ArchiveRefusedError: the range is not the next one, or another rule refuses it.
            CorruptRecordError: the leader's records are damaged; they are repaired.
            LeadershipLostError: the outcome is unknown.
        """
        check_uri(request.table)
        await self.ready()
        self._check_members()
        start, end, theirs = request.start, request.end, RowsDigest(request.rows, request.digest)
        for known in self.table.containing(start, most=1):
            if (known.start, known.end) == (start, end):
                return theirs == RowsDigest(known.rows, known.digest), known.rows
        if start != self.next_start:
            self.refuse_start(start)
        self._check_stored(start)
        if not start < end <= self.replica.visible_end:
            values = {"end": end, "visible_end": self.replica.visible_end}
            self._refuse("not-visible", "the range is empty, or ends above what read_committed shows", "retry", values)
        # As the leader cuts them: one more entry than fits, which is the first of the next range.
        nbytes = self.replica.log.position_of(end - 1) - self.replica.log.position_of(start)
        if end - start > self._range_entries or nbytes > self._range_bytes:
            what = f"a range has at most {self._range_entries} indexes and {self._range_bytes} bytes of the log"
            self._refuse("too-large", what, "prove the ranges that the leader cuts")
        if not self.table.is_active:  # from the first record on retention waits for the archive
            self.replica.pins.set([_PIN, _PIN_MS], start, self.replica.pin_time_ms)
        orphaned = self.replica.visibility.orphaned(start, end)
        found = await self._read(RangeReading(self.replica.log, start, end, orphaned))
        if theirs != RowsDigest(found.rows, found.digest):
            return False, found.rows
        await self._membership.raise_version(ARCHIVE_VERSION, who)
        outcome = asyncio.get_running_loop().create_future()
        self.record(found, request.table, _into(outcome))
        _raised(await outcome)
        self.replica.pins.set([_PIN, 0], start, self.replica.pin_time_ms)
        return True, found.rows

    async def _read(self, reading: RangeReading) -> ArchivedRange:
        """Read a range with pauses, so that appends get the processor."""
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            found = await loop.run_in_executor(self._executor, reading.next_part)
            if found is not None:
                return found
            await asyncio.sleep(_PAUSE * (loop.time() - begun))

    def record(self, found: ArchivedRange, table: str, reply: Reply) -> None:
        """Append the entry that records a range as this log has it; ``reply`` gets an error if it does not count."""
        self.appends.start(_Proof(self, found, table, reply))

    async def end(self, who: str) -> None:
        """End the archive. Idempotent; raise as ``prove``."""
        await self.ready()
        if self.table.is_active:
            _LOG.warning("ending archive: group=%s end=%d peer=%s", self.replica.group, self.table.end, who)
        outcome = asyncio.get_running_loop().create_future()
        self.finish(_into(outcome))
        _raised(await outcome)

    def finish(self, reply: Reply) -> None:
        """Append the entry that ends the archive, unless there is none."""
        self.appends.start(_End(self, reply))

    async def ready(self) -> None:
        """Wait until this leader's tables are complete and it has proved that it still leads.

        Raises:
            ArchiveRefusedError: the log cannot have an archive.
            NotLeaderError: this node does not lead.
        """
        if not self.replica.profile_b:
            self._refuse("profile", "a log of profile A cannot record an archive", "use a log of profile B")
        outcome = asyncio.get_running_loop().create_future()
        self.appends.when_ready(_into(outcome))
        _raised(await outcome)

    # --- refusals ------------------------------------------------------------------------------------------------

    def not_next(self, start: int) -> ArchiveRefusedError:
        """Return the error for a range that starts elsewhere."""
        return ArchiveRefusedError(
            f"the range starts at index {start}, and the next one at {self.next_start}",
            f"group {self.replica.group}",
            "ask for the ranges again; another job may prove the same archive",
            {"reason": "not-next", "start": start, "next": self.next_start},
        )

    def refuse_start(self, start: int) -> NoReturn:
        """Raise that error."""
        raise self.not_next(start)

    def _check_stored(self, start: int) -> None:
        first = self.replica.raft.first_index
        if start < first:
            self._refuse(
                "trimmed",
                f"{self.replica.node_id} has deleted the entries from index {start} to {first}",
                "transfer leadership to a node that has them, or end the archive and begin it again",
                {"start": start, "first_index": first},
            )

    def _check_members(self) -> None:
        if older := self._membership.older_than(ARCHIVE_VERSION):
            what = f"{', '.join(older)} have not shown that they know archives"
            self._refuse("older-nodes", what, "start these nodes, or upgrade them", {"nodes": list(older)})

    def _refuse(self, reason: str, what: str, remedy: str, values: dict[str, Any] | None = None) -> NoReturn:
        raise ArchiveRefusedError(what, f"group {self.replica.group}", remedy, {"reason": reason} | (values or {}))

    # --- disk ----------------------------------------------------------------------------------------------------

    def _cut(self, start: int, end: int, is_closed: bool) -> list[list[int]]:
        """Return [start, end, bytes] of the full ranges before ``end``, and of the last one if it is closed."""
        log, found = self.replica.log, list[list[int]]()
        while start < end and len(found) < ARCHIVE_RANGES_MAX:
            begin = log.position_of(start)
            stop = min(int(log.index_at_position(begin + self._range_bytes)), start + self._range_entries, end)
            is_full = stop < end or stop - start == self._range_entries
            if not (is_full or is_closed or self._age_ms(start) >= CLOSED_MS):
                break
            found.append([start, stop, log.position_of(stop) - begin])
            start = stop
        return found

    def _age_ms(self, start: int) -> int:
        """Return the age of an entry in log time, or a little less: at most the interval of entries that carry it."""
        replica = self.replica
        recorded_ms = replica.log.first_log_time(start, replica.readable_end)
        if recorded_ms is None:  # no entry with the log time follows, so it is due at most this long after the last one
            recorded_ms = replica.tables.log_time_ms + self._log_time_ms
        return replica.log_time.now_ms - recorded_ms


class RangeReading:
    """Reads a range as a log has it, part by part, from its files; every record is checked. Not thread-safe.

    Args:
        log: the log.
        start: first index.
        end: end (exclusive), at most the visible end.
        orphaned: the orphaned ranges that overlap it.
    """

    def __init__(self, log: CommitLog, start: int, end: int, orphaned: Sequence[tuple[int, int]]) -> None:
        self._log, self._start, self._end, self._orphaned = log, start, end, orphaned
        self._at = start
        self._position = 0
        self._hasher = RowsHasher()

    def next_part(self) -> ArchivedRange | None:
        """Read the next part; return the range with the last one.

        Raises:
            CorruptRecordError: a record is damaged.
        """
        records = self._log.read(self._at, self._end, _READ_BYTES)
        if self._at == self._start:
            self._position = records.first.position
        self._hasher.update(data_entries(records, self._at, self._orphaned))
        self._at += records.count
        if self._at < self._end:
            return None
        last, rows = check_of_last(records), self._hasher.digest()
        return ArchivedRange(
            start=self._start,
            end=self._end,
            rows=rows.rows,
            digest=rows.digest,
            position=self._position,
            nbytes=records.last.position + records.last.size - self._position,
            last_time_ms=records.last.time_ms,
            term=last.term,
            check=last.check,
        )


def range_of(log: CommitLog, start: int, end: int, orphaned: Sequence[tuple[int, int]]) -> ArchivedRange:
    """Return a range as a log has it; see ``RangeReading``."""
    reading = RangeReading(log, start, end, orphaned)
    while (found := reading.next_part()) is None:
        pass
    return found


def _into(outcome: asyncio.Future[AppendedRange | DLedgerError]) -> Reply:
    """Return a reply that completes a future, whose request may have been cancelled."""
    return lambda found: None if outcome.done() else outcome.set_result(found)


def _raised(outcome: AppendedRange | DLedgerError) -> None:
    if isinstance(outcome, DLedgerError):
        raise outcome
