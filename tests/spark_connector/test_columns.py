"""Columns and rows: Arrow schemas and their DDL, selected columns, and with ``decode = message`` filters and bodies."""

from __future__ import annotations

import subprocess
import sys
import zlib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, DataType, IntegerType, LongType, MapType, StringType, StructField, StructType

from dledger_core.rocketmq import encode_messages
from spark_connector import ddl_of
from spark_connector.columns import chosen_columns, schema_for
from spark_connector.errors import DecodeError, SchemaError
from spark_connector.messages import MESSAGE_SCHEMA, decoded
from spark_connector.reading.readers import DLedgerBatchReader
from tests.rocketmq.test_inner_batches import batch
from tests.spark_connector.engine import options_of
from tests.spark_connector.store_writer import StoreWriter

EVERY_TYPE = pa.schema(
    [
        pa.field("needed", pa.int64(), nullable=False),
        ("odd `name", pa.int8()),
        ("small", pa.int16()),
        ("medium", pa.int32()),
        ("flag", pa.bool_()),
        ("single", pa.float32()),
        ("double", pa.float64()),
        ("day", pa.date32()),
        ("text", pa.string()),
        ("bytes", pa.binary()),
        ("at", pa.timestamp("us", "UTC")),
        ("local", pa.timestamp("us")),
        ("map", pa.map_(pa.string(), pa.string())),
        ("list", pa.list_(pa.struct([("group", pa.string()), ("end", pa.int64())]))),
    ]
)
COMPRESSED, LZ4, ZSTD = 0x1, 0x100, 0x200


def test_ddl_quotes_names_and_marks_not_null() -> None:
    assert ddl_of(EVERY_TYPE).startswith("`needed` bigint NOT NULL, `odd ``name` tinyint, `small` smallint")
    with pytest.raises(SchemaError, match="uint64"):
        ddl_of(pa.schema([("count", pa.uint64())]))


@pytest.mark.parametrize(
    ("fields", "decode"),
    [
        ([("body", StringType())], "none"),
        ([("Body", BinaryType()), ("body", BinaryType())], "none"),
        ([("index", LongType()), ("topic", StringType())], "none"),
        ([("index", IntegerType())], "message"),
        ([("properties", MapType(StringType(), IntegerType()))], "message"),
        ([("index", LongType()), ("index", LongType())], "none"),
        ([], "none"),
    ],
)
def test_columns_that_source_does_not_have_are_rejected(fields: list[tuple[str, DataType]], decode: str) -> None:
    schema = StructType([StructField(name, kind) for name, kind in fields])
    with pytest.raises(SchemaError):
        chosen_columns(schema, schema_for(decode))


def read(store: StoreWriter, columns: Sequence[str] | None = None, **options: Any) -> list[dict[str, Any]]:
    chosen = options_of(store, **options).model_copy(update={"columns": columns and tuple(columns)})
    reader = DLedgerBatchReader(chosen)
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def read_messages(store: StoreWriter, columns: Sequence[str] | None = None, **options: Any) -> list[dict[str, Any]]:
    return read(store, columns, decode="message", **options)


@pytest.mark.parametrize(
    "columns",
    [["body"], ["timestamp", "index"], ["index", "group", "body", "term", "position", "timestamp"], ["group"]],
    ids=",".join,
)
def test_entries_have_columns_that_were_named(store: StoreWriter, columns: list[str]) -> None:
    store.append_numbers(3)
    found = read(store, columns)
    assert found == [{name: row[name] for name in columns} for row in read(store)]
    assert [list(row) for row in found] == [columns] * 3


MESSAGES = [*encode_messages("orders", 3, [b"one", b"two"], tags="t", keys="k").to_pylist(), b"no message"]


@pytest.mark.parametrize("bodies", [MESSAGES, MESSAGES[:2], MESSAGES[2:]], ids=["some", "all", "none"])
@pytest.mark.parametrize(
    "columns",
    [
        ["topic"],
        ["error"],
        ["index"],
        ["error", "index", "tags"],
        ["msg_id", "body", "properties"],
        ["queue_offset", "queue_id"],
        MESSAGE_SCHEMA.names[::-1],
    ],
    ids=",".join,
)
def test_messages_have_columns_that_were_named(store: StoreWriter, columns: list[str], bodies: list[bytes]) -> None:
    store.append(bodies)
    found = read_messages(store, columns)
    assert found == [{name: row[name] for name in columns} for row in read_messages(store)]
    assert len(found) == len(bodies)


@pytest.mark.parametrize("columns", [None, ["index"], ["topic", "error"], ["body"]])
def test_other_body_fails_query_on_request(store: StoreWriter, columns: list[str] | None) -> None:
    store.append(MESSAGES)
    assert len(read_messages(store, columns, onDecodeError="column")) == 3
    with pytest.raises(DecodeError) as caught:
        read_messages(store, columns, onDecodeError="fail")
    assert caught.value.values["index"] == 2


def test_entry_with_error_has_its_stored_body_on_request(store: StoreWriter) -> None:
    damaged = bytearray(batch(3, "BABA"))
    damaged[100] ^= 1
    store.append([batch(0, "AAB"), bytes(damaged), *MESSAGES])
    found = read_messages(store, ["index", "stored_body"])
    assert [row["index"] for row in found] == [0, 0, 0, 1, 2, 3, 4]
    assert [row["stored_body"] for row in found] == [None, None, None, bytes(damaged), None, None, MESSAGES[2]]
    assert "stored_body" not in read_messages(store)[0]
    chosen = StructType([StructField("stored_body", BinaryType())])
    assert chosen_columns(chosen, schema_for("message")) == ("stored_body",)
    with pytest.raises(SchemaError):
        chosen_columns(chosen, schema_for("none"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"topics": "a"}, [0, 2, 4, 6]),
        ({"topics": "a, b"}, range(8)),
        ({"topics": '["b"]', "tags": "y"}, [1, 5]),
        ({"tags": "x || y"}, [0, 1, 4, 5]),
        ({"tags": "x,z"}, [0, 3, 4, 7]),
        ({"tags": '["x","z"]', "topics": "b"}, [3, 7]),
        ({"tags": "*"}, range(8)),
        ({"topics": "A"}, []),
        ({"tags": "none such"}, []),
    ],
)
def test_topics_and_tags_filter_messages(store: StoreWriter, options: dict[str, str], expected: Any) -> None:
    bodies = [b"body-%d" % number for number in range(8)]
    store.append(encode_messages(["a", "b"] * 4, 0, bodies, tags=["x", "y", None, "z"] * 2).to_pylist())
    store.append([b"other"])
    found = read_messages(store, **options)
    assert [row["index"] for row in found] == [*expected, 8]  # a body that is not a message stays
    assert [row["body"] for row in found] == [row["body"] for row in read_messages(store, ["body"], **options)]
    assert [row["body"] for row in found[:-1]] == [bodies[index] for index in expected]
    assert found[-1]["error"]


def test_filtered_message_is_not_decompressed_and_damaged_one_reported(store: StoreWriter) -> None:
    good = zlib.compress(b"wanted" * 100)
    store.append(encode_messages(["a", "b", "a"], 3, [good, b"not zlib", good], sys_flag=COMPRESSED).to_pylist())
    assert [row["body"] for row in read_messages(store, topics="a", onDecodeError="fail")] == [b"wanted" * 100] * 2
    [row] = read_messages(store, topics="b")
    assert (row["topic"], row["queue_id"], row["body"]) == ("b", 3, None)
    assert "zlib" in row["error"]
    with pytest.raises(DecodeError, match="entry 1 "):
        read_messages(store, onDecodeError="fail")


def compressed(kind: str, body: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, kind) as stream:
        stream.write(body)
    return sink.getvalue().to_pybytes()


def test_columns_of_messages_with_every_compression(store: StoreWriter) -> None:
    body = b"the same text " * 1000
    stored = [zlib.compress(body), compressed("lz4", body), compressed("zstd", body), body]
    flags = [COMPRESSED, COMPRESSED | LZ4, COMPRESSED | ZSTD, 0]
    hosts = {"born_host": "10.0.0.1:5", "store_host": "10.0.0.2:10911"}
    numbers = {"physical_offset": 4660, "queue_offset": 9, "sys_flag": flags}
    messages = encode_messages("t", 0, stored, keys="k1 k2", properties={"p": "v"}, **hosts, **numbers)
    store.append(messages.to_pylist())
    rows = read_messages(store)
    assert [(row["body"], row["error"]) for row in rows] == [(body, None)] * 4
    for row in rows:
        assert dict(row["properties"]) == {"KEYS": "k1 k2", "p": "v"}
        assert (row["born_host"], row["store_host"]) == ("10.0.0.1:5", "10.0.0.2:10911")
        assert row["msg_id"] == "0A00000200002A9F0000000000001234"
        assert (row["keys"], row["queue_offset"]) == ("k1 k2", None)


def test_compressed_bodies_are_decompressed_in_chunks() -> None:
    body = bytes(300_000)
    messages = encode_messages("t", 0, [zlib.compress(body)] * 40, sys_flag=COMPRESSED)
    batch = pa.RecordBatch.from_pydict({"index": list(range(40)), "body": messages.cast(pa.binary())})
    indexes, before = [], pa.total_allocated_bytes()
    for columns in decoded(batch, ["body"], fail=True, group="g", opened_bytes_max=1 << 20):
        assert pa.total_allocated_bytes() - before < 8 << 20, "not all 12 MB at once"
        assert set(columns["body"].to_pylist()) == {body}
        indexes += columns["index"].to_pylist()
        del columns
    assert indexes == list(range(40))


def test_process_that_reads_from_nodes_does_not_import_rocketmq() -> None:
    """Each Python process of Spark imports the connector again, at every start of a query."""
    code = "import sys, spark_connector.source; print([name for name in sys.modules if '.rocketmq' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
