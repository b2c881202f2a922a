"""A batch read: bounds are fixed once, when Spark plans the query."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from spark_connector.errors import OptionError
from spark_connector.options import EARLIEST, LATEST, DLedgerOptions, StartSpec
from spark_connector.reading.partitions import RangesPartition, read_partition
from spark_connector.reading.tracking import Tracker

__all__ = ["DLedgerBatchReader"]


class DLedgerBatchReader(DataSourceReader):
    """Plans [startingOffsets, endingOffsets) of each group and reads it on executors."""

    def __init__(self, options: DLedgerOptions) -> None:
        self._options = options
        _refuse("startingOffsets", options.starting_offsets, "latest", LATEST)
        _refuse("endingOffsets", options.ending_offsets, "earliest", EARLIEST)

    def partitions(self) -> list[InputPartition]:
        """Plans the partitions, on the driver."""
        tracker = Tracker(self._options)
        if not tracker.groups and tracker.finder is not None:
            raise tracker.finder.nothing_found()
        bounds = tracker.bounds()
        starts, ends = tracker.starts(bounds, "earliest", EARLIEST), tracker.ends(bounds)
        tracker.check_reachable(starts, bounds)
        for group, start in starts.items():
            if start > ends[group]:
                raise OptionError(
                    f"group {group!r} would end at {ends[group]}, before its start {start}",
                    "starting and ending options",
                    "give an end behind the start",
                )
        planned: list[InputPartition] = list(tracker.partitions(starts, ends, bounds))
        return planned

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yields the partition's entries; runs on executors."""
        # Where there is nothing to read Spark passes a partition of its own making.
        return read_partition(partition if isinstance(partition, RangesPartition) else None, self._options)


def _refuse(name: str, spec: StartSpec | None, word: str, number: int) -> None:
    given = spec == word or (isinstance(spec, Mapping) and number in spec.values())
    if given:
        raise OptionError(f"a batch cannot use {word} here", name, "give an index, or leave the option out")
