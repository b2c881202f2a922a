"""A driver as a user would write it, with three queries; the crash matrix starts it again and again and kills it.

Usage::

    DLEDGER_CRASH=FOLDER python -m tests.spark_connector.crash_driver

FOLDER holds ``run.json``: peers, directory of checkpoints and tables, the pipelines to run with the point at which each
shall stand (null: none), what to do there, and Spark settings. Exit code 0: all queries came to their end, 1: one has
failed.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs._session import spark_session
from tests.spark_connector.dying_source import FOLDER, DyingSource, newest, stand
from tests.support.spark_jvm import jvm_pid

CHEAP = {
    "spark.master": "local[4]",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.databricks.delta.stats.collect": "false",
}
"""It lives for seconds and sees few rows."""
_SMALL = {"fetchMaxBytes": "20000", "maxOffsetsPerTrigger": "200", "pinFor": "1s"}


def logs(spark: Any, run: dict[str, Any], pipeline: str) -> Any:
    source = {"peers": run["peers"], "groups": "s1,s2", "startingOffsets": "earliest", "pipeline": pipeline}
    return spark.readStream.format("dying").options(**source, **_SMALL).load()


def sink(rows: Any, run: dict[str, Any], pipeline: str, **options: str) -> Any:
    return rows.coalesce(1).writeStream.format("dying").options(peers=run["peers"], pipeline=pipeline, **options)


def log_to_delta(spark: Any, run: dict[str, Any]) -> Any:
    rows = logs(spark, run, "log to delta").select("group", "index", "body")
    return rows.writeStream.format("delta").option("path", f"{run['directory']}/table")


def log_to_log(spark: Any, run: dict[str, Any]) -> Any:
    rows = logs(spark, run, "log to log").selectExpr("concat('t', substring(group, 2)) AS group", "body")
    return sink(rows, run, "log to log", appendMaxBytes="8000")


def delta_to_log(spark: Any, run: dict[str, Any]) -> Any:
    rows = spark.readStream.format("delta").option("maxFilesPerTrigger", 1).load(f"{run['directory']}/numbers")
    bodies = rows.selectExpr("CAST(number AS STRING) AS body")
    return sink(bodies, run, "delta to log", group="d", appendMaxBytes="1000")


PIPELINES: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "log to delta": log_to_delta,
    "log to log": log_to_log,
    "delta to log": delta_to_log,
}


def main() -> int:
    folder = Path(os.environ[FOLDER])
    run = json.loads((folder / "run.json").read_text())
    settings = CHEAP | {name: str(value) for name, value in run["settings"].items()}
    with spark_session("crash", settings=settings) as spark:
        spark.dataSource.register(DyingSource)
        plan: dict[str, Any] = {"act": run["act"], "pids": [jvm_pid(spark), os.getpid()], "pipelines": {}}
        for name, point in run["pipelines"].items():
            checkpoint = f"{run['directory']}/{name} checkpoint"
            # It dies in the second micro-batch of this run: the first may be the one that was not finished before.
            batch = run["batch"] if run["batch"] is not None else newest(checkpoint, "commits") + 2
            plan["pipelines"][name] = {"point": point, "checkpoint": checkpoint, "batch": batch}
        (folder / "plan.json").write_text(json.dumps(plan))
        queries = {}
        for name, mine in plan["pipelines"].items():
            writer = PIPELINES[name](spark, run).option("checkpointLocation", mine["checkpoint"])
            queries[name] = writer.trigger(availableNow=True).start()
        return follow(queries, plan)


def follow(queries: dict[str, Any], plan: dict[str, Any]) -> int:
    code, running = 0, dict(queries)
    while running:
        for name, query in list(running.items()):
            if query.isActive:
                continue
            del running[name]
            point = plan["pipelines"][name]["point"]
            if query.exception() is not None:
                if point == "commit log refused":
                    stand(name)
                sys.stdout.write(f"{name}: {query.exception()}\n")
                code = 1
            elif point == "ended":
                stand(name)
        time.sleep(0.02)
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:  # noqa: BLE001 - the test shows it
        traceback.print_exc()
        sys.exit(1)
