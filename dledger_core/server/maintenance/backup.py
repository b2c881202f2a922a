"""Backups: the committed entries of groups, and all that a snapshot install carries, in a directory.

``backup_files`` has the format. A ``BackupSource`` is a stopped store or a running node. A backup never contains a term
with a vote: a store that was set back in time has forgotten votes and acknowledgements, and may elect a leader that
lacks acknowledged entries. So ``restore`` writes stores that have retired their log.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

import msgpack
import numpy as np

from dledger_core.client.backup import PIN_S, NodeLog, nodes_to_back_up
from dledger_core.client.position import check_of
from dledger_core.client.protocol import Metadata
from dledger_core.config import Peer, parse_peer
from dledger_core.errors import (
    BehindError,
    CorruptRecordError,
    DLedgerError,
    EndLostError,
    IndexOutOfRangeError,
    ProtocolError,
    QuarantinedError,
    RequestTimedOutError,
    StoreBusyError,
    StoreIncompleteError,
    StoreMismatchError,
    UnreachableError,
)
from dledger_core.ids import NO_TERM
from dledger_core.lineage import AncestorLog, find_link
from dledger_core.net.credentials import PLAINTEXT, Credentials
from dledger_core.record import HEADER_BYTES, Records
from dledger_core.storage.check.judge import batch_ends
from dledger_core.storage.check.repair import StoreRepair
from dledger_core.storage.files.backup_files import (
    BackupFile,
    GroupBackup,
    NewFile,
    SegmentFile,
    as_full,
    is_intact,
    load_manifest,
    load_unfinished,
    locked,
    save_manifest,
    save_unfinished,
)
from dledger_core.storage.files.file_system import Files, OsFiles
from dledger_core.storage.files.identity import load_identity
from dledger_core.storage.files.layout import Layout, LogMeta, parse_log_meta
from dledger_core.storage.files.members_file import ConfigurationEntry, KnownConfigurations, entries_of, members_file
from dledger_core.storage.files.meta_files import hard_state_file, load_checkpoint
from dledger_core.storage.files.table_store import DamagedTablesError
from dledger_core.storage.tables.tables import LogTables, load_tables

_READ_BYTES: Final = 8 << 20
_TEMPORARY: Final = "new.tmp"
_OTHER_DIRECTORY: Final = "use another directory for this backup"
OnProgress = Callable[[int, int], object]
"""Called with the number of entries that are done, and of all entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLog:
    """The log of a source.

    Attributes:
        meta: its identity and constants, and the start of the source's log.
        term: the highest term that the source knows.
        members: configurations of the group, of which those up to the last entry count.
        tables: the stored tables; not ahead of ``last_index``.
        last_index: the last entry that is known to be committed.
    """

    meta: LogMeta
    term: int
    members: tuple[ConfigurationEntry, ...]
    tables: LogTables
    last_index: int


class BackupSource(Protocol):
    """A log to back up."""

    @property
    def log(self) -> SourceLog:
        """The log; the same at each call."""

    def read(self, start: int, end: int) -> Records:
        """Return checked records from ``start`` on, at least one; raise CorruptRecordError if it is damaged."""


@dataclass(frozen=True, slots=True)
class BackupReport:
    """A backup of a group.

    Attributes:
        group: the group.
        log: uuid of its log.
        first_index: the first entry.
        end_index: end (exclusive) of the entries.
        copied_files: files that were written.
        copied_bytes: bytes in them.
        kept_files: files of earlier backups that were verified and not copied again.
    """

    group: str
    log: str
    first_index: int
    end_index: int
    copied_files: int
    copied_bytes: int
    kept_files: int


class StoppedStore:
    """The store of a node that does not run; locked until it is closed.

    Args:
        path: the store.
        files: the file system.

    Raises:
        StoreBusyError: a node has the store open.
        StoreMismatchError: it is not a native store, or not of a bootstrapped log.
        EndLostError: the end of its log may be lost.
        QuarantinedError: it is quarantined.
        CorruptRecordError: it is damaged, or a write to it has failed.
    """

    def __init__(self, path: Path, files: Files | None = None) -> None:
        self._files = files or OsFiles()
        self._layout = Layout(path)
        try:
            self._store = StoreRepair.open(path, files=self._files)
        except StoreBusyError as error:
            raise StoreBusyError(
                "a node has the store open: copied while it changes, its files are a damaged log",
                error.where,
                "back up the running node with dledger backup --peers; or stop it",
            ) from None
        try:
            self._check_state()
            self.log: Final = self._find_log()
        except BaseException:
            self.close()
            raise

    def _check_state(self) -> None:
        path, store = str(self._layout.root), self._store
        identity = load_identity(self._files, self._layout)
        if store.meta.log_uuid is None:
            raise StoreMismatchError(
                "the store has no bootstrapped log", path, "start its node, and bootstrap the group"
            )
        if identity.log_uuid not in (None, store.meta.log_uuid):
            raise StoreIncompleteError(
                "a recovery of the store was interrupted", path, "start its node: it completes the recovery"
            )
        if (reason := store.quarantine_reason) is not None:
            raise QuarantinedError(
                f"the store is quarantined: {reason}", path, "run dledger repair on this store, or back up another node"
            )
        if (reason := store.verification_reason) is not None:
            raise CorruptRecordError(
                f"the store needs verification: {reason}",
                path,
                "run dledger repair on this store, or back up another node",
            )
        floor = store.floor
        if (floor is not None and floor.is_open) or load_checkpoint(self._files, self._layout.checkpoint) is None:
            raise _end_lost(path)

    def _find_log(self) -> SourceLog:
        meta = self._store.meta
        try:
            tables = load_tables(self._files, self._layout, meta)
        except CorruptRecordError as error:
            raise _not_intact(error) from error
        members = members_file(self._layout).load(self._files).value or KnownConfigurations(lost=True)
        if members.lost:
            raise EndLostError(
                "both copies of the members file are missing or damaged",
                str(self._layout.members),
                "back up another node; or start this one, and wait until it has caught up",
            )
        checkpoint, state = (
            load_checkpoint(self._files, self._layout.checkpoint),
            hard_state_file(self._layout.hard_state).load(self._files),
        )
        assert checkpoint is not None
        # Tables contain committed entries only, and may be newer than the checkpoint after a crash.
        committed = max(checkpoint.commit_index, meta.first_index - 1, tables.durable_index)
        if committed > checkpoint.durable_index:
            try:
                self._store.read(committed, committed + 1, 1)
            except CorruptRecordError:
                raise _end_lost(str(self._layout.root)) from None
        identity = load_identity(self._files, self._layout)
        retired = None if identity.recovery is None or identity.is_member else identity.recovery.retired.end
        log = SourceLog(
            meta=meta,
            term=max(NO_TERM if state.value is None else state.value.term, retired.term if retired else NO_TERM),
            members=members.trimmed(meta.first_index).entries,
            tables=tables,
            last_index=committed,
        )
        _check_tables(log, str(self._layout.root))
        return log

    def read(self, start: int, end: int) -> Records:
        """See ``BackupSource``."""
        try:
            return self._store.read(start, end, _READ_BYTES)
        except CorruptRecordError as error:
            raise _not_intact(error) from error

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def __enter__(self) -> StoppedStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end_lost(where: str) -> EndLostError:
    return EndLostError(
        "the end of the log may be lost: acknowledged entries may be missing",
        where,
        "back up another node; or start this one, and wait until dledger status no longer shows it as recovering",
    )


def _not_intact(error: CorruptRecordError) -> CorruptRecordError:
    remedy = "run dledger repair on this store, then the same command again; or back up another node"
    return CorruptRecordError(error.what, error.where, remedy, error.values)


def _check_tables(log: SourceLog, where: str) -> None:
    """Raise EndLostError if the tables are ahead of the log."""
    if log.tables.applied_index > log.last_index:
        raise EndLostError(
            "the node has not received all entries since it installed a snapshot",
            where,
            "start the node, if it does not run, and wait until it has caught up; or back up another one",
        )


class RunningNode:
    """The log of a node that runs; its entries are pinned until ``running_node`` ends.

    Args:
        node: connection to it.
        runner: runs the requests.
        fields: the log as the node reports it.
        image: its tables.
        files: reads the tables.

    Raises:
        EndLostError: the node has not received all entries since it installed a snapshot.
        ProtocolError: the report is malformed.
    """

    def __init__(
        self, node: NodeLog, runner: asyncio.Runner, fields: Mapping[str, Any], image: bytes, files: Files
    ) -> None:
        self._node = node
        self._runner = runner
        self._pinned_s = time.monotonic()
        try:
            rows = files.rows_in_image(image)
            self.log: Final = SourceLog(
                meta=parse_log_meta(fields["meta"], Path("of the node")),
                term=int(fields["term"]),
                members=entries_of(fields["members"]),
                tables=LogTables() if rows is None else LogTables.from_rows(rows),
                last_index=int(fields["last_index"]),
            )
        except (DamagedTablesError, KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"the node's answer about its log is malformed: {error}", "") from None
        _check_tables(self.log, f"group {self.log.meta.group}")

    def read(self, start: int, end: int) -> Records:
        """See ``BackupSource``."""
        if time.monotonic() - self._pinned_s > PIN_S / 4:
            self._runner.run(self._node.pin(self.log.meta.first_index))
            self._pinned_s = time.monotonic()
        try:
            return self._runner.run(self._node.read(start, end))
        except IndexOutOfRangeError as error:  # a snapshot install, which no pin holds back
            what = "the node has restarted its log after a snapshot install"
            raise UnreachableError(what, error.where, "run the same command again", error.values) from error
        except CorruptRecordError as error:
            remedy = "wait until the node has repaired it from a peer, then run the same command again"
            raise CorruptRecordError(error.what, error.where, remedy, error.values) from error


@contextmanager
def running_node(
    group: str, metadata: Metadata, timeout_s: float, credentials: Credentials, files: Files
) -> Iterator[RunningNode]:
    """Start a backup on a node of a group, a follower if one has all entries, and end it with the block.

    Args:
        group: the group.
        metadata: of the group, as its nodes report it now.
        timeout_s: timeout of a connection and of a request.
        credentials: TLS files and token.
        files: the file system of this machine.

    Raises:
        EndLostError: a node is recovering.
        NoLeaderError: no node leads the group.
        DLedgerError: no node could start a backup.
    """
    nodes, committed = nodes_to_back_up(group, metadata)
    peers = [parse_peer(f"{node.node_id}-{node.address}") for node in metadata.nodes]
    with asyncio.Runner() as runner:
        node, started = _start(runner, peers, nodes, committed, group, timeout_s, credentials)
        try:
            yield RunningNode(node, runner, *started, files)
        finally:
            runner.run(node.end())


def _start(
    runner: asyncio.Runner,
    peers: Sequence[Peer],
    nodes: Sequence[str],
    committed: int,
    group: str,
    timeout_s: float,
    credentials: Credentials,
) -> tuple[NodeLog, tuple[dict[str, Any], bytes]]:
    """Start a backup on the first node that can."""
    for name in nodes:
        node = NodeLog(peers, name, group, timeout_s, credentials)
        try:
            return node, runner.run(node.start(committed))
        except DLedgerError as error:
            runner.run(node.end())
            if name == nodes[-1] or not isinstance(error, BehindError | UnreachableError | RequestTimedOutError):
                raise
    raise UnreachableError(f"no node serves group {group}", "", "start its nodes; dledger status shows them")


def back_up_group(
    group: str,
    metadata: Metadata,
    destination: Path,
    timeout_s: float,
    credentials: Credentials = PLAINTEXT,
    *,
    files: Files | None = None,
    on_progress: OnProgress | None = None,
) -> BackupReport:
    """Back up a group from one of its nodes; the directory is locked. Errors as of ``running_node`` and ``back_up``."""
    files = files or OsFiles()
    with running_node(group, metadata, timeout_s, credentials, files) as source:
        return back_up(source, destination, files=files, on_progress=on_progress)


def stores_in(directory: Path, group: str | None = None) -> list[Path]:
    """Return the stores to back up: the directory itself, or those of all groups in a node's directory.

    Args:
        directory: a store, or a node's directory.
        group: of a node's directory, the group; None = all.

    Raises:
        StoreMismatchError: there is none, or those of several nodes.
    """
    if _has_store(directory):
        return [directory]
    found = [path for path in sorted(directory.glob(f"{group or '*'}/dledger-*")) if _has_store(path)]
    if not found:
        raise StoreMismatchError(
            "no store found", str(directory), "name a store, or the directory of a node, which has one per group"
        )
    nodes = sorted({path.name.removeprefix("dledger-") for path in found})
    if len(nodes) > 1:
        raise StoreMismatchError(
            f"the directory has stores of several nodes: {', '.join(nodes)}", str(directory), f"name one: {found[0]}"
        )
    return found


def _has_store(path: Path) -> bool:
    layout = Layout(path)
    return layout.data.is_dir() or layout.log_meta.exists()


def back_up_stores(
    stores: list[Path], destination: Path, *, files: Files | None = None, on_progress: OnProgress | None = None
) -> list[BackupReport]:
    """Back up stopped stores, one per group, into a directory.

    Raises:
        StorageError: a store or the directory does not allow it; groups before it are backed up.
    """
    files, reports = files or OsFiles(), []
    with locked(files, destination):
        for path in stores:
            with StoppedStore(path, files) as source:
                reports.append(back_up(source, destination, files=files, on_progress=on_progress))
    return reports


def back_up(
    source: BackupSource, destination: Path, *, files: Files, on_progress: OnProgress | None = None
) -> BackupReport:
    """Back up one log; the directory is locked. An interrupted call can be repeated, and continues.

    Raises:
        StoreMismatchError: the directory has a backup of another log, or a newer one.
        CorruptRecordError: the log is damaged; an earlier backup stays as it is.
        DiskFullError: the directory's disk is full; an earlier backup stays as it is.
    """
    directory = destination / source.log.meta.group
    with as_full(directory):
        files.mkdir(directory)
        return _Backup(source, directory, files, on_progress or (lambda done, total: None)).run()


@dataclass
class _Backup:
    """One backup of a log.

    Attributes:
        source: the log.
        directory: of the group.
        files: the file system.
        on_progress: see ``OnProgress``.
        segments: the files so far.
        copied: those that were written.
    """

    source: BackupSource
    directory: Path
    files: Files
    on_progress: OnProgress
    segments: list[SegmentFile] = field(default_factory=list)
    copied: list[BackupFile] = field(default_factory=list)

    def run(self) -> BackupReport:
        log = self.source.log
        log_uuid, first = str(log.meta.log_uuid), log.meta.first_index
        end = self._complete_end()
        before = load_manifest(self.files, self.directory)
        if before is not None:
            self._check(before, end)
        known = self._known(before, end, log_uuid)
        at = first
        while at < end:
            segment = known.get(at)
            if segment is None or segment.end_index > end or not is_intact(self.files, self.directory, segment):
                segment = self._copy(at, end)
                self.copied.append(segment)
            self.segments.append(segment)
            at = segment.end_index
            if at < end:  # a later run does not copy it again
                save_unfinished(self.files, self.directory, log_uuid, tuple(self.segments))
            self.on_progress(at - first, end - first)
        tables = self._write_tables()
        found = self._end(end, log_uuid)
        backup = GroupBackup(
            meta=replace(log.meta, store_uuid=None, discarding=False),
            term=max(log.term, found.term),
            members=tuple(entry for entry in log.members if entry.index < end),
            end=found,
            segments=tuple(self.segments),
            tables=tables,
        )
        save_manifest(self.files, self.directory, backup)
        nbytes, kept = sum(each.size for each in self.copied), len(self.segments) - len(self.copied)
        return BackupReport(log.meta.group, log_uuid, first, end, len(self.copied), nbytes, kept)

    def _complete_end(self) -> int:
        """Return the end (exclusive) of the committed entries, which is the end of a batch."""
        log = self.source.log
        end = log.last_index + 1
        while end > log.meta.first_index and not len(batch_ends(self.source.read(end - 1, end))):
            end -= 1
        return end

    def _check(self, before: GroupBackup, end: int) -> None:
        """Raise unless the earlier backup is one of the same log, up to an entry that the source has."""
        meta, where = self.source.log.meta, str(self.directory)
        kept, log = before.meta, before.end.log_uuid
        link = find_link(meta.continues, log)
        constants = (kept.profile, kept.data_segment_bytes) == (meta.profile, meta.data_segment_bytes)
        if (log != meta.log_uuid and link is None) or not constants:
            raise StoreMismatchError(
                f"the directory has a backup of another log of group {meta.group}",
                where,
                _OTHER_DIRECTORY,
                {"backup": log, "log": meta.log_uuid},
            )
        last = before.end.index
        if last >= end or (link is not None and last > link.index):
            raise StoreMismatchError(
                f"the backup continues up to index {last}, and the log ends at {end - 1}",
                where,
                f"back up a node that has caught up; if the log has lost these entries, {_OTHER_DIRECTORY}",
            )
        if last >= meta.first_index and self._entry(last) != (before.end.term, before.end.check):
            raise StoreMismatchError(
                f"the log has another entry at index {last} than the backup",
                where,
                f"the log has lost entries of the backup: {_OTHER_DIRECTORY}",
            )

    def _known(self, before: GroupBackup | None, end: int, log_uuid: str) -> dict[int, SegmentFile]:
        """Return the files of earlier runs that no later entry can change, by their first index."""
        known = list(load_unfinished(self.files, self.directory, log_uuid))
        if before is not None:
            is_newest = bool(before.segments) and before.segments[-1].end_index == end
            known += before.segments if is_newest else before.segments[:-1]
        return {each.first_index: each for each in known}

    def _copy(self, start: int, end: int) -> SegmentFile:
        """Write the records of the segment that starts with an entry."""
        size = self.source.log.meta.data_segment_bytes
        records = self.source.read(start, end)
        position = records.first.position
        limit, at = position - position % size + size, start
        new = NewFile(self.files, self.directory / _TEMPORARY)
        try:
            while True:
                positions = records.headers["position"].astype(np.int64)
                count = int(np.searchsorted(positions, limit))
                if count and int(positions[0]) != position + new.size:
                    raise CorruptRecordError(
                        "the record has another position", str(self.directory), "back up another node", {"index": at}
                    )
                if count:
                    new.write(memoryview(records.slice(0, count).data))
                at += count
                if count < records.count or at >= end:
                    break
                records = self.source.read(at, end)
            done = new.finish(f"{position:020d}-{start:020d}-{at:020d}")
        finally:
            new.close()
        return SegmentFile(done.name, done.size, done.sha256, position, start, at)

    def _write_tables(self) -> BackupFile:
        new = NewFile(self.files, self.directory / _TEMPORARY)
        try:
            new.write(bytes(msgpack.packb(self.source.log.tables.rows())))
            return new.finish(f"tables-{new.sha256[:16]}")
        finally:
            new.close()

    def _end(self, end: int, log_uuid: str) -> AncestorLog:
        meta = self.source.log.meta
        if end == meta.first_index:
            return AncestorLog(log_uuid, end - 1, meta.previous_term or NO_TERM, None)
        term, check = self._entry(end - 1)
        return AncestorLog(log_uuid, end - 1, term, check)

    def _entry(self, index: int) -> tuple[int, int]:
        """Return term and check of an entry."""
        records = self.source.read(index, index + 1)
        found, body = records.first, memoryview(records.data)[HEADER_BYTES : int(records.sizes[0])]
        return found.term, check_of(found.index, found.term, found.position, body)
