"""The data source ``dledger``: makes the reader or writer that the options ask for."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from spark_connector.errors import OptionError
from spark_connector.options import DLedgerOptions
from spark_connector.schema import chosen_columns, ddl_of, schema_for

__all__ = ["DLedgerDataSource"]


class DLedgerDataSource(DataSource):
    """``format("dledger")``: batch and stream, reading and writing."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "dledger"

    def schema(self) -> str:
        """The columns of a read; raises on a wrong option, before the query starts."""
        return ddl_of(_columns_of(DLedgerOptions.for_reading(self.options)))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Make the batch reader, or that of a metadata table."""
        options = self._read_options(schema)
        if options.table is not None:
            from spark_connector.reading.tables import TableReader

            return TableReader(options)
        from spark_connector.reading.readers import DLedgerBatchReader

        return DLedgerBatchReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Make the stream reader."""
        if "table" in {name.lower() for name in self.options}:
            raise OptionError("table: a metadata table cannot be streamed", "", "use spark.read, not spark.readStream")
        from spark_connector.reading.readers import DLedgerStreamReader

        return DLedgerStreamReader(self._read_options(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Make the batch writer: one transaction for each group."""
        options = DLedgerOptions.for_writing(self.options)
        from spark_connector.writing.writers import DLedgerBatchWriter

        return DLedgerBatchWriter(options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Make the stream writer: one transaction for each micro-batch and group."""
        options = DLedgerOptions.for_writing(self.options)
        from spark_connector.writing.writers import DLedgerStreamWriter

        return DLedgerStreamWriter(options, schema, overwrite, self.options.get("checkpointlocation", ""))

    def _read_options(self, schema: StructType) -> DLedgerOptions:
        options = DLedgerOptions.for_reading(self.options)
        return options.model_copy(update={"columns": chosen_columns(schema, _columns_of(options))})


def _columns_of(options: DLedgerOptions) -> pa.Schema:
    if options.table is None:
        return schema_for(options.decode, options.protocol)
    from spark_connector.reading.tables import TABLES

    return TABLES[options.table]
