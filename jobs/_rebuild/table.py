"""The Delta table that the rebuild writes: made, extended or replaced, clustered, and read back.

A table belongs to the checkpoint that keeps it, and remembers the id of its streaming query: with another checkpoint
it would hold messages twice, so that is refused. A write carries the query's id and the micro-batch's number, so a
micro-batch that is run again after a crash writes nothing.

A table without a checkpoint is replaced by one Delta commit, so readers see its old rows until all new ones are there,
and never a mixture. Delta clusters by topic and queue only with ``OPTIMIZE``, which follows as a commit of its own: it
moves rows and changes none. A table kept by a checkpoint is left to its user's own OPTIMIZE, which rewrites much of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from dledger_core import ConfigError
from jobs._directories import check_table
from jobs._rebuild.slots import QUEUE
from jobs._rebuild.units import UNIT_COLUMNS
from spark_connector import ddl_of, local_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "TABLE_SCHEMA",
    "Ends",
    "Table",
    "check_table_option",
    "kept_in",
]

TABLE_SCHEMA: Final = ddl_of(
    pa.schema([*UNIT_COLUMNS, pa.field("broker_serves", pa.bool_()), pa.field("rebuild_slot", pa.int64())])
)
_COLUMNS: Final = [*UNIT_COLUMNS.names, "broker_serves", "rebuild_slot"]
_OWNER: Final = "dledger.rebuild.query"
"""Table property: id of the streaming query that keeps the table."""
_CLUSTERED_BYTES_MIN: Final = 1 << 30
_SEARCHED: Final = ("topic", "queue_id", "queue_offset", "position", "index", "store_timestamp", "msg_id")
"""Columns by whose least and greatest values files are skipped; for others these would cost time and skip little."""

Ends = dict[tuple[str, str, int], int]
"""The offset behind the last one of each queue, by group, topic and queue id."""


def check_table_option(table: str) -> str:
    """Return the table's absolute path; refuse a directory that holds something other than a Delta table."""
    check_table(table)
    return str(local_path(table) or table)


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
        """Return the id of the query that keeps the table, None if there is no table or it is replaced whole."""
        from delta.tables import DeltaTable

        if not self.exists():
            return None
        properties = DeltaTable.forPath(self._spark, self._path).detail().select("properties").first()
        assert properties is not None
        return dict(properties[0]).get(_OWNER)

    def check(self, *, kept: bool) -> None:
        """Check a table that is there already, before anything is read.

        Args:
            kept: a checkpoint is to keep it; otherwise it is to be replaced.

        Raises:
            ConfigError: it has other columns, or is kept by a checkpoint and none was given, or the other way round.
        """
        if not self.exists():
            return
        columns = self.rows().columns
        if columns != _COLUMNS:
            remedy = "name another directory; a table of an earlier version is made anew"
            raise ConfigError(
                f"{self._path} is a table of something else", "--table", remedy, {"columns": ",".join(columns)}
            )
        if kept and self.owner() is None:
            raise ConfigError(f"{self._path} was rebuilt as a whole", "--table", "name a new directory")
        if not kept and self.owner() is not None:
            remedy = "give its --checkpoint, or name another table"
            raise ConfigError(f"{self._path} is kept up to date by a stream", "--table", remedy)

    def make(self, owner: str | None = None) -> None:
        """Make the table, clustered by queue, if there is none.

        Args:
            owner: the id of the query that is to keep it.
        """
        from delta.tables import DeltaTable

        schema = self._spark.createDataFrame([], TABLE_SCHEMA).schema
        builder = DeltaTable.createIfNotExists(self._spark).location(self._path).addColumns(schema)
        builder = builder.property("delta.dataSkippingStatsColumns", ",".join(_SEARCHED))
        if owner is not None:
            builder = builder.property(_OWNER, owner)
        builder.clusterBy("topic", "queue_id").execute()

    def check_owner(self, query: str) -> None:
        """Raise ConfigError unless the query keeps the table."""
        if self.owner() != query:
            raise ConfigError(
                f"{self._path} was not made with this checkpoint",
                "--table, --checkpoint",
                "give the table's own checkpoint, or a new table and a new checkpoint",
            )

    def append(self, rows: DataFrame, query: str, number: int) -> None:
        """Add the rows of a micro-batch of a query, once: Delta skips a micro-batch that it has committed."""
        writer = rows.write.format("delta").mode("append")
        writer.option("txnAppId", query).option("txnVersion", str(number)).save(self._path)

    def replace(self, rows: DataFrame) -> None:
        """Put the rows in the place of all others, in one commit."""
        # A plain overwrite would forget the table's clustering; replacing every row does not.
        rows.write.format("delta").mode("overwrite").option("replaceWhere", "true").save(self._path)

    def cluster(self) -> bool:
        """Cluster the rows by topic and queue where that helps; return whether it does.

        OPTIMIZE writes files of up to 1 GiB: of a smaller table one file, in which Delta can skip nothing.
        """
        from delta.tables import DeltaTable

        table = DeltaTable.forPath(self._spark, self._path)
        size = table.detail().select("sizeInBytes").first()
        if size is None or size[0] <= _CLUSTERED_BYTES_MIN:
            return False
        table.optimize().executeCompaction()
        return True

    def rows(self) -> DataFrame:
        """Return the table as it is now."""
        return self._spark.read.format("delta").load(self._path)

    def ends(self) -> Ends:
        """Return where the queues end."""
        from pyspark.sql import functions as f

        ends = self.rows().groupBy(*QUEUE).agg((f.max("queue_offset") + 1).alias("end")).collect()
        return {(row["group"], row["topic"], row["queue_id"]): row["end"] for row in ends}

    def facts(self, batch_topics: tuple[str, ...]) -> dict[str, Any]:
        """Count rows, slots and queues for the summary.

        Args:
            batch_topics: their queues may have holes, as a message there takes several queue offsets.
        """
        from pyspark.sql import functions as f

        offset = f.col("queue_offset")
        queues = self.rows().groupBy(*QUEUE).agg(
            f.count("*").alias("rows"),
            f.count_if("broker_serves").alias("slots"),
            f.count_if(f.col("rebuild_slot").isNull()).alias("left_out"),
            (f.max(offset) - f.min(offset) + 1).alias("span"),
        )  # fmt: skip
        dense = (f.col("slots") == f.col("span")) | f.col("topic").isin(*batch_topics)
        row = queues.agg(
            f.count("*").alias("queues"),
            *(f.coalesce(f.sum(name), f.lit(0)).alias(name) for name in ("rows", "slots", "left_out")),
            f.coalesce(f.bool_and(dense), f.lit(True)).alias("dense"),
        ).first()
        assert row is not None
        return {**row.asDict(), "duplicate_slots": row["rows"] - row["slots"]}


def kept_in(rows: DataFrame, on_duplicate: str) -> DataFrame:
    """Return the unit of each slot, with ``queue_offset`` = slot: as in RocketMQ's rebuild, or on a running broker."""
    from pyspark.sql import functions as f

    if on_duplicate == "last":
        return rows.where("broker_serves")
    return rows.where("rebuild_slot is not null").withColumn("queue_offset", f.col("rebuild_slot"))
