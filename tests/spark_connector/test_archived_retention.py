"""A log of which retention keeps a tenth, proved while it is written: all of it is read, each entry once, in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dledger_core import Client, LocalCluster
from spark_connector.options import DLedgerOptions
from spark_connector.reading.readers import DLedgerBatchReader, DLedgerStreamReader
from tests.support.archiving import STEPS, DirectJob, JobKilledError
from tests.support.slow_elections import SLOW_ELECTIONS
from tests.support.soon import soon

BODY_BYTES, BATCH = 1000, 2000
PARTS = 10


def prove(job: DirectJob, until: int, killed_at: str | None = None) -> None:
    """Prove all below an index by a job, after one that is killed at a step."""
    if killed_at is not None:
        with pytest.raises(JobKilledError):
            job.start(killed_at).prove(until)
    done = job.start().prove(until)
    assert (done.findings, done.end) == ([], until)


def numbers_in(batches: Iterator[pa.RecordBatch]) -> Iterator[np.ndarray]:
    for batch in batches:
        yield pc.binary_slice(batch.column("body"), 0, 10).cast(pa.string()).cast(pa.int64()).to_numpy()


def check_each_once(batches: Iterator[pa.RecordBatch], count: int) -> None:
    """Each number from 0 on, once and in order."""
    seen = 0
    for numbers in numbers_in(batches):
        assert np.array_equal(numbers, np.arange(seen, seen + len(numbers)))
        seen += len(numbers)
    assert seen == count


def batch_rows(reader: DLedgerBatchReader) -> Iterator[pa.RecordBatch]:
    for one in reader.partitions():
        yield from reader.read(one)


def stream_rows(options: DLedgerOptions) -> Iterator[pa.RecordBatch]:
    """Micro-batches of a query that starts again after each of them."""
    offset = DLedgerStreamReader(options).initialOffset()
    while True:
        reader = DLedgerStreamReader(options)
        after = reader.latestOffset(offset, reader.getDefaultReadLimit())
        if after == offset:
            return
        for one in reader.partitions(offset, after):
            yield from reader.read(one)
        offset = after


@pytest.mark.integration
@pytest.mark.parametrize("megabytes", [200, pytest.param(10_240, marks=pytest.mark.soak)])
def test_log_that_retention_shortens_is_read_from_its_first_entry(megabytes: int, tmp_path: Path) -> None:
    keep = (megabytes << 20) // 10
    total = (megabytes << 20) // BODY_BYTES // (PARTS * BATCH) * PARTS * BATCH
    filler = b"x" * (BODY_BYTES - 10)
    with (
        LocalCluster(3, data_segment_bytes=keep // 16, retain_bytes=keep, **SLOW_ELECTIONS) as cluster,
        Client(cluster.peers, timeout_ms=60_000) as client,
    ):
        job = DirectJob(client, tmp_path / "table")
        for part in range(PARTS):
            first = part * total // PARTS
            for at in range(first, first + total // PARTS, BATCH):
                client.append([b"%010d" % number + filler for number in range(at, at + BATCH)])
            if part in (4, 6):  # the leader, and the other time another node, while ranges are proved
                killed = cluster.leader() if part == 4 else next(n for n in cluster.node_ids if n != cluster.leader())
                cluster.kill(killed)
                prove(job, client.bounds().end)
                cluster.restart(killed)
            elif part < PARTS - 1:  # the last part stays in the log alone
                prove(job, client.bounds().end, STEPS[part] if part < len(STEPS) else None)
        soon(lambda: client.bounds().first_index > total // 2, 300, every_s=0.5)
        assert all(node.first_index > 0 for node in client.metadata().nodes)
        given = {"peers": cluster.peers, "archive": "true", "startingOffsets": "earliest", "pollMs": "1"}
        check_each_once(batch_rows(DLedgerBatchReader(DLedgerOptions.for_reading(given))), total)
        limited = {"maxOffsetsPerTrigger": str(total // 7)}
        check_each_once(stream_rows(DLedgerOptions.for_reading(given | limited)), total)
