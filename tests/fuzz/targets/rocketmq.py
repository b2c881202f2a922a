"""Message records of RocketMQ, whole batches at a time, against a reading of the same bytes one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from dledger_core.rocketmq import consume_queue_columns, decode_messages, expanded_messages
from dledger_core.rocketmq.message.decode import BODY_BYTES_MAX
from dledger_core.rocketmq.message.properties import parse_properties
from dledger_core.rocketmq.store.commit_log import scan_records
from tests.fuzz.finding import expect, memory_below

ROWS_MAX = 4


def rows_in(data: bytes) -> list[bytes | None]:
    """Input: rows behind their u16 lengths; the length 0xFFFF is a null."""
    rows: list[bytes | None] = []
    at = 0
    while at + 2 <= len(data) and len(rows) < ROWS_MAX:
        size = int.from_bytes(data[at : at + 2], "big")
        at += 2
        if size == 0xFFFF:
            rows.append(None)
            continue
        rows.append(data[at : at + size])
        at += size
    return rows


def run_rocketmq(data: bytes) -> None:
    """Message records; input as ``rows_in`` says."""
    rows = rows_in(data)
    with memory_below((8 << 20) + 200 * len(data) + 2 * ROWS_MAX * BODY_BYTES_MAX):
        batch = decode_messages(pa.array(rows, pa.binary()))
    batch.validate(full=True)
    expect(batch.num_rows == len(rows), "rows were lost", rows=batch.num_rows)
    expanded, origin = expanded_messages(pa.array(rows, pa.binary()))
    expanded.validate(full=True)
    of = list(range(len(rows))) if origin is None else origin.tolist()
    expect(sorted(set(of)) == list(range(len(rows))) and of == sorted(of), "a row of an entry is lost", rows=of)
    queue = consume_queue_columns(pa.array(rows, pa.binary()))
    queue.validate(full=True)
    for at, row in enumerate(rows):
        alone = decode_messages(pa.array([row], pa.binary()))
        expect(alone.slice(0, 1).equals(batch.slice(at, 1)), "a message changes with its neighbours", row=row)
        one = batch.slice(at, 1).to_pylist()[0] if _is_datable(batch.slice(at, 1)) else None
        if one is None:
            continue
        for name in ("topic", "queue_offset", "physical_offset", "tags_code"):
            expect(queue.column(name)[at].as_py() == one[name], "the two decoders differ", name=name)
        if one["topic"] is not None:
            expect(row is not None and one["store_size"] == len(row), "a size that is not the record's")
            _check_properties(one, row)
    for row in rows:
        spans = list(scan_records(row or b""))
        expect(sum(size for _, size in spans) <= len(row or b""), "records overlap", spans=spans)


def _is_datable(row: pa.RecordBatch) -> bool:
    """Whether Python's own calendar knows the times in a row."""
    try:
        row.to_pylist()
    except (OverflowError, ValueError):
        return False
    return True


def _check_properties(one: dict[str, Any], row: bytes) -> None:
    size = sum(len(name.encode()) + len(value.encode()) for name, value in one["properties"])
    expect(size <= 3 * len(row), "more properties than bytes", size=size)
    pairs = dict(one["properties"])
    for column, name in (("tags", "TAGS"), ("keys", "KEYS")):
        expect(one[column] == pairs.get(name), "a column differs from its property", name=name, pairs=pairs)


def _slow_pairs(text: bytes) -> dict[str, str]:
    """As RocketMQ's ``string2messageProperties`` does it."""
    pairs: dict[str, str] = {}
    for piece in text.split(b"\x02"):
        name, mark, value = piece.partition(b"\x01")
        if mark and name and value:
            # two names of other bytes may be one text: both are then U+FFFD
            pairs[name.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
    return pairs


def run_properties(data: bytes) -> None:
    """Properties of messages; input as ``rows_in`` says."""
    rows = [row or b"" for row in rows_in(data)]
    blob = np.frombuffer(b"\x02".join(rows) + b"\x02", np.uint8)
    lengths = np.array([len(row) for row in rows], np.int64)
    starts = np.cumsum(lengths + 1) - lengths - 1
    with memory_below((4 << 20) + 400 * len(data)):
        pairs = parse_properties(blob, starts, lengths)
        found, tags = pairs.to_map(), pairs.values_of("TAGS")
    found.validate(full=True)
    tags.validate(full=True)
    for at, row in enumerate(rows):
        slow = _slow_pairs(row)
        expect(dict(found[at].as_py()) == slow, "other properties", row=row, found=found[at].as_py(), slow=slow)
        expect(tags[at].as_py() == slow.get("TAGS"), "another tag", row=row)
