"""The Delta table that the rebuild writes: made, checked, and read back for the summary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dledger_core.errors import ConfigError
from jobs._directories import check_table, local_path
from jobs._rebuild.units import TABLE_COLUMNS, TABLE_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["checked_table", "make_table", "queue_facts"]


def checked_table(table: str) -> str:
    """Returns the table's absolute path; refuses a directory that holds something other than a Delta table."""
    check_table(table)
    return str(local_path(table) or table)


def make_table(spark: SparkSession, table: str, properties: dict[str, str] | None = None) -> None:
    """Makes the table clustered by queue if it is absent; refuses one with other columns."""
    from delta.tables import DeltaTable

    if DeltaTable.isDeltaTable(spark, table):
        columns = tuple(spark.read.format("delta").load(table).columns)
        if columns != TABLE_COLUMNS:
            found = {"columns": ",".join(columns)}
            raise ConfigError(f"{table} is a table of something else", "--table", "name another directory", found)
        return
    schema = spark.createDataFrame([], TABLE_SCHEMA).schema
    builder = DeltaTable.createIfNotExists(spark).location(table).addColumns(schema)
    for name, value in (properties or {}).items():
        builder = builder.property(name, value)
    builder.clusterBy("topic", "queue_id").execute()


def queue_facts(spark: SparkSession, table: str) -> dict[str, Any]:
    """Reads the written table back and says what it holds."""
    from pyspark.sql import functions as f

    offset = f.col("queue_offset")
    queues = (
        spark.read.format("delta")
        .load(table)
        .groupBy("group", "topic", "queue_id")
        .agg(f.count("*").alias("rows"), (f.max(offset) - f.min(offset) + 1).alias("slots"))
    )
    row = queues.agg(
        f.count("*").alias("queues"),
        f.coalesce(f.sum("rows"), f.lit(0)).alias("rows"),
        f.coalesce(f.bool_and(f.col("rows") == f.col("slots")), f.lit(True)).alias("without_holes"),
    ).first()
    assert row is not None
    return {"rows": row["rows"], "queues": row["queues"], "dense": bool(row["without_holes"])}
