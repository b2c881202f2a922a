"""Columns of the data source, and entries as rows with these columns.

The schemas are Arrow's, the core's where it has them, with their DDL text for Spark. With ``decode = message``,
RocketMQ messages become columns. Batches are converted as columns. Topics and tags are filtered before bodies are
decompressed, so unwanted messages cost little. Bodies are decompressed in chunks, because a few megabytes may expand to
gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from dledger_core import READ_SCHEMA, rocketmq
from spark_connector.errors import SchemaError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

from collections.abc import Iterator

import pyarrow.compute as pc

from dledger_core.rocketmq import Selected, decode_chunks, select_entries
from spark_connector.errors import DecodeError
from spark_connector.options import DLedgerOptions
from spark_connector.planning import Range

__all__ = [
    "ENTRY_SCHEMA",
    "MESSAGE_SCHEMA",
    "STORED_BODY",
    "chosen_columns",
    "ddl_of",
    "decoded",
    "rows_of",
    "schema_for",
]

ENTRY_SCHEMA: Final = pa.schema([pa.field("group", pa.string()), *READ_SCHEMA])
"""Columns with ``decode = none``."""

_OF_ENTRIES: Final = ("body", "physical_offset")
MESSAGE_SCHEMA: Final = pa.schema(
    [*ENTRY_SCHEMA, *(field for field in rocketmq.MESSAGE_SCHEMA if field.name not in _OF_ENTRIES)]
)
"""Columns with ``decode = message``."""

STORED_BODY: Final = pa.field("stored_body", pa.binary())
"""With ``decode = message``, and only if a user-given schema names it: the bytes of an entry whose ``error`` is set."""

_COMMITTED: Final = pa.field("committed", pa.bool_())
"""Of a Java group: true if a probe proved it, else null."""


def schema_for(decode: str, protocol: str = "dledger", columns: Sequence[str] | None = None) -> pa.Schema:
    """Return the columns for the options ``decode`` and ``protocol``, or ``columns`` of them in that order."""
    schema = MESSAGE_SCHEMA if decode == "message" else ENTRY_SCHEMA
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


OPENED_BYTES_MAX: Final = 32 << 20
"""Limit of the decompressed bodies of one chunk; a single body may exceed it."""


_MADE_HERE: Final = ("group", "committed")


def needed_columns(schema: pa.Schema, options: DLedgerOptions) -> tuple[str, ...] | None:
    """Return the columns that rows in ``schema`` need of a node; None for complete entries, whose bodies they need."""
    if not {"body", STORED_BODY.name}.isdisjoint(schema.names):
        return None
    names = [name for name in schema.names if name not in _MADE_HERE]
    if options.decode == "message":
        filtered = [column for column, _ in _filters(options)]
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
    names = ["index", "term", "position", "timestamp", "body"]
    if "body" not in batch.schema.names:
        chunks = iter([_of_decoded(batch, part, options) if options.decode == "message" else batch])
    elif options.decode == "message":
        of_messages = [name for name in schema.names if name not in (*names[:-1], *_MADE_HERE)]
        selected = wanted(batch.select(names), options)
        batch, fail = selected.entries, options.on_decode_error == "fail"
        chunks = selected.only(decoded(batch, of_messages, fail=fail, group=part.group)) if batch.num_rows else iter(())
    else:
        chunks = iter([batch.select(names)])
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


def wanted(batch: pa.RecordBatch, options: DLedgerOptions) -> Selected:
    """Return the entries whose messages pass the topics and tags of the options and the pushed filters.

    A body that is not a message stays: ``onDecodeError`` decides about it.

    Args:
        batch: entries with the column ``body``.
        options: the query's options.
    """
    named = _filters(options)
    if not named or not batch.num_rows:
        return Selected(batch)
    columns = list({"topic", *(column for column, _ in named)})
    return select_entries(batch, columns, lambda _, found: _passing(found, named), opened_bytes_max=OPENED_BYTES_MAX)


_Filters = Sequence[tuple[str, tuple[str, ...]]]


def _filters(options: DLedgerOptions) -> _Filters:
    """Return the columns of messages that the query filters, with their values."""
    given = (("topic", options.topics), ("tags", options.tags), *options.pushed_values)
    return [(column, values) for column, values in given if values]


def _passing(found: pa.RecordBatch, filters: _Filters) -> Any:
    """Return which messages pass all filters, or are bodies that are not messages; null means no."""
    keep: Any = None
    for column, values in filters:
        fits = pc.is_in(found.column(column), pa.array(values, pa.string()))
        keep = fits if keep is None else pc.and_(keep, fits)
    return pc.or_(keep, found.column("topic").is_null())


def _of_decoded(rows: pa.RecordBatch, part: Range, options: DLedgerOptions) -> pa.RecordBatch:
    """Return the rows of messages that pass; with ``onDecodeError=fail`` raise as ``decoded`` does."""
    filters, fail = _filters(options), options.on_decode_error == "fail"
    if filters:
        good = pc.fill_null(_passing(rows, filters), False)
        indexes = rows.column("index")
        of_entries, rows = rows.filter(pc.is_in(indexes, indexes.filter(good))), rows.filter(good)
    else:
        of_entries = rows
    if fail:
        _check(of_entries.column("error"), of_entries, part.group)
    return rows


def decoded(
    batch: pa.RecordBatch,
    names: list[str],
    *,
    fail: bool,
    group: str,
    opened_bytes_max: int = OPENED_BYTES_MAX,
) -> Iterator[pa.RecordBatch]:
    """Yield rows: columns of a batch, plus those of its messages, which replace ``body``; inner batches expanded.

    Args:
        batch: entries with the column ``body``.
        names: columns of the messages, perhaps with STORED_BODY; without ``body`` none is decompressed.
        fail: raise if a body is not a message or cannot be decompressed.
        group: the log, for the error.
        opened_bytes_max: limit of the decompressed bodies of one chunk.

    Raises:
        DecodeError: such a body was found.
    """
    of_messages = [name for name in names if name != STORED_BODY.name]
    needs_error = (fail or STORED_BODY.name in names) and "error" not in names
    asked = [*of_messages, "error"] if needs_error else of_messages
    for chunk, found in decode_chunks(batch, asked, opened_bytes_max=opened_bytes_max):
        if fail:
            _check(found.column("error"), chunk, group)
        columns = {name: chunk.column(name) for name in chunk.schema.names}
        columns |= {name: found.column(name) for name in of_messages}
        if STORED_BODY.name in names:
            columns[STORED_BODY.name] = _stored_bodies(batch, chunk.column("position"), found.column("error"))
        yield pa.RecordBatch.from_pydict(columns)


def _stored_bodies(batch: pa.RecordBatch, positions: pa.Array, errors: pa.Array) -> pa.Array:
    """Return for each entry its body in its first row with an error, else null.

    In each such row of an inner batch a few bytes would become gigabytes.
    """
    wrong = np.flatnonzero(errors.is_valid())
    entries, firsts = np.unique(np.asarray(positions)[wrong], return_index=True)
    rows = np.full(len(errors), -1)
    rows[wrong[firsts]] = np.searchsorted(np.asarray(batch.column("position")), entries)
    return batch.column("body").take(pa.array(rows, mask=rows < 0))


def _check(errors: pa.Array, entries: pa.RecordBatch, group: str) -> None:
    wrong = len(errors) - errors.null_count
    if wrong:
        at = pc.index(errors.is_valid(), True).as_py()
        name = "position" if entries.column("index").null_count else "index"  # a CommitLog has positions only
        value = entries.column(name)[at].as_py()
        entry = f"entry {value}" if name == "index" else f"the message at position {value}"
        raise DecodeError(
            f"{entry} cannot be decoded as a message: {errors[at].as_py()}",
            f"group {group!r}",
            "set onDecodeError=column to get such entries as rows with the column error, or start after this one",
            {name: value, "such_entries_nearby": wrong},
        )
