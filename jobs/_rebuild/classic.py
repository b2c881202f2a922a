"""Reads a classic CommitLog, one task per file, into the rows of a stream's entries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from dledger_core.rocketmq import CommitLogFile
from jobs._rebuild.units import DECODED_SCHEMA, EntryRules, damage, decoded

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["read_classic", "reader"]


def read_classic(
    spark: SparkSession, files: tuple[CommitLogFile, ...], group: str, rules: EntryRules, *, closed: bool
) -> DataFrame:
    """Return rows of DECODED_SCHEMA; ``index`` is null, because a classic log has none.

    Args:
        spark: the session.
        files: of the CommitLog, in order.
        group: group name of the rows.
        rules: for reading entries.
        closed: whether a DLedger store follows, so that the last file too must end with a BLANK.
    """
    read = reader(files, group, rules, closed=closed)
    return spark.range(0, len(files), 1, len(files)).mapInArrow(read, DECODED_SCHEMA)


def reader(
    files: tuple[CommitLogFile, ...], group: str, rules: EntryRules, *, closed: bool
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function that a task applies to batches of file numbers; arguments as of ``read_classic``."""

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                file, open_end = files[number], number == len(files) - 1 and not closed
                for found in file.scan():
                    if isinstance(found, pa.RecordBatch):
                        yield from decoded([_entries(found, group)], rules)
                    elif found.kind == "damaged" or (found.kind == "end" and not open_end and file.size):
                        yield damage(group, found.position)

    return read


def _entries(messages: pa.RecordBatch, group: str) -> pa.RecordBatch:
    count = messages.num_rows
    columns = {"group": pa.repeat(pa.scalar(group), count), "index": pa.nulls(count, pa.int64())}
    return pa.RecordBatch.from_pydict(columns | {name: messages.column(name) for name in messages.schema.names})
