"""The archive that a simulated log must have, by the committed entries alone, and what follows from it.

The members of a group share one. It reads each entry as the first member reported it committed, so it has no end to
lose, installs nothing and forgets nothing; a log that is continued has another one, which reads the entries again.

* Each range that counts was proved: its digest is that of the committed rows, by an implementation of its own.
* The tables of every member have the ranges as of the last entry that they include, whatever brought them. So ranges
  are equal on all members, and none outlives the end of a log that is continued.
* No member deletes an entry that is not archived, by the archive as of the entries that it knows to be committed, or
  that its tables include. A snapshot install leaves out no more than the leader's trims did: up to the archive's end,
  or before it began.
* A member that may have acknowledged a range has a store that 0.2.0 does not open.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from blake3 import blake3

from dledger_core import control
from dledger_core.bootstrap import ARCHIVE_VERSION
from dledger_core.client.position import check_of_last
from dledger_core.control import ArchivedRange
from dledger_core.ids import Index
from dledger_core.record import HEADER_BYTES, MAGIC_DATA, Records, merge_ranges
from dledger_core.storage.files.layout import Layout
from tests.sim.safety import check

if TYPE_CHECKING:
    from tests.sim.replica_member import ReplicaMember
    from tests.sim.simulator import Simulator


class Print(int):
    """Checksum of a record, by which shadows compare it; it carries the record."""

    record: bytes

    @classmethod
    def of(cls, crc: int, record: bytes) -> Print:
        """Return the checksum ``crc`` of a record."""
        found = cls(crc)
        found.record = record
        return found


class Recorded(NamedTuple):
    """A committed entry that changed the archive: a range that counts, or None for its end."""

    index: Index
    range: ArchivedRange | None


class Archives:
    """See the module."""

    def __init__(self, sim: Simulator) -> None:
        self._sim = sim
        self._seen = 0
        self._records: list[bytes] = []
        self._recorded: list[Recorded] = []

    def observe(self, member: ReplicaMember | None) -> None:
        """Read the newly committed entries; a member whose tables include them shows which ones are orphaned."""
        committed = self._sim.checker.committed
        for batch in committed[self._seen :]:
            check(batch.first_index == len(self._records), "a committed batch is missing", batch)
            for each in batch.payload:  # type: ignore[attr-defined]
                self._records.append(each.record)
                self._apply(Index(len(self._records) - 1), member)
        self._seen = len(committed)

    def _apply(self, index: Index, member: ReplicaMember | None) -> None:
        one = _records([self._records[index]])
        fields = {} if one.first.magic == MAGIC_DATA else control.unpack(self._records[index][HEADER_BYTES:])
        active = self._as_of(index)
        if fields.get("k") == "archive-end" and active:
            self._recorded.append(Recorded(index, None))
        if fields.get("k") != "archived":
            return
        found = ArchivedRange.of_row(fields["r"])
        if found.start == active[-1].end if active else fields.get("b"):
            self._recorded.append(Recorded(index, found))
            self._sim.counters["ranges recorded"] += 1
            if member is not None:
                self._compare(index, found, member)
        else:
            self._sim.counters["ranges that do not count"] += 1

    def _compare(self, index: Index, found: ArchivedRange, member: ReplicaMember) -> None:
        """Compare a range with the committed rows that ``read_committed`` shows."""
        first, shared = member.replica.raft.first_index, self._sim.shared
        forgotten = [(start, min(end, first)) for start, end in shared.orphaned if start < first]
        hidden = merge_ranges([*forgotten, *member.replica.tables.transactions.orphaned.ranges])
        all_of = [_records([record]) for record in self._records[found.start : found.end]]
        shown = [
            each
            for at, each in enumerate(all_of, found.start)
            if each.first.magic == MAGIC_DATA and not any(start <= at < end for start, end in hidden)
        ]
        last = all_of[-1]
        position = all_of[0].first.position
        expected = ArchivedRange(
            start=found.start,
            end=found.end,
            rows=len(shown),
            digest=_digest(shown),
            position=position,
            nbytes=last.first.position + last.first.size - position,
            last_time_ms=last.first.time_ms,
            term=last.first.term,
            check=check_of_last(last).check,
        )
        check(found.end <= index and found == expected, "a range is recorded that was not proved", found, expected)

    def _as_of(self, index: int) -> list[ArchivedRange]:
        """Return the ranges of the archive after the entries up to ``index``."""
        ranges: list[ArchivedRange] = []
        for each in self._recorded:
            if each.index <= index:
                ranges = [] if each.range is None else [*ranges, each.range]
        return ranges

    def check_tables(self, member: ReplicaMember) -> None:
        """Check the archive of a member's tables."""
        tables = member.replica.tables
        check(
            tables.applied_index < len(self._records), "tables include an entry that is not committed", member.node_id
        )
        found, expected = list(tables.archive.containing(-1)), self._as_of(tables.applied_index)
        check(found == expected, "the archive is not that of the log", member.node_id, found, expected)

    def check_trim(self, member: ReplicaMember, known: int) -> None:
        """Check the first index of a member that raised it and knew ``known`` and all entries before as committed."""
        first, ranges = member.core.first_index, self._as_of(known)
        if ranges:
            self._sim.counters["trims of an archived log"] += 1
            check(first <= ranges[-1].end, "an entry is trimmed that is not archived", member.node_id, first, ranges)

    def check_install(self, member: ReplicaMember, first: int) -> None:
        """Check the first index of a log that a snapshot install has restarted."""
        ranges = self._as_of(member.replica.tables.applied_index)
        if ranges:
            self._sim.counters["installs of an archived log"] += 1
            begun = next(each.index for each in reversed(self._recorded) if each.range == ranges[0])
            end = max(begun, ranges[-1].end)
            check(first <= end, "an install leaves out entries that are not archived", member.node_id, first, end)

    def check_format(self, member: ReplicaMember) -> None:
        """Check that a program which does not know archives would not open the durable store of a member."""
        if member.disk.configurations()[-1].configuration.version >= ARCHIVE_VERSION:
            inode = member.files.durable_names.get(Layout(member.path).log_meta)
            check(inode is not None, "a store without an identity", member.node_id)
            assert inode is not None
            version = json.loads(bytes(inode.durable))["format_version"]
            check(version == ARCHIVE_VERSION, "0.2.0 opens a store with an archive", member.node_id, version)


def _records(records: Sequence[bytes]) -> Records:
    return Records(np.array(list(map(len, records)), "<u4"), b"".join(records))


def _digest(rows: Sequence[Records]) -> bytes:
    """Return the digest of rows; ``dledger_core.digest`` is another implementation."""
    columns, bodies = blake3(), blake3()
    for row in rows:
        header, body = row.first, bytes(row.data)[HEADER_BYTES:]
        micros = header.time_ms * 1000 or -(1 << 63)
        columns.update(struct.pack("<5q", header.index, header.term, header.position, micros, len(body)))
        bodies.update(body)
    return blake3(columns.digest() + bodies.digest()).digest()
