"""The data source that the rebuild streams from: each task decodes the entries that it reads.

Message bodies stay in the process that reads them. As rows of ``format("dledger")`` they would cross from Python to
the JVM and back only to be decoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from jobs._rebuild.units import DECODED_SCHEMA, EntryRules, decoded
from spark_connector.options import DLedgerOptions
from spark_connector.reading.readers import DLedgerStreamReader
from spark_connector.source import DLedgerDataSource

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import InputPartition
    from pyspark.sql.types import StructType

__all__ = ["UnitSource"]

_COLUMNS: Final = ("group", "index", "position", "body")


class UnitSource(DLedgerDataSource):
    """``format("dledger-units")``: rows of DECODED_SCHEMA.

    Its options are those of ``format("dledger")`` and ``rules``: the JSON text of EntryRules.
    """

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "dledger-units"

    def schema(self) -> str:
        """Columns of a read."""
        return DECODED_SCHEMA

    def streamReader(self, schema: StructType) -> UnitReader:
        """Make the stream reader."""
        entries = dict(self.options)
        rules = EntryRules.parse(entries.pop("rules"))
        options = DLedgerOptions.for_reading(entries).model_copy(update={"columns": _COLUMNS})
        return UnitReader(options, rules)


class UnitReader(DLedgerStreamReader):
    """Plans micro-batches as the connector's reader does; its tasks decode."""

    def __init__(self, options: DLedgerOptions, rules: EntryRules) -> None:
        super().__init__(options)
        self._rules = rules

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self._options, "rules": self._rules}

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the units of the partition's entries and their runs."""
        return decoded(super().read(partition), self._rules)
