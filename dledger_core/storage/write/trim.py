"""Move the start of a log: trim its first segments, or restart a follower at its leader's first index.

``meta/log.json`` decides, and is replaced atomically. Before that, the stored tables durably contain the state of the
entries to delete; only afterwards are files removed. The next start completes a change that a crash interrupted, so a
store is always either in the old or in the new state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dledger_core.ids import Index, Position, Term
from dledger_core.record import is_segment_name, segment_name
from dledger_core.storage.files.file_system import Files
from dledger_core.storage.files.layout import Layout, LogMeta, save_log_meta
from dledger_core.storage.files.members_file import ConfigurationEntry
from dledger_core.storage.files.meta_files import Checkpoint, save_checkpoint
from dledger_core.storage.tables.tables import TableChanges


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStart:
    """Start of a log whose first entries are deleted.

    Attributes:
        first_index: the first remaining entry.
        position: its position.
        previous_term: term of the entry before; NO_TERM if unknown.
        log_uuid: identity of the log, or None.
        tables: all rows of the tables of the committed entries up to ``first_index - 1`` or further.
        members: the configuration in force before ``first_index``.
        commitlog_prefix: fingerprint of the CommitLog that the log starts after, or None.
    """

    first_index: Index
    position: Position
    previous_term: Term
    log_uuid: str | None
    tables: TableChanges
    members: ConfigurationEntry
    commitlog_prefix: str | None = None


def end_interrupted(files: Files, layout: Layout, meta: LogMeta) -> LogMeta:
    """Complete a change that a crash interrupted, before the segments are listed; return the resulting identity.

    Segments before the start of the log that a trim left are removed: neither checkpoint nor repair covers them. They
    stay only if the first segment itself is missing, for analysis.
    """
    # The identity decides which log there is. With this mark the files are those of no log, and an entry of them that
    # returned would follow entries of the new one (test_restart_is_atomic_across_crashes).
    if meta.discarding:
        return remove_everything(files, layout, meta)
    _remove_new_tables(files, layout)
    bases = sorted(int(name) for name in files.listdir(layout.data) or () if is_segment_name(name))
    first = meta.first_position - meta.first_position % meta.data_segment_bytes
    if first in bases:
        _remove(files, layout, [segment_name(base) for base in bases if base < first])
    return meta


def _remove_new_tables(files: Files, layout: Layout) -> None:
    """Remove the tables of an install that a crash ended before the log restarted."""
    names = [name for name in files.listdir(layout.meta) or () if name.startswith(layout.new_tables.name)]
    for name in names:
        files.unlink(layout.meta / name)
    if names:
        files.sync_dir(layout.meta)


def _remove(files: Files, layout: Layout, names: Sequence[str]) -> None:
    for name in names:
        files.unlink(layout.data / name)
    if names:
        files.sync_dir(layout.data)


def remove_everything(files: Files, layout: Layout, meta: LogMeta) -> LogMeta:
    """Remove all segments and take the new tables, so that the store is like its identity; idempotent."""
    files.move_tables(layout.new_tables, layout.tables)
    # Before the segments: a checkpoint above the end of the log means damage.
    start = Checkpoint(meta.first_index - 1, meta.first_index - 1, meta.first_position)
    save_checkpoint(files, layout.checkpoint, start)
    for directory in (layout.data, layout.index):
        for name in files.listdir(directory) or ():
            if is_segment_name(name):
                files.unlink(directory / name)
        files.sync_dir(directory)
    # The mark goes last: until then each step is repeated (test_repair_completes_a_restart_with_a_failed_write).
    meta = replace(meta, discarding=False)
    save_log_meta(files, layout.log_meta, meta)
    return meta
