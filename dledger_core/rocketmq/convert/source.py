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
from dledger_core.ids import NO_INDEX, NodeId, Term
from dledger_core.raft.ready import HardState
from dledger_core.rocketmq import broker_end_of, end_of, locate
from dledger_core.rocketmq.convert.parts import ClassicPart, LogPart, Part
from dledger_core.rocketmq.store.commit_log import commit_log_files
from dledger_core.storage.files.file_system import Files, OsFiles
from dledger_core.storage.files.hard_state import read_properties
from dledger_core.storage.files.index_file import IndexFile
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.log_info import LogMeta
from dledger_core.storage.files.recovering import recovering_above
from dledger_core.storage.files.segments import Segments
from dledger_core.storage.read.store_reader import StoreReader, open_store
from dledger_core.storage.read.visibility import Outcomes
from dledger_core.storage.tables.tables import LogTables
from dledger_core.storage.write.trim import load_tables

_FLOCK: Final = "hhqqi"
"""Linux's struct flock: type, whence, start, length, pid."""


def check_node_idle(layout: Layout) -> None:
    """Raises StoreBusyError if a node of ours has the store open."""
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
    """Raises StoreBusyError if a RocketMQ broker runs on the directory that holds its store or CommitLog.

    A broker locks the first byte of its file ``lock`` while it runs; Linux tells without taking a lock.
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
class Source:
    """What is converted.

    Attributes:
        kind: ``classic`` CommitLog, ``java-a`` or ``java-b`` store, ``mixed`` log, or ``dledger``: a store of ours.
        path: the directory named by the caller.
        parts: what to read, in order.
        hard_state: term and vote.
        commit_index: a recorded lower bound in the log's own indexes, or -1.
        meta: what a store of ours records; else None.
        data_segment_bytes: size of its data files.
        index_segment_bytes: size of its index files, or None: it has none.
        tables: snapshot of a store of ours, or None.
        fingerprint: of the files; another one means that the source has changed.
        continued_by_java: Java DLedger has appended to a store of ours since.
        notes: what its owner should know.
        before: the CommitLog that a store of ours begins behind; it is not converted, its queues are gone on with.
        broker_end: below this index of the log a broker gave the queue offsets; None: it gave all.
    """

    kind: Kind
    path: Path
    parts: tuple[Part, ...]
    hard_state: HardState
    commit_index: int
    meta: LogMeta | None
    data_segment_bytes: int
    index_segment_bytes: int | None
    tables: bytes | None
    fingerprint: str
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
        """Index of the first entry as the converted log will have it."""
        return self.parts[0].begin.number

    @property
    def data_bytes(self) -> int:
        """About how many bytes there are to read."""
        return sum(part.data_bytes for part in self.parts)

    def check(self, *, cut_tail: bool) -> list[str]:
        """Reads the store among the parts from end to end; returns what its owner should know.

        Reading up to the end is not enough: a damaged record can look like the end of a log, and what follows it would
        be lost in silence, as it is in Java's own recovery.

        Args:
            cut_tail: bytes behind the last entry of a Java store may be left out.

        Raises:
            CorruptRecordError: it is damaged, or there are such bytes and they may not.
        """
        log = self.log
        notes = []
        for finding in log.verify().findings if log is not None else ():
            if self.continued_by_java and Path(finding.path).name == "log.json":
                continue  # kept from the reader, which is to see the store as Java does
            if finding.kind == "INDEX_MISMATCH":
                between = f"{finding.start} to {finding.end - 1}"
                notes.append(f"the index disagrees with the data about entries {between}; the data counts")
            elif finding.kind == "TORN_TAIL" and (cut_tail or self.meta is not None):
                notes.append(f"left out, as recovery does: {finding.message}")
            else:
                torn = finding.kind == "TORN_TAIL"
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
        """Compares the last entry with what the checkpoint says is committed; see ``check``."""
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
        # Not by the reader: a native store to which Java has appended is read as Java's, without its identity.
        outcomes = Outcomes(LogTables.restore(self.tables or b""), log.first_index)
        visible = outcomes.visibility(log.control_entries, log.last_index + 1)
        opened = visible.open_transaction
        if opened is not None and not drop_open:
            raise ConfigError(
                f"transaction {opened.batch_id} of query {opened.query_id!r} is open from index {visible.end} on",
                str(self.path),
                "commit or abort it, or leave its entries out with --drop-open",
                {"query_id": opened.query_id, "batch_id": opened.batch_id, "index": int(visible.end)},
            )
        return tuple(sorted([*visible.orphaned_ranges, *outcomes.open_ranges()]))

    def close(self) -> None:
        """Lets go of the files."""
        if self.log is not None:
            self.log.close()


_TAIL_ROWS: Final = 1024


def open_source(path: Path, commitlog: Path | None = None, files: Files | None = None) -> Source:
    """Opens a source.

    Args:
        path: a node's store, a classic CommitLog directory, or the broker's directory that holds one or both.
        commitlog: the classic CommitLog that precedes the store at ``path``.
        files: the file system for stores.

    Raises:
        ConfigError: there is nothing of the kind, or the two do not fit together.
        StoreBusyError: a node of ours, or a broker, has the store open.
        StoreMismatchError: a file is not what it should be.
        CorruptRecordError: files are missing.
    """
    files = files or OsFiles()
    location = locate(path).after(commitlog)
    store, classic = location.store, location.commitlog
    for directory in filter(None, (store, classic)):
        check_broker_idle(directory.absolute().parent)
    part = ClassicPart(commit_log_files(classic)) if classic is not None else None
    if store is None:
        assert part is not None
        sizes = {file.size for file in part.files[:-1]} or {part.files[-1].size}
        if not max(sizes):
            raise ConfigError(
                "the directory contains only empty files", str(classic), "name a CommitLog that has messages"
            )
        mark = _fingerprint([Path(file.path) for file in part.files])
        state = HardState(Term(0), None)
        return Source("classic", path, (part,), state, NO_INDEX, None, max(sizes), None, None, mark)
    return _open_store(path, store, part, files)


def _open_store(path: Path, store: Path, classic: ClassicPart | None, files: Files) -> Source:
    layout = Layout(store)
    check_node_idle(layout)
    reader, meta, continued = _open_reader(store, files)
    data_bytes, index_bytes = reader.segment_bytes
    watched = [*sorted(layout.data.iterdir()), *(p for p in (layout.root / "currterm", layout.root / "checkpoint"))]
    if classic is not None:
        watched += [Path(file.path) for file in classic.files]
        _check_joins(reader, classic, data_bytes)
        classic = replace(classic, closed=reader.last_index >= reader.first_index)
    before, classic = (classic, None) if meta is not None else (None, classic)
    kind: Kind = "mixed" if classic is not None else _kind_of(reader, meta)
    parts: tuple[Part, ...] = (LogPart(reader),) if classic is None else (classic, LogPart(reader))
    commit = reader.commit_index
    hard_state = _hard_state(files, layout, reader)
    if meta is not None and recovering_above(files, layout, hard_state.term) is not None:
        raise CorruptRecordError(
            "the end of this log was lost, and with it entries that its node may have acknowledged",
            str(store),
            "convert another node's, or let this one catch up first; dledger repair --accept-loss gives them up",
        )
    return Source(
        kind,
        path,
        parts,
        hard_state,
        NO_INDEX if commit is None else int(commit),
        meta,
        data_bytes,
        index_bytes,
        _tables(files, layout, meta),
        _fingerprint([p for p in watched if p.exists()], str(reader.last_index)),
        continued,
        (*_notes(reader, layout, files, continued=continued), *([_NOT_CONVERTED] if before is not None else [])),
        before,
        broker_end_of(reader, meta),
    )


def _tables(files: Files, layout: Layout, meta: LogMeta | None) -> bytes | None:
    """Returns the tables of a store of ours; raises CorruptRecordError if it cannot be without them and is."""
    if meta is None:
        return None
    load_tables(files, layout, meta)
    return files.read(layout.tables)


def _notes(reader: StoreReader, layout: Layout, files: Files, *, continued: bool) -> list[str]:
    found = ["Java DLedger has appended to this store of ours"] if continued else []
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
            "records carry no CRC their bodies may be torn; the other nodes have them whole if they were acknowledged"
        )
    behind = index.read(last + 1, last + 1 + _TAIL_ROWS)["index"] == np.arange(last + 1, last + 1 + _TAIL_ROWS)
    if behind[0]:
        more = len(behind) if behind.all() else int(np.argmin(behind))
        found.append(
            f"Java's index names {'at least ' * bool(behind.all())}{more} entries behind the last one: it truncated "
            "them, or this node lost them; jobs/audit_replicas.py tells which"
        )
    return found


def _kind_of(reader: StoreReader, meta: LogMeta | None) -> Kind:
    if meta is not None or reader.writer == "dledger-python":
        return "dledger"
    return reader.writer


class _WithoutMeta(OsFiles):
    """The file system as Java sees it: what is ours alone does not exist."""

    def read(self, path: Path) -> bytes | None:
        """See ``Files``."""
        return None if path.parent.name == "meta" else super().read(path)


def _open_reader(store: Path, files: Files) -> tuple[StoreReader, LogMeta | None, bool]:
    """Returns the store's reader, its identity, and whether Java has appended to a store of ours.

    Java's records carry no append time and no CRC, so behind ours they count as damage until they are converted.
    """
    reader = open_store(store, files=files)
    meta = reader.meta
    if meta is None or meta.profile == "A":
        return reader, meta, False
    java = open_store(store, files=_WithoutMeta())
    behind = int(reader.last_index) + 1
    if java.last_index >= behind and int(java.records(behind, behind + 1, 1).headers["flags"][0]) == 0:
        reader.close()
        return java, meta, True
    java.close()
    return reader, meta, False


def _check_joins(reader: StoreReader, classic: ClassicPart, data_bytes: int) -> None:
    """The store of a mixed log begins where the CommitLog ends, at index 0."""
    if reader.last_index < reader.first_index:
        return
    first = int(reader.records(reader.first_index, reader.first_index + 1, 1).headers["position"][0])
    if reader.first_index != 0 or classic.files[-1].end != first:
        raise StoreMismatchError(
            "the store does not go on from the CommitLog",
            str(reader.path),
            "name the CommitLog that precedes it; without one the store is converted alone",
            {"commitlog_end": classic.files[-1].end, "position": first, "index": int(reader.first_index)},
        )


def _hard_state(files: Files, layout: Layout, reader: StoreReader) -> HardState:
    """Returns term and vote; a term that is not below that of any entry or of what Java left behind.

    Java deletes ``currterm`` before it renames the new one, so a crash can leave only the copies.
    """
    runs = reader.term_ranges()
    last = max((int(run.term) for run in runs), default=0)
    found = read_properties(files, layout.root / "currterm") or {}
    term, vote = _number(found.get("currTerm")), found.get("voteLeader")
    spare = read_properties(files, layout.root / "currterm.tmp") or {}
    highest = max(last, term, _number(spare.get("currTerm")))
    return HardState(Term(highest), NodeId(vote) if vote and term == highest else None)


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() else 0


def _fingerprint(paths: Sequence[Path], *more: str) -> str:
    """Returns a digest of names, sizes and times of files."""
    facts = [(str(path), stat.st_size, stat.st_mtime_ns) for path in paths for stat in [path.stat()]]
    return hashlib.sha256(repr((facts, more)).encode()).hexdigest()
