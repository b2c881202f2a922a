"""A reader's memory is bounded whatever the backlog: measured on a process that reads as a Python worker does."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from dledger_core.rocketmq import encode_messages
from tests.spark_connector.store_writer import StoreWriter

BOUND_KIB = 300 << 10
WORKER = """
import json, sys
from spark_connector.reading.readers import DLedgerBatchReader
from spark_connector.options import DLedgerOptions
import pyspark.worker

reader = DLedgerBatchReader(DLedgerOptions.for_reading(json.loads(sys.argv[1])))
rows = nbytes = largest = 0
for partition in reader.partitions():
    for batch in reader.read(partition):
        rows, nbytes, largest = rows + batch.num_rows, nbytes + batch.nbytes, max(largest, batch.nbytes)
        del batch
[peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(json.dumps([rows, nbytes, largest, int(peak)]))
"""


def work(store: StoreWriter, **options: str) -> list[int]:
    """Read the store in a process of its own; returns rows, bytes, largest batch, and its peak memory in KiB."""
    given = {"path": str(store.path), "minPartitions": "1", **options}
    command = [sys.executable, "-c", WORKER, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    found: list[int] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_backlog_of_many_small_and_of_large_entries(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, segment_bytes=64 << 20) as store:
        for _ in range(30):
            store.append([bytes(1000)] * 4000)
        for _ in range(30):
            store.append([bytes(2 << 20)] * 2)
        rows, nbytes, largest, peak = work(store)
    assert rows == 120_060
    assert nbytes > 230_000_000
    assert largest <= 8 << 20
    assert peak <= BOUND_KIB


@pytest.mark.slow
def test_messages_whose_bodies_grow_hundredfold(tmp_path: Path) -> None:
    packed = zlib.compress(bytes(range(200)) * 5000)
    assert 50 < 1_000_000 / len(packed) < 500
    with StoreWriter(tmp_path, segment_bytes=64 << 20) as store:
        store.append(encode_messages("t", 0, [packed] * 600, sys_flag=1).to_pylist())
        rows, nbytes, largest, peak = work(store, decode="message")
    assert rows == 600
    assert nbytes > 600_000_000
    assert largest <= 8 << 20
    assert peak <= BOUND_KIB
