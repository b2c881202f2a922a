"""Rows that Spark wants to write, as bodies per group.

Two shapes are taken: ``body`` alone (binary or string), or the columns of a message (``topic`` and ``body``, and any of
``queue_id, tags, keys, properties``). Both may have a column ``group``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

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

from dledger_core.config import check_group_name
from spark_connector.errors import SchemaError
from spark_connector.options import DLedgerOptions

__all__ = ["SinkShape", "bodies_by_group", "sink_shape"]

_TEXT: Final = (StringType,)
_BYTES: Final = (BinaryType, StringType)
_WHOLE: Final = (IntegerType, LongType, ShortType, ByteType)
_KINDS: Final[dict[str, tuple[type[DataType], ...]]] = {
    "group": _TEXT,
    "body": _BYTES,
    "topic": _TEXT,
    "queue_id": _WHOLE,
    "tags": _TEXT,
    "keys": _TEXT,
    "properties": (MapType,),
}
_MESSAGE: Final = frozenset({"topic", "queue_id", "tags", "keys", "properties"})
_DEFAULT_GROUP: Final = "default"


@dataclass(frozen=True, slots=True)
class SinkShape:
    """How rows become bodies.

    Attributes:
        group: target of all rows; None = the column ``group`` says.
        message: encode the columns as RocketMQ messages.
    """

    group: str | None
    message: bool


def sink_shape(schema: StructType, options: DLedgerOptions) -> SinkShape:
    """Checks the columns before the query starts.

    Raises:
        SchemaError: a column is missing, unknown or of a wrong type.
    """
    kinds = {column.name: column.dataType for column in schema.fields}
    for name, kind in kinds.items():
        if name not in _KINDS:
            raise SchemaError(
                f"column {name!r} cannot be written", "columns", f"select only columns among {', '.join(_KINDS)}"
            )
        if not isinstance(kind, _KINDS[name]):
            raise SchemaError(
                f"column {name!r} has type {kind.simpleString()}",
                "columns",
                f"cast it to {' or '.join(known.typeName() for known in _KINDS[name])}",
            )
    properties = kinds.get("properties")
    if isinstance(properties, MapType) and not (
        isinstance(properties.keyType, StringType) and isinstance(properties.valueType, StringType)
    ):
        raise SchemaError("column 'properties' is not map<string,string>", "columns", "cast its keys and values")
    message = bool(_MESSAGE & set(kinds))
    missing = {"body", *(["topic"] if message else [])} - set(kinds)
    if missing:
        raise SchemaError(f"column {min(missing)!r} is missing", "columns", f"add it; there are {', '.join(kinds)}")
    by_column = options.group is None and "group" in kinds
    return SinkShape(None if by_column else options.group or _DEFAULT_GROUP, message)


def bodies_by_group(batch: pa.RecordBatch, shape: SinkShape, first_row: int) -> Iterator[tuple[str, pa.Array]]:
    """Yields (group, bodies), the bodies of a group in the order of its rows.

    Args:
        batch: rows as Spark gives them; strings and binaries may be large.
        shape: what ``sink_shape`` found.
        first_row: number of the batch's first row within the task, for errors.

    Raises:
        SchemaError: a null body, topic or group.
    """
    for name in ("group", "topic", "body"):
        if name in batch.schema.names and batch.column(name).null_count:
            row = first_row + pc.index(batch.column(name).is_null(), True).as_py()
            raise SchemaError(f"column {name!r} is null in row {row} of the task", "columns", "drop or fill such rows")
    if shape.group is not None:
        yield shape.group, _bodies(batch, shape)
        return
    groups = batch.column("group")
    for group in pc.unique(groups).to_pylist():
        yield check_group_name(group), _bodies(batch.filter(pc.equal(groups, group)), shape)


def _bodies(batch: pa.RecordBatch, shape: SinkShape) -> pa.Array:
    if not shape.message:
        return batch.column("body").cast(pa.large_binary())
    from dledger_core.rocketmq import encode_messages

    columns: dict[str, Any] = {name: batch.column(name) for name in batch.schema.names if name != "group"}
    return encode_messages(**{"queue_id": 0, **columns}).cast(pa.large_binary())
