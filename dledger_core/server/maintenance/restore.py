"""Restore a backup: write stores that have retired their log.

Such a store never votes and acknowledges nothing. ``dledger recover --lost`` continues its log where all other stores
are lost, or takes it as one more survivor; while a majority lives it changes nothing. A marker in each store says that
the restore is not complete; it is written before any other file, and removed after all of them.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import msgpack
import numpy as np

from dledger_core.bootstrap import StoreIdentity
from dledger_core.config import is_node_id
from dledger_core.errors import ConfigError, CorruptRecordError, StoreIncompleteError, StoreMismatchError
from dledger_core.lineage import LogEnd, RecoveryState, RetiredLog
from dledger_core.record import MAGIC_BLANK, PREFIX, index_records
from dledger_core.storage.check.judge import ScanCursor, native_rules
from dledger_core.storage.check.scan import RecordBlock, Scanner
from dledger_core.storage.files.backup_files import (
    MANIFEST,
    GroupBackup,
    SegmentFile,
    as_full,
    damaged,
    groups_of,
    is_intact,
    load_manifest,
)
from dledger_core.storage.files.file_system import Files, OsFiles, remove_durably, write_checked
from dledger_core.storage.files.identity import save_identity
from dledger_core.storage.files.index_file import IndexFile
from dledger_core.storage.files.layout import Layout, lock_store, save_log_meta
from dledger_core.storage.files.members_file import KnownConfigurations, members_file
from dledger_core.storage.files.meta_files import Checkpoint, save_checkpoint
from dledger_core.storage.files.segments import Segments
from dledger_core.storage.files.table_store import DamagedTablesError, Rows
from dledger_core.storage.tables.tables import LogTables, TableChanges, save_tables

_CHUNK_BYTES: Final = 4 << 20
OnProgress = Callable[[int, int], object]
"""Called with the number of bytes that are done, and of all bytes."""


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """A restored store.

    Attributes:
        group: its group.
        log: uuid of the log that it retired.
        node: the node that it belongs to.
        store: the store's directory.
        first_index: the first entry.
        end_index: end (exclusive) of the entries; later ones are not in the backup.
    """

    group: str
    log: str
    node: str
    store: str
    first_index: int
    end_index: int


def restore(
    source: Path,
    directory: Path,
    *,
    node_id: str | None = None,
    files: Files | None = None,
    on_progress: OnProgress | None = None,
) -> list[RestoreReport]:
    """Write the stores of all groups of a backup into a node's directory.

    An interrupted call can be repeated.

    Args:
        source: the directory of the backup.
        directory: of the node; it must be empty, or contain an interrupted restore.
        node_id: the node; None = the one whose logs were backed up.
        files: the file system.
        on_progress: see ``OnProgress``.

    Raises:
        ConfigError: no node is named, and the logs are those of several nodes.
        StoreMismatchError: the directory contains something, or there is no backup.
        StoreIncompleteError: the first backup of a group is not complete.
        CorruptRecordError: a file of the backup is missing or damaged.
        DiskFullError: the disk of the directory is full.
    """
    files = files or OsFiles()
    if node_id is not None and not is_node_id(node_id):
        raise ConfigError(f"{node_id!r} is not a node id", "", "name a node, such as n0")
    with ExitStack() as stack:
        backups = _backups(files, source)
        node = node_id or _node_of(backups, source)
        layouts = {group: Layout(directory / group / f"dledger-{node}") for group in backups}
        _check_vacant(files, directory, layouts)
        stack.enter_context(as_full(directory))
        for layout in layouts.values():
            stack.callback(lock_store(files, layout).close)
        _check_vacant(files, directory, layouts)  # another restore may have ended meanwhile
        for group, layout in layouts.items():
            write_checked(files, layout.restoring, {"log": backups[group].end.log_uuid})
        total = sum(segment.size for backup in backups.values() for segment in backup.segments)
        done = 0
        reports = []
        for group, backup in backups.items():
            start = done

            def report(nbytes: int, start: int = start) -> None:
                if on_progress is not None:
                    on_progress(start + nbytes, total)

            write = _Restore(files, source / group, layouts[group], backup, report)
            reports.append(write.run(node))
            done += sum(segment.size for segment in backup.segments)
        for layout in layouts.values():
            remove_durably(files, layout.restoring)
        return reports


def _backups(files: Files, source: Path) -> dict[str, GroupBackup]:
    groups, found = groups_of(files, source), {}
    for group in groups:
        backup = load_manifest(files, source / group)
        if backup is None:
            raise StoreIncompleteError(
                f"the backup of group {group} is not complete", str(source / group), "run dledger backup again"
            )
        found[group] = backup
    if not found:
        raise StoreMismatchError(
            f"no backup found: no directory in it has a {MANIFEST}", str(source), "name the directory of dledger backup"
        )
    return found


def _node_of(backups: Mapping[str, GroupBackup], source: Path) -> str:
    """Return the node whose logs were backed up; of running nodes, each group may be of another one."""
    nodes = sorted({backup.meta.node_id for backup in backups.values()})
    if len(nodes) > 1:
        shown = ", ".join(nodes)
        raise ConfigError(f"the backup has logs of several nodes: {shown}", str(source), "name the node with --self-id")
    return nodes[0]


def _check_vacant(files: Files, directory: Path, layouts: dict[str, Layout]) -> None:
    """Raise StoreMismatchError unless the directory has no file, or those of an interrupted restore only."""
    names = set(files.listdir(directory) or ())
    stores = {layout.root for layout in layouts.values()}
    interrupted = any(files.read(layout.restoring) is not None for layout in layouts.values())
    for name in sorted(names):
        inside = (
            {directory / name / each for each in files.listdir(directory / name) or ()} if name in layouts else None
        )
        if inside is None or not inside <= stores:
            found = name if inside is None else str(min(inside - stores).relative_to(directory))
            raise _not_empty(directory, found)
    for layout in layouts.values():
        if not interrupted and _files_of(files, layout):
            raise _not_empty(directory, str(layout.root.relative_to(directory)))


def _files_of(files: Files, layout: Layout) -> list[Path]:
    """Return the files of a store, without its lock."""
    inside = (layout.data, layout.index, layout.meta)
    found = [layout.root / name for name in files.listdir(layout.root) or ()]
    found = [path for path in found if path not in inside]
    for directory in inside:
        found += [directory / name for name in files.listdir(directory) or ()]
    return [path for path in found if path != layout.lock]


def _not_empty(directory: Path, found: str) -> StoreMismatchError:
    return StoreMismatchError(
        f"the directory is not empty (it contains {found!r})",
        str(directory),
        "restore into an empty or a new directory",
    )


@dataclass
class _Restore:
    """The restore of one store; starts from the beginning where one was interrupted.

    Attributes:
        files: the file system.
        source: directory of the group's backup.
        layout: the store.
        backup: the backup.
        on_bytes: called with the number of bytes that are done.
        ranges: (term, first index) of the entries so far.
    """

    files: Files
    source: Path
    layout: Layout
    backup: GroupBackup
    on_bytes: Callable[[int], None]
    ranges: list[tuple[int, int]] = field(default_factory=list)

    def run(self, node_id: str) -> RestoreReport:
        files, layout, backup = self.files, self.layout, self.backup
        store, end = uuid.uuid4().hex, backup.end
        self._remove_everything()
        rows = self._rows()
        files.mkdir(layout.data)
        files.mkdir(layout.index)
        self._write_records()
        save_checkpoint(files, layout.checkpoint, Checkpoint(end.index, end.index, backup.end_position))
        members_file(layout).save(files, KnownConfigurations(backup.members))
        if rows:
            save_tables(files, layout.tables, TableChanges(LogTables.from_rows(rows).applied_index, dict(rows), True))
        save_log_meta(files, layout.log_meta, replace(backup.meta, node_id=node_id, store_uuid=store))
        state = RecoveryState(RetiredLog(end.log_uuid, store, self._log_end()))
        save_identity(files, layout, StoreIdentity(store=store, recovery=state))
        for directory in (layout.root, layout.meta, layout.data, layout.index):
            files.sync_dir(directory)
        return RestoreReport(
            backup.meta.group, end.log_uuid, node_id, str(layout.root), backup.meta.first_index, end.index + 1
        )

    def _remove_everything(self) -> None:
        for path in _files_of(self.files, self.layout):
            if path != self.layout.restoring:
                self.files.unlink(path)

    def _rows(self) -> Rows:
        """Return the rows of the tables."""
        wanted = self.backup.tables
        if not is_intact(self.files, self.source, wanted):
            raise damaged(self.source, wanted)
        found = msgpack.unpackb(self.files.read(self.source / wanted.name) or b"", use_list=False)
        try:
            LogTables.from_rows(found)
        except DamagedTablesError:
            raise damaged(self.source, wanted) from None
        return [(key, value) for key, value in found]

    def _write_records(self) -> None:
        """Write all segments, then the index from their records, which are checked."""
        files, layout, meta = self.files, self.layout, self.backup.meta
        data = Segments.load(files, layout.data, meta.data_segment_bytes, write=True)
        index = IndexFile(Segments.load(files, layout.index, meta.index_segment_bytes, write=True))
        try:
            for segment in self.backup.segments:
                self._write_segment(data, segment)
            data.sync_dir()
            scanner = Scanner(data, index, native_rules(meta), ScanCursor(meta.first_position, meta.first_index))
            for block in scanner.blocks():
                rows = index_records(block.records)
                rows["position"] = block.positions
                index.write(block.first_index, rows)
                self._add_terms(block)
            if scanner.cursor.index != self.backup.end.index + 1:
                raise CorruptRecordError(
                    f"the records of the backup end at index {(scanner.cursor.index or 0) - 1}, and its manifest "
                    f"names {self.backup.end.index} as the last one",
                    str(self.source),
                    "restore from another backup",
                )
            index.segments.sync(index.segments.bases)
            index.segments.sync_dir()
        finally:
            data.close()
            index.segments.close()

    def _add_terms(self, block: RecordBlock) -> None:
        terms = block.records.headers["term"].astype(np.int64)
        for row in (0, *(np.flatnonzero(np.diff(terms)) + 1).tolist()):
            if not self.ranges or self.ranges[-1][0] != terms[row]:
                self.ranges.append((int(terms[row]), block.first_index + row))

    def _write_segment(self, data: Segments, segment: SegmentFile) -> None:
        base = data.base_of(segment.position)
        data.create(base)
        file, found, at = self.files.open(self.source / segment.name), hashlib.sha256(), 0
        try:
            while chunk := file.pread(_CHUNK_BYTES, at):
                if at + len(chunk) > segment.size:
                    break
                data.write(segment.position + at, [chunk])
                found.update(chunk)
                at += len(chunk)
                self.on_bytes(at)
        finally:
            file.close()
        if (at, found.hexdigest()) != (segment.size, segment.sha256):
            raise damaged(self.source, segment)
        left = base + data.segment_bytes - segment.end_position
        if segment is not self.backup.segments[-1] and left:
            data.write(segment.end_position, [PREFIX.pack(MAGIC_BLANK, left)])
        data.sync([base])

    def _log_end(self) -> LogEnd:
        """Return the final end of the log that the store retired: later entries are lost here."""
        end = self.backup.end
        return LogEnd(
            term=self.backup.term,
            last_term=end.term,
            last_index=end.index,
            commit_index=end.index,
            check=end.check,
            is_recovering=True,
            ranges=tuple(self.ranges),
        )
