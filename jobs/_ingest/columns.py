"""The columns of the job's Delta tables, compared with the rows that it writes before anything is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from dledger_core import ConfigError
from spark_connector import ddl_of, local_path
from spark_connector.columns import schema_for

from .._cli import progress
from .._delta_log import StoredColumns, stored_columns

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructField

__all__ = ["TargetTable"]

_ADDED: Final = {"batch_index"}
"""Columns that tables of earlier releases lack."""


class TargetTable:
    """A Delta table that may exist, and the columns that the job writes to it.

    Args:
        option: the option that names it.
        directory: its directory.
        offered: the columns of the rows.
    """

    def __init__(self, option: str, directory: str, offered: pa.Schema) -> None:
        self.directory = directory
        self._option = option
        self._offered = offered

    def columns(self, spark: SparkSession | None = None) -> list[str] | None:
        """Return the columns to write; None if only Spark can read the table, and there is no session yet.

        A nullable column that the rows lack is left to its user and becomes null; Delta computes a generated one. A
        table of an earlier release lacks columns that were added since, and keeps its own.

        Raises:
            ConfigError: a column is missing or has another type, or the rows lack one that must not be null or that the
                table is partitioned by.
        """
        path = local_path(self.directory)
        if path is not None:
            stored = stored_columns(path)
        elif spark is None:
            return None
        else:
            stored = self._columns_by(spark)
        names: list[str] = self._offered.names
        if stored is None or not stored.schema["fields"]:
            return names
        from pyspark.sql.types import StructType

        fields = StructType.fromJson(stored.schema).fields
        found = {field.name.lower(): field for field in fields}  # names as Delta's: no case
        self._check(found, stored.partitions)
        for name in _ADDED & set(names) - set(found):
            add = f"ALTER TABLE delta.`{self.directory}` ADD COLUMN {name} {self._type_of(name)}"
            progress(f"note: the table has no column {name}; to add it, run in Spark SQL: {add}")
        return [name for name in names if name in found]

    def _columns_by(self, spark: SparkSession) -> StoredColumns | None:
        """Return the columns of a table anywhere, without its partitions: Spark does not show which are generated."""
        from delta.tables import DeltaTable

        if not DeltaTable.isDeltaTable(spark, self.directory):
            return None
        return StoredColumns(json.loads(spark.read.format("delta").load(self.directory).schema.json()))

    def _check(self, found: dict[str, StructField], partitions: Sequence[str]) -> None:
        names = set(self._offered.names)
        missing = sorted(names - set(found) - _ADDED)
        other = [
            f"{name} is {found[name].dataType.simpleString()}, not {self._type_of(name)}"
            for name in sorted(names & set(found))
            if found[name].dataType.simpleString() != self._type_of(name)
        ]
        of_messages = set(schema_for("message").names) - _ADDED
        left_out = {name: field for name, field in found.items() if name not in names and not _is_generated(field)}
        needed = sorted(field.name for field in left_out.values() if not field.nullable)
        where = f"{self._option} {self.directory}"
        remedy = "name another directory, or use the --decode and --protocol of the table"
        if missing or other:
            wrong = [*(f"it has no column {name}" for name in missing), *other]
            raise ConfigError(f"{where} has other columns than the rows to write: {', '.join(wrong)}", "", remedy)
        if "topic" not in names and of_messages <= set(found):
            raise ConfigError(f"{where} has the columns of messages, and the rows are not decoded", "", remedy)
        if needed:
            alter = f"ALTER TABLE delta.`{self.directory}` ALTER COLUMN `{needed[0]}` DROP NOT NULL"
            what = f"{where}: the rows have no column {', '.join(needed)}, which must not be null"
            raise ConfigError(what, "", f"name another directory, or run in Spark SQL: {alter}")
        # Delta's sink refuses rows without such a column at the first micro-batch.
        absent = [name for name in partitions if name.lower() in left_out]
        if absent:
            what = f"{where} is partitioned by {', '.join(absent)}, which the rows do not have"
            ways = "name another directory, or make such a column of the table one that Delta generates"
            raise ConfigError(what, "", f"{ways}: DATE GENERATED ALWAYS AS (CAST(timestamp AS DATE))")

    def _type_of(self, name: str) -> str:
        field = self._offered.field(name)
        return ddl_of(pa.schema([pa.field("x", field.type)])).removeprefix("`x` ")


def _is_generated(field: StructField) -> bool:
    """Whether Delta computes the column from others."""
    return "delta.generationExpression" in field.metadata
