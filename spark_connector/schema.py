"""Columns of the data source, as Spark types and as the Arrow types Spark insists on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from spark_connector.errors import SchemaError

__all__ = ["ENTRY_SCHEMA", "MESSAGE_SCHEMA", "arrow_schema", "check_columns", "chosen_columns", "schema_for"]

_ENTRY: Final[tuple[tuple[str, DataType], ...]] = (
    ("group", StringType()),
    ("index", LongType()),
    ("term", LongType()),
    ("position", LongType()),
    ("timestamp", TimestampType()),
)
_BODY: Final[tuple[tuple[str, DataType], ...]] = (("body", BinaryType()),)
_MESSAGE: Final[tuple[tuple[str, DataType], ...]] = (
    ("topic", StringType()),
    ("queue_id", IntegerType()),
    ("queue_offset", LongType()),
    ("tags", StringType()),
    ("keys", StringType()),
    ("properties", MapType(StringType(), StringType())),
    ("flag", IntegerType()),
    ("sys_flag", IntegerType()),
    ("born_timestamp", TimestampType()),
    ("born_host", StringType()),
    ("store_timestamp", TimestampType()),
    ("store_host", StringType()),
    ("msg_id", StringType()),
    ("reconsume_times", IntegerType()),
    ("prepared_transaction_offset", LongType()),
    ("store_size", IntegerType()),
    ("body_crc", IntegerType()),
    ("tags_code", LongType()),
    ("error", StringType()),
)


def _struct(columns: tuple[tuple[str, DataType], ...]) -> StructType:
    return StructType([StructField(name, kind, True) for name, kind in columns])


ENTRY_SCHEMA: Final = _struct(_ENTRY + _BODY)
"""Columns with ``decode = none``."""

MESSAGE_SCHEMA: Final = _struct(_ENTRY + _BODY + _MESSAGE)
"""Columns with ``decode = message``."""


_COMMITTED: Final = StructField("committed", BooleanType(), True)
"""Of a Java group: true where a probe has proved it, else null."""


def schema_for(decode: str, protocol: str = "dledger") -> StructType:
    """Returns the columns for the options ``decode`` and ``protocol``."""
    schema = MESSAGE_SCHEMA if decode == "message" else ENTRY_SCHEMA
    return StructType([*schema.fields, _COMMITTED]) if protocol == "dledger-java" else schema


def arrow_schema(decode: str, protocol: str = "dledger", columns: Sequence[str] | None = None) -> pa.Schema:
    """Returns the exact Arrow schema that Spark expects of the batches; ``columns``: of these, None = of all."""
    schema = to_arrow_schema(schema_for(decode, protocol), timezone="UTC")
    return schema if columns is None else pa.schema([schema.field(name) for name in columns])


def chosen_columns(schema: StructType, offered: StructType) -> tuple[str, ...]:
    """Returns the columns that a user-given schema names: some of the source's or all, in any order.

    Raises:
        SchemaError: one is not the source's, has another type, or is named twice; or there is none.
    """
    kinds = {column.name: column.dataType for column in offered.fields}
    names = tuple(schema.names)
    fit = all(kinds.get(column.name) == column.dataType for column in schema.fields)
    if not fit or not names or len(set(names)) < len(names):
        raise SchemaError(
            f"the schema {schema.simpleString()} does not fit this source",
            "schema",
            f"leave .schema() out, or name some of these columns: {offered.simpleString()}",
        )
    return names


def check_columns(schema: StructType, wanted: StructType) -> None:
    """Raises SchemaError if a user-given schema is not a metadata table's own."""
    found = [(column.name, column.dataType) for column in schema.fields]
    if found != [(column.name, column.dataType) for column in wanted.fields]:
        raise SchemaError(
            f"the schema {schema.simpleString()} is not the one of this table",
            "schema",
            f"leave .schema() out; the columns are {wanted.simpleString()}",
        )
