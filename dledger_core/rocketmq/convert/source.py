"""The source of a conversion: opened, checked, and known to have no writer."""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np

from dledger_core.errors import ConfigError, CorruptRecordError, StoreBusyError, StoreMismatchError
from dledger_core.ids import NO_INDEX, MemberId, Term
from dledger_core.raft.ready import HardState
from dledger_core.rocketmq import broker_end_of, check_continues, end_of, locate
from dledger_core.rocketmq.convert.parts import ClassicPart, LogPart, LostRange, SourcePart
from dledger_core.rocketmq.message.bodies import MESSAGES
from dledger_core.rocketmq.store.commit_log import commit_log_files
from dledger_core.storage.check.judge import BodyFormat
from dledger_core.storage.files.file_system import Files, OsFiles
from dledger_core.storage.files.index_file import IndexFile
from dledger_core.storage.files.layout import Layout, LogMeta
from dledger_core.storage.files.meta_files import hard_state_file, load_floor, read_properties
from dledger_core.storage.files.segments import Segments
from dledger_core.storage.read.store_reader import StoreReader, open_store
from dledger_core.storage.read.visibility import Outcomes
from dledger_core.storage.tables.tables import LogTables, load_tables

_FLOCK: Final = "hhqqi"
"""Linux's struct flock: type, whence, start, length, pid."""


def check_node_idle(layout: Layout) -> None:
    """Raise StoreBusyError if a node has the store open."""
    try:
        fd = os.open(layout.lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StoreBusyError("a node has the store open", str(layout.root), "stop the node first") from None
    finally:
        os.close(fd)


def check_broker_idle(directory: Path) -> None:
    """Raise StoreBusyError if a RocketMQ broker runs on the directory that holds its store or CommitLog.

    A running broker locks the first byte of its file ``lock``; Linux reports that without taking a lock.
    """
    path = directory / "lock"
    if sys.platform != "linux" or not path.is_file():
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        asked = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    except OSError:  # a file system without such locks
        return
    finally:
        os.close(fd)
    if kind != fcntl.F_UNLCK:
        raise StoreBusyError(
            "a RocketMQ broker runs on this store", str(directory), "stop the broker first", {"pid": pid}
        )


_NOT_CONVERTED: Final = "the CommitLog was not converted: its files stay as they are, and belong before what came out"

Kind = Literal["classic", "java-a", "java-b", "mixed", "dledger"]


@dataclass(frozen=True, slots=True)
class ConversionSource:
    """An opened source.

    Attributes:
        kind: ``classic`` CommitLog, ``java-a`` or ``java-b`` store, ``mixed`` log, or ``dledger``: a native store.
        path: the directory named by the caller.
        parts: what to read, in order.
        hard_state: term and vote.
        commit_index: a recorded lower limit in the log's own indexes, or -1.
        meta: identity of a native store; otherwise None.
        data_segment_bytes: size of its data files.
        index_segment_bytes: size of its index files, or None: it has none.
        tables: snapshot of the tables of a native store, or None.
        stamp: of the files; another one means that the source has changed.
        continued_by_java: Java DLedger has appended to a native store.
        notes: remarks for its owner.
        before: the commitlog prefix of a native store; it is not converted, but its queue offsets continue.
        broker_end: end of the indexes with queue offsets from a broker; None: all have one.
    """

    kind: Kind
    path: Path
    parts: tuple[SourcePart, ...]
    hard_state: HardState
    commit_index: int
    meta: LogMeta | None
    data_segment_bytes: int
    index_segment_bytes: int | None
    tables: bytes | None
    stamp: str
    continued_by_java: bool = False
    notes: tuple[str, ...] = ()
    before: ClassicPart | None = None
    broker_end: int | None = None

    @property
    def log(self) -> StoreReader | None:
        """The store among the parts."""
        return next((part.reader for part in self.parts if isinstance(part, LogPart)), None)

    @property
    def first_index(self) -> int:
        """Index of the first entry in the converted log."""
        return self.parts[0].begin.number

    @property
    def data_bytes(self) -> int:
        """Approximate number of bytes to read."""
        return sum(part.data_bytes for part in self.parts)

    def check(self, *, cut_tail: bool, leave_out: tuple[tuple[int, int], ...] = ()) -> list[str]:
        """Read the complete store among the parts; return remarks for its owner.

        Reading up to the end is not enough: a damaged record can look like the end of a log, and the entries after it
        would be lost without notice, as in Java's own recovery.

        Args:
            cut_tail: bytes after the last entry of a Java store may be dropped.
            leave_out: ranges [start, end) of entries that may be damaged.

        Raises:
            CorruptRecordError: it is damaged, or there are such bytes and they must not be dropped.
        """
        log = self.log
        notes = []
        for finding in log.verify().findings if log is not None else ():
            name = Path(finding.path).name
            if self.continued_by_java and name in ("log.json", "hard-state"):
                continue  # hidden from the reader, which reads the store as Java does; or older than Java's own
            if name == "members":
                continue  # the copy gets members of its own
            if any(start <= finding.start and finding.end <= end for start, end in leave_out):
                notes.append(f"left out: entries {finding.start} to {finding.end - 1}: {finding.message}")
                continue
            if finding.kind == "INDEX_MISMATCH":
                between = f"{finding.start} to {finding.end - 1}"
                notes.append(f"the index differs from the data for entries {between}; the data is used")
            elif finding.kind in ("TORN_TAIL", "MISSING") and (cut_tail or self.meta is not None):
                between = f"entries {finding.start} to {finding.end - 1}, " if finding.kind == "MISSING" else ""
                notes.append(f"dropped, as in recovery: {between}{finding.message}")
            else:
                torn = finding.kind in ("TORN_TAIL", "MISSING")
                raise CorruptRecordError(
                    f"the source is damaged: {finding.message}",
                    finding.path,
                    "compare with a replica; Java's recovery would drop these bytes, and so does --cut-tail"
                    if torn
                    else "convert an intact replica, or repair this one first",
                    {"kind": finding.kind, "start": finding.start, "end": finding.end, "position": finding.position},
                )
        return [*notes, *self._lost_end(cut_tail=cut_tail)]

    def _lost_end(self, *, cut_tail: bool) -> list[str]:
        """Compare the last entry with the commit index in the checkpoint; see ``check``."""
        log = self.log
        missing = None if log is None else end_of(log).missing_committed
        if log is None or missing is None:
            return []
        if not cut_tail:
            raise CorruptRecordError(
                "the source lost its end: its checkpoint records more committed entries than it contains",
                str(log.path),
                "convert an intact replica; --cut-tail converts the remaining entries",
                {"last_index": missing[0] - 1, "committed_index": missing[1] - 1},
            )
        return [f"entries {missing[0]} to {missing[1] - 1} are lost: the checkpoint records them as committed"]

    @property
    def lost_before(self) -> list[LostRange]:
        """Entries of the store whose files are missing before its first entry."""
        first, gaps = (0, ()) if self.log is None else (int(self.log.first_index), self.log.gaps)
        return [
            LostRange(int(gap.start), int(gap.end), int(gap.position), str(gap.path), gap.message)
            for gap in gaps
            if gap.end <= first
        ]

    @property
    def lost_after(self) -> list[LostRange]:
        """Entries that the store had after its last one, as its index, its checkpoint or what follows them tells."""
        end = None if self.log is None else end_of(self.log)
        if end is None or end.lost is None or end.lost[1] <= end.end:
            return []
        start = max(end.lost[0], end.end)
        return [LostRange(start, end.lost[1], end.position, str(end.path), "the end of the log is lost")]

    def hidden_ranges(self, *, drop_open: bool) -> tuple[tuple[int, int], ...]:
        """Return the ranges [start, end) of entries that ``read_committed`` does not show, sorted.

        Args:
            drop_open: include the entries of open transactions.

        Raises:
            ConfigError: a transaction is open, and its entries may not be dropped.
        """
        log = self.log
        if log is None or self.meta is None:
            return ()
        # Not from the reader: it reads a native store to which Java has appended as a Java store, without its identity.
        outcomes = Outcomes(LogTables.restore(self.tables or b""), log.first_index)
        visible = outcomes.visibility(log.control_entries, log.last_index + 1)
        opened = visible.open_transaction
        if opened is not None and not drop_open:
            raise ConfigError(
                f"transaction {opened.batch_id} of query {opened.query_id!r} is open from index {visible.end} on",
                str(self.path),
                "commit or abort it, or drop its entries with --drop-open",
                {"query_id": opened.query_id, "batch_id": opened.batch_id, "index": int(visible.end)},
            )
        return tuple(sorted([*visible.orphaned_ranges, *outcomes.open_ranges()]))

    def close(self) -> None:
        """Close the files."""
        if self.log is not None:
            self.log.close()


_TAIL_ROWS: Final = 1024


def open_source(
    path: Path,
    commitlog: Path | None = None,
    files: Files | None = None,
    *,
    bodies: BodyFormat | None = MESSAGES,
    salvage: bool = False,
) -> ConversionSource:
    """Open a source.

    Args:
        path: a node's store, a classic CommitLog directory, or the broker's directory that holds one or both.
        commitlog: the classic CommitLog that precedes the store at ``path``.
        files: the file system for stores.
        bodies: the format of bodies that are checked; None = all are opaque.
        salvage: of a store that is damaged, what can be read.

    Raises:
        ConfigError: the directory contains no log, or the two do not belong together.
        StoreBusyError: a node or a broker has the store open.
        StoreMismatchError: a file has wrong content.
        CorruptRecordError: files are missing.
    """
    files = files or OsFiles()
    location = locate(path).after(commitlog)
    store, classic = location.store, location.commitlog
    for directory in filter(None, (store, classic)):
        check_broker_idle(directory.absolute().parent)
    part = ClassicPart(commit_log_files(classic)) if classic is not None else None
    if salvage and (store is None or part is not None):
        raise ConfigError(
            "only a store can be salvaged, and here is a classic CommitLog",
            str(classic),
            "name the store itself, the directory with data/ and index/; 'dledger dump' shows what a CommitLog has",
        )
    if store is None:
        assert part is not None
        sizes = {file.size for file in part.files[:-1]} or {part.files[-1].size}
        if not max(sizes):
            raise ConfigError(
                "the directory contains only empty files", str(classic), "name a CommitLog that has messages"
            )
        stamp = _stamp([Path(file.path) for file in part.files])
        state = HardState(Term(0), None)
        return ConversionSource("classic", path, (part,), state, NO_INDEX, None, max(sizes), None, None, stamp)
    return _open_store(path, store, part, files, bodies, salvage=salvage)


def _open_store(
    path: Path, store: Path, classic: ClassicPart | None, files: Files, bodies: BodyFormat | None, *, salvage: bool
) -> ConversionSource:
    layout = Layout(store)
    check_node_idle(layout)
    reader, meta, continued = _open_reader(store, files, bodies)
    if reader.gaps and not salvage:
        raise reader.gaps[0].error
    data_bytes, index_bytes = reader.segment_bytes
    watched = [*sorted(layout.data.iterdir()), *(p for p in (layout.root / "currterm", layout.root / "checkpoint"))]
    if classic is not None:
        watched += [Path(file.path) for file in classic.files]
        _check_joins(reader, classic)
        classic = replace(classic, closed=reader.last_index >= reader.first_index)
    before, classic = (classic, None) if meta is not None else (None, classic)
    kind: Kind = "mixed" if classic is not None else _kind_of(reader, meta)
    log = LogPart(reader, salvage)
    parts: tuple[SourcePart, ...] = (log,) if classic is None else (classic, log)
    commit = reader.commit_index
    hard_state = _hard_state(files, layout, reader)
    if not salvage and meta is not None and load_floor(files, layout, hard_state.term) is not None:
        raise CorruptRecordError(
            "the end of this log was lost, with entries that its node may have acknowledged",
            str(store),
            "convert another node's store, or let this node catch up first; 'dledger salvage' copies the rest",
        )
    return ConversionSource(
        kind,
        path,
        parts,
        hard_state,
        NO_INDEX if commit is None else int(commit),
        meta,
        data_bytes,
        index_bytes,
        _tables(files, layout, meta),
        _stamp([p for p in watched if p.exists()], str(reader.last_index)),
        continued,
        (*_notes(reader, layout, files, continued=continued), *([_NOT_CONVERTED] if before is not None else [])),
        before,
        broker_end_of(reader, meta),
    )


def _tables(files: Files, layout: Layout, meta: LogMeta | None) -> bytes | None:
    """Return the tables of a native store; raise CorruptRecordError if necessary tables are missing."""
    if meta is None:
        return None
    tables = load_tables(files, layout, meta)
    return tables.snapshot() if tables.applied_index >= 0 else None


def _notes(reader: StoreReader, layout: Layout, files: Files, *, continued: bool) -> list[str]:
    found = ["Java DLedger has appended to this native store"] if continued else []
    last, first = int(reader.last_index), int(reader.first_index)
    if reader.writer == "dledger-python" or last < first:
        return found
    index = IndexFile(Segments.load(files, layout.index, reader.segment_bytes[1], gaps=True))
    begin = max(first, last - _TAIL_ROWS + 1)
    known = index.read(begin, last + 1)["index"] == np.arange(begin, last + 1)
    missing = len(known) if not known.any() else int(np.argmax(known[::-1]))
    if 0 < missing < _TAIL_ROWS:
        found.append(
            f"the last {missing} entries are not in Java's index: it was killed while it wrote them, and since its "
            "records carry no CRC their bodies may be torn; acknowledged entries are intact on the other nodes"
        )
    after = index.read(last + 1, last + 1 + _TAIL_ROWS)["index"] == np.arange(last + 1, last + 1 + _TAIL_ROWS)
    if after[0] and reader.missing is None:
        more = len(after) if after.all() else int(np.argmin(after))
        found.append(
            f"Java's index names {'at least ' * bool(after.all())}{more} entries after the data: it truncated them"
        )
    return found


def _kind_of(reader: StoreReader, meta: LogMeta | None) -> Kind:
    if meta is not None or reader.writer == "dledger-python":
        return "dledger"
    return reader.writer


class WithoutMeta(OsFiles):
    """The file system as Java sees it: without the files in ``meta``."""

    def read(self, path: Path) -> bytes | None:
        """Return the content of a file; None for files in ``meta``."""
        return None if path.parent.name == "meta" else super().read(path)


def _open_reader(store: Path, files: Files, bodies: BodyFormat | None) -> tuple[StoreReader, LogMeta | None, bool]:
    """Return the store's reader, its identity, and whether Java has appended to a native store.

    Java's records carry no append time and no CRC, so after native records they count as damage until converted.
    """
    reader = open_store(store, bodies=bodies, files=files)
    meta = reader.meta
    if meta is None or meta.profile == "A":
        return reader, meta, False
    java = open_store(store, bodies=bodies, files=WithoutMeta())
    end = int(reader.last_index) + 1
    if java.last_index >= end and int(java.raw(end, end + 1, 1).headers["flags"][0]) == 0:
        reader.close()
        return java, meta, True
    java.close()
    return reader, meta, False


def _check_joins(reader: StoreReader, classic: ClassicPart) -> None:
    """Raise StoreMismatchError unless the store of a mixed log starts at the end of the CommitLog, with index 0."""
    check_continues(tuple(classic.files), reader)
    if reader.last_index >= reader.first_index and reader.first_index != 0:
        remedy = "restore its first files, or convert the store alone"
        values = {"index": int(reader.first_index)}
        raise StoreMismatchError(
            "the store after a CommitLog lacks its first entries", str(reader.path), remedy, values
        )


def _hard_state(files: Files, layout: Layout, reader: StoreReader) -> HardState:
    """Return term and vote; the term is at least that of every entry and of Java's files.

    Java deletes ``currterm`` before it renames the new one, so a crash can leave only the copies. A native store has
    its own file, which is older if Java continued the store.
    """
    last = max((int(each.term) for each in reader.term_ranges()), default=0)
    native = hard_state_file(layout.hard_state).load(files).value
    found = read_properties(files, layout.root / "currterm") or {}
    term, vote = _number(found.get("currTerm")), found.get("voteLeader")
    spare = read_properties(files, layout.root / "currterm.tmp") or {}
    highest = max(last, term, _number(spare.get("currTerm")), 0 if native is None else native.term)
    if native is not None and native.term == highest:
        return native
    return HardState(Term(highest), MemberId(vote) if vote and term == highest else None)


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() else 0


def _stamp(paths: Sequence[Path], *more: str) -> str:
    """Return a digest of names, sizes and times of files."""
    files = [(str(path), stat.st_size, stat.st_mtime_ns) for path in paths for stat in [path.stat()]]
    return hashlib.sha256(repr((files, more)).encode()).hexdigest()
