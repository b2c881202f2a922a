"""The executor's side fetches ahead: in order, up to a limit, and not after Spark has stopped."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from dledger_core.record import READ_SCHEMA
from spark_connector.errors import RetentionError
from spark_connector.options import DLedgerOptions
from spark_connector.planning import Range
from spark_connector.reading.logs import Chunk
from spark_connector.reading.partitions import RangesPartition, read_partition

END = 20
CHUNKS_MAX = 3


class CountingLog:
    """A log whose entries are a chunk and a batch each; entries below ``first`` are deleted."""

    group = "default"

    def __init__(self, first: int = 0, fails_at: int = END) -> None:
        self.asked: list[int] = []
        self.given = 0
        self.ahead: list[int] = []
        self._first, self._fails_at = first, fails_at

    def chunk(self, part: Range, start: int, replica: int) -> Chunk:
        self.asked.append(start)
        self.ahead.append(len(self.asked) - self.given)
        if start < self._first:
            raise RetentionError.of(part.group, start, self._first, part.end)
        if start >= self._fails_at:
            raise ValueError(f"at {start}")
        row = {"index": start, "term": 1, "position": start, "timestamp": None, "body": bytes(1 << 20)}
        return Chunk(pa.RecordBatch.from_pylist([row], schema=READ_SCHEMA), start + 1)


def reading(log: CountingLog, **options: str) -> Any:
    chosen = DLedgerOptions.for_reading({"peers": "n0-127.0.0.1:1", **options})
    source: Any = log
    return read_partition(RangesPartition((Range("default", 0, END),), 0), chosen, lambda _options, _group: source)


def test_chunks_come_in_order_and_at_most_three_are_in_memory() -> None:
    log = CountingLog()
    for number, batch in enumerate(reading(log)):
        assert batch.column("index").to_pylist() == [number]
        log.given = number + 1
    assert log.given == END
    assert log.asked == list(range(END))
    assert max(log.ahead) <= CHUNKS_MAX


def test_prefetch_stops_with_task() -> None:
    log = CountingLog()
    batches = reading(log)
    next(batches)
    batches.close()
    assert 1 <= len(log.asked) <= CHUNKS_MAX


def test_error_comes_after_earlier_chunks() -> None:
    log = CountingLog(fails_at=5)
    found = []
    with pytest.raises(ValueError, match="at 5"):
        found.extend(batch.column("index")[0].as_py() for batch in reading(log))
    assert log.asked == list(range(6))


def test_gap_is_error_or_is_passed_as_option_says() -> None:
    log = CountingLog(first=7)
    with pytest.raises(RetentionError):
        list(reading(log))
    batches = reading(CountingLog(first=7), failOnDataLoss="false")
    assert [batch.column("index")[0].as_py() for batch in batches] == list(range(7, END))
