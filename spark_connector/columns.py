"""Columns of the data source, and entries as rows with these columns.

The schemas are Arrow's, the core's where it has them, with their DDL text for Spark. Batches are converted as columns.
The columns of messages are in ``messages``, which is imported only where ``decode = message`` asks for them: each
Python process of Spark imports its modules again, and RocketMQ's are a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from dledger_core import READ_SCHEMA
from spark_connector.errors import SchemaError
from spark_connector.options import DLedgerOptions
from spark_connector.planning import Range
from spark_connector.schemas import ENTRY_SCHEMA, MADE_HERE, STORED_BODY

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

__all__ = [
    "chosen_columns",
    "ddl_of",
    "rows_of",
    "schema_for",
]

_COMMITTED: Final = pa.field("committed", pa.bool_())
"""Of a Java group: true if a probe proved it, else null."""


def schema_for(decode: str, protocol: str = "dledger", columns: Sequence[str] | None = None) -> pa.Schema:
    """Return the columns for the options ``decode`` and ``protocol``, or ``columns`` of them in that order."""
    schema = ENTRY_SCHEMA
    if decode == "message":
        from spark_connector.messages import MESSAGE_SCHEMA

        schema = MESSAGE_SCHEMA
    if protocol == "dledger-java":
        schema = schema.append(_COMMITTED)
    return schema if columns is None else pa.schema([_offered(schema).field(name.lower()) for name in columns])


def _offered(schema: pa.Schema) -> pa.Schema:
    """Return all columns that a user-given schema may name."""
    return schema.append(STORED_BODY) if "error" in schema.names else schema


def with_names(batch: pa.RecordBatch, columns: Sequence[str] | None) -> pa.RecordBatch:
    """Return a batch with the names of a user-given schema, which Spark expects as they are written there."""
    return batch if columns is None else batch.rename_columns(list(columns))


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
    """Return the columns of a user-given schema: any of those offered, in any order, with the given names.

    Names are compared without case, as Spark does by default; a Python data source is not told spark.sql.caseSensitive.

    Raises:
        SchemaError: a column is unknown, has another type or is named twice, or there is none.
    """
    known = {field.name: _type_name(field.type) for field in _offered(offered)}
    names = tuple(schema.names)
    fit = all(known.get(column.name.lower()) == column.dataType.simpleString() for column in schema.fields)
    if not fit or not names or len(set(map(str.lower, names))) < len(names):
        raise SchemaError(
            f"the schema {schema.simpleString()} does not match the columns of this source",
            "",
            f"leave .schema() out, or name some of these columns: {ddl_of(offered)}",
        )
    return names


def needed_columns(schema: pa.Schema, options: DLedgerOptions) -> tuple[str, ...] | None:
    """Return the columns that rows in ``schema`` need of a node; None for complete entries, whose bodies they need."""
    if not {"body", STORED_BODY.name}.isdisjoint(schema.names):
        return None
    names = [name for name in schema.names if name not in MADE_HERE]
    if options.decode == "message":
        filtered = [column for column, _ in options.message_filters]
        names += [*filtered, "topic"] if filtered else []
        names += ["error"] if options.on_decode_error == "fail" else []
        if set(names) <= set(ENTRY_SCHEMA.names):
            names.append("batch_index")  # without a column of messages an inner batch would be one row
    if options.decode == "message" or "committed" in schema.names or not names:
        names.append("index")
    return tuple(dict.fromkeys(names))


def rows_of(batch: pa.RecordBatch, part: Range, options: DLedgerOptions, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a batch in ``schema``: messages filtered and decoded, ``group`` and ``committed`` added.

    Args:
        batch: entries with all of their columns, or rows with those of ``needed_columns``.
        part: the range that they belong to.
        options: the query's options.
        schema: the columns.
    """
    if options.decode == "message":
        from spark_connector.messages import rows_of_messages

        chunks = rows_of_messages(batch, schema.names, options, part.group)
    else:
        chunks = iter([batch.select(READ_SCHEMA.names) if "body" in batch.schema.names else batch])
    for chunk in chunks:
        rows, columns = chunk.num_rows, {name: chunk.column(name) for name in chunk.schema.names}
        if "group" in schema.names:
            columns["group"] = pa.repeat(part.group, rows)
        if (
            part.log is not None and "queue_offset" in columns
        ):  # a broker assigns them; in native logs the rebuild job does
            columns["queue_offset"] = pa.nulls(rows, pa.int64())
        if "committed" in schema.names:  # true up to the index that a probe proved committed
            proved = pc.less_equal(columns["index"], pa.scalar(part.min_commit, pa.int64()))
            columns["committed"] = pc.if_else(proved, pa.scalar(True), pa.scalar(None, pa.bool_()))
        yield pa.RecordBatch.from_arrays([columns[field.name].cast(field.type) for field in schema], schema=schema)
