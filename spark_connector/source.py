"""The data source ``dledger``: makes the reader or writer that the options ask for."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from spark_connector.columns import chosen_columns, ddl_of, schema_for
from spark_connector.errors import OptionError, brief
from spark_connector.options import DLedgerOptions
from spark_connector.planning import core_count
from spark_connector.reading.readers import DLedgerBatchReader, DLedgerStreamReader, FilteredBatchReader
from spark_connector.reading.tables import TABLES, TableReader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["DLedgerDataSource", "data_source_of"]


class DLedgerDataSource(DataSource):
    """``format("dledger")``: batch and stream, reading and writing.

    Attributes:
        parallelism: number of tasks that the cluster runs at once; None = not known, see ``core_count``.
    """

    parallelism: ClassVar[int | None] = None

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "dledger"

    @brief
    def schema(self) -> str:
        """The columns of a read; raises on a wrong option, before the query starts."""
        return ddl_of(_columns_of(DLedgerOptions.for_reading(self.options)))

    @brief
    def reader(self, schema: StructType) -> DataSourceReader:
        """Make the batch reader, or that of a metadata table."""
        options = self._read_options(schema)
        if options.table is not None:
            return TableReader(options)
        return DLedgerBatchReader(options) if options.filter_pushdown == "none" else FilteredBatchReader(options)

    @brief
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Make the stream reader."""
        if "table" in {name.lower() for name in self.options}:
            raise OptionError("table: a metadata table cannot be streamed", "", "use spark.read, not spark.readStream")
        return DLedgerStreamReader(self._read_options(schema))

    @brief
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Make the batch writer: one transaction for each group."""
        options = DLedgerOptions.for_writing(self.options)
        from spark_connector.writing.writers import DLedgerBatchWriter  # readers do not need RocketMQ's modules

        return DLedgerBatchWriter(options, schema, overwrite)

    @brief
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Make the stream writer: one transaction for each micro-batch and group."""
        options = DLedgerOptions.for_writing(self.options, stream=True)
        checkpoint = self.options.get("checkpointlocation", "")
        from spark_connector.writing.writers import DLedgerStreamWriter

        return DLedgerStreamWriter(options, schema, overwrite, self.label(), checkpoint)

    def label(self) -> str:
        """Return a name of the query that all its writers compute, whether they plan, commit or abort.

        Spark makes each of them from the options alone, of which the checkpoint location is no other query's.
        """
        options = json.dumps(sorted(self.options.items()))
        return hashlib.sha256(options.encode()).hexdigest()[:16]

    def _read_options(self, schema: StructType) -> DLedgerOptions:
        options = DLedgerOptions.for_reading(self.options)
        chosen = chosen_columns(schema, _columns_of(options))
        return options.model_copy(update={"columns": chosen, "parallelism": self.parallelism})


def data_source_of(spark: SparkSession) -> type[DLedgerDataSource]:
    """Return the data source for a session: it knows the parallelism of the session's cluster as of now."""
    # Only here is the session known: Spark makes a source from its class and the options, in a process of its own.
    context = getattr(spark, "sparkContext", None)  # Spark Connect has none
    if context is None:
        setting = spark.conf.get("spark.default.parallelism", None)
        parallelism = int(setting) if setting else None
    elif context.master.partition("[")[0] == "local":
        parallelism = context.defaultParallelism
    else:
        # The executors of a cluster may not have registered yet.
        parallelism = max(context.defaultParallelism, core_count())
    return type(DLedgerDataSource.__name__, (DLedgerDataSource,), {"parallelism": parallelism})


def _columns_of(options: DLedgerOptions) -> pa.Schema:
    return schema_for(options.decode, options.protocol) if options.table is None else TABLES[options.table]
