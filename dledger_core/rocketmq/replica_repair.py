"""Repairs a stopped broker's DLedger store from its replicas, byte for byte: only what a majority of them proves.

The replicas of a RocketMQ log (Java DLedger, generation A) have the same bytes at the same positions. A range of
entries is replaced if, for each entry, more than half of all replicas, the damaged one included, have the same record,
index row and end of the file; and if the store has a later entry that equals the majority's. Two logs with an entry of
one index and term are equal before it (Log Matching, Raft section 5.3), so these are the entries that the store had.
Nothing is appended or truncated: the broker's own recovery and its leader do that.

Only bytes that differ are written, in place, records before their index rows, and each is synced. A missing file is
written completely under another name and then renamed. So a crash leaves at most the damage that there was, and the
same command continues.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from dledger_core.errors import ConfigError, CorruptRecordError, StoreBusyError, StoreMismatchError
from dledger_core.record import MAGIC_BLANK, PREFIX, Records, index_records, segment_name
from dledger_core.rocketmq.convert.source import check_broker_idle
from dledger_core.rocketmq.store.directory import Damaged, readable
from dledger_core.storage.files.file_system import File, Files, OsFiles
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.segments import Segments
from dledger_core.storage.read.store_files import StoreFiles
from dledger_core.storage.read.store_reader import StoreReader

_CHUNK_BYTES: Final = 4 << 20
_SLOW_ENTRIES: Final = 4096
_DIGEST_BYTES: Final = 16
_PART: Final = ".repairing"
_REPLICAS_MIN: Final = 3
_COPY: Final = (
    "copy the complete directory of an intact replica while its broker is stopped, or save what can be read with "
    "'dledger salvage'"
)


@dataclass(frozen=True, slots=True)
class DifferentRange:
    """Entries [start, end) of a store that are damaged, missing, or have other bytes than the majority's.

    Attributes:
        start: the first one.
        end: end (exclusive).
        position: of the first record; -1 if unknown.
        path: the data file of that record; the store if unknown.
        state: ``damaged``: a majority proves the bytes; ``repaired``; ``refused``: they are not proven.
        replicas: those that have the proven bytes of the complete range.
        reason: the damage, or why it is refused.
        remedy: the next step for a refused range.
    """

    start: int
    end: int
    position: int
    path: str
    state: Literal["damaged", "repaired", "refused"]
    replicas: tuple[str, ...]
    reason: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class _Entry:
    """An intact entry of a replica: its place, and digests of its record, and of its row and the end of its file."""

    position: int
    size: int
    term: int
    record: bytes
    around: bytes


@dataclass(slots=True)
class _Run:
    """Consecutive entries that differ from the majority's.

    Attributes:
        holders: numbers of the replicas with the proven bytes of all its entries.
        sources: (first entry, number of a replica to copy from), for each part of the run.
        unproven: the first entry without a majority; None = there is none.
        diverged: the first entry that the store has intact in another term; None = there is none.
        rows_only: whether all records are right, and only rows or the ends of files differ.
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


class _Replica:
    """An opened store of the group."""

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

    def entries(self, start: int, end: int, upto: int) -> dict[int, _Entry]:
        """Return the intact entries in [start, end); the end of a file counts for those before ``upto - 1``."""
        low, high, found = max(start, self.start), min(end, self.end), {}
        for each in readable(self.log, low, high) if low < high else ():
            if not isinstance(each, Records):
                continue
            first, view, headers = int(each.headers["index"][0]), memoryview(each.data), each.headers
            rows = self.rows(first, first + each.count)
            for number, (begin, size) in enumerate(zip(each.starts.tolist(), each.sizes.tolist(), strict=True)):
                position, term = int(headers["position"][number]), int(headers["term"][number])
                last = first + number + 1 >= min(upto, self.end)
                around = rows[number : number + 1].tobytes() + (b"" if last else self.blank(position + size))
                record = _digest(view[begin : begin + size])
                found[first + number] = _Entry(position, size, term, record, _digest(around))
        return found

    def close(self) -> None:
        """Close the files."""
        self.log.close()


class ReplicaRepair:
    """A store and its replicas; made by ``open``.

    Attributes:
        start: the store's first entry.
        end: its end (exclusive).
        replica_ends: the end of each other replica, by its directory.
    """

    def __init__(self, replicas: Sequence[_Replica], files: Files) -> None:
        self._all = tuple(replicas)
        self._target, *self._donors = self._all
        self._files = files
        self._majority = len(self._all) // 2 + 1
        self.start, self.end = self._target.start, self._target.end
        self._found: list[tuple[_Run, DifferentRange]] = []
        self.replica_ends = {str(each.path): each.end for each in self._donors}

    @classmethod
    @contextmanager
    def open(
        cls, directory: Path, replicas: Sequence[Path], *, write: bool = True, files: Files | None = None
    ) -> Iterator[ReplicaRepair]:
        """Open a store for repair; a broker cannot start on it meanwhile.

        Args:
            directory: the store: the directory with data/ and index/.
            replicas: the stores of all other replicas of its group; their brokers may be running.
            write: False = nothing is written, and nothing is locked.
            files: the file system.

        Raises:
            StoreBusyError: a broker runs on the store, or another repair.
            StoreMismatchError: these are not stores of RocketMQ with files of one size.
            ConfigError: too few replicas, or one of them twice.
        """
        files = files or OsFiles()
        _check_distinct(directory, replicas)
        with ExitStack() as stack:
            if write:
                stack.enter_context(_locked(directory))
                _remove_parts(directory, files)
            opened = [stack.enter_context(closing(_Replica(path, files))) for path in (directory, *replicas)]
            _check_kind(opened)
            yield cls(opened, files)

    def find(self, progress: Callable[[int], None] = lambda entries: None) -> list[DifferentRange]:
        """Compare all entries of the store with the replicas'; return the ranges that differ.

        Args:
            progress: called with the number of entries so far.

        Raises:
            StoreMismatchError: no entry of the store equals a majority's: these are not replicas of one log.
        """
        runs, equal = self._runs(self.start, self.end, progress)
        if not equal:
            raise StoreMismatchError(
                "the store has no entry that a majority of the replicas has too",
                str(self._target.path),
                "name the stores of all other replicas of its group",
                {"first_index": self.start, "last_index": self.end - 1},
            )
        self._found = [(run, self._judged(run)) for run in runs if not self._is_left(run)]
        return [judged for _, judged in self._found]

    def repair(self, progress: Callable[[int], None] = lambda entries: None) -> list[DifferentRange]:
        """Write the proven bytes of the ranges that ``find`` returns as damaged; return all ranges with their state.

        Raises:
            OSError: the disk failed; the same call continues later.
        """
        self.find(progress)
        for run, judged in self._found:
            if judged.state == "damaged":
                self._write(run)
        # Read back from new descriptors, and judged again: nothing is called repaired that a later audit could find.
        with closing(_Replica(self._target.path, self._files)) as now:
            self._all = (now, *self._donors)
            return [self._checked(judged) if judged.state == "damaged" else judged for _, judged in self._found]

    def _runs(
        self, start: int, end: int, progress: Callable[[int], None] = lambda entries: None
    ) -> tuple[list[_Run], int]:
        """Return the runs of entries in [start, end) that differ, and the number of those that equal a majority's."""
        runs: list[_Run] = []
        at, equal = start, 0
        while at < end:
            stop = self._equal_to(at, end)
            if stop is None:
                stop = min(end, at + _SLOW_ENTRIES)
                equal += self._compare(at, stop, runs)
            else:
                equal += stop - at
            at = stop
            progress(at - start)
        return runs, equal

    def _equal_to(self, at: int, end: int) -> int | None:
        """Return the end of the entries from ``at`` on that equal a majority's; None if the first ones may not."""
        target = self._all[0]
        records = target.records(at, end)
        if records is None:
            return None
        stop = at + records.count
        positions = records.headers["position"].astype(np.int64)
        ends = (positions + records.sizes.astype(np.int64)).tolist()
        jumps = [ends[row] for row in np.flatnonzero(positions[1:] != np.array(ends[:-1], np.int64)).tolist()]
        if stop < self.end:
            jumps.append(ends[-1])
        rows = index_records(records).tobytes()
        if target.rows(at, stop).tobytes() != rows:
            return None
        blanks = [target.blank(position) for position in jumps]
        agreeing = 1
        for each in self._donors:
            other = each.records(at, stop)
            agreeing += (
                other is not None
                and other.data == records.data
                and each.rows(at, stop).tobytes() == rows
                and [each.blank(position) for position in jumps] == blanks
            )
        return stop if agreeing >= self._majority else None

    def _compare(self, start: int, end: int, runs: list[_Run]) -> int:
        """Add the entries of [start, end) that differ to the runs; return the number of those that equal a majority's.

        An intact entry that the other replicas deleted, or do not have yet, does not differ.
        """
        tables = [each.entries(start, end, self.end) for each in self._all]
        reasons, equal = self._reasons(start, end), 0
        for at in range(start, end):
            entries = [table.get(at) for table in tables]
            votes = Counter(entry for entry in entries if entry is not None)
            right = next((entry for entry, count in votes.items() if count >= self._majority), None)
            own = entries[0]
            if right is not None and own == right:
                equal += 1
                continue
            if right is None and own is not None and all(entry in (None, own) for entry in entries):
                continue
            holders = frozenset(number for number, entry in enumerate(entries) if right is not None and entry == right)
            same_record = own is not None and right is not None and own.record == right.record
            run = runs[-1] if runs and runs[-1].end == at else None
            if run is None:
                position = right.position if right is not None else own.position if own is not None else -1
                what = "the index row, or the end of the file, has other bytes" if same_record else "it has other bytes"
                run = _Run(at, at, position, reasons.get(at, what), holders)
                runs.append(run)
            run.end, run.holders, run.rows_only = at + 1, run.holders & holders, run.rows_only and same_record
            if right is None:
                run.unproven = at if run.unproven is None else run.unproven
            elif not run.sources or run.sources[-1][1] not in holders:
                run.sources.append((at, min(holders)))
            if own is not None and right is not None and own.term != right.term and run.diverged is None:
                run.diverged = at
        return equal

    def _reasons(self, start: int, end: int) -> dict[int, str]:
        """Return the damage of the entries in [start, end) that the store cannot return."""
        return {
            at: each.error.what
            for each in readable(self._all[0].log, start, end)
            if isinstance(each, Damaged)
            for at in range(max(start, each.start), min(each.end, end))
        }

    def _is_left(self, run: _Run) -> bool:
        """Whether a run is left to the broker: at its start it writes the last rows again, from the records."""
        return run.end >= self.end and run.rows_only and run.unproven is None

    def _judged(self, run: _Run) -> DifferentRange:
        path = str(self._target.data.path(run.position) if run.position >= 0 else self._target.path)
        names = tuple(str(self._all[number].path) for number in sorted(run.holders))
        found = DifferentRange(run.start, run.end, run.position, path, "damaged", names, run.reason)
        if run.unproven is not None:
            what = f"{run.reason}; no majority of the {len(self._all)} replicas has the same entry {run.unproven}"
            return replace(found, state="refused", reason=what, remedy=_COPY)
        if run.end >= self.end:
            # Without an equal entry after them they may be another leader's, which no majority of bytes disproves.
            ends = f"entry {run.diverged} has another term" if run.diverged is not None else run.reason
            what = f"{ends}, and no later entry of the store equals the majority's"
            remedy = f"start the broker: its leader replaces the end of its log; if it does not start, {_COPY}"
            return replace(found, state="refused", reason=what, remedy=remedy)
        return found

    def _write(self, run: _Run) -> None:
        """Write the proven bytes of a run, durably: records, then index rows."""
        layout, (data_bytes, index_bytes) = Layout(self._target.path), self._target.sizes
        with _Writer(self._files, layout.data, data_bytes) as data:
            for donor, _, records in self._proven(run):
                view, at = memoryview(records.data), 0
                for position, size in zip(records.headers["position"].tolist(), records.sizes.tolist(), strict=True):
                    data.write(position, view[at : at + size])
                    blank = donor.blank(position + size)
                    if blank:
                        data.write(position + size, blank)
                    at += size
        with _Writer(self._files, layout.index, index_bytes) as index:
            for donor, start, records in self._proven(run):
                rows = donor.rows(start, start + records.count)
                for number in range(records.count):
                    index.write((start + number) * rows.itemsize, rows[number : number + 1].tobytes())

    def _proven(self, run: _Run) -> Iterator[tuple[_Replica, int, Records]]:
        """Yield the entries of a run, with a replica that has the proven bytes, and the first index."""
        stops = [start for start, _ in run.sources[1:]] + [run.end]
        for (start, number), stop in zip(run.sources, stops, strict=True):
            at, donor = start, self._all[number]
            while at < stop:
                records = donor.records(at, stop)
                if records is None:
                    raise CorruptRecordError(
                        "the replica can no longer be read", str(donor.path), "run the command again", {"index": at}
                    )
                yield donor, at, records
                at += records.count

    def _checked(self, judged: DifferentRange) -> DifferentRange:
        left, _ = self._runs(judged.start, judged.end)
        if not left:
            return replace(judged, state="repaired")
        what = "the disk returns other bytes than were written, or the replicas changed meanwhile"
        return replace(judged, state="refused", reason=what, remedy="check the disk, and run the command again")


class _Writer:
    """Writes bytes that differ into the files of a directory; missing files get their names once they are complete."""

    def __init__(self, files: Files, directory: Path, size: int) -> None:
        self._files = files
        self._directory = directory
        self._segments = Segments.load(files, directory, size, write=True, gaps=True)
        self._written: set[int] = set()
        self._new: dict[int, File] = {}

    def write(self, position: int, data: bytes | memoryview) -> None:
        """Write bytes of one file."""
        segments, base = self._segments, self._segments.base_of(position)
        if base in segments.bases:
            if segments.read(position, len(data)) != data:
                segments.fill_up(base)
                segments.write(position, [data])
                self._written.add(base)
            return
        if base not in self._new:
            self._new[base] = self._files.open(
                self._directory / f"{segment_name(base)}{_PART}", write=True, create=True
            )
            self._new[base].truncate(segments.segment_bytes)
        self._new[base].pwritev([data], position - base)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._segments.sync(sorted(self._written))
                for base, file in self._new.items():
                    file.datasync()
                    self._files.rename(self._directory / f"{segment_name(base)}{_PART}", segment_name(base))
        finally:
            for file in self._new.values():
                file.close()
            self._segments.close()


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _check_distinct(directory: Path, replicas: Sequence[Path]) -> None:
    if len(replicas) + 1 < _REPLICAS_MIN:
        raise ConfigError(
            f"--from names {len(replicas)} replica: two stores that differ have no majority",
            "",
            "name the stores of all other replicas of the group, each with --from",
        )
    known: dict[Path, Path] = {}
    for path in (directory, *replicas):
        other = known.get(path.resolve())
        if other is not None:  # one replica must not have two votes
            raise ConfigError(f"{path} and {other} are the same store", "", "name each replica once")
        known[path.resolve()] = path


def _check_kind(replicas: Sequence[_Replica]) -> None:
    for each in replicas:
        if each.log.writer != "java-a" or each.log.identity_lost:
            native = each.log.writer == "dledger-python" or each.log.identity_lost
            what = "a store of this project" if native else "a store of Java DLedger 0.4, which no RocketMQ writes"
            remedy = "repair it with --peers" if native else _COPY
            raise StoreMismatchError(f"--from repairs stores of RocketMQ, and this is {what}", str(each.path), remedy)
    first = replicas[0]
    for each in replicas[1:]:
        if each.sizes != first.sizes:
            raise StoreMismatchError(
                "the replica has files of another size than the store",
                str(each.path),
                "name the stores of the other replicas of its group",
                {"sizes": list(each.sizes), "store": list(first.sizes)},
            )


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keep a broker from starting on a store, and another repair from writing to it.

    A broker locks the first byte of its file ``lock`` (BrokerStartup), which is not made if it is missing.
    """
    lock = directory.resolve().parent / "lock"
    check_broker_idle(lock.parent)
    busy = StoreBusyError("a broker, another repair or a reader has the store open", str(directory), "stop it first")
    with ExitStack() as stack:
        opened = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, opened)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _check_closed(Layout(directory).data)
            if lock.is_file():
                of_broker = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
                stack.callback(os.close, of_broker)
                fcntl.lockf(of_broker, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        except BlockingIOError:
            raise busy from None
        yield


def _check_closed(data: Path) -> None:
    """Raise BlockingIOError if a process has the newest data file open: a broker's lock may be in another directory."""
    newest = max((path for path in data.glob("[0-9]" * 20)), default=None)
    if newest is None:
        return
    fd = os.open(newest, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        raise
    except OSError:  # a file system without leases, or a file of another user
        pass
    finally:
        os.close(fd)


def _remove_parts(directory: Path, files: Files) -> None:
    """Remove the incomplete files of an interrupted repair."""
    for place in (Layout(directory).data, Layout(directory).index):
        for name in files.listdir(place) or ():
            if name.endswith(_PART):
                files.unlink(place / name)
