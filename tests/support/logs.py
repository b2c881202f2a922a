"""Making batches and filling a CommitLog, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dledger_core.config import StorageConfig
from dledger_core.ids import Index, NodeId, Term
from dledger_core.raft.batch import Batch
from dledger_core.raft.ready import HardState
from dledger_core.record import Columns, ProposedBatch, Records, records_of
from dledger_core.storage import CommitLog
from dledger_core.storage.tables.tables import LogTables, TablesSnapshot

SMALL = StorageConfig(data_segment_bytes=4096, index_segment_bytes=1024, preallocate_bytes=0)
STORE = Path("/disk/g/dledger-n0")
NO_TABLES = TablesSnapshot.of(LogTables())


def open_log(files: object = None, directory: Path = STORE, config: StorageConfig = SMALL) -> CommitLog:
    return CommitLog.open(directory, group="g", node_id="n0", config=config, files=files)


def place(
    log: CommitLog,
    first_index: int,
    bodies: Sequence[bytes],
    term: int = 1,
    *,
    control: bytes | None = None,
    magic: int = 2,
    now_ms: int = 1000,
) -> Batch:
    """Give a leader's batch its place at the staged end."""
    proposal = ProposedBatch(Columns.from_bodies(bodies), control, magic)
    return log.place(proposal, Index(first_index), Term(term), now_ms)


def received(batch: Batch) -> Batch:
    """Return the same batch as a follower receives it."""
    records = records_of(batch)
    return replace(batch, payload=Records(records.sizes.copy(), bytes(records.data)))


def append(
    log: CommitLog, bodies: Sequence[bytes], term: int = 1, *, control: bytes | None = None, now_ms: int = 1000
) -> Batch:
    """Place and persist one batch at the durable end."""
    batch = place(log, log.last_index() + 1, bodies, term, control=control, now_ms=now_ms)
    state = log.hard_state
    log.persist(HardState(Term(term), NodeId("n0")) if state.term < term else None, None, [batch])
    return batch


def bodies_of(records: Records) -> list[bytes]:
    data = memoryview(records.bodies)
    ends = (records.sizes.astype("i8") - 48).cumsum().tolist()
    return [bytes(data[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def read_all(log: CommitLog) -> list[tuple[int, bytes]]:
    """(term, body) of every durable entry."""
    first, end = log.first_index(), log.last_index() + 1
    if first == end:
        return []
    records = log.read(first, end, 1 << 30)
    assert records.count == end - first
    return list(zip(records.headers["term"].tolist(), bodies_of(records), strict=True))
