"""Two tables of one query: decoded messages, and the bodies that cannot be decoded (dead letters).

Delta's own sink writes one table, so ``foreachBatch`` writes both. Each write has the query's id and the number of the
micro-batch, as one of Delta's sink has: a micro-batch that is repeated after a crash writes nothing that is there, and
a query can continue with or without dead letters.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from spark_connector import ddl_of
from spark_connector.messages import MESSAGE_SCHEMA
from spark_connector.schemas import STORED_BODY

from .._table_history import batch_metadata

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["DEAD_LETTERS", "MessagesAndDeadLetters"]

_KEPT: Final = ("group", "index", "term", "position", "timestamp", "batch_index")
DEAD_LETTERS: Final = pa.schema(
    [*(MESSAGE_SCHEMA.field(name) for name in _KEPT), pa.field("body", pa.binary()), pa.field("reason", pa.string())]
)
"""Columns of the dead letters: the entry, its body as the log has it, and why it is not a message.

An entry of a CommitLog has a position and no index.
"""


class MessagesAndDeadLetters:
    """Writes each micro-batch to both tables, once.

    Args:
        table: directory of the table of messages.
        columns: its columns.
        dead_letters: directory of the other one.

    Attributes:
        query: the query's id, to be set once it has started.
        count: dead letters so far.
    """

    def __init__(self, table: str, columns: list[str], dead_letters: str) -> None:
        self._table = table
        self._columns = columns
        self._dead_letters = dead_letters
        self.query: Future[str] = Future()
        self.count = 0

    @staticmethod
    def schema(offered: pa.Schema) -> str:
        """Return the columns to read, as DDL: those offered, and the bodies as the log has them."""
        return ddl_of(offered.append(STORED_BODY))

    def write(self, rows: DataFrame, number: int) -> None:
        """Write a micro-batch; the function of ``foreachBatch``."""
        rows = rows.persist()  # read and decoded once
        try:
            dead = rows.where("error is not null")
            count = dead.count()
            # First: after a crash here the query may continue without dead letters, whose table then has all rows.
            if count:
                body, reason = f"{STORED_BODY.name} as body", "error as reason"
                self._append(
                    dead.selectExpr(*(f"`{name}`" for name in _KEPT), body, reason), self._dead_letters, number
                )
            self.count += count
            # Without a row too: the table's history has each micro-batch of the checkpoint.
            self._append(rows.where("error is null").select(*self._columns), self._table, number)
        finally:
            rows.unpersist()

    def _append(self, rows: DataFrame, directory: str, number: int) -> None:
        query = self.query.result()
        writer = rows.write.format("delta").mode("append").option("userMetadata", batch_metadata(query, number))
        writer.option("txnAppId", query).option("txnVersion", str(number)).save(directory)
