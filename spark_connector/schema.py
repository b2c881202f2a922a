"""Columns of the data source: Arrow schemas, the core's where it has them, and their DDL text for Spark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from dledger_core import READ_SCHEMA, rocketmq
from spark_connector.errors import SchemaError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = ["ENTRY_SCHEMA", "MESSAGE_SCHEMA", "chosen_columns", "ddl_of", "schema_for"]

ENTRY_SCHEMA: Final = pa.schema([pa.field("group", pa.string()), *READ_SCHEMA])
"""Columns with ``decode = none``."""

_OF_ENTRIES: Final = ("body", "physical_offset")
MESSAGE_SCHEMA: Final = pa.schema(
    [*ENTRY_SCHEMA, *(field for field in rocketmq.MESSAGE_SCHEMA if field.name not in _OF_ENTRIES)]
)
"""Columns with ``decode = message``."""

_COMMITTED: Final = pa.field("committed", pa.bool_())
"""Of a Java group: true if a probe proved it, else null."""


def schema_for(decode: str, protocol: str = "dledger", columns: Sequence[str] | None = None) -> pa.Schema:
    """Return the columns for the options ``decode`` and ``protocol``, or ``columns`` of them in that order."""
    schema = MESSAGE_SCHEMA if decode == "message" else ENTRY_SCHEMA
    if protocol == "dledger-java":
        schema = schema.append(_COMMITTED)
    return schema if columns is None else pa.schema([schema.field(name) for name in columns])


def ddl_of(schema: pa.Schema) -> str:
    """Return an Arrow schema as DDL text, which Spark accepts for every schema.

    Raises:
        SchemaError: Spark has no such type.
    """
    return ", ".join(f"{_quoted(field.name)} {_type_name(field.type)}{_null(field)}" for field in schema)


_SIMPLE: Final = (
    (pa.types.is_boolean, "boolean"),
    (pa.types.is_int8, "tinyint"),
    (pa.types.is_int16, "smallint"),
    (pa.types.is_int32, "int"),
    (pa.types.is_int64, "bigint"),
    (pa.types.is_float32, "float"),
    (pa.types.is_float64, "double"),
    (pa.types.is_date32, "date"),
    (lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind), "string"),
    (lambda kind: pa.types.is_binary(kind) or pa.types.is_large_binary(kind), "binary"),
    (lambda kind: pa.types.is_timestamp(kind) and kind.tz is not None, "timestamp"),
    (pa.types.is_timestamp, "timestamp_ntz"),
)


def _type_name(kind: Any) -> str:
    for matches, name in _SIMPLE:
        if matches(kind):
            return name
    if pa.types.is_map(kind):
        return f"map<{_type_name(kind.key_type)},{_type_name(kind.item_type)}>"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"array<{_type_name(kind.value_type)}>"
    if pa.types.is_struct(kind):
        return f"struct<{','.join(f'{_quoted(field.name)}:{_type_name(field.type)}' for field in kind)}>"
    raise SchemaError(f"Spark has no type for Arrow's {kind}", "", "cast the column")


def _null(field: pa.Field) -> str:
    return "" if field.nullable else " NOT NULL"


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


def chosen_columns(schema: StructType, offered: pa.Schema) -> tuple[str, ...]:
    """Return the columns of a user-given schema: any of those offered, in any order.

    Raises:
        SchemaError: a column is unknown, has another type or is named twice, or there is none.
    """
    known = {field.name: _type_name(field.type) for field in offered}
    names = tuple(schema.names)
    fit = all(known.get(column.name) == column.dataType.simpleString() for column in schema.fields)
    if not fit or not names or len(set(names)) < len(names):
        raise SchemaError(
            f"the schema {schema.simpleString()} does not match the columns of this source",
            "",
            f"leave .schema() out, or name some of these columns: {ddl_of(offered)}",
        )
    return names
