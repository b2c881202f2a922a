"""Spark's columns are those of the Arrow schemas; a user-given schema selects some of them in any order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, DataType, IntegerType, LongType, MapType, StringType, StructField, StructType

from dledger_core.rocketmq import encode_messages
from spark_connector import ddl_of
from spark_connector.columns import MESSAGE_SCHEMA, chosen_columns, schema_for
from spark_connector.errors import DecodeError, SchemaError
from spark_connector.reading.readers import DLedgerBatchReader
from spark_connector.reading.tables import TABLES
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
SCHEMAS = {
    "every type": EVERY_TYPE,
    "java messages": schema_for("message", "dledger-java"),
    **{f"table {name}": schema for name, schema in TABLES.items()},
}


def test_ddl_of_quotes_names_and_not_null_columns() -> None:
    assert ddl_of(EVERY_TYPE).startswith("`needed` bigint NOT NULL, `odd ``name` tinyint, `small` smallint")


def test_ddl_of_rejects_types_unknown_to_spark() -> None:
    with pytest.raises(SchemaError, match="uint64"):
        ddl_of(pa.schema([("count", pa.uint64())]))


def test_schema_for_returns_named_columns_in_order() -> None:
    names = ("committed", "body", "index")
    schema = schema_for("none", "dledger-java", names)
    assert (schema.names, schema.types) == (list(names), [pa.bool_(), pa.binary(), pa.int64()])


@pytest.mark.spark
def test_ddl_of_means_same_schema_to_spark(dledger: Any) -> None:
    for schema in SCHEMAS.values():
        frame = dledger.createDataFrame([], ddl_of(schema))
        assert frame.toArrow().schema.remove_metadata() == schema


BODIES = [*encode_messages("orders", 3, [b"one", b"two"], tags="t", keys="k").to_pylist(), b"no message"]


def read(store: StoreWriter, columns: tuple[str, ...], **options: Any) -> list[dict[str, Any]]:
    reader = DLedgerBatchReader(options_of(store, **options).model_copy(update={"columns": columns}))
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


@pytest.mark.parametrize(
    "columns",
    [("body",), ("timestamp", "index"), ("index", "group", "body", "term", "position", "timestamp"), ("group",)],
)
def test_entries_have_columns_that_were_named(store: StoreWriter, columns: tuple[str, ...]) -> None:
    store.append_numbers(3)
    everything = read(store, tuple(schema_for("none").names))
    assert read(store, columns) == [{name: row[name] for name in columns} for row in everything]
    assert [list(row) for row in read(store, columns)] == [list(columns)] * 3


@pytest.mark.parametrize(
    "columns",
    [
        ("topic",),
        ("error",),
        ("index",),
        ("error", "index", "tags"),
        ("msg_id", "body", "properties"),
        ("queue_offset", "queue_id"),
        tuple(reversed(MESSAGE_SCHEMA.names)),
    ],
)
@pytest.mark.parametrize("bodies", [BODIES, BODIES[:2], BODIES[2:]], ids=["some", "all", "none"])
def test_messages_have_columns_that_were_named(
    store: StoreWriter, columns: tuple[str, ...], bodies: list[bytes]
) -> None:
    store.append(bodies)
    everything = read(store, tuple(MESSAGE_SCHEMA.names), decode="message")
    found = read(store, columns, decode="message")
    assert found == [{name: row[name] for name in columns} for row in everything]
    assert len(found) == len(bodies)


@pytest.mark.parametrize("columns", [("index",), ("topic", "error"), ("body",)])
def test_other_body_fails_with_any_selected_columns(store: StoreWriter, columns: tuple[str, ...]) -> None:
    store.append(BODIES)
    with pytest.raises(DecodeError, match="DLEDGER_DECODE"):
        read(store, columns, decode="message", onDecodeError="fail")


def test_filters_use_unselected_columns(store: StoreWriter) -> None:
    store.append(BODIES[:2])
    store.append(encode_messages("payments", 0, [b"three"], tags="t").to_pylist())
    assert [row["body"] for row in read(store, ("body",), decode="message", topics="payments")] == [b"three"]


@pytest.mark.parametrize(
    ("fields", "decode"),
    [
        ([("body", StringType())], "none"),
        ([("Body", BinaryType())], "none"),
        ([("index", LongType()), ("topic", StringType())], "none"),
        ([("index", IntegerType())], "message"),
        ([("properties", MapType(StringType(), IntegerType()))], "message"),
        ([("index", LongType()), ("index", LongType())], "none"),
        ([], "none"),
    ],
)
def test_columns_that_source_does_not_have(fields: list[tuple[str, DataType]], decode: str) -> None:
    schema = StructType([StructField(name, kind) for name, kind in fields])
    with pytest.raises(SchemaError, match=r"DLEDGER_SCHEMA"):
        chosen_columns(schema, schema_for(decode))


@pytest.mark.spark
@pytest.mark.integration
def test_batch_stream_and_view_of_some_columns(dledger: Any, cluster: Any, log: Any, tmp_path: Path) -> None:
    first = log.append(BODIES).first_index
    options = {"peers": cluster.peers, "groups": log.group, "decode": "message"}
    columns = "topic string, index bigint, tags string"
    rows = [("orders", first, "t"), ("orders", first + 1, "t"), (None, first + 2, None)]
    batch = dledger.read.format("dledger").options(**options).schema(columns).load()
    assert [tuple(row) for row in batch.orderBy("index").collect()] == rows
    assert batch.columns == ["topic", "index", "tags"]
    stream = dledger.readStream.format("dledger").options(**options, startingOffsets="earliest").schema(columns).load()
    writer = stream.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer.trigger(availableNow=True).start(str(tmp_path / "out")).awaitTermination()
    streamed = dledger.read.parquet(str(tmp_path / "out")).orderBy("index")
    assert [tuple(row) for row in streamed.collect()] == rows
    given = ", ".join(f"{name} '{value}'" for name, value in options.items())
    dledger.sql(f"CREATE OR REPLACE TEMPORARY VIEW some (tags STRING, body BINARY) USING dledger OPTIONS ({given})")
    assert sorted(row["body"] or b"" for row in dledger.sql("SELECT body FROM some").collect()) == [b"", b"one", b"two"]
    dledger.catalog.dropTempView("some")
