"""The beginning of a log moves: its first segments are deleted, or a follower starts anew behind what its leader has.

``meta/log.json`` decides, and is replaced atomically. Before it says that entries are gone, ``meta/tables`` durably
holds what they said; only then are files removed. A crash in between is ended at the next start, so a store is at any
moment as it was, or as it was to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dledger_core.errors import CorruptRecordError
from dledger_core.ids import Index, Position, Term
from dledger_core.record import is_segment_name, segment_name
from dledger_core.storage.files.checkpoint import Checkpoint, save_checkpoint
from dledger_core.storage.files.file_system import Files
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.log_info import LogMeta, save_log_meta
from dledger_core.storage.tables.tables import LogTables

__all__ = ["LogStart", "TablesSnapshot", "end_interrupted", "load_tables", "remove_everything"]


@dataclass(frozen=True, slots=True)
class TablesSnapshot:
    """The tables of producers and transactions as bytes.

    Attributes:
        applied_index: the last control entry taken in; -1 if there was none.
        data: what ``LogTables.snapshot`` returned.
    """

    applied_index: Index
    data: bytes

    @classmethod
    def of(cls, tables: LogTables) -> TablesSnapshot:
        """Returns the snapshot of tables as they are now."""
        return cls(tables.applied_index, tables.snapshot())


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStart:
    """Where a log begins whose first entries are deleted.

    Attributes:
        first_index: the first entry that is still to be had.
        position: where its record lies.
        previous_term: term of the entry before; NO_TERM if unknown.
        log_uuid: identity of the log, or None.
        tables: of all committed entries up to ``first_index - 1`` or further.
        behind: fingerprint of the CommitLog that the log starts after, or None.
    """

    first_index: Index
    position: Position
    previous_term: Term
    log_uuid: str | None
    tables: TablesSnapshot
    behind: str | None = None


def load_tables(files: Files, layout: Layout, meta: LogMeta) -> LogTables:
    """Returns the tables of the last snapshot; the log's control entries behind it are still to be applied.

    Raises:
        CorruptRecordError: the entries that could replace a missing or damaged snapshot are deleted.
    """
    data = files.read(layout.tables)
    if meta.tables_index is None:
        return LogTables.restore(data or b"")
    tables = LogTables.parse(data) if data is not None else None
    if tables is not None and tables.applied_index >= meta.tables_index:
        return tables
    found = "missing" if data is None else "damaged" if tables is None else "older than the deletion"
    raise CorruptRecordError(
        f"the tables of producers and transactions are {found}, and the entries they came from are deleted",
        str(layout.tables),
        "restore the file, or move the whole store away and let the node catch up from its peers",
        {"first_index": meta.first_index},
    )


def end_interrupted(files: Files, layout: Layout, meta: LogMeta) -> LogMeta:
    """Ends what a crash interrupted, before anybody looks at the segments; returns the identity as it is then.

    What a deletion left before the log's beginning goes too: no checkpoint and no repair looks at it any more. Only
    where the beginning itself is lost it stays, for people to look at.
    """
    if meta.discarding:
        return remove_everything(files, layout, meta)
    bases = sorted(int(name) for name in files.listdir(layout.data) or () if is_segment_name(name))
    first = meta.first_position - meta.first_position % meta.data_segment_bytes
    if first in bases:
        _remove(files, layout, [segment_name(base) for base in bases if base < first])
    return meta


def _remove(files: Files, layout: Layout, names: Sequence[str]) -> None:
    for name in names:
        files.unlink(layout.data / name)
    if names:
        files.sync_dir(layout.data)


def remove_everything(files: Files, layout: Layout, meta: LogMeta) -> LogMeta:
    """Removes all segments, so that the store is the empty one that its identity tells of; repeatable."""
    start = Checkpoint(meta.first_index - 1, meta.first_index - 1, meta.first_position)
    save_checkpoint(files, layout.checkpoint, start)
    for folder in (layout.data, layout.index):
        for name in files.listdir(folder) or ():
            if is_segment_name(name):
                files.unlink(folder / name)
        files.sync_dir(folder)
    meta = replace(meta, discarding=False)
    save_log_meta(files, layout.log_meta, meta)
    return meta
