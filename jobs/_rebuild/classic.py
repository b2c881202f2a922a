"""Reads a classic CommitLog into units, each of its files by one task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from dledger_core.errors import ConfigError
from dledger_core.rocketmq.commit_log import CommitLogFile, FileStop, commit_log_files
from jobs._rebuild.tasks import Product
from jobs._rebuild.units import UNIT_ARROW, EntryRules, Units, units_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["DAMAGED", "group_of", "preceding", "read_classic", "until_now"]

DAMAGED = "damaged_files"
"""Why a row is no unit: a file whose records end in something that is neither BLANK nor zeros."""


def group_of(directory: str) -> str:
    """The group of a classic log alone, which records none: the name of the broker's store directory."""
    return Path(directory).resolve().parent.name


def preceding(directory: str, store: str) -> tuple[CommitLogFile, ...]:
    """Returns the classic files that a DLedger store goes on from.

    Raises:
        ConfigError: the store does not begin where the files end.
    """
    from dledger_core import open_store

    files = commit_log_files(directory)
    with open_store(store) as reader:
        if reader.last_index < reader.first_index:
            return files
        first = reader.read(reader.first_index, reader.first_index + 1, max_bytes=1).column("position")[0].as_py()
    if files[-1].end != first:
        found = {"commitlog_ends_at": files[-1].end, "store_begins_at": first}
        raise ConfigError("the store does not go on where the CommitLog ends", directory, "name its own", found)
    return files


def until_now(files: tuple[CommitLogFile, ...]) -> tuple[CommitLogFile, ...]:
    """Returns the files with the last one cut where its messages end now: a broker may be writing to it."""
    *_, stop = files[-1].scan()
    if not isinstance(stop, FileStop) or stop.kind != "end":
        return files
    return (*files[:-1], replace(files[-1], size=stop.position - files[-1].position))


def read_classic(
    spark: SparkSession,
    files: tuple[CommitLogFile, ...],
    group: str,
    rules: EntryRules,
    product: Product,
    *,
    closed: bool,
) -> DataFrame:
    """Returns what tasks make of the messages in the files; ``index`` is null, a classic log has none.

    Args:
        spark: the session.
        files: from ``commit_log_files``.
        group: name the rows carry.
        rules: how to read them.
        product: what of them.
        closed: a DLedger store follows, so the last file too must end with a BLANK.
    """
    read = _reader(files, group, replace(rules, narrow=product.narrow), product, closed)
    return spark.range(0, len(files), 1, len(files)).mapInArrow(read, product.schema)


def _reader(
    files: tuple[CommitLogFile, ...], group: str, rules: EntryRules, product: Product, closed: bool
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def units(number: int) -> Iterator[Units]:
        last = number == len(files) - 1 and not closed
        for found in files[number].scan():
            if isinstance(found, pa.RecordBatch):
                yield from units_of([_entries(found, group)], rules)
            elif found.kind == "damaged" or (found.kind == "end" and not last and files[number].size):
                yield Units(_damage(found, group))

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from product.make(units(number))

    return read


def _entries(messages: pa.RecordBatch, group: str) -> pa.RecordBatch:
    count = messages.num_rows
    columns = {"group": pa.repeat(pa.scalar(group), count), "index": pa.nulls(count, pa.int64())}
    return pa.RecordBatch.from_pydict(columns | {name: messages.column(name) for name in messages.schema.names})


def _damage(stop: FileStop, group: str) -> pa.RecordBatch:
    row = {"group": group, "position": stop.position, "skipped": DAMAGED, "carried": True, "part": stop.position}
    return pa.RecordBatch.from_pylist([row], UNIT_ARROW)
