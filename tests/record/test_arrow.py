from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest

from dledger_core.record import (
    READ_SCHEMA,
    RECORD_SCHEMA,
    Columns,
    Records,
    empty_batch,
    encode,
    integers_of,
    repeated,
    time_at,
    to_arrow,
)

PLANNING = """
import sys
from dledger_core.client import measure_behind, record_at
from dledger_core.record import Columns, encode, repeated, to_arrow
import spark_connector.reading.stream_reader
columns = Columns.from_bodies([b"a", b"bc"])
records = encode(columns, first_index=5, term=1, position=0, timestamp_ms=1_700_000_000_000, segment_bytes=4096)
batch = to_arrow(records, magic=True)
row = record_at(batch, 6, "here")
assert (row["body"], row["timestamp"].year) == (b"bc", 2023)
assert measure_behind(5, 7, lambda start, end: (batch, 7), lambda index: 200).records == 2
assert len(repeated("g", 2)) == 2
assert "pandas" not in sys.modules, "an array was made of Python's values, or the other way round"
"""


def test_planning_and_reading_import_no_pandas() -> None:
    done = subprocess.run([sys.executable, "-c", PLANNING], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("schema", [READ_SCHEMA, RECORD_SCHEMA])
def test_an_empty_batch_has_all_columns(schema: pa.Schema) -> None:
    batch = empty_batch(schema)
    batch.validate(full=True)
    assert (batch.num_rows, batch.schema) == (0, schema)


@pytest.mark.parametrize("text", ["", "g", "Gruppe-ä"])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_column_that_says_the_same_in_each_row(text: str, rows: int) -> None:
    column = repeated(text, rows)
    column.validate(full=True)
    assert column.to_pylist() == [text] * rows


def test_integers_and_times_of_a_slice() -> None:
    times = [datetime(2026, 11, 22, 3, 4, 5, 678000, UTC), None, datetime(1969, 12, 31, tzinfo=UTC)]
    column = pa.array(times, pa.timestamp("us", tz="UTC"))
    assert [time_at(column, row) for row in range(3)] == times
    assert [time_at(column[1:], row) for row in range(2)] == times[1:]
    assert integers_of(pa.array([1, 2, 3], pa.int32())[1:]).tolist() == [2, 3]
    assert integers_of(pa.array([], pa.int64())).tolist() == []


def records_at(timestamp_ms: int) -> Records:
    columns = Columns.from_bodies([b"a", b"", b"ccc"])
    return encode(columns, first_index=7, term=2, position=0, timestamp_ms=timestamp_ms, segment_bytes=4096)


def test_an_unknown_append_time_is_null_and_the_columns_are_sound() -> None:
    known, unknown = (to_arrow(records_at(time_ms), magic=True) for time_ms in (1_700_000_000_123, 0))
    for batch in (known, unknown):
        batch.validate(full=True)
        assert batch["index"].to_pylist() == [7, 8, 9]
    assert known["timestamp"].to_pylist() == [datetime(2023, 11, 14, 22, 13, 20, 123000, UTC)] * 3
    assert unknown["timestamp"].to_pylist() == [None] * 3
    kept = to_arrow(records_at(1), np.array([True, False, True]))
    kept.validate(full=True)
    assert kept["body"].to_pylist() == [b"a", b"ccc"]
