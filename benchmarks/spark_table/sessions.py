"""The lines of other ways to run Spark: over Spark Connect, with other versions of PySpark, as a Declarative Pipeline.

Each way has a process of its own. ``python -m benchmarks.spark_table.sessions GIVEN`` is the process of one session: it
measures batch reads, streams and the sink on it, and prints the lines as JSON. *Classic* is such a process with the
installed PySpark and nothing special. The other versions of PySpark are fetched by pip on first use (450 MB each).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pyspark

from benchmarks.spark_table.brokers import Brokers, MissingError
from benchmarks.spark_table.kafka import Kafka
from benchmarks.spark_table.measures import Bench
from benchmarks.spark_table.memory_source import MemorySource
from benchmarks.spark_table.report import DLEDGER, KAFKA, Line
from benchmarks.spark_table.systems import Ledger, Memory, System
from benchmarks.timing import seconds
from dledger_core.environment import find_java

ROOT: Final = Path(__file__).resolve().parents[2]
CACHE: Final = Path.home() / ".cache" / "dledger-pyspark"
VERSIONS: Final = ("4.1.4", "4.3.0")
CLASSIC: Final = "classic"
SIZE: Final = 100
SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.log.level": "OFF",
    "spark.driver.memory": "4g",
    "spark.sql.shuffle.partitions": "2",
}
SPECIFICATION: Final = "name: speed\nstorage: {storage}\nlibraries:\n  - glob:\n      include: transformations/**\n"
PIPELINE: Final = """\
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

dp.create_sink("nothing", "noop", {{}})


@dp.append_flow(target="nothing")
def rows():
    return SparkSession.active().readStream.format({name!r}).options(**{options!r}).load()
"""
PROGRAM: Final = """\
from pyspark.sql import SparkSession
from spark_connector import register

spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
register(spark)
rows = spark.readStream.format({name!r}).options(**{options!r}).load()
rows.writeStream.format("noop").option("checkpointLocation", {checkpoint!r}).trigger(availableNow=True).start() \\
    .awaitTermination()
"""


class Elsewhere:
    """The same logs, read and written by sessions in other processes.

    Args:
        peers: the nodes, whose log of bodies of 100 B is filled.
        rows: its entries.
        rounds: runs of each system, after a warm-up.
        kafka: the brokers, filled too; for the installed PySpark only, because their jar is of its version.
    """

    def __init__(self, peers: str, rows: int, rounds: int, kafka: Brokers | None) -> None:
        self._given: dict[str, Any] = {"peers": peers, "rows": rows, "rounds": rounds}
        self._kafka = kafka

    def connect(self) -> list[Line]:
        """Measure over Spark Connect, server and client on this machine."""
        return self._with_classic("over Spark Connect", self._measured(remote=True))

    def version(self, version: str) -> list[Line]:
        """Measure with another version of PySpark."""
        home = _fetched(version)
        more = {"PYTHONPATH": os.pathsep.join([str(home), str(ROOT)]), "SPARK_HOME": str(home / "pyspark")}
        return self._with_classic(f"PySpark {version}", self._measured(kafka=False, **more))

    def pipeline(self) -> Line:
        """The whole ``spark-pipelines run`` of one flow -> noop, JVM included; next to a program that does the same."""
        group = f"full{SIZE}"
        sources = {DLEDGER: ("dledger", {"peers": self._given["peers"], "groups": group})}
        settings: dict[str, str] = {}
        if self._kafka is not None:
            sources[KAFKA] = ("kafka", {"kafka.bootstrap.servers": self._kafka.address, "subscribe": group})
            settings = Kafka.settings(self._kafka)
        runs: dict[str, list[float]] = {name: [] for name in (*sources, "a program")}
        for _ in range(self._given["rounds"]):
            for name, (source, options) in sources.items():
                found = {"name": source, "options": {**options, "startingOffsets": "earliest", "minPartitions": "2"}}
                runs[name].append(_pipeline(found, settings))
                if name == DLEDGER:
                    runs["a program"].append(_program(found))
        return Line("Declarative Pipeline, whole run of one flow → noop, 100 B", "s", runs)

    @cached_property
    def _classic(self) -> list[Line]:
        return self._measured()

    def _with_classic(self, title: str, lines: list[Line]) -> list[Line]:
        return [
            replace(line, name=f"{title}: {line.name}", runs={**line.runs, CLASSIC: classic.runs[DLEDGER]})
            for line, classic in zip(lines, self._classic, strict=True)
        ]

    def _measured(self, *, remote: bool = False, kafka: bool = True, **more: str) -> list[Line]:
        given: dict[str, Any] = {**self._given, "remote": remote}
        if kafka and self._kafka is not None:
            given["kafka"] = {"address": self._kafka.address, "settings": Kafka.settings(self._kafka)}
        command = [sys.executable, "-m", "benchmarks.spark_table.sessions", json.dumps(given)]
        return [Line(**each) for each in json.loads(_run(command, ROOT, more).splitlines()[-1])]


def _fetched(version: str) -> Path:
    """Return a directory with a version of PySpark, which pip fetches on first use."""
    home = CACHE / version
    if not home.is_dir():
        partial = home.with_name(f"{version}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(partial)]
        _run([*command, f"pyspark=={version}"], ROOT, {})
        partial.rename(home)
    return home


def _pipeline(source: dict[str, Any], settings: dict[str, str]) -> float:
    with tempfile.TemporaryDirectory(prefix="dledger-bench-", ignore_cleanup_errors=True) as folder:
        project = Path(folder)
        (project / "transformations").mkdir()
        (project / "transformations" / "rows.py").write_text(PIPELINE.format(**source))
        (project / "spark-pipeline.yml").write_text(SPECIFICATION.format(storage=(project / "storage").as_uri()))
        home = Path(pyspark.__file__).parent
        command = [str(home / "bin" / "spark-pipelines"), "run", "--remote", "local[2]"]
        for name, value in ({"spark.ui.enabled": "false"} | settings).items():
            command += ["--conf", f"{name}={value}"]
        more = {"SPARK_HOME": str(home), "PYSPARK_DRIVER_PYTHON": sys.executable}
        return seconds(lambda: _run(command, project, more))


def _program(source: dict[str, Any]) -> float:
    with tempfile.TemporaryDirectory(prefix="dledger-bench-", ignore_cleanup_errors=True) as checkpoint:
        program = PROGRAM.format(**source, checkpoint=checkpoint)
        return seconds(lambda: _run([sys.executable, "-c", program], ROOT, {}))


def _run(command: list[str], folder: Path, more: dict[str, str]) -> str:
    environment = os.environ | {
        "JAVA_HOME": str(find_java()),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
    }
    environment |= more
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [
            line for line in (done.stderr or done.stdout).splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)
        ]
        raise MissingError(f"{' '.join(command[:3])} failed: {said[-1] if said else f'exit code {done.returncode}'}")
    return done.stdout


def main() -> None:
    """Measure on one session."""
    from pyspark.sql import SparkSession

    from spark_connector import register

    given = json.loads(sys.argv[1])
    rows, kafka = {SIZE: given["rows"]}, given.get("kafka", {})
    builder: Any = SparkSession.builder
    builder = builder.remote("local[2]") if given["remote"] else builder.master("local[2]")
    spark = builder.config(map={**SETTINGS, **kafka.get("settings", {})}).getOrCreate()
    register(spark)
    spark.dataSource.register(MemorySource)
    nodes: Any = SimpleNamespace(peers=given["peers"], groups=())
    ledger = Ledger(spark, nodes, rows)
    systems: list[System] = [ledger, Memory(spark, rows)]
    with_sink = Bench(spark, systems, rows, given["rounds"])
    if kafka:
        brokers: Any = SimpleNamespace(address=kafka["address"])
        systems = [*systems, Kafka(spark, brokers, rows)]
    bench = Bench(spark, systems, rows, given["rounds"])
    lines = [bench.batch_read(SIZE, ""), bench.whole_stream(SIZE), with_sink.sink(given["rows"] // 5, ledger)]
    sys.stdout.write(json.dumps([asdict(line) for line in lines]) + "\n")
    spark.stop()


if __name__ == "__main__":
    main()
