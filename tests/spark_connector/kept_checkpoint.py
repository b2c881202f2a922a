"""Spark checkpoints of a source and of a sink, kept so that later versions prove they resume from them.

``python -m tests.compatibility.make --only checkpoints`` makes those of this version, once, before it is released.

One query reads a log and writes another one, one reads the log into a Delta table. Each driver died after the sink's
commit and before Spark's: the last micro-batch has to be replayed, and must write nothing. After it the source has
unread entries.
"""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dledger_core import Client, LocalCluster
from jobs._session import spark_session
from spark_connector import register

GROUPS = ("source", "target")
STORE: dict[str, Any] = {"data_segment_bytes": 64 << 10, "index_segment_bytes": 32 << 10}
ROWS = 100
READ = 60


def rows(start: int, end: int) -> list[bytes]:
    return [b"row-%05d" % number for number in range(start, end)]


def _source(spark: Any, peers: str) -> Any:
    reading = {"peers": peers, "groups": "source", "startingOffsets": "earliest", "maxOffsetsPerTrigger": "20"}
    return spark.readStream.format("dledger").options(**reading).load().select("body").writeStream


def to_log(spark: Any, peers: str, directory: Path) -> Any:
    """Run the query into the other log, to what there is now; return it when it has ended."""
    writer = _source(spark, peers).format("dledger").options(peers=peers, group="target")
    return _ended(writer.option("checkpointLocation", str(directory / "checkpoint")))


def to_table(spark: Any, peers: str, directory: Path) -> Any:
    """Run the query into the Delta table, as ``to_log``."""
    writer = _source(spark, peers).format("delta")
    writer = writer.option("checkpointLocation", str(directory / "table-checkpoint"))
    return _ended(writer.option("path", str(directory / "table")))


QUERIES: dict[str, Callable[[Any, str, Path], Any]] = {"checkpoint": to_log, "table-checkpoint": to_table}
"""The queries by the names of their Spark checkpoints."""


def _ended(writer: Any) -> Any:
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    return query


def make(spark: Any, archive: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        stores = directory / "cluster"
        with LocalCluster(1, stores, GROUPS, **STORE) as cluster, Client(cluster.peers, "source") as client:
            client.append(rows(0, READ))
            for query in QUERIES.values():
                query(spark, cluster.peers, directory)
            client.append(rows(READ, ROWS))
        for name in QUERIES:
            newest = max((directory / name / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
            newest.unlink()
            newest.with_name(f".{newest.name}.crc").unlink(missing_ok=True)
            shutil.rmtree(directory / name / "state", ignore_errors=True)
        for log in stores.glob("*.log"):
            log.unlink()
        with tarfile.open(archive, "w:xz") as tar:
            for name in ("cluster", "table", *QUERIES):
                tar.add(directory / name, name)


def make_checkpoints(archive: Path) -> None:
    """Write the archive of the version at hand."""
    with spark_session("kept-checkpoint", settings={"spark.master": "local[2]"}) as spark:
        register(spark)
        make(spark, archive)
