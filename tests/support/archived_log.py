"""A log with an archive in memory: the answers of a leader, and Delta tables with its rows, written without a JVM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from dledger_core import (
    READ_SCHEMA,
    RECORD_SCHEMA,
    ArchivableRanges,
    ArchivedRange,
    ArchivedRanges,
    ArchiveRefusedError,
    ArchiveState,
    Fetch,
    IndexOutOfRangeError,
    LogRange,
    LogSlice,
    Metadata,
    NodeStatus,
    Proof,
    RowsDigest,
    UnreachableError,
    rows_digest,
)
from dledger_core.client import EntryCheck, check_of
from dledger_core.lineage import AncestorLog

GROUP = "g"
ENTRY_SCHEMA = pa.schema([pa.field("group", pa.string()), *READ_SCHEMA])
CONTROLS = frozenset({0, 100, 101, 299})
"""Indexes without a row."""
RECORD_BYTES = 60
UUID = "0b8e4d1c-0000-4000-8000-000000000001"


def entry(index: int, **changed: Any) -> dict[str, Any]:
    """The entry of the log at an index; terms change at 150, and every seventh entry has no append time."""
    row = {
        "index": index,
        "term": 1 if index < 150 else 3,
        "position": index * RECORD_BYTES,
        "timestamp": None if index % 7 == 0 else 1_700_000_000_000_000 + index * 1000,
        "body": f"entry {index:06}".encode(),
    }
    return row | changed


def rows_of(entries: list[dict[str, Any]], group: str = GROUP) -> pa.Table:
    """Entries as rows of a table, in the given order."""
    columns = {name: [one.get(name, group) for one in entries] for name in ENTRY_SCHEMA.names}
    return pa.table(
        [
            pa.array(columns[field.name], pa.int64()).cast(field.type)
            if field.name == "timestamp"
            else pa.array(columns[field.name], field.type)
            for field in ENTRY_SCHEMA
        ],
        schema=pa.schema([field.with_nullable(True) for field in ENTRY_SCHEMA]),
    )


class ArchivedGroup:
    """The leader of a log of 300 entries, cut into ranges of 100, as its client sees it.

    Attributes:
        node_hangs: another node hangs: it may have entries that the leader has deleted.
    """

    def __init__(self, size: int = 300, every: int = 100) -> None:
        self.group, self.log_uuid = GROUP, UUID
        self.size, self.every, self.first_index = size, every, 0
        self.recorded: list[ArchivedRange] = []
        self.table: str | None = None
        self.asked = 0
        self.pins: list[int] = []
        self._pinned: set[str] = set()
        self.node_hangs = False
        self.chain: tuple[AncestorLog, ...] = ()

    # --- what the job asks

    def entries(self, start: int, end: int) -> list[dict[str, Any]]:
        return [entry(index) for index in range(start, end) if index not in CONTROLS]

    def rows(self, start: int, end: int) -> pa.Table:
        return rows_of(self.entries(start, end)).select(READ_SCHEMA.names).cast(READ_SCHEMA)

    @property
    def archived_end(self) -> int:
        return self.recorded[-1].end if self.recorded else 0

    def archivable_ranges(self, start: int | None = None, *, until: int | None = None) -> ArchivableRanges:
        at = self.archived_end if start is None else start
        ends = [at + number * self.every for number in range(1, 1000) if at + number * self.every <= self.size]
        starts = [at, *ends]
        ranges = [LogSlice(low, high, (high - low) * RECORD_BYTES) for low, high in zip(starts, ends, strict=False)]
        return ArchivableRanges(tuple(ranges), at, self.size)

    def prove_archived(self, start: int, end: int, digest: RowsDigest, *, table: str) -> Proof:
        if start != self.archived_end:
            raise ArchiveRefusedError("not next", "", "", {"reason": "not-next"})
        own = rows_digest(self.rows(start, end))
        if own == digest:
            self.table, last = table, entry(end - 1)
            check = check_of(end - 1, last["term"], last["position"], last["body"])
            time = (last["timestamp"] or 0) // 1000
            size = (end - start) * RECORD_BYTES
            self.recorded.append(
                ArchivedRange(
                    start=start, end=end, rows=own.rows, digest=own.digest, position=start * RECORD_BYTES,
                    nbytes=size, last_time_ms=time, term=last["term"], check=check,
                )
            )  # fmt: skip
        return Proof(own == digest, own.rows)

    def archived_ranges(self, start: int = 0) -> ArchivedRanges:
        self.asked += 1
        found = tuple(one for one in self.recorded if one.end > start)
        state = ArchiveState(0, self.archived_end, self.table) if self.table is not None else None
        return ArchivedRanges(found[:2], state)  # two at a time, so that callers must continue

    # --- what a reader asks

    def metadata(self) -> Metadata:
        return Metadata("n1", 3, (NodeStatus("n1", "", "leader", first_index=self.first_index), NodeStatus("n2", "")))

    def trim_before(self, method: str, first_index: int) -> None:
        """Trim entries when a method is called for the first time, before its response."""
        answer = getattr(self, method)

        def trimming(*given: Any, **more: Any) -> Any:
            self.first_index = max(self.first_index, first_index)
            return answer(*given, **more)

        setattr(self, method, trimming)

    def bounds(self, **_: Any) -> LogRange:
        return LogRange(self.first_index, self.size, self.size - 1, self.log_uuid, self.chain)

    def fetch(self, start: int, end: int, **_: Any) -> Fetch:
        self._check(start)
        batch = self.rows(start, min(end, start + 10)).combine_chunks().to_batches()
        found = batch[0] if batch else pa.RecordBatch.from_pylist([], READ_SCHEMA)
        return Fetch(found, min(end, start + 10), self.size - 1, self.size, self.first_index)

    def records(self, start: int, end: int, **_: Any) -> Fetch:
        self._check(start)
        row = entry(start) | {"magic": 1}
        columns = [
            pa.array([row[field.name]], pa.int64()).cast(field.type)
            if field.name == "timestamp"
            else pa.array([row[field.name]], field.type)
            for field in RECORD_SCHEMA
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA)
        return Fetch(batch, end, self.size - 1, self.size, self.first_index)

    def offset_for_time(self, timestamp: int, **_: Any) -> int:
        times = (
            index
            for index in range(self.first_index, self.size)
            if (entry(index)["timestamp"] or 0) >= timestamp * 1000
        )
        return next(times, self.size)

    def split_points(self, start: int, end: int, positions: Any) -> list[int]:
        self._check(start)
        return [min(max(position // RECORD_BYTES, start), end) for position in positions]

    def pin(self, name: str, start: int, seconds: float) -> None:
        self.pins += [start] if seconds else []
        (self._pinned.add if seconds else self._pinned.discard)(name)

    @property
    def pinned(self) -> bool:
        return bool(self._pinned)

    def wait_for_entries(self, *_: Any, **__: Any) -> frozenset[str]:
        return frozenset()

    def describe(self, _: str) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([], pa.schema([]))

    def _check(self, index: int) -> None:
        if index < self.first_index:
            if self.node_hangs:  # a client that retries waits for it, as long as it may
                raise UnreachableError("no node responded")
            values = {"first_index": self.first_index, "last_index": self.size - 1}
            raise IndexOutOfRangeError("deleted", "", "", values)

    def check_at(self, index: int) -> EntryCheck:
        row = entry(index)
        return EntryCheck(row["term"], check_of(index, row["term"], row["position"], row["body"]))


def write_table(path: Path, *parts: pa.Table) -> str:
    """Write a Delta table, each part as a commit."""
    for number, part in enumerate(parts):
        write_deltalake(
            path, part, mode="append" if number else "overwrite", schema_mode="overwrite" if not number else None
        )
    return str(path)


def new_table(path: Path, log: ArchivedGroup) -> str:
    """Write a table with all rows of a log, in three commits, and rows of another group."""
    parts = [rows_of(log.entries(at, at + log.every)) for at in range(0, log.size, log.every)]
    return write_table(path, *parts, rows_of([entry(5), entry(250)], "other"))


def overwrite(path: str, entries: list[dict[str, Any]]) -> None:
    """Replace all rows of a table."""
    write_deltalake(path, rows_of(entries), mode="overwrite")


def append(path: str, entries: list[dict[str, Any]], group: str = GROUP, storage: dict[str, str] | None = None) -> None:
    """Add rows to a table."""
    write_deltalake(path, rows_of(entries, group), mode="append", storage_options=storage)


def delete(path: str, where: str) -> None:
    """Delete rows of a table."""
    DeltaTable(path).delete(where)
