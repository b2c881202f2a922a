"""The tables that a replica derives from its log's control entries, together: apply, snapshot, restore."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

import msgpack

from dledger_core import control
from dledger_core.checksum import Buffer, crc32
from dledger_core.config import Limits
from dledger_core.continuation import Chain, chain_of
from dledger_core.errors import CorruptRecordError
from dledger_core.ids import NO_INDEX, Index
from dledger_core.storage.files.file_system import Files
from dledger_core.storage.files.layout import Layout, LogMeta
from dledger_core.storage.tables.producers import ProducerTable
from dledger_core.storage.tables.transactions import ONCE_MAX, OPEN_MAX, QUERIES_MAX, TransactionTable

_VERSION: Final = 3


class LogTables:
    """Producers, transactions, the log's uuid and chain, and its log time as of ``applied_index``. Not thread-safe."""

    def __init__(self) -> None:
        self.producers = ProducerTable()
        self.transactions = TransactionTable()
        self.log_uuid: str | None = None
        self.chain: Chain = ()
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
            self.chain = chain_of(fields.get("c", []))

    def usage(self, limits: Limits) -> list[tuple[str, int, int]]:
        """Return (table, rows, limit on them) of each table that can be full."""
        rows_max = limits.producers
        return [
            ("producers", len(self.producers), rows_max),
            ("producers used once", self.producers.once_count, rows_max // 2),
            ("queries", self.transactions.count, QUERIES_MAX),
            ("queries used once", self.transactions.once_count, ONCE_MAX),
            ("open transactions", len(self.transactions.open), OPEN_MAX),
        ]

    def snapshot(self) -> bytes:
        """Return the tables as bytes: CRC-32 and a msgpack map."""
        fields: dict[str, Any] = {
            "version": _VERSION,
            "applied": self.applied_index,
            "log": self.log_uuid,
            "chain": [asdict(link) for link in self.chain],
            "time": self.log_time_ms,
            "producers": self.producers.snapshot(),
            "transactions": self.transactions.snapshot(),
        }
        packed = bytes(msgpack.packb(fields))
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
            return cls._unpack(data[4:])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, msgpack.UnpackException):
            return None

    @classmethod
    def _unpack(cls, packed: bytes) -> LogTables | None:
        fields = msgpack.unpackb(packed, strict_map_key=False)
        if fields.get("version") != _VERSION:
            return None
        tables = cls()
        tables.applied_index = Index(fields["applied"])
        tables.log_uuid = fields["log"]
        tables.chain = chain_of(fields["chain"])
        tables.log_time_ms = int(fields["time"])
        tables.producers.restore(fields["producers"])
        tables.transactions.restore(fields["transactions"])
        return tables


@dataclass(frozen=True, slots=True)
class TablesSnapshot:
    """The tables of producers and transactions as bytes.

    Attributes:
        applied_index: the last control entry applied; -1 if there was none.
        data: result of ``LogTables.snapshot``.
    """

    applied_index: Index
    data: bytes

    @classmethod
    def of(cls, tables: LogTables) -> TablesSnapshot:
        """Return the snapshot of the tables' current state."""
        return cls(tables.applied_index, tables.snapshot())


def load_tables(files: Files, layout: Layout, meta: LogMeta) -> LogTables:
    """Return the tables of the last snapshot; the log's later control entries are not applied yet.

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
        f"the tables of producers and transactions are {found}, and the entries they were derived from are deleted",
        str(layout.tables),
        "restore the file, or move the store away and let the node catch up from its peers",
        {"first_index": meta.first_index},
    )
