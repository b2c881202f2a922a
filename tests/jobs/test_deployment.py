"""The jobs run under spark-submit and in a session made as a notebook makes it, by public configuration alone."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dledger_core import Client, LocalCluster
from dledger_core.archive import ArchiveTable
from dledger_core.environment import DELTA_VERSION, find_java
from tests.support.archived_log import append, entry
from tests.support.object_store import KEY, SECRET, bucket_on_loopback
from tests.support.slow_elections import SLOW_ELECTIONS
from tests.support.spark_jvm import short_lived_environment
from tests.test_guides import blocks

CHECKOUT = Path(__file__).resolve().parents[2]
HISTORY = CHECKOUT / "spark_connector" / "HISTORY.md"
BIN = Path(sys.executable).parent
SUBMIT = [str(BIN / "spark-submit"), "--master", "local[1]"]
PACKAGES = ["--packages", f"io.delta:delta-spark_4.2_2.13:{DELTA_VERSION}"]
JOBS = ("ingest", "rebuild_consume_queue", "audit_replicas")

pytestmark = [pytest.mark.spark, pytest.mark.integration]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with LocalCluster(3, data_segment_bytes=1 << 20, **SLOW_ELECTIONS) as running:
        with Client(running.peers) as client:
            client.append([b"one", b"two"])
        yield running


def arguments(job: str, peers: str, directory: Path) -> list[str]:
    checkpoint = ["--checkpoint", str(directory / "checkpoint")] if job == "ingest" else []
    return ["--peers", peers, "--table", str(directory / "table"), *checkpoint]


def run(
    command: Sequence[str], directory: Path, python_path: str = "", *, timeout_s: float = 400.0
) -> tuple[int, list[str]]:
    """Run a program in an empty directory, with the Java and the interpreter that a user would name."""
    work = directory / "work"
    work.mkdir()
    ours = ("SPARK_", "PYSPARK_", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment |= {"JAVA_HOME": str(find_java()), "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": python_path}
    environment |= short_lived_environment()
    environment["PATH"] = f"{BIN}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        [*command], capture_output=True, text=True, check=False, cwd=work, env=environment, timeout=timeout_s
    )
    lines = done.stdout.splitlines()  # spark-submit sends a program's stderr to its own stdout
    assert lines, done.stderr
    assert not list(work.iterdir())
    return done.returncode, lines


@pytest.mark.parametrize("job", [*(pytest.param(job, marks=pytest.mark.soak) for job in JOBS[:-1]), JOBS[-1]])
def test_job_runs_under_spark_submit_and_given_settings_win(job: str, cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    given = {
        "spark.sql.shuffle.partitions": "7",
        "spark.sql.session.timeZone": "Europe/Berlin",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": (tmp_path / "events").as_uri(),
    }
    settings = [part for name, value in given.items() for part in ("--conf", f"{name}={value}")]
    program = [str(CHECKOUT / "jobs" / f"{job}.py"), *arguments(job, cluster.peers, tmp_path)]
    code, lines = run([*SUBMIT, *PACKAGES, *settings, *program], tmp_path)
    summary = json.loads(lines[-1])
    assert (code, summary["status"]) == (0, "ok"), lines
    assert (tmp_path / "table").is_dir()
    found = settings_in_event_log(tmp_path / "events")
    ours = {"spark.ui.enabled": "false", "spark.log.level": "OFF"}
    assert given | ours == {name: found.get(name) for name in given | ours}


def settings_in_event_log(directory: Path) -> dict[str, str]:
    """Return the settings with which Spark ran its only application."""
    lines = [line for path in sorted(directory.rglob("events_*")) for line in path.read_text().splitlines()]
    [event] = [line for line in lines if line.startswith('{"Event":"SparkListenerEnvironmentUpdate"')]
    return dict(json.loads(event)["Spark Properties"])


HADOOP_VERSION = "3.5.0"
"""Of PySpark's own jars (``pyspark/jars/hadoop-client-api-*.jar``)."""
SDK_VERSION = "2.35.4"
"""Of the AWS SDK that this Hadoop names, whose modules are a twentieth of its bundle."""
SDK = ("s3", "s3-transfer-manager", "sts", "apache-client", "netty-nio-client")
STARVED_S = 1200.0
"""A run takes 20 s of a processor, of which a busy machine leaves it a twentieth."""
EXCLUDED = ("software.amazon.awssdk:bundle", "org.wildfly.openssl:wildfly-openssl", "org.slf4j:slf4j-api")


@pytest.mark.soak
@pytest.mark.timeout(2 * STARVED_S)
def test_archive_on_object_storage_is_written_by_spark_and_shows_no_secret(cluster: Any, tmp_path: Path) -> None:
    """The command of the guide, with the files that it describes."""
    (tmp_path / "events").mkdir()
    guide = HISTORY.read_text()
    [line] = blocks(guide, "On object storage", "")
    packages = [PACKAGES[1], f"org.apache.hadoop:hadoop-aws:{HADOOP_VERSION}"]
    printed = shlex.split(line)
    assert printed[:3] == ["spark-submit", "--packages", ",".join(packages)]
    packages += [f"software.amazon.awssdk:{name}:{SDK_VERSION}" for name in SDK]
    with bucket_on_loopback() as bucket, Client(cluster.peers) as client:
        assert [name for name in (*bucket.of_hadoop, *bucket.storage) if f"`{name}`" not in guide] == []
        client.append([b"three"] * 100)
        end = client.bounds().end
        events = {"spark.eventLog.enabled": "true", "spark.eventLog.compress": "false"}
        events["spark.eventLog.dir"] = (tmp_path / "events").as_uri()
        properties, storage = tmp_path / "s3a.conf", tmp_path / "storage.json"
        properties.write_text("".join(f"{name} {value}\n" for name, value in (bucket.of_hadoop | events).items()))
        storage.write_text(json.dumps(bucket.storage))
        table = f"s3a://{bucket.name}/archive"
        given = {"$DLEDGER_PEERS": cluster.peers, "s3a://bucket/history": table}
        given |= {path.name: str(path) for path in (properties, storage)}
        given["jobs/archive.py"] = str(CHECKOUT / "jobs" / "archive.py")
        assert given.keys() <= set(printed)
        submit = [*SUBMIT, "--packages", ",".join(packages), "--exclude-packages", ",".join(EXCLUDED)]
        submit += [given.get(part, part) for part in printed[3:]]
        code, lines = run([*submit, "--until", str(end)], tmp_path, timeout_s=STARVED_S)
        summary = json.loads(lines[-1])
        assert (code, summary["status"], summary["archived_end"]) == (0, "ok", end), lines
        archive = client.metadata().archive
        assert archive is not None
        assert archive.table == table
        # deltalake writes to the same table: the row is found, and replaced by Spark.
        append(table, [entry(1)], "default", storage=bucket.storage)
        (tmp_path / "work").rmdir()
        code, verified = run([*submit, "--verify"], tmp_path, timeout_s=STARVED_S)
        summary = json.loads(verified[-1])
        assert (code, summary["status"]) == (0, "ok"), verified
        assert ArchiveTable(table, bucket.storage).count("default", 0, end) == sum(
            one.rows for one in client.archived_ranges().ranges
        )
    stored = [path.read_text() for path in (tmp_path / "events").rglob("events_*")]
    assert len(stored) == 2
    shown = "\n".join([*lines, *verified, *stored])
    assert [secret for secret in (KEY, SECRET) if secret in shown] == []


@pytest.mark.soak
def test_job_without_delta_jar_names_option_under_spark_submit(cluster: Any, tmp_path: Path) -> None:
    program = [str(CHECKOUT / "jobs" / "ingest.py"), *arguments("ingest", cluster.peers, tmp_path)]
    code, lines = run([*SUBMIT, *program], tmp_path)
    summary = json.loads(lines[-1])
    assert (code, summary["error"]) == (3, "CONFIG"), lines
    assert f"spark-submit {' '.join(PACKAGES)}" in summary["message"]
    assert not any("\tat " in line for line in lines)


NOTEBOOK = """
import importlib, json, os, sys
from delta import configure_spark_with_delta_pip
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local[1]").config(map={{
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.sql.warehouse.dir": {warehouse!r},
    "spark.executorEnv.PYTHONPATH": {checkout!r},
    "spark.sql.shuffle.partitions": "2",
    "spark.databricks.delta.snapshotPartitions": "1",
}})
spark = configure_spark_with_delta_pip(builder).getOrCreate()
from jobs._cli import run_job
codes = []
for job, arguments in {jobs!r}.items():
    try:
        run_job(importlib.import_module("jobs." + job).command, arguments)
    except SystemExit as ended:
        codes.append(ended.code)
print(json.dumps({{"codes": codes, "active": spark.range(3).count()}}))
"""


@pytest.mark.soak
def test_jobs_run_in_notebook_session_and_leave_it_running(cluster: Any, tmp_path: Path) -> None:
    jobs = {job: arguments(job, cluster.peers, tmp_path / job) for job in JOBS}
    program = NOTEBOOK.format(checkout=str(CHECKOUT), jobs=jobs, warehouse=str(tmp_path / "warehouse"))
    code, lines = run([sys.executable, "-c", program], tmp_path, python_path=str(CHECKOUT))
    assert code == 0
    assert json.loads(lines[-1]) == {"codes": [0, 0, 0], "active": 3}, lines
