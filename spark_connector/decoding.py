"""``decode = message``: entries to rows of messages, whole batches at a time.

Topics and tags are looked at before bodies are decompressed, so what a query does not want costs little. Bodies are
decompressed in pieces: a few megabytes of them may stand for gigabytes.
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

_OPENED_BYTES_MAX: Final = 32 << 20
"""What the bodies of one piece may grow to; a single body may be larger."""


def rows_of(batch: pa.RecordBatch, part: Range, options: DLedgerOptions, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Adds the group, decodes messages, leaves out what nobody asked for and casts to what Spark checks for."""
    names = ["index", "term", "position", "timestamp", "body"]
    if options.decode == "message":
        of_messages = [name for name in schema.names if name not in (*names[:-1], "group", "committed")]
        batch = wanted(batch.select(names), options)
        fail = options.on_decode_error == "fail"
        pieces = decoded(batch, of_messages, fail=fail, group=part.group) if batch.num_rows else iter(())
    else:
        pieces = iter([{name: batch.column(name) for name in names}])
    for columns in pieces:
        rows = len(columns["index"])
        if "group" in schema.names:
            columns["group"] = pa.repeat(part.group, rows)
        if part.log is not None and "queue_offset" in columns:  # brokers assign them; in our logs the rebuild does
            columns["queue_offset"] = pa.nulls(rows, pa.int64())
        if "committed" in schema.names:  # true up to what a probe has proved
            proved = pc.less_equal(columns["index"], pa.scalar(part.min_commit, pa.int64()))
            columns["committed"] = pc.if_else(proved, pa.scalar(True), pa.scalar(None, pa.bool_()))
        yield pa.RecordBatch.from_arrays([columns[field.name].cast(field.type) for field in schema], schema=schema)


def wanted(batch: pa.RecordBatch, options: DLedgerOptions) -> pa.RecordBatch:
    """Returns the entries whose messages have one of the topics and one of the tags that the options name.

    A body that is no message stays: it is for ``onDecodeError`` to say what becomes of it.

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


def decoded(batch: pa.RecordBatch, names: list[str], *, fail: bool, group: str) -> Iterator[dict[str, Any]]:
    """Yields the columns of pieces of a batch: its own, with those of the messages instead of and beside ``body``.

    Args:
        batch: entries with the column ``body``.
        names: columns of the messages; where ``body`` is not among them none is decompressed.
        fail: a body that is no message, or cannot be decompressed, is an error.
        group: the log, for the error's text.

    Raises:
        DecodeError: there is such a body.
    """
    asked = [*names, "error"] if fail and "error" not in names else names
    for piece, found in decode_chunks(batch, asked, opened_bytes_max=_OPENED_BYTES_MAX):
        if fail:
            _check(found.column("error"), piece.column("index"), group)
        yield {name: piece.column(name) for name in piece.schema.names} | {n: found.column(n) for n in names}


def _check(errors: pa.Array, indexes: pa.Array, group: str) -> None:
    wrong = len(errors) - errors.null_count
    if wrong:
        at = pc.index(errors.is_valid(), True).as_py()
        index = indexes[at].as_py()
        raise DecodeError(
            f"entry {index} is no message that can be read: {errors[at].as_py()}",
            f"group {group!r}",
            "set onDecodeError=column to get such entries as rows with the column error, or start behind this one",
            {"index": index, "such_entries_nearby": wrong},
        )
