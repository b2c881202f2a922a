"""Inner batches of RocketMQ 5: one stored record, and as many rows as consumers get messages."""

from __future__ import annotations

import json
import random
import struct
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dledger_core import open_store
from dledger_core.rocketmq import (
    decode_chunks,
    decode_messages,
    encode_messages,
    expanded_messages,
    expanded_queue_columns,
    java_hash,
    queue_statistics,
)
from jobs._rebuild.units import EntryRules, ranges_and_units
from spark_connector.columns import schema_for
from spark_connector.options import DLedgerOptions
from spark_connector.planning import Range
from tests.cli import command
from tests.jobs.broker_store import write_broker_store, write_commitlog

UNWRAPPED = 0x80 | 0x40


def inner(number: int, tag: str) -> bytes:
    """A message in a batch: sizes, no magic, no CRC, a flag, body and properties."""
    body, properties = b"order %d" % number, f"KEYS\x01k{number}\x02TAGS\x01{tag}\x02UNIQ_KEY\x01U{number}\x02".encode()
    content = struct.pack(">iiii", 0, 0, 100 + number, len(body)) + body
    content += struct.pack(">h", len(properties)) + properties
    return struct.pack(">i", len(content) + 4) + content


def batch(base: int, tags: str, *, body: bytes | None = None, **changes: object) -> bytes:
    made = b"".join(inner(base + at, f"Tag{tag}") for at, tag in enumerate(tags)) if body is None else body
    given = {"queue_offset": base, "sys_flag": UNWRAPPED, "store_timestamp": 1_760_000_000_000 + base}
    given |= {"properties": {"INNER_NUM": str(len(tags)), "INNER_BASE": str(base), "UNIQ_KEY": f"U{base}"}}
    return encode_messages("Batch", 0, [made], **(given | changes))[0].as_py()


RECORDS = [batch(0, "AAB"), batch(3, "BABA"), encode_messages("Plain", 1, [b"x"], "TagA", "kx")[0].as_py()]
INDEXES = [0, 0, 0, 1, 1, 1, 1, 2]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write_broker_store(tmp_path / "dledger-n0", RECORDS, committed=2)
    return tmp_path / "dledger-n0"


def test_messages_of_inner_batches_are_rows(store: Path) -> None:
    with open_store(store) as opened:
        rows = opened.messages().read_all().to_pylist()
        assert opened.verify().findings == ()
    assert [row["index"] for row in rows] == INDEXES
    assert [row["position"] for row in rows[:4]] == [0, 0, 0, rows[3]["position"]]
    assert [row["batch_index"] for row in rows] == [0, 1, 2, 0, 1, 2, 3, None]
    assert [row["queue_offset"] for row in rows] == [*range(7), 0]
    assert [row["body"] for row in rows] == [*(b"order %d" % number for number in range(7)), b"x"]
    assert [row["keys"] for row in rows] == [*(f"k{number}" for number in range(7)), "kx"]
    assert [row["tags"][-1] for row in rows] == list("AABBABAA")
    assert [row["flag"] for row in rows] == [*range(100, 107), 0]
    assert dict(rows[4]["properties"]) == {"KEYS": "k4", "TAGS": "TagA", "UNIQ_KEY": "U4"}
    assert [row["tags_code"] for row in rows] == java_hash(pa.array([row["tags"] for row in rows])).tolist()
    assert len({(row["msg_id"], row["store_timestamp"], row["sys_flag"]) for row in rows[3:7]}) == 1
    assert {row["error"] for row in rows} == {None}


def test_undecoded_entries_are_one_row_each(store: Path) -> None:
    assert decode_messages(pa.array(RECORDS))["batch_index"].to_pylist() == [None, None, None]
    assert [row["index"] for row in command.rows_of("dump", store)] == [0, 1, 2]
    with open_store(store) as opened:
        assert opened.read(0, 3).num_rows == 3


def test_dump_and_export_expand_and_filter_messages(store: Path, tmp_path: Path) -> None:
    decoded = ("--decode", "message")
    assert [row["index"] for row in command.rows_of("dump", store, *decoded)] == INDEXES
    for option, value, expected in (
        ("--tag", "TagB", [2, 3, 5]),
        ("--key", "k4", [4]),
        ("--grep", "order [16]", [1, 6]),
    ):
        rows = command.rows_of("dump", store, *decoded, option, value)
        assert [row["queue_offset"] for row in rows] == expected
        found = json.loads(command.run("export", store, tmp_path / value, option, value, "--format", "json").stdout)
        table = pa.concat_tables(pq.read_table(path) for path in (tmp_path / value).glob("*.parquet"))
        assert table["queue_offset"].to_pylist() == expected
        assert found["rows"] == len(expected)
    summary = json.loads(command.run("export", store, tmp_path / "all", "--format", "json").stdout)
    assert summary["rows"] == len(INDEXES)
    (path,) = (tmp_path / "all").glob("*.parquet")
    assert pq.read_table(path)["index"].to_pylist() == INDEXES


def test_classic_commitlog_expands_inner_batches(tmp_path: Path) -> None:
    write_commitlog(tmp_path / "commitlog", RECORDS)
    rows = command.rows_of("dump", tmp_path / "commitlog", "--decode", "message")
    assert [row["batch_index"] for row in rows] == [0, 1, 2, 0, 1, 2, 3, None]
    look = json.loads(command.run("look", tmp_path / "commitlog", "--format", "json").stdout)
    assert "Batch" in json.dumps(look)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, list(range(8))), ({"tags": "TagB"}, [2, 3, 5]), ({"topics": "Plain"}, [7]), ({"topics": "Batch"}, range(7))],
)
def test_spark_rows_are_expanded_and_filtered(options: dict[str, str], expected: list[int]) -> None:
    from spark_connector.columns import rows_of

    entries = pa.table({"index": [0, 1, 2], "term": [0, 0, 0], "position": [0, 500, 900]}).to_batches()[0]
    entries = entries.append_column("timestamp", pa.nulls(3, pa.timestamp("us", "UTC")))
    entries = entries.append_column("body", pa.array(RECORDS))
    given = DLedgerOptions.for_reading({"path": "/", "decode": "message", **options})
    part = Range("g", 0, 3)
    schema = schema_for("message")
    rows = [row for each in rows_of(entries, part, given, schema) for row in each.to_pylist()]
    keys = [*(f"k{number}" for number in range(7)), "kx"]
    assert [row["keys"] for row in rows] == [keys[at] for at in expected]
    assert [row["index"] for row in rows] == [INDEXES[at] for at in expected]


def test_rebuild_has_a_unit_for_each_message() -> None:
    entries = pa.table({"group": ["g"] * 3, "index": [0, 1, 2], "position": [0, 500, 1000]}).to_batches()[0]
    entries = entries.append_column("body", pa.array(RECORDS))
    ranges, units = ranges_and_units(entries, EntryRules())
    found = [(row["topic"], row["queue_offset"], row["position"], row["tags_code"]) for row in units.to_pylist()]
    codes = java_hash(pa.array([f"Tag{tag}" for tag in "AABBABA"])).tolist()
    assert found[:7] == [("Batch", at, 48 if at < 3 else 548, code) for at, code in enumerate(codes)]
    assert sum(row["units"] for row in ranges.to_pylist()) == 8


def test_statistics_count_messages_and_records_once() -> None:
    found = queue_statistics([pa.record_batch({"index": [0, 1, 2], "body": pa.array(RECORDS)})])
    rows = {row["topic"]: row for row in found.queues.to_pylist()}
    assert (rows["Batch"]["messages"], rows["Batch"]["bytes"]) == (7, len(RECORDS[0]) + len(RECORDS[1]))


SHORT = struct.pack(">iiiiih", 22, 0, 0, 0, 0, 0)
GOOD = inner(0, "TagA")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"plain text",
        GOOD[:-1],
        GOOD + b"\0",
        GOOD + bytes(22),
        struct.pack(">i", -1) + GOOD[4:],
        struct.pack(">i", len(GOOD) + 1) + GOOD[4:],
        GOOD[:16] + struct.pack(">i", 1 << 30) + GOOD[20:],
        GOOD[:16] + struct.pack(">i", -5) + GOOD[20:],
        GOOD[:27] + struct.pack(">h", -1) + GOOD[29:],
        SHORT * 40_000,
    ],
    ids=lambda body: f"{len(body)}-{body[:20].hex()}",
)
def test_malformed_inner_batch_is_one_row_with_an_error(body: bytes) -> None:
    records = pa.array([RECORDS[0], batch(9, "", body=body), RECORDS[2]])
    for found, origin in (expanded_messages(records), expanded_queue_columns(records)):
        assert origin.tolist() == [0, 0, 0, 1, 2]
        assert [row["error"] is not None for row in found.to_pylist()] == [False] * 3 + [True, False]
    assert expanded_messages(records)[0].to_pylist()[3]["body"] == body


def test_batches_of_many_sizes_are_unwrapped_in_order() -> None:
    random.seed(3)
    counts = [random.choice([1, 2, 3, 50, 200]) for _ in range(60)]
    records, base = [], 0
    for count in counts:
        records.append(batch(base, "A" * count))
        base += count
    found, origin = expanded_messages(pa.array(records))
    assert found["queue_offset"].to_pylist() == list(range(base))
    assert found["keys"].to_pylist() == [f"k{number}" for number in range(base)]
    assert origin.tolist() == np.repeat(np.arange(len(counts)), counts).tolist()


def test_damaged_batch_stays_one_row() -> None:
    record = bytearray(RECORDS[0])
    record[100] ^= 1
    found, origin = expanded_messages(pa.array([bytes(record)]))
    assert (found.num_rows, found["body"][0].as_py(), found["error"].null_count) == (1, None, 0)
    assert origin is None or origin.tolist() == [0]


def test_random_bodies_never_fail() -> None:
    random.seed(5)
    for _ in range(300):
        body = bytearray(b"".join(inner(at, "T") for at in range(random.randint(1, 6))))
        for _ in range(random.randint(0, 3)):
            body[random.randrange(len(body))] = random.choice([0, 1, 0x7F, 0x80, 0xFF])
        found, origin = expanded_messages(pa.array([RECORDS[2], batch(0, "", body=bytes(body))]))
        found.validate(full=True)
        assert found.num_rows == len(origin) >= 2


def test_forged_batches_are_decoded_in_bounded_chunks() -> None:
    forged = batch(0, "", body=SHORT * 32_767)
    wide = encode_messages("t" * 30_000, 0, [SHORT * 32_767], sys_flag=UNWRAPPED)[0].as_py()
    began = time.process_time()
    entries = pa.record_batch({"body": pa.array([forged] * 20 + [wide])})
    chunks = [found for _, found in decode_chunks(entries, ["topic", "keys", "error"], opened_bytes_max=16 << 20)]
    assert max(found.num_rows for found in chunks) < 66_000
    assert sum(found.num_rows for found in chunks) == 20 * 32_767 + 1
    assert chunks[-1]["error"][-1].is_valid
    assert time.process_time() - began < 20
