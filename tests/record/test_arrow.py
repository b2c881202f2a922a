from __future__ import annotations

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
    to_arrow,
)


@pytest.mark.parametrize("schema", [READ_SCHEMA, RECORD_SCHEMA])
def test_empty_batch_has_all_columns(schema: pa.Schema) -> None:
    batch = empty_batch(schema)
    batch.validate(full=True)
    assert (batch.num_rows, batch.schema) == (0, schema)


def records_at(timestamp_ms: int) -> Records:
    columns = Columns.from_bodies([b"a", b"", b"ccc"])
    return encode(columns, first_index=7, term=2, position=0, timestamp_ms=timestamp_ms, segment_bytes=4096)


def test_unknown_append_time_is_null_and_columns_are_valid() -> None:
    known, unknown = (to_arrow(records_at(time_ms), magic=True) for time_ms in (1_700_000_000_123, 0))
    for batch in (known, unknown):
        batch.validate(full=True)
        assert batch["index"].to_pylist() == [7, 8, 9]
    assert known["timestamp"].to_pylist() == [datetime(2023, 11, 14, 22, 13, 20, 123000, UTC)] * 3
    assert unknown["timestamp"].to_pylist() == [None] * 3
    kept = to_arrow(records_at(1), np.array([True, False, True]))
    kept.validate(full=True)
    assert kept["body"].to_pylist() == [b"a", b"ccc"]
