"""Spark's columns are those of the Arrow schemas."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from spark_connector import ddl_of
from spark_connector.errors import SchemaError
from spark_connector.reading.tables import TABLES
from spark_connector.schema import schema_for

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


def test_ddl_of_quotes_names_and_marks_columns_that_are_never_null() -> None:
    assert ddl_of(EVERY_TYPE).startswith("`needed` bigint NOT NULL, `odd ``name` tinyint, `small` smallint")


def test_ddl_of_rejects_types_unknown_to_spark() -> None:
    with pytest.raises(SchemaError, match="uint64"):
        ddl_of(pa.schema([("count", pa.uint64())]))


def test_schema_for_gives_named_columns_in_their_order() -> None:
    names = ("committed", "body", "index")
    schema = schema_for("none", "dledger-java", names)
    assert (schema.names, schema.types) == (list(names), [pa.bool_(), pa.binary(), pa.int64()])


@pytest.mark.spark
def test_ddl_of_means_same_schema_to_spark(dledger: Any) -> None:
    for schema in SCHEMAS.values():
        frame = dledger.createDataFrame([], ddl_of(schema))
        assert frame.toArrow().schema.remove_metadata() == schema
