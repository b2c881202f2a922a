"""The one route from a log to its table: a stream over the log whose micro-batches become Delta commits.

Each micro-batch is read and decoded once (``UnitSource``), into rows that Spark keeps while the slots follow from the
runs among them.
A classic CommitLog comes before the entries of the first micro-batch that has any, as rows of the same kind.

With a checkpoint each micro-batch extends the table: a queue goes on behind the highest offset that it has there.
Without one, a temporary checkpoint starts from an empty state, so that the first micro-batch has the whole log: it
replaces the table.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Final

from dledger_core import ConfigError
from jobs._cli import progress
from jobs._rebuild.classic import read_classic
from jobs._rebuild.queues import Queues, advanced
from jobs._rebuild.slots import count_units, place, queues_of
from jobs._rebuild.table import TABLE_SCHEMA, Table
from jobs._rebuild.units import (
    ALL_ENTRIES,
    DAMAGED,
    DECODED_SCHEMA,
    IMPOSSIBLE,
    STRANGE,
    units_of,
)
from jobs._session import AVAILABLE_NOW, parse_trigger

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from jobs._rebuild.plan import RebuildPlan

__all__ = ["TableStream"]

_POLL_S: Final = 1
_PLACES_MAX: Final = 100
_CLUSTERED_ROWS_MIN: Final = 1 << 24
"""OPTIMIZE writes files of up to 1 GiB: of fewer rows it would make one file, in which Delta can skip nothing."""
_ENDS: Final = "`group` string, topic string, queue_id int, base bigint"


class TableStream:
    """One run of a plan.

    Args:
        spark: the session.
        plan: the plan.

    Attributes:
        batches: micro-batches that are in the table.
        units: of them.
        skipped: entries that are no units, for each reason.
        places: positions of the first 100 of them, for each reason.
        optimize_s: seconds that clustering the table took; 0 if it was not clustered.
    """

    def __init__(self, spark: SparkSession, plan: RebuildPlan) -> None:
        self._spark = spark
        self._plan = plan
        self._table = Table(spark, plan.table)
        self._query: Future[str] = Future()
        self._queues: Queues | None = None if plan.checkpoint else {}
        self.batches = 0
        self.units = 0
        self.skipped: Counter[str] = Counter()
        self.places: dict[str, list[int]] = {}
        self.optimize_s = 0.0

    def run(self, stop: Event) -> None:
        """Bring the table up to date; ``stop`` ends the run between two micro-batches.

        Raises:
            StreamingQueryException: a micro-batch failed.
        """
        if self._plan.checkpoint is not None:
            self._follow(self._plan.checkpoint, stop)
            return
        if self._plan.source:
            with tempfile.TemporaryDirectory(prefix="dledger-rebuild-") as checkpoint:
                self._follow(Path(checkpoint).as_uri(), stop)
        if not self.batches and not stop.is_set():
            self._write(self._with_classic(self._spark.createDataFrame([], DECODED_SCHEMA)), 0)
        if self.units > _CLUSTERED_ROWS_MIN and not stop.is_set():
            began = time.monotonic()
            self._table.cluster()
            self.optimize_s = round(time.monotonic() - began, 3)

    @property
    def queues(self) -> Queues:
        """The queues in the table."""
        if self._queues is None:
            self._queues = self._table.queues() if self._table.exists() else {}
        return self._queues

    def _follow(self, checkpoint: str, stop: Event) -> None:
        from jobs._rebuild.source import UnitSource  # it imports PySpark

        self._spark.dataSource.register(UnitSource)
        options = {**self._plan.source, "startingOffsets": "earliest", "rules": self._plan.rules.to_json()}
        if self._plan.trigger == AVAILABLE_NOW:  # entries that are appended meanwhile are left to the next run
            ends = {group: end for group, (_, end) in self._plan.ranges.items()}
            options["endingOffsets"] = json.dumps(ends)
        rows = self._spark.readStream.format(UnitSource.name()).schema(DECODED_SCHEMA).options(**options).load()
        writer = rows.writeStream.foreachBatch(self._take).option("checkpointLocation", checkpoint)
        query = writer.trigger(**parse_trigger(self._plan.trigger)).start()
        try:
            self._query.set_result(str(query.id))
            while not query.awaitTermination(_POLL_S):
                if stop.is_set():
                    return
        finally:
            query.stop()

    def _take(self, rows: DataFrame, number: int) -> None:
        """Put a micro-batch into the table."""
        if self._plan.checkpoint is not None:
            if number == 0 and not self._table.exists():
                self._table.replace(self._spark.createDataFrame([], TABLE_SCHEMA), self._query.result())
            self._table.check_owner(self._query.result())
        if number == 0 and rows.isEmpty():  # it only notes in the checkpoint where the stream starts
            return
        self._write(self._with_classic(rows), number)
        progress(f"micro-batch {number} is in the table")

    def _with_classic(self, rows: DataFrame) -> DataFrame:
        plan = self._plan
        if self.batches or not plan.classic:
            return rows
        [group] = plan.ranges
        rules = replace(plan.rules, header_bytes=0, broker_end=ALL_ENTRIES, hidden=())
        return read_classic(self._spark, plan.classic, group, rules, closed=bool(plan.source)).unionByName(rows)

    def _write(self, rows: DataFrame, number: int) -> None:
        """Place the units among decoded rows, and write them."""
        from pyspark import StorageLevel

        rows = rows.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            runs = rows.where("batch is null").drop("batch")
            queues = queues_of(runs)
            found = [row.asDict() for row in queues.collect()]
            counts = count_units(found)
            self._count_skipped(runs)
            self.units += counts.given + counts.assigned
            progress(f"{counts.given + counts.assigned} units; writing the table")
            if self._plan.checkpoint is None and not self.batches:
                self._table.replace(place(units_of(rows), runs, queues, counts))
                self._queues = advanced({}, found)
            elif counts.given + counts.assigned:
                if counts.given:
                    self._check_first(runs)
                known = self.queues
                bases = self._spark.createDataFrame([(*key, queue.end) for key, queue in known.items()], _ENDS)
                placed = place(units_of(rows), runs, queues, counts, bases)
                self._table.append(placed, self._query.result(), number)
                # The table may have had the first micro-batch of this run, and counted it.
                self._queues = advanced(known, found) if self.batches else None
            self.batches += 1
        finally:
            rows.unpersist()

    def _check_first(self, runs: DataFrame) -> None:
        """Check that all of a broker's queue offsets are here: which messages it serves depends on all of them."""
        from pyspark.sql import functions as f

        begin = runs.where("carried and skipped is null").agg(f.min("position")).first()
        assert begin is not None
        if self._table.rows().where(f.col("position") < begin[0]).limit(1).count():
            remedy = "rebuild it as a whole, without --checkpoint"
            what = "a broker's queue offsets come after entries that are in the table"
            raise ConfigError(what, "--checkpoint", remedy)

    def _count_skipped(self, runs: DataFrame) -> None:
        from pyspark.sql import functions as f

        counts = runs.where("skipped is not null").groupBy("skipped").agg(f.sum("units")).collect()
        self.skipped.update(dict(map(tuple, counts)))
        for reason in (STRANGE, IMPOSSIBLE, DAMAGED):
            known = self.places.setdefault(reason, [])
            if self.skipped[reason] and len(known) < _PLACES_MAX:
                found = runs.where(f.col("skipped") == reason).select("position").orderBy("position")
                known += [row["position"] for row in found.limit(_PLACES_MAX - len(known)).collect()]
