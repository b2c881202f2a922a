"""The Delta table of a rebuild, and the one route from a log to it: a stream whose micro-batches become Delta commits.

Each micro-batch is read and decoded once (``UnitSource``), into rows that Spark keeps while the slots are computed from
their ranges. A classic CommitLog comes before the entries of the first micro-batch that has any, as rows of the same
kind. With a checkpoint each micro-batch extends the table: a queue continues after its highest offset there. Without
one, a temporary checkpoint starts from an empty state, so the first micro-batch has the complete log and replaces the
table.

A table belongs to the checkpoint that extends it, and records the id of its streaming query. Another checkpoint would
write messages twice, so it is rejected. A write has the query's id and the micro-batch's number, so a micro-batch that
is repeated after a crash writes nothing.

One Delta commit creates or replaces a table without a checkpoint, so readers see its old rows until all new ones are
committed, and never a mixture. Delta clusters by topic and queue only with ``OPTIMIZE``, which follows as a separate
commit: it moves rows and changes none. Users run OPTIMIZE themselves on a table with a checkpoint, because it rewrites
much of the table.
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

import pyarrow as pa

from dledger_core import ConfigError
from spark_connector import ddl_of

from .._cli import progress
from .._session import AVAILABLE_NOW, parse_trigger, with_short_errors
from .slots import QUEUE, Queue, Queues, advanced, count_units, place, queues_of
from .units import (
    ALL_ENTRIES,
    DAMAGED,
    DAMAGED_MESSAGE,
    DECODED_SCHEMA,
    IMPOSSIBLE,
    STRANGE,
    UNIT_COLUMNS,
    units_of,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from .plan import RebuildPlan


TABLE_SCHEMA: Final = ddl_of(
    pa.schema([*UNIT_COLUMNS, pa.field("broker_serves", pa.bool_()), pa.field("rebuild_slot", pa.int64())])
)
_COLUMNS: Final = [*UNIT_COLUMNS.names, "broker_serves", "rebuild_slot"]
_OWNER: Final = "dledger.rebuild.query"
"""Table property: id of the streaming query that extends the table."""
_SEARCHED: Final = ("topic", "queue_id", "queue_offset", "position", "index", "store_timestamp", "msg_id")
"""Columns with statistics for data skipping; for others these cost time and skip few files."""


class Table:
    """The table in a directory."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self._spark = spark
        self._path = path

    def exists(self) -> bool:
        """Whether there is a Delta table."""
        from delta.tables import DeltaTable

        return DeltaTable.isDeltaTable(self._spark, self._path)

    def owner(self) -> str | None:
        """Return the id of the query that extends the table, None without one or without a table."""
        from delta.tables import DeltaTable

        if not self.exists():
            return None
        properties = DeltaTable.forPath(self._spark, self._path).detail().select("properties").first()
        assert properties is not None
        return dict(properties[0]).get(_OWNER)

    def check(self, *, kept: bool) -> None:
        """Check an existing table before the log is read.

        Args:
            kept: whether a checkpoint extends it; otherwise it is replaced.

        Raises:
            ConfigError: it has other columns, or belongs to a checkpoint and none was given, or the reverse.
        """
        if not self.exists():
            return
        columns = self.rows().columns
        if columns != _COLUMNS:
            remedy = "name another directory; rebuild a table of an earlier version"
            found = {"columns": ",".join(columns)}
            raise ConfigError(f"--table {self._path} has other columns than a rebuilt table", "", remedy, found)
        if kept and self.owner() is None:
            raise ConfigError(f"--table {self._path} was made without --checkpoint", "", "name a new directory")
        if not kept and self.owner() is not None:
            remedy = "use its --checkpoint, or name another table"
            raise ConfigError(f"--table {self._path} was made with a --checkpoint", "", remedy)

    def replace(self, rows: DataFrame, owner: str | None = None) -> None:
        """Replace all rows, in one commit that creates the table if it is missing.

        Args:
            rows: columns of TABLE_SCHEMA.
            owner: the id of the query that extends the table.
        """
        properties = {"delta.dataSkippingStatsColumns": ",".join(_SEARCHED)}
        if owner is not None:
            properties[_OWNER] = owner
        given = ", ".join(f"'{name}' = '{value}'" for name, value in properties.items())
        # In this text braces name data frames. Delta's DataFrame writers cannot cluster a table.
        path = self._path.replace("`", "``").replace("{", "{{").replace("}", "}}")
        rows.sparkSession.sql(
            f"""CREATE OR REPLACE TABLE delta.`{path}` USING delta CLUSTER BY (topic, queue_id)
            TBLPROPERTIES ({given}) AS SELECT * FROM {{rows}}""",  # noqa: S608 - the path is quoted
            rows=rows,
        )

    def check_owner(self, query: str) -> None:
        """Raise ConfigError if another query extends the table."""
        if self.owner() != query:
            raise ConfigError(
                f"--table {self._path} was not made with this --checkpoint",
                "",
                "use the table's own checkpoint, or a new table and a new checkpoint",
            )

    def append(self, rows: DataFrame, query: str, number: int) -> None:
        """Add the rows of a micro-batch of a query, once: Delta skips a micro-batch that it has committed."""
        writer = rows.write.format("delta").mode("append")
        writer.option("txnAppId", query).option("txnVersion", str(number)).save(self._path)

    def cluster(self) -> None:
        """Cluster the rows by topic and queue."""
        from delta.tables import DeltaTable

        DeltaTable.forPath(self._spark, self._path).optimize().executeCompaction()

    def rows(self) -> DataFrame:
        """Return the present rows of the table."""
        return self._spark.read.format("delta").load(self._path)

    def queues(self) -> Queues:
        """Return the queues in the table."""
        from pyspark.sql import functions as f

        offset = f.col("queue_offset")
        repeating = f.bool_or(f.expr("not broker_serves or rebuild_slot is null")).alias("non_monotonic")
        ends = [f.min(offset).alias("low"), (f.max(offset) + 1).alias("end"), f.count("*").alias("rows")]
        found = self.rows().groupBy(*QUEUE).agg(*ends, f.count("*").alias("slots"), repeating).collect()
        queues = {(group, topic, queue_id): Queue(*rest) for group, topic, queue_id, *rest in found}
        if any(queue.non_monotonic for queue in queues.values()):  # rare: only these queues have fewer slots than rows
            counts = self.rows().groupBy(*QUEUE).agg(f.count_distinct(offset), repeating).where("non_monotonic")
            for *key, slots, _ in counts.collect():
                queues[key[0], key[1], key[2]] = queues[key[0], key[1], key[2]]._replace(slots=slots)
        return queues


_POLL_S: Final = 1
_PLACES_MAX: Final = 100
_CLUSTERED_ROWS_MIN: Final = 1 << 24
"""OPTIMIZE writes files of up to 1 GiB: fewer rows would become one file, which Delta can only read completely."""
_ENDS: Final = "`group` string, topic string, queue_id int, base bigint"


class TableStream:
    """One run of a plan.

    Args:
        spark: the session.
        plan: the plan.

    Attributes:
        batches: number of micro-batches in the table.
        units: number of their units.
        skipped: entries without a unit, and damaged messages, per reason.
        places: positions of the first 100 of them, per reason.
        optimize_s: duration of clustering the table; 0 if it was not clustered.
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
        """Write all available entries to the table; ``stop`` ends the run between two micro-batches.

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
            started = time.monotonic()
            self._table.cluster()
            self.optimize_s = round(time.monotonic() - started, 3)

    @property
    def queues(self) -> Queues:
        """The queues in the table."""
        if self._queues is None:
            self._queues = self._table.queues() if self._table.exists() else {}
        return self._queues

    def _follow(self, checkpoint: str, stop: Event) -> None:
        from .source import UnitSource  # needs PySpark

        self._spark.dataSource.register(UnitSource)
        # The planned start, or entries that retention deletes meanwhile would be missing without an error
        # (test_entries_deleted_between_plan_and_stream_are_a_loss).
        starts = {group: start for group, (start, _) in self._plan.ranges.items()}
        options = {**self._plan.source, "startingOffsets": json.dumps(starts), "rules": self._plan.rules.to_json()}
        if self._plan.trigger == AVAILABLE_NOW:  # entries that are appended meanwhile are left to the next run
            ends = {group: end for group, (_, end) in self._plan.ranges.items()}
            options["endingOffsets"] = json.dumps(ends)
        rows = self._spark.readStream.format(UnitSource.name()).schema(DECODED_SCHEMA).options(**options).load()
        writer = rows.writeStream.foreachBatch(with_short_errors(self._take)).option("checkpointLocation", checkpoint)
        query = writer.trigger(**parse_trigger(self._plan.trigger)).start()
        try:
            self._query.set_result(str(query.id))
            while not query.awaitTermination(_POLL_S):
                if stop.is_set():
                    return
        finally:
            query.stop()

    def _take(self, rows: DataFrame, number: int) -> None:
        """Write a micro-batch to the table."""
        if self._plan.checkpoint is not None:
            if number == 0 and not self._table.exists():
                self._table.replace(self._spark.createDataFrame([], TABLE_SCHEMA), self._query.result())
            self._table.check_owner(self._query.result())
        if number == 0 and rows.isEmpty():  # it only records the start of the stream in the checkpoint
            return
        self._write(self._with_classic(rows), number)
        progress(f"micro-batch {number} is in the table")

    def _with_classic(self, rows: DataFrame) -> DataFrame:
        plan = self._plan
        if self.batches or not plan.classic:
            return rows
        [group] = plan.ranges
        rules = replace(plan.rules, header_bytes=0, broker_end=ALL_ENTRIES, hidden=())
        from .source import read_classic  # needs PySpark

        return read_classic(self._spark, plan.classic, group, rules, closed=bool(plan.source)).unionByName(rows)

    def _write(self, rows: DataFrame, number: int) -> None:
        """Place the units among decoded rows, and write them."""
        from pyspark import StorageLevel

        rows = rows.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            ranges = rows.where("batch is null").drop("batch")
            queues = queues_of(ranges, self._plan.batch_topics)
            found = [row.asDict() for row in queues.collect()]
            counts = count_units(found)
            self._count_skipped(ranges)
            self.units += counts.given + counts.assigned
            progress(f"{counts.given + counts.assigned} units; writing the table")
            if self._plan.checkpoint is None and not self.batches:
                self._table.replace(place(units_of(rows), ranges, queues, counts))
                self._queues = advanced({}, found)
            elif counts.given + counts.assigned:
                if counts.given:
                    self._check_first(ranges)
                known = self.queues
                bases = self._spark.createDataFrame([(*key, queue.end) for key, queue in known.items()], _ENDS)
                placed = place(units_of(rows), ranges, queues, counts, bases)
                self._table.append(placed, self._query.result(), number)
                # The table may have had the first micro-batch of this run, and counted it.
                self._queues = advanced(known, found) if self.batches else None
            self.batches += 1
        finally:
            rows.unpersist()

    def _check_first(self, ranges: DataFrame) -> None:
        """Check that all of a broker's queue offsets are in this batch: the served messages depend on all of them."""
        from pyspark.sql import functions as f

        begin = ranges.where("carried and skipped is null").agg(f.min("position")).first()
        assert begin is not None
        if self._table.rows().where(f.col("position") < begin[0]).limit(1).count():
            remedy = "rebuild the table without --checkpoint"
            what = "--checkpoint: entries with a broker's queue offsets follow entries in the table"
            raise ConfigError(what, "", remedy)

    def _count_skipped(self, ranges: DataFrame) -> None:
        from pyspark.sql import functions as f

        counts = ranges.where("skipped is not null").groupBy("skipped").agg(f.sum("units")).collect()
        self.skipped.update(dict(map(tuple, counts)))
        for reason in (STRANGE, IMPOSSIBLE, DAMAGED, DAMAGED_MESSAGE):
            known = self.places.setdefault(reason, [])
            if self.skipped[reason] and len(known) < _PLACES_MAX:
                found = ranges.where(f.col("skipped") == reason).select("position").orderBy("position")
                known += [row["position"] for row in found.limit(_PLACES_MAX - len(known)).collect()]
