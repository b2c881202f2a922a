"""Rows of Spark become bodies per group, without a JVM; an invalid row is named."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from dledger_core.config import RECORD_BYTES_MAX
from dledger_core.rocketmq import decode_messages
from spark_connector.errors import SchemaError
from spark_connector.options import DLedgerOptions
from spark_connector.writing.rows import SinkShape, rows_by_group, sink_shape

PEERS = {"peers": "n0-127.0.0.1:1"}
PLAIN, BY_COLUMN = SinkShape("orders", message=False), SinkShape(None, message=False)
MESSAGE = SinkShape("orders", message=True)


def schema(**columns: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


def shape_of(columns: StructType, **options: str) -> SinkShape:
    return sink_shape(columns, DLedgerOptions.for_writing({**PEERS, **options}))


def rows(shape: SinkShape, first_row: int = 0, partition: int = 3, **columns: Any) -> dict[str, tuple[list, list]]:
    batch = pa.record_batch(columns)
    found = rows_by_group(batch, shape, first_row, partition)
    return {each.group: (each.bodies.to_pylist(), each.numbers.tolist()) for each in found}


@pytest.mark.parametrize(
    ("columns", "options", "shape"),
    [
        (schema(body=BinaryType()), {}, SinkShape("default", message=False)),
        (schema(body=StringType()), {"group": "a"}, SinkShape("a", message=False)),
        (schema(body=StringType(), group=StringType()), {}, SinkShape(None, message=False)),
        (schema(body=StringType(), group=StringType()), {"group": "a"}, SinkShape("a", message=False)),
        (schema(topic=StringType(), body=BinaryType()), {}, SinkShape("default", message=True)),
        (
            schema(
                group=StringType(),
                topic=StringType(),
                queue_id=LongType(),
                tags=StringType(),
                keys=StringType(),
                properties=MapType(StringType(), StringType()),
                body=StringType(),
            ),
            {},
            SinkShape(None, message=True),
        ),
    ],
)
def test_columns_select_shape(columns: StructType, options: dict[str, str], shape: SinkShape) -> None:
    assert shape_of(columns, **options) == shape


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        (schema(), "'body'"),
        (schema(topic=StringType()), "'body'"),
        (schema(tags=StringType(), body=StringType()), "'topic'"),
        (schema(body=StringType(), value=StringType()), "'value'"),
        (schema(body=IntegerType()), "'body'"),
        (schema(body=ArrayType(StringType())), "'body'"),
        (schema(body=StringType(), group=LongType()), "'group'"),
        (schema(body=StringType(), topic=StringType(), queue_id=StringType()), "'queue_id'"),
        (
            schema(body=StringType(), topic=StringType(), properties=MapType(StringType(), LongType())),
            "'properties'",
        ),
        (StructType([StructField("body", StringType())] * 2), "'body'"),
    ],
)
def test_wrong_columns_are_named(columns: StructType, name: str) -> None:
    with pytest.raises(SchemaError) as caught:
        shape_of(columns)
    assert str(caught.value).startswith("[DLEDGER_SCHEMA] ")
    assert name in caught.value.what


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.string(), pa.large_string()])
def test_body_of_any_type_and_slice_is_written(kind: pa.DataType) -> None:
    body = pa.array(["left out", "a", "", "größer", "left out"], pa.string()).cast(kind).slice(1, 3)
    assert rows(PLAIN, first_row=10, body=body) == {"orders": ([b"a", b"", "größer".encode()], [10, 11, 12])}


def test_rows_keep_order_and_numbers_in_each_group() -> None:
    found = rows(BY_COLUMN, first_row=100, body=pa.array(["1", "2", "3", "4"]), group=pa.array(["b", "a", "b", "b"]))
    assert found == {"b": ([b"1", b"3", b"4"], [100, 102, 103]), "a": ([b"2"], [101])}
    assert rows(SinkShape("x", message=False), body=pa.array(["1"]), group=pa.array([None], pa.string())) == {
        "x": ([b"1"], [0])
    }


def test_message_columns_become_messages() -> None:
    found = rows(
        MESSAGE,
        topic=pa.array(["t", "t"]),
        queue_id=pa.array([0, 7], pa.int64()),
        tags=pa.array(["A", None]),
        keys=pa.array([None, "k1 k2"]),
        properties=pa.array([[("p", "v")], None], pa.map_(pa.string(), pa.string())),
        body=pa.array(["x", "y"]),
    )
    messages = decode_messages(pa.array(found["orders"][0], pa.binary())).to_pylist()
    assert [(m["topic"], m["queue_id"], m["tags"], m["keys"], m["body"]) for m in messages] == [
        ("t", 0, "A", None, b"x"),
        ("t", 7, None, "k1 k2", b"y"),
    ]
    assert dict(messages[0]["properties"])["p"] == "v"


LONG = RECORD_BYTES_MAX - 48
MESSAGES = {"topic": pa.array(["t"] * 3), "body": pa.array(["a", "b", "c"])}
WRONG: list[tuple[SinkShape, dict[str, Any], tuple[str, ...]]] = [
    (PLAIN, {"body": pa.array([b"a", None])}, ("'body'", "row 8 of partition 3")),
    (BY_COLUMN, {"body": ["a"], "group": pa.array([None], pa.string())}, ("'group'", "row 7 of partition 3")),
    (
        BY_COLUMN,
        {"body": ["a", "b", "c"], "group": ["ok", "no/name", "ok"]},
        ("'no/name'", "'group'", "row 8 of partition 3"),
    ),
    (
        BY_COLUMN,
        {"body": [b"a", b"b", b"x" * (LONG + 1)], "group": ["a", "b", "b"]},
        ("row 9 of partition 3", f"{LONG + 49} bytes", "'b'", str(RECORD_BYTES_MAX)),
    ),
    (MESSAGE, MESSAGES | {"topic": pa.array(["t", None, "t"])}, ("'topic'", "row 8 of partition 3")),
    (MESSAGE, MESSAGES | {"queue_id": pa.array([0, 1, None])}, ("'queue_id'", "row 9 of partition 3")),
    (
        MESSAGE,
        MESSAGES | {"queue_id": pa.array([0, 1 << 40, 0])},
        ("'queue_id'", "row 8 of partition 3"),
    ),
    (MESSAGE, MESSAGES | {"topic": ["t", "t", ""]}, ("'topic'", "row 9 of partition 3")),
    (
        MESSAGE,
        MESSAGES | {"properties": pa.array([None, None, [("a", "b\x02")]], pa.map_(pa.string(), pa.string()))},
        ("'properties'", "row 9 of partition 3"),
    ),
    (MESSAGE, MESSAGES | {"tags": ["", "A", "A"]}, ("'properties'", "row 7 of partition 3")),
]


@pytest.mark.parametrize(("shape", "columns", "names"), WRONG)
def test_invalid_row_is_named(shape: SinkShape, columns: dict[str, Any], names: tuple[str, ...]) -> None:
    with pytest.raises(SchemaError) as caught:
        rows(shape, first_row=7, **columns)
    assert str(caught.value).startswith("[DLEDGER_SCHEMA] ")
    assert [name for name in names if name not in str(caught.value)] == []


def test_largest_record_is_written() -> None:
    assert rows(PLAIN, body=pa.array([b"x" * LONG]))["orders"][1] == [0]
