"""The tables that a replica derives from its log's control entries, together: apply, store, restore.

In a store the tables are rows of a ``TableStore``, one per producer and so on; in a snapshot the same rows as bytes.
Applying a control entry changes a few rows, and only these are written. One row says which entries are applied, so a
transaction leaves the tables as of one entry.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

import msgpack

from dledger_core import control
from dledger_core.checksum import Buffer, crc32
from dledger_core.config import Limits
from dledger_core.errors import CorruptRecordError
from dledger_core.ids import NO_INDEX, Index
from dledger_core.lineage import Ancestors, ancestors_of
from dledger_core.storage.files.file_system import Files
from dledger_core.storage.files.layout import REPLACE, Layout, LogMeta
from dledger_core.storage.files.table_store import DamagedTablesError, Rows, TableStore
from dledger_core.storage.tables import producers
from dledger_core.storage.tables.archived import ARCHIVED, ArchiveTable
from dledger_core.storage.tables.changes import RowChanges
from dledger_core.storage.tables.open_transactions import OPEN_MAX
from dledger_core.storage.tables.producers import ProducerTable
from dledger_core.storage.tables.queries import ONE_TIME_MAX, QUERIES_MAX
from dledger_core.storage.tables.transactions import TransactionTable

_VERSION: Final = 4
_META: Final = b"m"


class LogTables:
    """Producers, transactions, archive, the log's uuid, chain and log time as of ``applied_index``. Not thread-safe."""

    def __init__(self) -> None:
        self._changes = RowChanges()
        self._taken_index: Index | None = None
        self._installed_index = NO_INDEX
        self.producers = ProducerTable(self._changes)
        self.transactions = TransactionTable(self._changes)
        self.archive = ArchiveTable(self._changes)
        self.log_uuid: str | None = None
        self.chain: Ancestors = ()
        self.applied_index: Index = NO_INDEX
        self.log_time_ms = 0

    def apply(self, index: Index, time_ms: int, body: Buffer) -> None:
        """Apply one committed control or configuration entry; entries at or below ``applied_index`` are ignored.

        Args:
            index: its index.
            time_ms: its append time, ms since the epoch.
            body: its body.
        """
        if index <= self.applied_index:
            return
        fields = control.unpack(body)
        # A later entry is not older, whatever it says: expiry goes by what the entries up to here say together.
        self.log_time_ms = max(self.log_time_ms, control.log_time(fields) or 0)
        try:
            self._apply(fields, index, time_ms)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            what = f"a control entry has malformed fields: {error!r}"
            raise CorruptRecordError(what, f"index {index}", "", {"index": int(index)}) from None
        self.producers.expire(self.log_time_ms)
        self.transactions.expire(self.log_time_ms)
        self.applied_index = index

    def _apply(self, fields: dict[str, Any], index: Index, time_ms: int) -> None:
        kind = fields.get("k")
        if kind == "producer":
            self.producers.apply(fields, index, time_ms, self.log_time_ms)
        elif kind == "expire":
            self.producers.remove(str(fields["p"]))
        elif kind == "attempt":
            self.transactions.apply_attempt(fields, index, self.log_time_ms)
        elif kind == "commit":
            self.transactions.apply_commit(fields, self.log_time_ms)
        elif kind == "abort":
            self.transactions.apply_abort(fields, self.log_time_ms)
        elif kind == "log":  # more than one in a log that continues another one
            self.log_uuid = str(fields["u"])
            self.chain = ancestors_of(fields.get("c", []))
        elif kind == "archived":
            self.archive.apply(fields, index)
        elif kind == "archive-end":
            self.archive.apply_end(index)

    def usage(self, limits: Limits) -> list[tuple[str, int, int]]:
        """Return (table, rows, limit on them) of each table that can be full."""
        rows_max = limits.producers
        return [
            ("producers", len(self.producers), rows_max),
            ("producers used once", self.producers.one_time_count, rows_max // 2),
            ("queries", len(self.transactions.queries), QUERIES_MAX),
            ("queries used once", self.transactions.queries.one_time_count, ONE_TIME_MAX),
            ("open transactions", len(self.transactions.open), OPEN_MAX),
        ]

    # --- rows ------------------------------------------------------------------------------------------------

    def take_changes(self) -> TableChanges:
        """Return the rows that changed since the last call, none if no entry was applied; takes no time."""
        if self.applied_index == self._taken_index:
            return TableChanges(self.applied_index, {}, is_complete=False)
        is_complete, self._taken_index = self._taken_index is None, self.applied_index
        changes = self._changes.take()
        changes[_META] = self._meta_row(self._installed_index)
        return TableChanges(self.applied_index, changes, is_complete)

    def rows(self) -> Rows:
        """Return all rows, in the order of their keys."""
        return sorted(self._rows(self._installed_index))

    def _rows(self, installed_index: Index) -> Iterator[tuple[bytes, bytes]]:
        yield _META, self._meta_row(installed_index)
        yield from self.producers.rows()
        yield from self.transactions.rows()
        yield from self.archive.rows()

    def _counts(self) -> list[int]:
        """Return the numbers of stored rows; that of the archive only if it has some, as in earlier versions."""
        archived = [self.archive.row_count] if self.archive.row_count else []
        return [len(self.producers), self.transactions.row_count, *archived]

    def _meta_row(self, installed_index: Index) -> bytes:
        fields: dict[str, Any] = {
            "version": _VERSION,
            "applied": self.applied_index,
            "installed": installed_index,
            "log": self.log_uuid,
            "chain": [asdict(link) for link in self.chain],
            "time": self.log_time_ms,
            "counts": self._counts(),
        }
        return bytes(msgpack.packb(fields))

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[bytes, bytes]]) -> LogTables:
        """Return the tables of stored rows, in the order of their keys; raise DamagedTablesError if they are none."""
        try:
            return cls._from_rows(rows)
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            IndexError,
            OverflowError,
            msgpack.UnpackException,
        ) as e:
            raise DamagedTablesError(f"the rows are no tables: {e!r}") from None

    @classmethod
    def installed(cls, rows: Rows | None) -> LogTables:
        """Return the tables of a snapshot install, which may be ahead of the log; raise DamagedTablesError."""
        tables = cls() if rows is None else cls.from_rows(rows)
        tables._installed_index = tables.applied_index
        return tables

    @classmethod
    def _from_rows(cls, rows: Sequence[tuple[bytes, bytes]]) -> LogTables:
        tables = cls()
        begin, end = (bisect_left(rows, (prefix,)) for prefix in (producers.PREFIX, producers.PREFIX_END))
        tables.producers.restore(islice(rows, begin, end))
        rest = dict(chain(rows[:begin], rows[end:]))
        fields = msgpack.unpackb(rest.pop(_META), strict_map_key=False)
        archived = [key for key in rest if key.startswith(ARCHIVED)]
        tables.archive.restore((key, rest.pop(key)) for key in archived)
        tables.transactions.restore(rest.items())
        if fields["version"] != _VERSION or fields["counts"] != tables._counts():
            raise ValueError("another version, or rows are missing")
        tables.applied_index = tables._taken_index = Index(fields["applied"])
        tables._installed_index = Index(fields["installed"])
        tables.log_uuid = fields["log"]
        tables.chain = ancestors_of(fields["chain"])
        tables.log_time_ms = int(fields["time"])
        return tables

    def trim(self, first_index: Index) -> None:
        """Forget what is only about entries that this store has deleted; unlike the rest it depends on the store."""
        self.transactions.orphaned.trim(first_index)
        self.archive.trim(first_index)

    def forget_after(self, index: Index) -> None:
        """Forget the entries after the end of a log that has lost them permanently; their producers are unknown then.

        Other entries get these indexes now. A producer that continued would take a retry of a lost append for a repeat.
        """
        self.producers.forget_after(index)
        self.transactions.forget_after(index)
        self.archive.forget_after(index)
        self.applied_index, self._installed_index = index, NO_INDEX
        # The keys of lost rows are used again, so changes alone could leave such a row in the store.
        self._changes.restart(chain(self.producers.rows(), self.transactions.rows(), self.archive.rows()))
        self._taken_index = None

    @property
    def durable_index(self) -> Index:
        """A control entry that was durable in the log of this store: the newest applied one.

        NO_INDEX if a snapshot install brought it, because such tables may be ahead of the log.
        """
        return self.applied_index if self.applied_index > self._installed_index else NO_INDEX

    # --- snapshots -------------------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """Return the tables as bytes: CRC-32 and a msgpack list of keys and values; equal tables have equal bytes."""
        packed = bytes(msgpack.packb(sorted(self._rows(NO_INDEX))))
        return crc32(packed).to_bytes(4, "big") + packed

    @classmethod
    def restore(cls, data: bytes) -> LogTables:
        """Return the tables of a snapshot; empty ones if it is damaged or has another version.

        Empty tables are correct for a complete log: they are then rebuilt from its control entries.
        """
        return cls.parse(data) or cls()

    @classmethod
    def parse(cls, data: bytes) -> LogTables | None:
        """Return the tables of a snapshot, or None if it is damaged or has another version."""
        if len(data) < 4 or crc32(data[4:]) != int.from_bytes(data[:4], "big"):
            return None
        try:
            return cls.installed(msgpack.unpackb(data[4:], use_list=False))
        except (TypeError, ValueError, msgpack.UnpackException):
            return None


@dataclass(frozen=True, slots=True)
class TableChanges:
    """Changed rows of the tables.

    Attributes:
        applied_index: the last control entry applied.
        rows: new values by key, None for a removed row.
        is_complete: whether these are all rows, because what the store has, if anything, is not usable.
    """

    applied_index: Index
    rows: Mapping[bytes, bytes | None]
    is_complete: bool

    @classmethod
    def complete(cls, tables: LogTables) -> TableChanges:
        """Return all rows of tables."""
        return cls(tables.applied_index, dict(tables.rows()), is_complete=True)


def load_tables(
    files: Files, layout: Layout, meta: LogMeta, read: Callable[[], Rows | None] | None = None
) -> LogTables:
    """Return the stored tables; the log's later control entries are not applied yet.

    Args:
        files: the file system.
        layout: the store.
        meta: its identity.
        read: reads the rows for the store's node; other programs read the file as it is.

    Raises:
        CorruptRecordError: the entries that could replace missing or damaged tables are deleted.
    """
    tables, found = None, "missing"
    try:
        rows = read() if read is not None else files.read_tables(layout.tables)
        tables = LogTables.from_rows(rows) if rows is not None else None
    except DamagedTablesError:
        found = "damaged"
    if meta.tables_index is None:
        return tables or LogTables()
    if tables is not None and tables.applied_index >= meta.tables_index:
        return tables
    if tables is not None:
        found = "older than the deletion"
    raise CorruptRecordError(
        f"the tables of producers and transactions are {found}, and the entries they were derived from are deleted",
        str(layout.tables),
        f"restore the file; or {REPLACE}",
        {"first_index": meta.first_index},
    )


def cut_back(tables: LogTables, table_store: TableStore, meta: LogMeta, last_index: int) -> LogTables:
    """Forget the entries after an index, which the log has lost; store the tables before others get these indexes.

    Tables of a log that contains its first entry are derived from it again.

    Args:
        tables: those in ``table_store``, of a later entry.
        table_store: the stored rows.
        meta: the log's identity.
        last_index: the last entry of the log.

    Raises:
        OSError: the transaction failed.
    """
    # With them a retry of a lost append would count as a repeat, and the response would have the index of another entry
    # (test_tables_ahead_of_log_are_cut_back_durably_before_other_entries_get_indexes).
    if meta.tables_index is None:
        tables = LogTables()
    else:
        tables.forget_after(Index(last_index))
    table_store.write(TableChanges.complete(tables).rows, replace=True)
    table_store.sync()
    return tables


def save_tables(files: Files, path: Path, tables: TableChanges) -> None:
    """Store complete tables in a file, durably; raise OSError."""
    store = files.open_tables(path, lambda error: None)
    try:
        store.write(tables.rows, replace=True)
        store.sync()
    finally:
        store.close()
