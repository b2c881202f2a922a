"""Open the files of a native store and recover it from a crash: everything that ``CommitLog`` starts with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from dledger_core.config import StorageConfig
from dledger_core.ids import NO_INDEX, Term
from dledger_core.raft.floor import Floor
from dledger_core.raft.ready import HardState
from dledger_core.storage.check.judge import native_rules
from dledger_core.storage.check.recovery import RecoveredEnd, recover
from dledger_core.storage.files.acknowledged_file import Remembered, load_acknowledged
from dledger_core.storage.files.file_system import File, Files
from dledger_core.storage.files.index_file import IndexFile
from dledger_core.storage.files.layout import Layout, LogMeta
from dledger_core.storage.files.members_file import KnownConfigurations, members_file
from dledger_core.storage.files.meta_files import (
    Checkpoint,
    FloorFile,
    checkpoint_file,
    hard_state_file,
    load_checkpoint,
    load_hard_state,
    raise_floor,
)
from dledger_core.storage.files.segments import Segments
from dledger_core.storage.files.table_store import TableStore
from dledger_core.storage.read import log_queries
from dledger_core.storage.read.record_reader import RecordReader
from dledger_core.storage.tables.tables import LogTables, cut_back, load_tables
from dledger_core.storage.write.fail_stop import FailStop
from dledger_core.storage.write.trim import end_interrupted


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredStore:
    """An open store after recovery.

    Attributes:
        config: the settings, with the sizes and the profile that the store has.
        files: the file system.
        layout: the paths.
        lock: held until the store is closed.
        fail_stop: the store's failure.
        meta: identity and start of the log.
        table_store: the stored tables.
        tables: their content, without entries that the log has lost.
        index: the index.
        reader: the records.
        checkpoint: the newest one, or None.
        hard_state: term and vote.
        members: the configurations.
        acknowledged: what is remembered of other stores.
        floor_file: the least end of a log that the node elects.
        end: both ends of the log.
    """

    config: StorageConfig
    files: Files
    layout: Layout
    lock: File
    fail_stop: FailStop
    meta: LogMeta
    table_store: TableStore
    tables: LogTables
    index: IndexFile
    reader: RecordReader
    checkpoint: Checkpoint | None
    hard_state: HardState
    members: KnownConfigurations
    acknowledged: Mapping[str, Remembered]
    floor_file: FloorFile
    end: RecoveredEnd


def recover_store(files: Files, layout: Layout, meta: LogMeta, config: StorageConfig, lock: File) -> RecoveredStore:
    """Open and recover a claimed store.

    Raises:
        CorruptRecordError: the store is damaged; nothing was truncated.
    """
    # A file that a killed process created is visible, but its name may not be durable.
    for directory in (layout.root, layout.meta, layout.data, layout.index):
        files.sync_dir(directory)
    meta = end_interrupted(files, layout, meta)
    fail_stop = FailStop(files, layout)
    table_store = files.open_tables(layout.tables, fail_stop.fail)
    tables = load_tables(files, layout, meta, table_store.read)
    load = partial(Segments.load, files, write=True, open_max=config.open_segments_max)
    data = load(layout.data, config.data_segment_bytes)
    index = IndexFile(load(layout.index, config.index_segment_bytes, gaps=True))
    reader = RecordReader(data, index, native_rules(meta))
    # Both copies are there before one of them is replaced: a power cut in that write may cost it
    # (test_power_cut_in_any_write_leaves_old_or_new_content_in_both_copies).
    for ab_file in (hard_state_file(layout.hard_state), checkpoint_file(layout.checkpoint), members_file(layout)):
        ab_file.make_equal(files)
    checkpoint = load_checkpoint(files, layout.checkpoint)
    hard_state = load_hard_state(files, layout, 0)
    saved = members_file(layout).load(files).value
    # A store without entries that never voted has acknowledged nothing, so it has lost nothing.
    is_new = not data.bases and hard_state == HardState(Term(0), None)
    members = saved or KnownConfigurations(lost=not is_new)
    recover_end = partial(recover, reader, index, meta, checkpoint, unsynced_bytes_max=config.unsynced_bytes_max)

    def has_lost_entries() -> bool:
        """Whether the log ends before an entry that was durable: what looks like a torn tail is damage.

        Two files name such entries: the members file configurations, the tables the newest control entry that they
        include.
        """
        newest = max(members.started(meta.first_index).newest_index, tables.durable_index)
        covered = NO_INDEX if checkpoint is None else checkpoint.durable_index
        return newest > max(covered, meta.first_index - 1) and recover_end(keep_tail=True).last_index < newest

    # A node without entries that it acknowledged must not help to elect a leader that lacks them too: the election
    # restriction (dissertation 3.6.1) counts on each voter's log. It votes again once a leader has sent what it may
    # have had (test_lost_checkpoint_makes_recovering_voter_that_cuts_nothing).
    if not is_new and (checkpoint is None or saved is None or has_lost_entries()):
        # Before recovery changes anything: the end is lost, although the files may not show it.
        raise_floor(files, layout, Floor(hard_state.term), hard_state.term)
    acknowledged = load_acknowledged(files, layout)
    floor_file = FloorFile(files, layout, hard_state.term)
    end = recover_end(keep_tail=floor_file.floor is not None and floor_file.floor.is_open)
    members = _configurations(members, reader, meta, checkpoint, end)
    if members != saved:
        members_file(layout).save(files, members)
    # A term below that of an own entry is a hard state that was lost: the node could vote twice in one term.
    load_hard_state(files, layout, end.term or meta.previous_term or 0)  # raises if it is older than the log
    return RecoveredStore(
        config=config,
        files=files,
        layout=layout,
        lock=lock,
        fail_stop=fail_stop,
        meta=meta,
        table_store=table_store,
        tables=cut_back(tables, table_store, meta, end.last_index) if tables.durable_index > end.last_index else tables,
        index=index,
        reader=reader,
        checkpoint=checkpoint,
        hard_state=hard_state,
        members=members,
        acknowledged=acknowledged,
        floor_file=floor_file,
        end=end,
    )


def _configurations(
    known: KnownConfigurations, reader: RecordReader, meta: LogMeta, checkpoint: Checkpoint | None, end: RecoveredEnd
) -> KnownConfigurations:
    """Return the configurations of the file and of the log.

    The checkpoint covers a configuration entry only after the file names it, so only later entries are searched.
    """
    known = known.started(meta.first_index).trimmed(end.first_index)
    known = known.checked(end.first_index, end.last_index, reader.term_at)
    covered = NO_INDEX if known.lost or checkpoint is None else checkpoint.durable_index
    # Without the file every entry may be a configuration
    # (test_store_that_lost_both_copies_recovers_until_a_leader_compared_its_log).
    begin = max(end.first_index, covered + 1)
    found = log_queries.configuration_entries(reader, begin, end.last_index + 1)
    entries = {entry.index: entry for entry in (*found, *known.entries)}.values()
    return known.with_entries(entries).completed(end.first_index)
