"""Source and sink with the installed Spark: ``python -m tests.support.spark_smoke``, which prints one line.

For each row of the table of versions in ``spark_connector/README.md``: a batch read, a stream with limits that
continues after a restart, the sink, whose driver is killed in the middle of the query and started again, and, where
Delta has a jar, a stream into a Delta table.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import DataFrame, SparkSession

from dledger_core import Client, LocalCluster
from dledger_core.environment import DELTA_SPARK_VERSIONS
from spark_connector import register
from spark_connector.reading.admission import PASSES_START

COUNT, LIMIT = 1000, 300
TIMEOUT_S = 300.0


HAS_DELTA = pyspark.__version__.rpartition(".")[0] in DELTA_SPARK_VERSIONS


def session() -> SparkSession:
    builder: Any = SparkSession.builder
    builder = builder.master("local[2]").config("spark.ui.enabled", "false")
    if HAS_DELTA:
        from delta import configure_spark_with_delta_pip

        builder = builder.config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        builder = builder.config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
        builder = configure_spark_with_delta_pip(builder)
    spark: SparkSession = builder.getOrCreate()
    register(spark)
    return spark


def source(spark: SparkSession, peers: str) -> Any:
    reader = spark.readStream.format("dledger").option("peers", peers).option("startingOffsets", "earliest")
    return reader.option("maxOffsetsPerTrigger", LIMIT).load().select("body")


def run_stream(spark: SparkSession, peers: str, checkpoint: Path, rows: dict[int, int], wanted: int) -> None:
    """Run the stream until it has read the wanted number of entries; ``rows`` gets those of each micro-batch."""
    is_done = threading.Event()

    def count(batch: DataFrame, number: int) -> None:
        rows[number] = batch.count()  # the last one of a stopped query may be run again
        if sum(rows.values()) >= wanted:
            is_done.set()

    writer = source(spark, peers).writeStream.foreachBatch(count).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(processingTime="100 milliseconds").start()
    assert is_done.wait(TIMEOUT_S), rows
    query.stop()


def count_in_table(spark: SparkSession, peers: str, directory: Path) -> int:
    """Stream all there is into a Delta table, and return the number of different bodies in it."""
    writer = source(spark, peers).writeStream.format("delta").option("checkpointLocation", f"{directory}/checkpoint")
    writer.trigger(availableNow=True).start(f"{directory}/table").awaitTermination()
    return spark.read.format("delta").load(f"{directory}/table").distinct().count()


def sink(peers: str, checkpoint: str) -> None:
    """Stream into the group ``out``, as a driver of its own."""
    writer = source(session(), peers).writeStream.format("dledger").option("peers", peers).option("group", "out")
    writer.option("checkpointLocation", checkpoint).trigger(
        processingTime="100 milliseconds"
    ).start().awaitTermination()


def count_out(peers: str) -> tuple[int, int]:
    """Return the number of bodies in ``out``, and of different ones."""
    with Client(peers, group="out") as client:
        bodies = client.read(0, 1 << 20, max_bytes=64 << 20).column("body").to_pylist()
    return len(bodies), len(set(bodies))


def killed_and_continued_sink(peers: str, directory: Path) -> tuple[int, int]:
    """Kill the driver once it has written something, start it again, and return ``count_out``."""
    command = [sys.executable, "-m", "tests.support.spark_smoke", peers, str(directory)]
    for wanted in (1, 2 * COUNT):
        driver = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
        try:
            end = time.monotonic() + TIMEOUT_S
            while count_out(peers)[0] < wanted:
                assert time.monotonic() < end, "the sink has stopped"
                assert driver.poll() is None, "the driver ended"
                time.sleep(0.1)
        finally:
            os.killpg(driver.pid, signal.SIGKILL)  # the driver and its JVM
            driver.wait()
    return count_out(peers)


def main() -> None:
    with tempfile.TemporaryDirectory() as name, LocalCluster(1, groups=("default", "out")) as cluster:
        peers, directory = cluster.peers, Path(name)
        spark = session()
        rows: dict[int, int] = {}
        for wanted in (COUNT, 2 * COUNT):
            with Client(peers) as client:
                client.append([f"{wanted}-{number}".encode() for number in range(COUNT)])
            run_stream(spark, peers, directory / "stream", rows, wanted)
            assert sum(rows.values()) == wanted, rows
        # Spark 4.1 does not tell a new query's first micro-batch from an AvailableNow run, which has no limit.
        limited = [count for number, count in rows.items() if number > 0 or PASSES_START]
        assert 0 < max(limited) <= LIMIT, rows
        assert spark.read.format("dledger").option("peers", peers).load().count() == 2 * COUNT
        assert not HAS_DELTA or count_in_table(spark, peers, directory / "delta") == 2 * COUNT
        spark.stop()
        assert killed_and_continued_sink(peers, directory / "sink") == (2 * COUNT, 2 * COUNT)
    delta = ", Delta" if HAS_DELTA else ""
    did = f"batch, limits over a restart, sink whose driver was killed{delta}"
    sys.stdout.write(f"PySpark {pyspark.__version__}: {did}: ok\n")


if __name__ == "__main__":
    sink(*sys.argv[1:]) if sys.argv[1:] else main()
