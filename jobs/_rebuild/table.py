"""The Delta table that the rebuild writes: made, extended or replaced, clustered, and read back.

A table belongs to the checkpoint that keeps it, and remembers the id of its streaming query: with another checkpoint
it would hold messages twice, so that is refused. A write carries the query's id and the micro-batch's number, so a
micro-batch that is run again after a crash writes nothing.

One Delta commit makes or replaces a table without a checkpoint, so readers see its old rows until all new ones are
there, and never a mixture. Delta clusters by topic and queue only with ``OPTIMIZE``, which follows as a separate
commit: it moves rows and changes none. Users run OPTIMIZE themselves on a table with a checkpoint, because it rewrites
much of the table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa

from dledger_core import ConfigError
from jobs._rebuild.queues import Queue, Queues
from jobs._rebuild.slots import QUEUE
from jobs._rebuild.units import UNIT_COLUMNS
from spark_connector import ddl_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["TABLE_SCHEMA", "Table", "kept_in"]

TABLE_SCHEMA: Final = ddl_of(
    pa.schema([*UNIT_COLUMNS, pa.field("broker_serves", pa.bool_()), pa.field("rebuild_slot", pa.int64())])
)
_COLUMNS: Final = [*UNIT_COLUMNS.names, "broker_serves", "rebuild_slot"]
_OWNER: Final = "dledger.rebuild.query"
"""Table property: id of the streaming query that keeps the table."""
_SEARCHED: Final = ("topic", "queue_id", "queue_offset", "position", "index", "store_timestamp", "msg_id")
"""Columns by whose least and greatest values files are skipped; for others these would cost time and skip little."""


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

    def replace(self, rows: DataFrame, owner: str | None = None) -> None:
        """Put the rows in the place of all others, in one commit that makes the table if there is none.

        Args:
            rows: columns of TABLE_SCHEMA.
            owner: the id of the query that is to keep the table.
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

    def cluster(self) -> None:
        """Cluster the rows by topic and queue."""
        from delta.tables import DeltaTable

        DeltaTable.forPath(self._spark, self._path).optimize().executeCompaction()

    def rows(self) -> DataFrame:
        """Return the table as it is now."""
        return self._spark.read.format("delta").load(self._path)

    def queues(self) -> Queues:
        """Return the queues in the table."""
        from pyspark.sql import functions as f

        offset = f.col("queue_offset")
        found = self.rows().groupBy(*QUEUE).agg(
            f.min(offset).alias("low"),
            (f.max(offset) + 1).alias("end"),
            f.count("*").alias("rows"),
            f.count_if("broker_serves").alias("slots"),
            f.bool_or(f.expr("not broker_serves or rebuild_slot is null")).alias("tangled"),
        )  # fmt: skip
        return {(group, topic, queue_id): Queue(*rest) for group, topic, queue_id, *rest in found.collect()}


def kept_in(rows: DataFrame, on_duplicate: str) -> DataFrame:
    """Return the unit of each slot, with ``queue_offset`` = slot: as in RocketMQ's rebuild, or on a running broker."""
    from pyspark.sql import functions as f

    if on_duplicate == "last":
        return rows.where("broker_serves")
    return rows.where("rebuild_slot is not null").withColumn("queue_offset", f.col("rebuild_slot"))
