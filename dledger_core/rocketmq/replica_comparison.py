"""Compares the entries of a store with those of its replicas: more than half of them decide what an entry is.

The replicas of a log have the same records at the same positions. An entry is proven if a majority, the compared store
included, has the same record; a damaged record is none. An intact entry that too few replicas have, and none
differently, does not differ: they deleted it, or do not have it yet.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dledger_core.errors import ConfigError, CorruptRecordError
from dledger_core.record import MAGIC_BLANK, PREFIX, Records, index_records
from dledger_core.rocketmq.store.directory import Damaged, readable
from dledger_core.storage.files.file_system import Files
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.segments import Segments
from dledger_core.storage.read.store_files import StoreFiles
from dledger_core.storage.read.store_reader import StoreReader

_CHUNK_BYTES: Final = 4 << 20
_SLOW_ENTRIES: Final = 4096
_DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Entry:
    """An intact entry of a replica: its place, and digests of its record, and of its row and the end of its file."""

    position: int
    size: int
    term: int
    record: bytes
    around: bytes


@dataclass(slots=True)
class Run:
    """Consecutive entries that differ from the majority's.

    Attributes:
        start: the first one.
        end: end (exclusive).
        position: of the first record; -1 if unknown.
        reason: the damage of the first one, or how it differs.
        holders: numbers of the replicas with the proven bytes of all its entries.
        sources: (first entry, number of a replica to copy from), for each part of the run.
        unproven: the first entry without a majority; None = there is none.
        diverged: the first entry that the store has intact in another term; None = there is none.
        rows_only: whether all records are right, and only rows or the ends of files differ.
        damaged: whether the store cannot return the first entry.
    """

    start: int
    end: int
    position: int
    reason: str
    holders: frozenset[int]
    sources: list[tuple[int, int]] = field(default_factory=list)
    unproven: int | None = None
    diverged: int | None = None
    rows_only: bool = True
    damaged: bool = False


@dataclass(slots=True)
class Agreement:
    """How the replicas agree on the entries that were compared.

    Attributes:
        proven: number of entries of the store that equal the majority's.
        alone: entries [start, end) of the store that too few replicas have for a majority, and none differently.
        equal: of each replica, by number, the number of entries that equal the store's.
        faulty: of each replica the entries [start, end) that a majority has, and that it has differently or damaged.
    """

    proven: int = 0
    alone: list[tuple[int, int]] = field(default_factory=list)
    equal: Counter[int] = field(default_factory=Counter)
    faulty: dict[int, list[tuple[int, int]]] = field(default_factory=dict)


class Replica:
    """An opened store of the group.

    Attributes:
        path: its directory.
        log: reads its entries.
        start: the first entry.
        end: its end (exclusive).
    """

    def __init__(self, path: Path, files: Files) -> None:
        self.path = path
        self._store = StoreFiles(files, Layout(path))
        # Bodies are opaque: the majority decides, also about a message that was damaged before the leader stored it.
        self.log = StoreReader(self._store)
        self.start, self.end = int(self.log.first_index), int(self.log.last_index) + 1

    @property
    def sizes(self) -> tuple[int, int]:
        """Sizes of the data files and of the index files."""
        return self._store.segment_bytes

    @property
    def data(self) -> Segments:
        """The data files."""
        return self._store.reader.data

    def rows(self, start: int, end: int) -> npt.NDArray[Any]:
        """Return index rows as stored on disk."""
        return self._store.rows.read(start, end)

    def blank(self, end: int) -> bytes:
        """Return the BLANK after a record that ends at a position; empty if there is none."""
        if end % self.data.segment_bytes == 0:
            return b""
        found = b""
        with suppress(CorruptRecordError):
            found = self.data.read(end, PREFIX.size)
        return found if len(found) == PREFIX.size and PREFIX.unpack(found)[0] == MAGIC_BLANK else b""

    def records(self, start: int, end: int) -> Records | None:
        """Return intact entries from ``start`` on; None if the first one is damaged or not there."""
        if not self.start <= start < min(end, self.end):
            return None
        with suppress(CorruptRecordError):
            return self.log.raw(start, min(end, self.end), _CHUNK_BYTES)
        found = next(readable(self.log, start, min(end, self.end)))
        return found if isinstance(found, Records) else None

    def entries(self, start: int, end: int, upto: int | None = None) -> dict[int, Entry]:
        """Return the intact entries in [start, end).

        Args:
            start: the first one.
            end: end (exclusive).
            upto: rows count, and before ``upto - 1`` the ends of files; None = only records count.
        """
        low, high, found = max(start, self.start), min(end, self.end), {}
        for each in readable(self.log, low, high) if low < high else ():
            if not isinstance(each, Records):
                continue
            first, view, headers = int(each.headers["index"][0]), memoryview(each.data), each.headers
            rows = None if upto is None else self.rows(first, first + each.count)
            for number, (begin, size) in enumerate(zip(each.starts.tolist(), each.sizes.tolist(), strict=True)):
                position, term = int(headers["position"][number]), int(headers["term"][number])
                around = b""
                if rows is not None and upto is not None:
                    last = first + number + 1 >= min(upto, self.end)
                    around = rows[number : number + 1].tobytes() + (b"" if last else self.blank(position + size))
                record = _digest(view[begin : begin + size])
                found[first + number] = Entry(position, size, term, record, _digest(around))
        return found

    def close(self) -> None:
        """Close the files."""
        self.log.close()


class Comparison:
    """Compares a store with its replicas.

    Args:
        replicas: the store, then its replicas; their numbers are their places here.
        majority: number of equal copies that prove an entry.
        records_only: whether rows of the index and the ends of files do not count.

    Attributes:
        agreement: of all entries compared so far.
    """

    def __init__(self, replicas: Sequence[Replica], majority: int, *, records_only: bool = False) -> None:
        self._all = tuple(replicas)
        self._majority = majority
        self._records_only = records_only
        self._end = self._all[0].end
        self.agreement: Final = Agreement()

    def runs(self, start: int, end: int, progress: Callable[[int], None] = lambda entries: None) -> list[Run]:
        """Return the runs of entries in [start, end) of the store that differ.

        Args:
            start: the first entry.
            end: end (exclusive), at most that of the store.
            progress: called with the number of entries so far.
        """
        runs: list[Run] = []
        at = start
        while at < end:
            stop = self._undisputed(at, end)
            if stop is None:
                stop = min(end, at + _SLOW_ENTRIES)
                self._compare(at, stop, runs)
            at = stop
            progress(at - start)
        return runs

    def _undisputed(self, at: int, end: int) -> int | None:
        """Return the end of entries from ``at`` on that no replica has differently; None if the first ones may differ.

        All are compared at once, so that equal stores cost little more than reading them.
        """
        target = self._all[0]
        records = target.records(at, end)
        if records is None:
            return None
        stop = at + records.count
        jumps = [] if self._records_only else self._jumps(records, stop)
        expected = self._around(target, at, stop, jumps)
        if not self._records_only and expected[0] != index_records(records).tobytes():
            return None
        holders = [0]
        for number, each in enumerate(self._all[1:], 1):
            if each.end <= at or stop <= each.start:
                continue
            other = each.records(at, stop)
            if other is None or other.data != records.data or self._around(each, at, stop, jumps) != expected:
                return None
            holders.append(number)
        found = self.agreement
        found.equal.update(dict.fromkeys(holders, records.count))
        if len(holders) >= self._majority:
            found.proven += records.count
        else:
            _extend(found.alone, at, stop)
        return stop

    def _jumps(self, records: Records, stop: int) -> list[int]:
        """Return the ends of records after which a file ends."""
        positions = records.headers["position"].astype(np.int64)
        ends = (positions + records.sizes.astype(np.int64)).tolist()
        jumps = [ends[row] for row in np.flatnonzero(positions[1:] != np.array(ends[:-1], np.int64)).tolist()]
        return [*jumps, ends[-1]] if stop < self._end else jumps

    def _around(self, replica: Replica, at: int, stop: int, jumps: list[int]) -> tuple[bytes, list[bytes]]:
        if self._records_only:
            return b"", []
        return replica.rows(at, stop).tobytes(), [replica.blank(position) for position in jumps]

    def _compare(self, start: int, end: int, runs: list[Run]) -> None:
        """Compare [start, end) entry by entry; add those that differ to the runs."""
        upto = None if self._records_only else self._end
        tables = [each.entries(start, end, upto) for each in self._all]
        reasons, agreement = self._reasons(start, end), self.agreement
        for at in range(start, end):
            entries = [table.get(at) for table in tables]
            votes = Counter(entry for entry in entries if entry is not None)
            right = next((entry for entry, count in votes.items() if count >= self._majority), None)
            own = entries[0]
            self._count(at, entries, right)
            if right is not None and own == right:
                continue
            if right is None and own is not None and all(entry in (None, own) for entry in entries):
                _extend(agreement.alone, at, at + 1)
                continue
            holders = frozenset(number for number, entry in enumerate(entries) if right is not None and entry == right)
            same_record = own is not None and right is not None and own.record == right.record
            run = runs[-1] if runs and runs[-1].end == at else None
            if run is None:
                position = right.position if right is not None else own.position if own is not None else -1
                what = "the index row, or the end of the file, has other bytes" if same_record else "it has other bytes"
                run = Run(at, at, position, reasons.get(at, what), holders, damaged=own is None)
                runs.append(run)
            run.end, run.holders, run.rows_only = at + 1, run.holders & holders, run.rows_only and same_record
            if right is None:
                run.unproven = at if run.unproven is None else run.unproven
            elif not run.sources or run.sources[-1][1] not in holders:
                run.sources.append((at, min(holders)))
            if own is not None and right is not None and own.term != right.term and run.diverged is None:
                run.diverged = at

    def _count(self, at: int, entries: list[Entry | None], right: Entry | None) -> None:
        found, own = self.agreement, entries[0]
        found.equal.update(number for number, entry in enumerate(entries) if entry is not None and entry == own)
        if right is None:
            return
        found.proven += own == right
        for number, (replica, entry) in enumerate(zip(self._all, entries, strict=True)):
            if number and entry != right and replica.start <= at < replica.end:
                _extend(found.faulty.setdefault(number, []), at, at + 1)

    def _reasons(self, start: int, end: int) -> dict[int, str]:
        """Return the damage of the entries in [start, end) that the store cannot return."""
        return {
            at: each.error.what
            for each in readable(self._all[0].log, start, end)
            if isinstance(each, Damaged)
            for at in range(max(start, each.start), min(each.end, end))
        }


def check_distinct(directory: Path, replicas: Sequence[Path]) -> None:
    """Raise ConfigError if a store is named twice: one replica must not have two votes."""
    known: dict[Path, Path] = {}
    for path in (directory, *replicas):
        other = known.get(path.resolve())
        if other is not None:
            raise ConfigError(f"{path} and {other} are the same store", "", "name each replica once")
        known[path.resolve()] = path


def _extend(ranges: list[tuple[int, int]], start: int, end: int) -> None:
    """Add [start, end) to ranges that end before it, or where it starts."""
    if ranges and ranges[-1][1] == start:
        ranges[-1] = ranges[-1][0], end
    else:
        ranges.append((start, end))


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
