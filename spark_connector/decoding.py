"""Entries to rows of the exact schema that Spark checks; with ``decode = message``, RocketMQ messages to columns.

Batches are converted as columns. Topics and tags are filtered before bodies are decompressed, so unwanted messages
cost little. Bodies are decompressed in chunks, because a few megabytes may expand to gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.rocketmq import decode_chunks, decode_messages
from spark_connector.errors import DecodeError
from spark_connector.options import DLedgerOptions
from spark_connector.planning import Range

OPENED_BYTES_MAX: Final = 32 << 20
"""Limit of the decompressed bodies of one chunk; a single body may exceed it."""


def rows_of(batch: pa.RecordBatch, part: Range, options: DLedgerOptions, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a batch in ``schema``: messages filtered and decoded, ``group`` and ``committed`` added."""
    names = ["index", "term", "position", "timestamp", "body"]
    if options.decode == "message":
        of_messages = [name for name in schema.names if name not in (*names[:-1], "group", "committed")]
        batch = wanted(batch.select(names), options)
        fail = options.on_decode_error == "fail"
        chunks = decoded(batch, of_messages, fail=fail, group=part.group) if batch.num_rows else iter(())
    else:
        chunks = iter([{name: batch.column(name) for name in names}])
    for columns in chunks:
        rows = len(columns["index"])
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


def wanted(batch: pa.RecordBatch, options: DLedgerOptions) -> pa.RecordBatch:
    """Return the entries whose messages have one of the topics and one of the tags of the options.

    A body that is not a message stays: ``onDecodeError`` decides about it.

    Args:
        batch: entries with the column ``body``.
        options: the query's options.
    """
    filters = {"topic": options.topics, "tags": options.tags}
    named = {column: values for column, values in filters.items() if values}
    if not named or not batch.num_rows:
        return batch
    found = decode_messages(batch.column("body"), [*named, "error"])
    keep: Any = None
    for column, values in named.items():
        fits = pc.is_in(found.column(column), pa.array(values, pa.string()))
        keep = fits if keep is None else pc.and_(keep, fits)
    return batch.filter(pc.or_(keep, found.column("error").is_valid()))


def decoded(
    batch: pa.RecordBatch,
    names: list[str],
    *,
    fail: bool,
    group: str,
    opened_bytes_max: int = OPENED_BYTES_MAX,
) -> Iterator[dict[str, Any]]:
    """Yield chunks of a batch as columns: its own, plus those of the messages, which replace ``body``.

    Args:
        batch: entries with the column ``body``.
        names: columns of the messages; without ``body`` none is decompressed.
        fail: raise if a body is not a message or cannot be decompressed.
        group: the log, for the error.
        opened_bytes_max: limit of the decompressed bodies of one chunk.

    Raises:
        DecodeError: such a body was found.
    """
    asked = [*names, "error"] if fail and "error" not in names else names
    for chunk, found in decode_chunks(batch, asked, opened_bytes_max=opened_bytes_max):
        if fail:
            _check(found.column("error"), chunk.column("index"), group)
        yield {name: chunk.column(name) for name in chunk.schema.names} | {n: found.column(n) for n in names}


def _check(errors: pa.Array, indexes: pa.Array, group: str) -> None:
    wrong = len(errors) - errors.null_count
    if wrong:
        at = pc.index(errors.is_valid(), True).as_py()
        index = indexes[at].as_py()
        raise DecodeError(
            f"entry {index} cannot be decoded as a message: {errors[at].as_py()}",
            f"group {group!r}",
            "set onDecodeError=column to get such entries as rows with the column error, or start after this one",
            {"index": index, "such_entries_nearby": wrong},
        )
