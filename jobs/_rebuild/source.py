"""The sources of a rebuild, a stream over a log and a classic CommitLog, whose tasks decode the entries that they read.

Message bodies stay in the process that reads them. As rows of ``format("dledger")`` they would cross from Python to
the JVM and back only to be decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from dledger_core import IndexOutOfRangeError
from dledger_core.rocketmq import CommitLogFile, Deleted, FileStop
from spark_connector.options import DLedgerOptions
from spark_connector.reading.readers import DLedgerStreamReader
from spark_connector.source import DLedgerDataSource

from .units import DECODED_SCHEMA, EntryRules, damage, decoded

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.datasource import InputPartition
    from pyspark.sql.types import StructType


_COLUMNS: Final = ("group", "index", "position", "body")


class UnitSource(DLedgerDataSource):
    """``format("dledger-units")``: rows of DECODED_SCHEMA.

    Its options are those of ``format("dledger")`` and ``rules``: the JSON text of EntryRules.
    """

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "dledger-units"

    def schema(self) -> str:
        """The columns of a read."""
        return DECODED_SCHEMA

    def streamReader(self, schema: StructType) -> UnitReader:
        """Make the stream reader."""
        entries = dict(self.options)
        rules = EntryRules.parse(entries.pop("rules"))
        options = DLedgerOptions.for_reading(entries).model_copy(update={"columns": _COLUMNS})
        return UnitReader(options, rules)


class UnitReader(DLedgerStreamReader):
    """Plans micro-batches as the connector's reader does; its tasks decode."""

    def __init__(self, options: DLedgerOptions, rules: EntryRules) -> None:
        super().__init__(options)
        self._rules = rules

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "rules": self._rules}

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the units of the partition's entries and their ranges."""
        return decoded(super().read(partition), self._rules)


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
                file, is_open = files[number], number == len(files) - 1 and not closed
                for found in _scan(file):
                    if isinstance(found, pa.RecordBatch):
                        yield from decoded([_entries(found, group)], rules)
                    elif not file.ends_at(found, is_open=is_open):
                        yield damage(group, found.position)

    return read


def _scan(file: CommitLogFile) -> Iterator[pa.RecordBatch | FileStop]:
    try:
        yield from file.scan()
    except FileNotFoundError:
        deleted = Deleted(file.position, file.end, by_position=True)
        remedy = "run the job again: it reads the files that exist"
        raise IndexOutOfRangeError(str(deleted), file.path, remedy) from None


def _entries(messages: pa.RecordBatch, group: str) -> pa.RecordBatch:
    count = messages.num_rows
    columns = {"group": pa.repeat(pa.scalar(group), count), "index": pa.nulls(count, pa.int64())}
    return pa.RecordBatch.from_pydict(columns | {name: messages.column(name) for name in messages.schema.names})
