"""Making batches and filling a CommitLog, for tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from dledger_core.config import StorageConfig
from dledger_core.ids import NO_TERM, Index, NodeId, Term
from dledger_core.raft.batch import Batch
from dledger_core.raft.ready import HardState
from dledger_core.record import HEADER_BYTES, Columns, ProposedBatch, Records, records_of
from dledger_core.storage import CommitLog, StoreReader
from dledger_core.storage.files.file_system import Files, OsFiles
from dledger_core.storage.files.layout import Layout, LogMeta, save_log_meta
from dledger_core.storage.files.members_file import ConfigurationEntry
from dledger_core.storage.tables.tables import LogTables, TableChanges
from dledger_core.storage.write.appender import Preallocation
from dledger_core.storage.write.log_writer import LogHooks

SMALL = StorageConfig(data_segment_bytes=4096, index_segment_bytes=1024, preallocate_bytes=0)
STORE = Path("/disk/g/dledger-n0")
MEMBERS = ConfigurationEntry(Index(7), NO_TERM, b"members")
LOG_UUID = "f0f0f0f0f0f04f0f8f0f0f0f0f0f0f0f"
NO_TABLES = TableChanges.complete(LogTables())


class PreallocationByHand(Preallocation):
    """No thread: a test calls ``CommitLog.preallocate``."""

    def poke(self) -> None:
        pass


def open_log(
    files: object = None, directory: Path = STORE, config: StorageConfig = SMALL, hooks: LogHooks | None = None
) -> CommitLog:
    return CommitLog.open(directory, group="g", node_id="n0", config=config, files=files, hooks=hooks)


def found_store(
    directory: Path, node_id: str = "n0", config: StorageConfig = SMALL, files: Files | None = None
) -> None:
    """Create the identity of a log, as its bootstrap does, unless it exists."""
    files, layout = files or OsFiles(), Layout(Path(directory))
    if files.read(layout.log_meta) is None:
        files.mkdir(layout.meta)
        meta = LogMeta(
            profile=config.profile,
            group="g",
            node_id=node_id,
            data_segment_bytes=config.data_segment_bytes,
            index_segment_bytes=config.index_segment_bytes,
            log_uuid=LOG_UUID,
        )
        save_log_meta(files, layout.log_meta, meta)


def place(
    log: CommitLog,
    first_index: int,
    bodies: Sequence[bytes],
    term: int = 1,
    *,
    control: bytes | None = None,
    configuration: bytes | None = None,
    now_ms: int = 1000,
) -> Batch:
    """Give a leader's batch its place at the staged end."""
    proposal = ProposedBatch(Columns.from_bodies(bodies), control, configuration)
    return log.place(proposal, Index(first_index), Term(term), now_ms)


def received(batch: Batch) -> Batch:
    """Return the same batch as a follower receives it."""
    records = records_of(batch)
    return replace(batch, payload=Records(records.sizes.copy(), bytes(records.data)))


def append(
    log: CommitLog,
    bodies: Sequence[bytes],
    term: int = 1,
    *,
    control: bytes | None = None,
    configuration: bytes | None = None,
    now_ms: int = 1000,
) -> Batch:
    """Place and persist one batch at the durable end."""
    batch = place(log, log.last_index() + 1, bodies, term, control=control, configuration=configuration, now_ms=now_ms)
    state = log.hard_state
    log.persist(HardState(Term(term), NodeId("n0")) if state.term < term else None, None, [batch])
    return batch


class Row(NamedTuple):
    """An entry as a test compares it."""

    index: int
    term: int
    magic: int
    body: bytes


def rows_of(records: Records) -> list[Row]:
    """Return the entries of a block, control entries included."""
    data, headers = memoryview(records.data), records.headers
    ends = records.starts + records.sizes
    bodies = [bytes(data[a:b]) for a, b in zip((records.starts + HEADER_BYTES).tolist(), ends.tolist(), strict=True)]
    return list(map(Row, *(headers[name].tolist() for name in ("index", "term", "magic")), bodies))


def bodies_of(records: Records) -> list[bytes]:
    return [row.body for row in rows_of(records)]


def rows_between(log: CommitLog, start: int, end: int) -> Iterator[Row]:
    """Yield the entries [start, end) of a log, however many of them a read returns."""
    while start < end:
        rows = rows_of(log.read(start, end, 1 << 20))
        yield from rows
        start += len(rows)


def read_all(log: CommitLog) -> list[tuple[int, bytes]]:
    """(term, body) of every durable entry."""
    return [(row.term, row.body) for row in rows_between(log, log.first_index(), log.last_index() + 1)]


def visible(reader: StoreReader, start: int | None = None) -> pa.RecordBatch:
    """Return all entries of a view that ``read_committed`` shows."""
    at = int(reader.first_index) if start is None else start
    batches = []
    while True:
        found = reader.fetch(at, int(reader.last_index) + 1)
        batches.append(found.batch)
        if found.next_index == at:
            return pa.concat_batches(batches)
        at = found.next_index
