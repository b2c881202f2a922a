"""The columns of the job's Delta tables, compared with the rows that it writes before anything is written."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from dledger_core import ConfigError
from spark_connector import ddl_of, local_path
from spark_connector.columns import schema_for

from .._cli import progress
from .._delta_log import stored_schema

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

        A nullable column that the rows lack is left to its user and becomes null. A table of an earlier release lacks
        columns that were added since, and keeps its own.

        Raises:
            ConfigError: a column is missing, has another type, or must not be null and the rows lack it.
        """
        path = local_path(self.directory)
        if path is not None:
            stored = stored_schema(path)
        elif spark is None:
            return None
        else:
            stored = self._schema_by(spark)
        names: list[str] = self._offered.names
        if stored is None or not stored["fields"]:
            return names
        from pyspark.sql.types import StructType

        found = {field.name.lower(): field for field in StructType.fromJson(stored).fields}  # names as Delta's: no case
        self._check(found)
        for name in _ADDED & set(names) - set(found):
            add = f"ALTER TABLE delta.`{self.directory}` ADD COLUMN {name} {self._type_of(name)}"
            progress(f"note: the table has no column {name}; to add it, run in Spark SQL: {add}")
        return [name for name in names if name in found]

    def _schema_by(self, spark: SparkSession) -> dict[str, Any] | None:
        from delta.tables import DeltaTable

        if not DeltaTable.isDeltaTable(spark, self.directory):
            return None
        schema: dict[str, Any] = json.loads(spark.read.format("delta").load(self.directory).schema.json())
        return schema

    def _check(self, found: dict[str, StructField]) -> None:
        names = set(self._offered.names)
        missing = sorted(names - set(found) - _ADDED)
        other = [
            f"{name} is {found[name].dataType.simpleString()}, not {self._type_of(name)}"
            for name in sorted(names & set(found))
            if found[name].dataType.simpleString() != self._type_of(name)
        ]
        of_messages = set(schema_for("message").names) - _ADDED
        needed = sorted(field.name for name, field in found.items() if name not in names and not field.nullable)
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

    def _type_of(self, name: str) -> str:
        field = self._offered.field(name)
        return ddl_of(pa.schema([pa.field("x", field.type)])).removeprefix("`x` ")
