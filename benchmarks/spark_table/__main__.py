"""Measures the table of the Spark connector's speed, in one run and on one machine, and writes a report.

One session ``local[2]``, three nodes as they are by default (acknowledged when on disk at a majority); an in-memory
Python source with the same columns as the ceiling, and three Kafka brokers (page-cache acknowledgement, Kafka's
default) with Spark's own connector at its best settings (minPartitions = cores, large producer batches): all on this
machine, all in one run, in turn. Kafka and its connector are fetched by Maven on first use; without a JDK or Maven it
is left out, which the report mentions. This is not a test: absolute numbers depend on the machine, so read the ratios.

    python -m benchmarks.spark_table --report build/spark-speed.md
    python -m benchmarks.spark_table --quick --only read sink --without-kafka
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.spark_table import brokers
from benchmarks.spark_table.hung_node import hung_lines
from benchmarks.spark_table.kafka import Kafka
from benchmarks.spark_table.latency import latency_lines
from benchmarks.spark_table.measures import TO_REACH, Bench
from benchmarks.spark_table.memory_source import MemorySource
from benchmarks.spark_table.report import Line, markdown
from benchmarks.spark_table.sessions import VERSIONS, Elsewhere
from benchmarks.spark_table.systems import Ledger, Memory, System
from benchmarks.spark_table.trickle import trickle_lines
from dledger_core import LocalCluster
from jobs._session import spark_session
from spark_connector import register

KINDS = ("plan", "filter", "read", "stream", "stream-noop", "start", "sink", "memory", "decode", "trickle", "hung")
KINDS += ("connect", "versions", "pipeline", "latency")
ALONE = ("latency",)
"""Parts that ``--only`` has to name: half an hour for each system."""
PLANNED = (1_000, 5_000, 10_000)
SETTINGS = {
    "spark.master": "local[2]",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.streaming.numRecentProgressUpdates": "5000",
}


def main() -> None:
    """Runs and writes."""
    options = parse_arguments()
    rows = {100: options.rows, 1024: options.rows // 5}
    left_out: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        kafka = None
        if options.without_kafka:
            left_out["Kafka"] = "--without-kafka"
        else:
            try:
                folder = tempfile.TemporaryDirectory(prefix="dledger-kafka-", ignore_cleanup_errors=True)
                kafka = stack.enter_context(brokers.Brokers(Path(stack.enter_context(folder))))
            except brokers.MissingError as error:
                left_out["Kafka"] = str(error)
        trickles = 2 * (options.rounds + 1)
        trickles = (trickles if "trickle" in options.only else 0) + ("latency" in options.only)
        groups = Ledger.groups(list(rows), trickles)
        cluster = stack.enter_context(LocalCluster(3, groups=tuple(groups)))
        settings = SETTINGS | (Kafka.settings(kafka) if kafka else {})
        spark = stack.enter_context(spark_session("spark-table", settings={"spark.driver.memory": "4g"} | settings))
        register(spark)
        spark.dataSource.register(MemorySource)
        ledger = Ledger(spark, cluster, rows)
        systems: list[System] = [ledger, Memory(spark, rows)]
        if kafka:
            systems.append(Kafka(spark, kafka, rows))
        about, lines = facts(spark, options), list[Line]()
        elsewhere = Elsewhere(cluster.peers, options.rows, options.rounds, kafka)
        for _ in measure(Bench(spark, systems, rows, options.rounds), ledger, elsewhere, options, lines, left_out):
            about["load"] = f"{os.getloadavg()[0]:.1f} at the end, of {os.cpu_count()} cores"
            if options.report:
                options.report.parent.mkdir(parents=True, exist_ok=True)
                options.report.write_text(markdown(about, lines, left_out))
    sys.stdout.write(markdown(about, lines, left_out))


def parse_arguments() -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, help="file of the table; it grows with each part")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each system, after a warm-up (default 5)")
    parser.add_argument("--rows", type=int, default=5_000_000, help="rows of 100 B; a fifth of them of 1 KB (5000000)")
    usual = [kind for kind in KINDS if kind not in ALONE]
    parser.add_argument("--only", nargs="*", default=usual, choices=KINDS, help="only these parts of the table")
    parser.add_argument("--quick", action="store_true", help="a try: 2 rounds, a fifth of the rows, short trickles")
    parser.add_argument("--without-kafka", action="store_true", help="leave Kafka out")
    options = parser.parse_args()
    options.trickle_seconds, options.hung_seconds, options.latency_seconds = 40.0, 30.0, 1800.0
    if options.quick:
        options.rounds, options.rows, options.trickle_seconds = 2, options.rows // 5, 10.0
        options.hung_seconds, options.latency_seconds = 12.0, 60.0
    return options


def measure(
    bench: Bench,
    ledger: Ledger,
    elsewhere: Elsewhere,
    options: argparse.Namespace,
    lines: list[Line],
    left_out: dict[str, str],
) -> Iterator[None]:
    """Fill the logs and measure the chosen parts; one that fails is left out. Yields after each."""
    sizes = list(bench.rows)
    if not set(options.only) <= {"sink", "decode", "trickle", "hung", "latency"}:
        for system in bench.systems:
            say(f"filling {system.name}")
            system.fill()
    decoded = {size: min(bench.rows[size], 2_000_000) for size in sizes if "decode" in options.only}
    for size, rows in decoded.items():
        ledger.fill_messages(rows, size)
    parts: dict[str, list[Callable[[], list[Line]]]] = {
        "plan": [lambda number=number: [bench.plan(number)] for number in PLANNED],
        "filter": [lambda: [bench.filtered(ledger, options.rows // 500)]],
        "read": [lambda size=size: [bench.batch_read(size, TO_REACH["read"][size])] for size in sizes],
        "stream": [lambda size=size: [bench.stream_to_delta(size, TO_REACH["stream"][size])] for size in sizes],
        "stream-noop": [lambda size=size: [bench.stream_to_noop(size)] for size in sizes],
        "start": [lambda: [bench.fixed_start()]],
        "sink": [lambda: [bench.sink(options.rows * 4 // 5, ledger)]],
        "trickle": [lambda: trickle_lines(list(bench.systems), options.rounds, options.trickle_seconds)],
        "hung": [lambda: hung_lines(bench.spark, options.hung_seconds)],
        "connect": [elsewhere.connect],
        "versions": [lambda version=version: elsewhere.version(version) for version in VERSIONS],
        "pipeline": [lambda: [elsewhere.pipeline()]],
        "latency": [lambda: latency_lines(list(bench.systems), options.latency_seconds)],
        "memory": [lambda size=size: [bench.worker_memory(ledger, size)] for size in sizes],
        "decode": [lambda size=size: [bench.decode(ledger, decoded[size], size)] for size in sizes],
    }
    for kind in KINDS:
        for part in parts[kind] if kind in options.only else []:
            say(f"\n{kind} ")
            try:
                lines.extend(part())
            except Exception as error:  # noqa: BLE001 - an hour of figures shall not be lost with the last of them
                left_out[kind] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
            yield
    say("\n")


def facts(spark: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Return the versions and the hardware that the numbers depend on."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "command": shlex.join(["python", "-m", "benchmarks.spark_table", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "versions": f"Spark {spark.version}, Python {platform.python_version()}, commit {commit.stdout.strip()}",
        "rows": f"{options.rows:,} of 100 B, {options.rows // 5:,} of 1 KB; median of {options.rounds} rounds",
    }


def say(text: str) -> None:
    """Shows progress."""
    sys.stderr.write(text)
    sys.stderr.flush()


if __name__ == "__main__":
    main()
