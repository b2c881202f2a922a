"""Columns of RocketMQ's messages, and bodies of entries as rows with these columns (``decode = message``).

Topics and tags are filtered before bodies are decompressed, so unwanted messages cost little. Bodies are decompressed
in chunks, because a few megabytes may expand to gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core import READ_SCHEMA, rocketmq
from dledger_core.rocketmq import Selected, decode_chunks, select_entries
from spark_connector.errors import DecodeError
from spark_connector.options import DLedgerOptions, Filters
from spark_connector.schemas import ENTRY_SCHEMA, MADE_HERE, STORED_BODY

__all__ = ["MESSAGE_SCHEMA", "OPENED_BYTES_MAX", "decoded", "rows_of_messages"]

_OF_ENTRIES: Final = ("body", "physical_offset")
MESSAGE_SCHEMA: Final = pa.schema(
    [*ENTRY_SCHEMA, *(field for field in rocketmq.MESSAGE_SCHEMA if field.name not in _OF_ENTRIES)]
)
"""Columns with ``decode = message``."""

OPENED_BYTES_MAX: Final = 32 << 20
"""Limit of the decompressed bodies of one chunk; a single body may exceed it."""


def rows_of_messages(
    batch: pa.RecordBatch, names: Sequence[str], options: DLedgerOptions, group: str
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of a batch that pass the query's filters, with at least the columns that are named.

    Args:
        batch: entries with all of their columns, or rows with those of ``needed_columns``.
        names: the columns of the rows.
        options: the query's options.
        group: the log, for errors.

    Raises:
        DecodeError: a body is not a message, with ``onDecodeError=fail``.
    """
    if "body" not in batch.schema.names:
        yield _of_decoded(batch, group, options)
        return
    *of_entries, _ = READ_SCHEMA.names
    of_messages = [name for name in names if name not in (*of_entries, *MADE_HERE)]
    selected = wanted(batch.select(READ_SCHEMA.names), options)
    if selected.entries.num_rows:
        fail = options.on_decode_error == "fail"
        yield from selected.only(decoded(selected.entries, of_messages, fail=fail, group=group))


def wanted(batch: pa.RecordBatch, options: DLedgerOptions) -> Selected:
    """Return the entries whose messages pass the topics and tags of the options and the pushed filters.

    A body that is not a message stays: ``onDecodeError`` decides about it.

    Args:
        batch: entries with the column ``body``.
        options: the query's options.
    """
    named = options.message_filters
    if not named or not batch.num_rows:
        return Selected(batch)
    columns = list({"topic", *(column for column, _ in named)})
    return select_entries(batch, columns, lambda _, found: _passing(found, named), opened_bytes_max=OPENED_BYTES_MAX)


def _passing(found: pa.RecordBatch, filters: Filters) -> Any:
    """Return which messages pass all filters, or are bodies that are not messages; null means no."""
    keep: Any = None
    for column, values in filters:
        fits = pc.is_in(found.column(column), pa.array(values, pa.string()))
        keep = fits if keep is None else pc.and_(keep, fits)
    return pc.or_(keep, found.column("topic").is_null())


def _of_decoded(rows: pa.RecordBatch, group: str, options: DLedgerOptions) -> pa.RecordBatch:
    """Return the rows of messages that pass; with ``onDecodeError=fail`` raise as ``decoded`` does."""
    filters, fail = options.message_filters, options.on_decode_error == "fail"
    if filters:
        good = pc.fill_null(_passing(rows, filters), False)
        indexes = rows.column("index")
        of_entries, rows = rows.filter(pc.is_in(indexes, indexes.filter(good))), rows.filter(good)
    else:
        of_entries = rows
    if fail:
        _check(of_entries.column("error"), of_entries, group)
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
