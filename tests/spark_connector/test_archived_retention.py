"""A log of which retention keeps a tenth, proved while it is written: all of it is read, each entry once, in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from dledger_core import Client, LocalCluster, Producer
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


def batch_rows(reader: DLedgerBatchReader, while_read: AbstractContextManager[None]) -> Iterator[pa.RecordBatch]:
    """The rows of each task; every task dies once within its first rows, and a node after the rows of the first one."""
    for number, one in enumerate(reader.partitions()):
        next(reader.read(one), None)
        with while_read if number == 1 else nullcontext():
            yield from reader.read(one)
    assert number > 0


def stream_rows(options: DLedgerOptions, while_read: AbstractContextManager[None]) -> Iterator[pa.RecordBatch]:
    """Micro-batches of a query whose driver dies within each of them, and reads it again; a node dies in the third."""
    offset, number = DLedgerStreamReader(options).initialOffset(), 0
    while True:
        reader = DLedgerStreamReader(options)
        after = reader.latestOffset(offset, reader.getDefaultReadLimit())
        if after == offset:
            assert number > 2
            return
        for one in reader.partitions(offset, after)[:1]:
            next(reader.read(one), None)
        replayed = DLedgerStreamReader(options)
        with while_read if number == 2 else nullcontext():
            for one in replayed.partitions(offset, after):
                yield from replayed.read(one)
        offset, number = after, number + 1


@contextmanager
def killed(cluster: LocalCluster, role: str) -> Iterator[None]:
    """Kill the leader or another node, from another thread so that requests are in flight, and start it again."""
    leader = cluster.leader()
    node = leader if role == "leader" else next(each for each in cluster.node_ids if each != leader)
    thread = threading.Thread(target=cluster.kill, args=[node])
    thread.start()
    try:
        yield
    finally:
        thread.join()
        cluster.restart(node)


def append(producer: Producer, numbers: range) -> None:
    filler = b"x" * (BODY_BYTES - 10)
    for at in range(numbers.start, numbers.stop, BATCH):
        producer.append([b"%010d" % number + filler for number in range(at, at + BATCH)])


def await_trim(client: Client, stored: int) -> None:
    soon(lambda: client.bounds().first_index > stored, 300)


FAULTS = {
    3: ("prove", "leader"),
    4: ("prove", "node"),
    5: ("append", "leader"),
    6: ("append", "node"),
    7: ("trim", "leader"),
    8: ("trim", "node"),
}
"""The step of a part in which a node is killed; in the parts before, the job dies at each of its STEPS."""


@pytest.mark.integration
@pytest.mark.parametrize("megabytes", [200, pytest.param(10_240, marks=pytest.mark.soak)])
def test_log_that_retention_shortens_is_read_from_its_first_entry(megabytes: int, tmp_path: Path) -> None:
    keep = (megabytes << 20) // 10
    total = (megabytes << 20) // BODY_BYTES // (PARTS * BATCH) * PARTS * BATCH
    with (
        LocalCluster(3, data_segment_bytes=keep // 16, retain_bytes=keep, **SLOW_ELECTIONS) as cluster,
        Client(cluster.peers, timeout_ms=60_000) as client,
    ):
        job, producer = DirectJob(client, tmp_path / "table"), Producer(client, "writer")

        def while_killed(part: int, step: str) -> AbstractContextManager[None]:
            at, role = FAULTS.get(part, ("", ""))
            return killed(cluster, role) if at == step else nullcontext()

        for part in range(PARTS):
            first, end = part * total // PARTS, (part + 1) * total // PARTS
            middle = first + (end - first) // BATCH // 2 * BATCH
            append(producer, range(first, middle))
            with while_killed(part, "append"):
                append(producer, range(middle, end))
            if part == PARTS - 1:  # it stays in the log alone
                break
            stored = client.bounds().first_index
            with while_killed(part, "prove"):
                prove(job, client.bounds().end, STEPS[part] if part < len(STEPS) else None)
            if FAULTS.get(part, ("", ""))[0] == "trim":
                await_trim(client, stored)  # of the leader; the nodes delete at most ten segments in one round
                with while_killed(part, "trim"):
                    assert client.bounds().first_index > stored
        soon(lambda: client.bounds().first_index > total // 2, 300, every_s=0.5)
        assert soon(lambda: all(node.first_index > 0 for node in client.metadata().nodes))
        given = {"peers": cluster.peers, "archive": "true", "startingOffsets": "earliest", "pollMs": "1"}
        reader = DLedgerBatchReader(DLedgerOptions.for_reading(given | {"minPartitions": "5"}))
        check_each_once(batch_rows(reader, killed(cluster, "leader")), total)
        limited = DLedgerOptions.for_reading(given | {"maxOffsetsPerTrigger": str(total // 7)})
        check_each_once(stream_rows(limited, killed(cluster, "node")), total)
