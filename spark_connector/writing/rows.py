"""Rows of Spark as bodies per group.

Two shapes are accepted: ``body`` alone (binary or string), or the columns of a message (``topic`` and ``body``, and any
of ``queue_id, tags, keys, properties``). Both may have a column ``group``. Names are compared without case, as Spark
does by default; a Python data source is not told ``spark.sql.caseSensitive``. Errors name a row by its number within
the Spark partition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
)

from dledger_core import RECORD_BYTES_MAX, BadRequestError, ConfigError
from dledger_core.config import check_group_name
from dledger_core.record import HEADER_BYTES
from dledger_core.rocketmq import encode_messages
from spark_connector.columns import schema_for
from spark_connector.errors import SchemaError
from spark_connector.options import DLedgerOptions

__all__ = ["GroupRows", "SinkShape", "rows_by_group", "sink_shape"]

_TEXT: Final = (StringType,)
_BYTES: Final = (BinaryType, StringType)
_INTEGER: Final = (IntegerType, LongType, ShortType, ByteType)
_KINDS: Final[dict[str, tuple[type[DataType], ...]]] = {
    "group": _TEXT,
    "body": _BYTES,
    "topic": _TEXT,
    "queue_id": _INTEGER,
    "tags": _TEXT,
    "keys": _TEXT,
    "properties": (MapType,),
}
_MESSAGE: Final = frozenset({"topic", "queue_id", "tags", "keys", "properties"})
_MADE: Final = {*schema_for("none").names, *schema_for("message").names} - {*_KINDS}
"""Columns of a read that are not the content of an entry."""
_NEVER_NULL: Final = ("topic", "queue_id", "body")
"""A record has no encoding of null, and an empty value instead would hide the difference."""


@dataclass(frozen=True, slots=True)
class SinkShape:
    """The conversion of rows to bodies.

    Attributes:
        group: target of all rows; None = the column ``group``.
        message: encode the columns as RocketMQ messages.
    """

    group: str | None
    message: bool


@dataclass(frozen=True, slots=True)
class GroupRows:
    """Consecutive rows of one group, as bodies that each fit into a record.

    Attributes:
        group: the target log.
        bodies: large_binary without nulls.
        numbers: each body's row number within the Spark partition.
    """

    group: str
    bodies: pa.Array
    numbers: np.ndarray[Any, np.dtype[np.int64]]


def sink_shape(schema: StructType, options: DLedgerOptions) -> SinkShape:
    """Check the columns before the query starts.

    Raises:
        SchemaError: a column is missing, unknown, duplicate, or of a wrong type.
    """
    names = Counter(map(str.lower, schema.names))
    # A DataFrame may have two columns of one name. Spark does not report it, and which of them is the body cannot be
    # known (test_wrong_columns_are_named).
    twice = next((name for name in schema.names if names[name.lower()] > 1), None)
    if twice is not None:
        raise SchemaError(f"duplicate column {twice!r}", "", "select it once; names are compared without case")
    kinds = {column.name.lower(): column.dataType for column in schema.fields}
    made = [given for given in schema.names if given.lower() in _MADE]
    if made:
        raise SchemaError(
            f"the source makes the columns {', '.join(made)}: the log gives written rows new ones",
            "",
            "select the others: df.select('group', 'body'), or those of a message",
        )
    for given, (name, kind) in zip(schema.names, kinds.items(), strict=True):
        if name not in _KINDS:
            raise SchemaError(
                f"column {given!r} cannot be written", "", f"select only columns among {', '.join(_KINDS)}"
            )
        if not isinstance(kind, _KINDS[name]):
            raise SchemaError(
                f"column {given!r} has type {kind.simpleString()}",
                "",
                f"cast it to {' or '.join(known.typeName() for known in _KINDS[name])}",
            )
    properties = kinds.get("properties")
    if isinstance(properties, MapType) and not (
        isinstance(properties.keyType, StringType) and isinstance(properties.valueType, StringType)
    ):
        raise SchemaError("column 'properties' is not map<string,string>", "", "cast its keys and values")
    # One column of a message makes all rows messages. So a forgotten topic is an error; as plain bodies the rows would
    # silently lose their tags and keys (test_wrong_columns_are_named).
    message = bool(_MESSAGE & set(kinds))
    missing = {"body", *(["topic"] if message else [])} - set(kinds)
    if missing:
        raise SchemaError(f"missing column {min(missing)!r}", "", f"add it to {', '.join(kinds)}")
    # The option overrides the column, so that a query can be pointed at another group without a change of its rows.
    by_column = options.group is None and "group" in kinds
    return SinkShape(None if by_column else options.group or options.default_group, message)


def rows_by_group(batch: pa.RecordBatch, shape: SinkShape, first_row: int, partition: int) -> Iterator[GroupRows]:
    """Yield the rows of each group, in the order of the batch.

    Args:
        batch: rows of Spark; strings and binaries may be large.
        shape: from ``sink_shape``.
        first_row: number of the batch's first row within the Spark partition.
        partition: number of that partition.

    Raises:
        SchemaError: a row cannot be written: a null in a required column, an invalid group name, a message that
            cannot be encoded, a record above the maximum size.
    """
    batch = batch.rename_columns([name.lower() for name in batch.schema.names])
    numbers = np.arange(first_row, first_row + batch.num_rows, dtype=np.int64)
    # Arrow stores a null as a value of length 0, so it would be written as an empty body (test_invalid_row_is_named).
    # With the option `group` the column is not read, so it may contain nulls
    # (test_rows_keep_order_and_numbers_in_each_group).
    for name in _NEVER_NULL if shape.group is not None else ("group", *_NEVER_NULL):
        if name in batch.schema.names and batch.column(name).null_count:
            row = numbers[pc.index(batch.column(name).is_null(), True).as_py()]
            raise SchemaError(
                f"column {name!r} is null in {_row_name(row, partition)}",
                "",
                f"filter such rows out (WHERE {name} IS NOT NULL) or fill them",
            )
    if shape.group is not None:
        yield _group_rows(shape.group, batch, shape, numbers, partition)
        return
    groups = batch.column("group")
    # A log orders the rows of one group only, so that is the order to keep
    # (test_rows_keep_order_and_numbers_in_each_group).
    for group in pc.unique(groups).to_pylist():
        rows = pc.equal(groups, group)
        group_numbers = numbers[rows.to_numpy(zero_copy_only=False)]
        try:
            # Rows name the group: no request may carry an invalid name, and a node could name the append only, not the
            # row (test_invalid_row_is_named).
            check_group_name(group)
        except ConfigError as error:
            where = f"column 'group' in {_row_name(group_numbers[0], partition)}"
            raise SchemaError(error.what, where, error.remedy) from None
        yield _group_rows(group, batch.filter(rows), shape, group_numbers, partition)


def _group_rows(group: str, batch: pa.RecordBatch, shape: SinkShape, numbers: Any, partition: int) -> GroupRows:
    bodies = _messages(batch, numbers, partition) if shape.message else batch.column("body")
    # `_chunks` reads 64-bit offsets from the buffer. Any other layout would be divided at wrong places
    # (test_body_of_any_type_and_slice_is_written).
    bodies = bodies.cast(pa.large_binary())
    if len(bodies):
        sizes = pc.binary_length(bodies)
        largest = int(pc.max(sizes).as_py()) + HEADER_BYTES
        # The leader would reject the complete append without naming the row (test_invalid_row_is_named). A record of
        # exactly the limit is written (test_largest_record_is_written).
        if largest > RECORD_BYTES_MAX:
            row = numbers[pc.index(sizes, largest - HEADER_BYTES).as_py()]
            raise SchemaError(
                f"{_row_name(row, partition)} makes a record of {largest} bytes",
                f"column 'body', group {group!r}",
                f"a record has at most {RECORD_BYTES_MAX} bytes: shorten the body, or store it elsewhere",
            )
    return GroupRows(group, bodies, numbers)


def _messages(batch: pa.RecordBatch, numbers: Any, partition: int) -> pa.Array:
    try:
        return _encoded(batch)
    except BadRequestError as error:
        at, found = _first_invalid(batch), error
        try:
            _encoded(batch.slice(at, 1))
        except BadRequestError as exact:
            found = exact
        where = f"column {found.where!r} in {_row_name(numbers[at], partition)}"
        raise SchemaError(found.what, where, found.remedy or "correct or filter such rows") from None


def _encoded(batch: pa.RecordBatch) -> pa.Array:
    columns: dict[str, Any] = {name: batch.column(name) for name in batch.schema.names if name != "group"}
    return encode_messages(**{"queue_id": 0, **columns})


def _first_invalid(batch: pa.RecordBatch) -> int:
    """Return the first row that cannot be encoded, by bisection: the encoder reports batches, not rows."""
    low, high = 0, batch.num_rows
    while high - low > 1:
        middle = (low + high) // 2
        try:
            _encoded(batch.slice(low, middle - low))
        except BadRequestError:
            high = middle
        else:
            low = middle
    return low


def _row_name(row: Any, partition: int) -> str:
    return f"row {int(row)} of partition {partition}"
