"""A stream's checkpoint with the logs that it reads and writes, kept so that later versions prove they resume from it.

Make one of the version at hand, once, before it is released; those that are there stay as they are::

    python -m tests.spark_connector.kept_checkpoint

The driver of that query died after the sink's commit and before Spark's: the last micro-batch has to be replayed, and
must write nothing. After it the source has unread entries.
"""

from __future__ import annotations

import shutil
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dledger_core import Client, LocalCluster
from jobs._session import spark_session
from spark_connector import register

TESTDATA = Path(__file__).with_name("testdata")
GROUPS = ("source", "target")
STORE: dict[str, Any] = {"data_segment_bytes": 64 << 10, "index_segment_bytes": 32 << 10}
ROWS = 100
_READ = 60


def rows(start: int, end: int) -> list[bytes]:
    return [b"row-%05d" % number for number in range(start, end)]


def go_on(spark: Any, peers: str, checkpoint: Path) -> Any:
    """Start the query, to what there is now; returns it when it has ended."""
    reading = {"peers": peers, "groups": "source", "startingOffsets": "earliest", "maxOffsetsPerTrigger": "20"}
    bodies = spark.readStream.format("dledger").options(**reading).load().select("body")
    writer = bodies.writeStream.format("dledger").options(peers=peers, group="target")
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination()
    return query


def make(spark: Any, archive: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        checkpoint = directory / "checkpoint"
        stores = directory / "cluster"
        with LocalCluster(1, stores, GROUPS, **STORE) as cluster, Client(cluster.peers, "source") as client:
            client.append(rows(0, _READ))
            go_on(spark, cluster.peers, checkpoint)
            client.append(rows(_READ, ROWS))
        newest = max((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
        newest.unlink()
        newest.with_name(f".{newest.name}.crc").unlink(missing_ok=True)
        for log in stores.glob("*.log"):
            log.unlink()
        shutil.rmtree(checkpoint / "state", ignore_errors=True)
        archive.parent.mkdir(exist_ok=True)
        with tarfile.open(archive, "w:xz") as tar:
            for name in ("cluster", "checkpoint"):
                tar.add(directory / name, name)


def main() -> None:
    archive = TESTDATA / f"checkpoint-{version('dledger')}.tar.xz"
    if archive.exists():
        sys.exit(f"{archive} is there already, and stays as it is")
    with spark_session("kept-checkpoint", settings={"spark.master": "local[2]"}) as spark:
        register(spark)
        make(spark, archive)


if __name__ == "__main__":
    main()
