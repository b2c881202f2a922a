"""Reads planned partitions as an executor does: on copies that went through pickle."""

from __future__ import annotations

import pickle
from typing import Any

import pyarrow as pa


def indexes(reader: Any, partitions: list[Any]) -> list[int]:
    """Return the column ``index`` of all rows, in the order of the partitions."""
    executor = pickle.loads(pickle.dumps(reader))
    found: list[int] = []
    for partition in pickle.loads(pickle.dumps(partitions)):
        for batch in executor.read(partition):
            assert isinstance(batch, pa.RecordBatch)
            found += batch.column("index").to_pylist()
    return found
