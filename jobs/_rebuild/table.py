"""The Delta table that the rebuild writes: made, checked, and read back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from dledger_core.errors import ConfigError
from jobs._directories import check_table
from jobs._rebuild.units import SEARCHED, UNIT_COLUMNS, UNIT_SCHEMA
from spark_connector import local_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "PROPERTIES",
    "TABLE_COLUMNS",
    "TABLE_SCHEMA",
    "checked_table",
    "kept_in",
    "make_table",
    "read_table",
    "table_facts",
]

TABLE_COLUMNS: Final = (*UNIT_COLUMNS, "broker_serves", "rebuild_slot")
TABLE_SCHEMA: Final = (
    ", ".join(UNIT_SCHEMA.split(", ")[: len(UNIT_COLUMNS)]) + ", broker_serves boolean, rebuild_slot bigint"
)

PROPERTIES: Final = {"delta.dataSkippingStatsColumns": ",".join(SEARCHED)}
"""Of a table that was rebuilt as a whole."""


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
            remedy = "name another directory; a table of an earlier version is made anew"
            raise ConfigError(f"{table} is a table of something else", "--table", remedy, found)
        return
    schema = spark.createDataFrame([], TABLE_SCHEMA).schema
    builder = DeltaTable.createIfNotExists(spark).location(table).addColumns(schema)
    for name, value in (PROPERTIES | (properties or {})).items():
        builder = builder.property(name, value)
    builder.clusterBy("topic", "queue_id").execute()


def read_table(spark: SparkSession, table: str) -> DataFrame:
    """The table as it is now."""
    return spark.read.format("delta").load(table)


def kept_in(rows: DataFrame, on_duplicate: str) -> DataFrame:
    """The unit of each slot, with ``queue_offset`` = slot: as RocketMQ's rebuild has it, or as a running broker."""
    from pyspark.sql import functions as f

    if on_duplicate == "last":
        return rows.where("broker_serves")
    return rows.where("rebuild_slot is not null").withColumn("queue_offset", f.col("rebuild_slot"))


def table_facts(spark: SparkSession, table: str) -> dict[str, Any]:
    """Says what a table holds that was not rebuilt as a whole."""
    from pyspark.sql import functions as f

    offset = f.col("queue_offset")
    queues = (
        read_table(spark, table)
        .groupBy("group", "topic", "queue_id")
        .agg(
            f.count("*").alias("rows"),
            f.count_if("broker_serves").alias("slots"),
            (f.max(offset) - f.min(offset) + 1).alias("span"),
        )
    )
    row = queues.agg(
        f.count("*").alias("queues"),
        *(f.coalesce(f.sum(name), f.lit(0)).alias(name) for name in ("rows", "slots")),
        f.coalesce(f.bool_and(f.col("slots") == f.col("span")), f.lit(True)).alias("dense"),
    ).first()
    assert row is not None
    found = {name: row[name] for name in ("rows", "slots", "queues", "dense")}
    return {**found, "duplicate_slots": row["rows"] - row["slots"]}
