"""Spark's calls to a stream reader, in the orders in which Spark makes them; readers and options of a store."""

from __future__ import annotations

import json
from typing import Any

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit

from spark_connector.options import DLedgerOptions
from spark_connector.reading.readers import DLedgerBatchReader, DLedgerStreamReader
from tests.spark_connector.reading_as_executor import indexes
from tests.spark_connector.store_writer import StoreWriter

__all__ = ["ALL", "Engine", "make_batch_reader", "make_reader", "next_of", "options_of"]

QUICK = {"pollMs": "1", "fetchRetryMs": "1"}
ALL = ReadAllAvailable()


def options_of(store: StoreWriter, **options: Any) -> DLedgerOptions:
    texts = {name: str(value) for name, value in options.items()}
    return DLedgerOptions.for_reading({"path": str(store.path), **QUICK, **texts})


def make_reader(store: StoreWriter, **options: Any) -> DLedgerStreamReader:
    return DLedgerStreamReader(options_of(store, **options))


def make_batch_reader(store: StoreWriter, **options: Any) -> DLedgerBatchReader:
    return DLedgerBatchReader(options_of(store, **options))


def next_of(offset: dict[str, Any], group: str = "default") -> int:
    return int(offset["groups"][group]["next"])


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

    def start(self, reader: DLedgerStreamReader, *, crash_before_commit: bool = False) -> None:
        """Plan and runs the next micro-batch, or replays one that was not committed."""
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
