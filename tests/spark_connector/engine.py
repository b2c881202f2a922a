"""Spark's calls to a reader, in the orders in which Spark makes them; readers of a store."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows

from spark_connector.options import DLedgerOptions
from spark_connector.reading.readers import DLedgerBatchReader, DLedgerStreamReader
from tests.spark_connector.store_writer import StoreWriter

QUICK = {"pollMs": "1", "fetchRetryMs": "1"}
ALL = ReadMaxRows((1 << 63) - 1)
"""The limit of a reader without limits."""
ONCE = ReadAllAvailable()
"""The limit that Spark passes with Trigger.Once."""


def options_of(store: StoreWriter, **options: Any) -> DLedgerOptions:
    texts = {name: str(value) for name, value in options.items() if value is not None}
    return DLedgerOptions.for_reading({"path": str(store.path), **QUICK, **texts})


def make_reader(store: StoreWriter, **options: Any) -> DLedgerStreamReader:
    """A stream reader, by default from the first entry on."""
    return DLedgerStreamReader(options_of(store, **{"startingOffsets": "earliest", **options}))


def make_batch_reader(store: StoreWriter, **options: Any) -> DLedgerBatchReader:
    return DLedgerBatchReader(options_of(store, **options))


def next_of(offset: dict[str, Any] | str, group: str = "default") -> int:
    parsed = json.loads(offset) if isinstance(offset, str) else offset
    return int(parsed["groups"][group]["next"])


def pin_batch(reader: DLedgerStreamReader) -> dict[str, Any]:
    """Plan the first micro-batch, which records the start only."""
    return reader.latestOffset(reader.initialOffset(), ALL)


def indexes(reader: Any, partitions: Any) -> list[int]:
    """Read partitions as an executor, on copies that went through pickle; return the column ``index``."""
    executor = pickle.loads(pickle.dumps(reader))
    found: list[int] = []
    for partition in pickle.loads(pickle.dumps(partitions)):
        for batch in executor.read(partition):
            assert isinstance(batch, pa.RecordBatch)
            found += batch.column("index").to_pylist()
    return found


def read_batch(reader: DLedgerBatchReader) -> list[int]:
    return indexes(reader, reader.partitions())


def read_all(log: Any, isolation: str = "read_committed") -> list[bytes]:
    """Return all bodies of a client's group that the isolation shows."""
    found: list[bytes] = []
    at, more = 0, True
    while more:  # acknowledged entries count, also before the nodes' own files contain them
        fetched = log.fetch(at, 1 << 40, max_bytes=4 << 20, consistency="linearizable", isolation=isolation)
        found += fetched.batch.column("body").to_pylist()
        more, at = fetched.next_index > at, fetched.next_index
    return found


class Engine:
    """Makes Spark's calls and keeps Spark's two logs; a new reader is a restart.

    A micro-batch that is replayed must read what it read before.
    """

    def __init__(self, limit: ReadLimit = ALL) -> None:
        self.limit = limit
        self.offsets: list[str] = []
        self.commits = 0
        self.read: list[int] = []
        self._interrupted: list[int] | None = None

    def run(self, reader: DLedgerStreamReader, times: int) -> None:
        for _ in range(times):
            self.start(reader)

    def start(self, reader: DLedgerStreamReader, *, crash_before_commit: bool = False) -> None:
        """Plan and run the next micro-batch, or replay one that was not committed."""
        if self.commits == len(self.offsets):
            begin = json.loads(self.offsets[-1]) if self.offsets else reader.initialOffset()
            end = json.dumps(reader.latestOffset(begin, self.limit))
            reader.reportLatestOffset()
            if self.offsets and end == self.offsets[-1]:
                return
            self.offsets.append(end)
        number = len(self.offsets) - 1
        begin = json.loads(self.offsets[number - 1]) if number else reader.initialOffset()
        rows = indexes(reader, reader.partitions(begin, json.loads(self.offsets[number])))
        assert self._interrupted in (None, rows)
        self._interrupted = rows if crash_before_commit else None
        if not crash_before_commit:
            self.commits += 1
            self.read += rows
