"""The lines of a query that follows a log to which a few rows are appended every second.

A process of its own appends 20 rows of 100 B a second; the query has no trigger interval. Of the micro-batches with
rows the first three are left out (planning, classes that are loaded). *append → visible* is the time from the
producer's clock in the row to the modification time of the Delta commit that adds the row's file; the rows of the
first three seconds are left out.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

from benchmarks.spark_table.report import Line
from benchmarks.spark_table.systems import System

RATE = 20.0
COLD_BATCHES = 3
COLD_S = 3.0
BEFORE_S = 4.0
Waits = npt.NDArray[np.float64]


def trickle_lines(systems: list[System], rounds: int, seconds: float) -> list[Line]:
    """Returns the lines: micro-batch -> noop, micro-batch -> Delta, append -> visible p50 and p99."""
    figures: tuple[dict[str, list[float]], ...] = tuple({system.name: [] for system in systems} for _ in range(4))
    for number in range(rounds + 1):
        for system in systems[:: 1 if number % 2 else -1]:
            took = [followed(system, RATE, seconds, None)[0]]
            with tempfile.TemporaryDirectory(prefix="dledger-bench-", ignore_cleanup_errors=True) as folder:
                took_delta, waited = followed(system, RATE, seconds, Path(folder), COLD_S)
            took.append(took_delta)
            if len(waited):
                took += list(np.percentile(waited, (50, 99)))
            for runs, value in zip(figures, took if number else [], strict=False):
                runs[system.name].append(value)
    names = [
        ("micro-batch on a trickle → noop, p50", "≤ 0.22 s"),
        ("micro-batch on a trickle → Delta, p50", "≤ 0.85 s"),
        ("append → visible in Delta, p50", "≤ 1.1 s"),
        ("append → visible in Delta, p99", "≤ 2.4 s"),
    ]
    return [Line(name, "s", runs, to_reach) for (name, to_reach), runs in zip(names, figures, strict=True)]


def followed(
    system: System, rate: float, seconds: float, folder: Path | None, cold_s: float = 0.0
) -> tuple[float, Waits]:
    """Runs one query; returns the median micro-batch in s, and for Delta how long each row took in s.

    Args:
        system: the log.
        rate: rows a second.
        seconds: for how long they are appended.
        folder: the Delta table; None = noop.
        cold_s: rows of the first seconds are left out.
    """
    with tempfile.TemporaryDirectory(prefix="dledger-bench-", ignore_cleanup_errors=True) as checkpoint:
        frame, producer = system.trickle(rate, seconds)
        writer = frame.writeStream.trigger(processingTime="0 seconds").option("checkpointLocation", checkpoint)
        query = writer.format("noop").start() if folder is None else writer.format("delta").start(str(folder))
        try:
            if producer is None:
                time.sleep(BEFORE_S + seconds)
            else:
                if producer.wait():
                    raise RuntimeError(f"the process that appends to {system.name} ended with {producer.returncode}")
                query.processAllAvailable()
            busy = [progress for progress in query.recentProgress if progress["numInputRows"]]
        finally:
            query.stop()
            if producer is not None:
                producer.kill()
                producer.wait()
    if len(busy) <= COLD_BATCHES:
        raise RuntimeError(
            f"{len(busy)} micro-batches with rows in {seconds:g} s: the machine is too busy for a trickle"
        )
    took = statistics.median(progress["durationMs"]["triggerExecution"] for progress in busy[COLD_BATCHES:]) / 1000
    if folder is None or "sent_ms" not in frame.columns:
        return took, np.empty(0)
    return took, _waited(frame.sparkSession, folder, cold_s)


def _waited(spark: Any, table: Path, cold_s: float) -> Waits:
    """Returns for each row of the table the seconds from the producer's clock to the commit."""
    committed = {}
    for commit in (table / "_delta_log").glob("*.json"):
        for line in commit.read_text().splitlines():
            added = json.loads(line).get("add")
            if added:
                committed[unquote(added["path"]).rpartition("/")[2]] = commit.stat().st_mtime_ns / 1e6
    rows = spark.read.format("delta").load(str(table)).selectExpr("_metadata.file_name as file", "sent_ms").toArrow()
    files = rows.column("file").combine_chunks().dictionary_encode()
    at = np.array([committed[name] for name in files.dictionary.to_pylist()])[files.indices.to_numpy()]
    sent = rows.column("sent_ms").to_numpy()
    return (at - sent)[sent > sent.min() + cold_s * 1000] / 1000
