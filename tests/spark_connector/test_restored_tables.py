"""Delta tables that go back to an earlier version: a query continues where its Spark checkpoint ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.errors import StreamingQueryException

from tests.rocketmq.remoting.fake_nodes import NAME, RunningGroup
from tests.spark_connector.engine import read_all
from tests.spark_connector.store_writer import StoreWriter
from tests.support.soon import soon

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.slow, pytest.mark.soak]


def bodies_of(table: str) -> set[bytes]:
    return set(DeltaTable(table).to_pyarrow_table().column("body").to_pylist())


@pytest.mark.parametrize("kind", ["store", "Java group"])
def test_query_does_not_notice_that_its_table_went_back(
    dledger: Any, store: StoreWriter, java: RunningGroup, tmp_path: Path, kind: str
) -> None:
    table = str(tmp_path / "table")
    options = {"path": str(store.path)}
    if kind == "Java group":
        options = {"peers": java.peers, "groups": NAME, "protocol": "dledger-java", "safetyLag": "0ms", "pollMs": "1"}

    def write(body: bytes) -> int:
        """Append, and run the query until the table has the entry: one of Java counts once it was seen before."""
        if kind == "store":
            store.append([body])
        else:
            java.group.write(body)

        def is_there() -> bool:
            rows = dledger.readStream.format("dledger").options(**options, startingOffsets="earliest").load()
            writer = rows.select("body").writeStream.format("delta")
            writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
            writer.start(table).awaitTermination()
            return body in bodies_of(table)

        soon(is_there)
        return DeltaTable(table).version()

    version = write(b"one")
    write(b"two")
    DeltaTable(table).restore(version)
    write(b"three")
    assert bodies_of(table) & {b"one", b"two", b"three"} == {b"one", b"three"}


def test_delta_reports_restored_table_and_written_rows_stay(
    dledger: Any, cluster: Any, log: Any, tmp_path: Path
) -> None:
    table = str(tmp_path / "table")

    def run() -> None:
        writer = dledger.readStream.format("delta").load(table).writeStream.format("dledger")
        writer = writer.options(peers=cluster.peers, group=log.group, checkpointLocation=str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()

    for body in ("one", "two"):
        write_deltalake(table, pa.table({"body": [body]}), mode="append")
        run()
    DeltaTable(table).restore(0)
    with pytest.raises(StreamingQueryException, match="DELTA_SOURCE"):
        run()
    assert read_all(log) == [b"one", b"two"]
