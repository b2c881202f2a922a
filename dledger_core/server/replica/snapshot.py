"""Contents of a snapshot install in addition to the first index: position, identity of the log, members, tables.

The leader packs its stored tables, which cover at least the trimmed entries. They are a pure function of the log, so
they may be ahead of the follower's log: the follower then skips the control entries that they cover. They contain
attempts that are open across the boundary, and orphaned ones before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import msgpack

from dledger_core.errors import CorruptRecordError, ProtocolError
from dledger_core.ids import NO_INDEX, NO_TERM, NUMBER_MAX, Index, Position, Term
from dledger_core.raft import AppendEntries, Batch, Configuration, ConfigurationInForce, InstalledSnapshot, Message
from dledger_core.record import HEADER_BYTES, records_of
from dledger_core.server.replica.background import Background, Work
from dledger_core.storage import CommitLog
from dledger_core.storage.files.members_file import ConfigurationEntry
from dledger_core.storage.files.table_store import DamagedTablesError
from dledger_core.storage.tables.tables import LogTables, TableChanges
from dledger_core.storage.write.trim import LogStart

_VERSION: Final = 2


def without_deleted(message: Message, first_index: Index) -> Message:
    """Return the message without entries before ``first_index``, if that is in the middle of one of its batches.

    Segments end where they are full, so a log may start inside a batch, and a leader that still has the complete batch
    sends it. Only the Ready loop can split a batch: the core moves batches as a whole.
    """
    if not isinstance(message, AppendEntries):
        return message
    # The core would refuse a batch of which it has a part, and the follower would never continue
    # (test_batch_across_new_first_index_is_accepted_from_there).
    for at, batch in enumerate(message.batches):
        if batch.first_index < first_index <= batch.last_index:
            records = records_of(batch).slice(first_index - batch.first_index, batch.count)
            rest = Batch(first_index, records.count, batch.term, records.nbytes, records)
            previous, batches = Index(first_index - 1), (rest, *message.batches[at + 1 :])
            return replace(message, prev_index=previous, prev_term=batch.term, batches=batches)
    return message


@dataclass(frozen=True, slots=True)
class NewLog:
    """A received snapshot: the start of the log for the store, the tables for the replica."""

    start: LogStart
    tables: LogTables


class SnapshotInstalls:
    """Packs and installs snapshots of one replica (``SnapshotPayloads``).

    The rows of the tables travel as the image of the leader's store. Reading the image, and the rows from it, takes
    seconds for a million of them, so that runs in the background.

    Args:
        log: its store.
        tables: returns its tables.
        background: see ``Environment``.
    """

    def __init__(
        self,
        log: CommitLog,
        tables: Callable[[], LogTables],
        background: Background,
    ) -> None:
        self._log = log
        self._tables = tables
        self._background = background
        self._outgoing: tuple[Index, Work[bytes]] | None = None
        self._incoming: tuple[bytes, Work[tuple[LogTables, TableChanges] | None]] | None = None

    def pack(self, first_index: Index, in_force: ConfigurationInForce) -> bytes | None:
        """See ``SnapshotPayloads``.

        The core forgets entries before the store deletes them. Until it has, its tables may not cover them yet.
        """
        # A snapshot without their rows would make a follower that leads later accept a repeat of a deleted append
        # (test_snapshot_waits_until_the_tables_cover_the_deleted_entries).
        if self._log.first_index() < first_index:
            return None
        if self._outgoing is None or self._outgoing[0] != first_index:
            fields = {
                "version": _VERSION,
                "position": self._log.position_of(first_index),
                # A converted log has its identity in the store alone, until its first leader records it
                # (test_snapshot_has_the_identity_that_no_entry_of_a_converted_log_contains).
                "log": self._tables().log_uuid or self._log.log_uuid,
                "prefix": self._log.commitlog_prefix,
                "members": (in_force.index, in_force.configuration.to_bytes()),
            }
            self._outgoing = first_index, Work(self._background, lambda: self._pack(fields))
        work = self._outgoing[1]
        if not work.is_done:
            return None
        self._outgoing = None  # the core has it now, and drops it after the transfer
        return work.result()

    def _pack(self, fields: dict[str, Any]) -> bytes:
        # The stored tables include the entries that a trim has deleted; the follower applies all later ones.
        return bytes(msgpack.packb(fields | {"tables": self._log.tables_image()}))

    def install(self, first_index: Index, previous_term: Term, data: bytes) -> InstalledSnapshot | None:
        """See ``SnapshotPayloads``."""
        fields = _fields(data)
        position, log_uuid = fields.get("position"), fields.get("log")
        position = position if type(position) is int else -1
        prefix = fields.get("prefix")
        kinds = isinstance(log_uuid, str | None) and isinstance(prefix, str | None)
        # No log has more entries than headers fit before them.
        placed = first_index * HEADER_BYTES <= position <= NUMBER_MAX
        in_force = _configuration(fields.get("members"), first_index)
        image = fields.get("tables")
        well_formed = placed and kinds and fields.get("version") == _VERSION
        if in_force is None or not well_formed or not isinstance(image, bytes):
            raise _malformed(first_index)
        segment_bytes, ours = self._log.config.data_segment_bytes, self._log.log_uuid
        # Records of two logs in one store, or segments of two sizes, could not be read again
        # (test_snapshot_that_does_not_match_is_rejected).
        if position % segment_bytes or (None not in (ours, log_uuid) and ours != log_uuid):
            raise ProtocolError(
                "the snapshot belongs to another log, or the segment sizes differ",
                f"index {first_index}",
                "use the same data-segment-bytes on all nodes, and the peers of one cluster",
                {"position": position, "segment_bytes": segment_bytes, "log": log_uuid, "ours": ours},
            )
        # In the background: a million rows would hold heartbeats up for longer than an election timeout
        # (test_snapshot_is_packed_and_read_in_the_background).
        if self._incoming is None or self._incoming[0] is not data:
            self._incoming = data, Work(self._background, lambda: self._read(image))
        work = self._incoming[1]
        if not work.is_done:
            return None
        self._incoming = None
        found = work.result()
        if found is None:
            raise _malformed(first_index)
        tables, rows = found
        start = LogStart(
            first_index=first_index,
            position=Position(position),
            previous_term=previous_term,
            log_uuid=log_uuid,
            commitlog_prefix=prefix,
            tables=rows,
            members=ConfigurationEntry(in_force.index, NO_TERM, in_force.configuration.to_bytes()),
        )
        self._log.stage_restart(start)
        return InstalledSnapshot(NewLog(start, tables), in_force)

    def _read(self, image: bytes) -> tuple[LogTables, TableChanges] | None:
        try:
            tables = LogTables.installed(self._log.rows_in_image(image))
        except DamagedTablesError:
            return None
        return tables, TableChanges.complete(tables)


def _malformed(first_index: Index) -> ProtocolError:
    return ProtocolError("the snapshot is malformed", f"index {first_index}", "run one version on all nodes")


def _configuration(found: Any, first_index: Index) -> ConfigurationInForce | None:
    """Return the packed configuration, or None unless it was in force before ``first_index``."""
    try:
        index, body = found
        known = type(index) is int and NO_INDEX <= index < first_index and isinstance(body, bytes)
        return ConfigurationInForce(Index(index), Configuration.from_bytes(body)) if known else None
    except (TypeError, ValueError, CorruptRecordError):
        return None


def _fields(data: bytes) -> dict[Any, Any]:
    try:
        found = msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, msgpack.UnpackException, msgpack.ExtraData):
        found = None
    return found if isinstance(found, dict) else {}
