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
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from dledger_core.errors import ConfigError, CorruptRecordError, StoreBusyError, StoreMismatchError
from dledger_core.record import Records, segment_name
from dledger_core.rocketmq.convert.source import check_broker_idle
from dledger_core.rocketmq.replica_comparison import Comparison, Replica, Run, check_distinct
from dledger_core.storage.files.file_system import File, Files, OsFiles
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.segments import Segments

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


class ReplicaRepair:
    """A store and its replicas; made by ``open``.

    Attributes:
        start: the store's first entry.
        end: its end (exclusive).
        replica_ends: the end of each other replica, by its directory.
    """

    def __init__(self, replicas: Sequence[Replica], files: Files) -> None:
        self._all = tuple(replicas)
        self._target, *self._donors = self._all
        self._files = files
        self.start, self.end = self._target.start, self._target.end
        self._found: list[tuple[Run, DifferentRange]] = []
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
        _check_number(replicas)
        check_distinct(directory, replicas)
        with ExitStack() as stack:
            if write:
                stack.enter_context(_locked(directory))
                _remove_parts(directory, files)
            opened = [stack.enter_context(closing(Replica(path, files))) for path in (directory, *replicas)]
            _check_kind(opened)
            yield cls(opened, files)

    def find(self, progress: Callable[[int], None] = lambda entries: None) -> list[DifferentRange]:
        """Compare all entries of the store with the replicas'; return the ranges that differ.

        Args:
            progress: called with the number of entries so far.

        Raises:
            StoreMismatchError: no entry of the store equals a majority's: these are not replicas of one log.
        """
        comparison = self._comparison(self._target)
        runs = comparison.runs(self.start, self.end, progress)
        if not comparison.agreement.proven:
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
        with closing(Replica(self._target.path, self._files)) as now:
            again = self._comparison(now)
            return [_checked(again, judged) if judged.state == "damaged" else judged for _, judged in self._found]

    def _comparison(self, target: Replica) -> Comparison:
        return Comparison((target, *self._donors), len(self._all) // 2 + 1)

    def _is_left(self, run: Run) -> bool:
        """Whether a run is left to the broker: at its start it writes the last rows again, from the records."""
        return run.end >= self.end and run.rows_only and run.unproven is None

    def _judged(self, run: Run) -> DifferentRange:
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

    def _write(self, run: Run) -> None:
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

    def _proven(self, run: Run) -> Iterator[tuple[Replica, int, Records]]:
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


def _checked(comparison: Comparison, judged: DifferentRange) -> DifferentRange:
    if not comparison.runs(judged.start, judged.end):
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


def _check_number(replicas: Sequence[Path]) -> None:
    if len(replicas) + 1 < _REPLICAS_MIN:
        raise ConfigError(
            f"--from names {len(replicas)} replica: two stores that differ have no majority",
            "",
            "name the stores of all other replicas of the group, each with --from",
        )


def _check_kind(replicas: Sequence[Replica]) -> None:
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
