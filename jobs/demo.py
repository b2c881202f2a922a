"""The whole pipeline on real events, with a failover in the middle, checked at the end.

A producer appends to three nodes while ``ingest.py`` streams into Delta. The leader is killed and restarted, the stream
is stopped and continued. Then the table is compared with the events, the consume queues are rebuilt and the three
replicas are audited.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if __package__ in (None, ""):  # started as a script: run the package's module, which finds its parts
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import_module(f"{Path(__file__).resolve().parent.name}.demo").main()

import click
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core import ConfigError, LocalCluster
from dledger_core.cli import EXIT_FINDING, EXIT_OK, DurationType, examples

from . import audit_replicas, ingest, rebuild_consume_queue
from ._cli import Outcome, StoppedError, dry_run_option, progress, run_job
from ._demo.flights import FLIGHTS_COUNT, AppendReport, append_with_failover, flight_messages
from ._demo.stream import IngestProcess
from ._session import check_versions, run_stoppable, spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SEGMENT_BYTES: Final = 64 << 20


@click.command(epilog=examples("demo.py", "demo.py --events 30000 --seconds 5 --keep /tmp/dledger-demo"))
@click.option(
    "--keep", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Write everything to DIR, keep it."
)
@click.option(
    "--events",
    type=click.IntRange(2000, FLIGHTS_COUNT),
    default=FLIGHTS_COUNT,
    show_default=True,
    help="Number of flights, from the first one.",
)
@click.option(
    "--seconds", type=DurationType(0), default=16.0, show_default=True, help="Spread the appends over this time."
)
@click.option("--tls", is_flag=True, help="Run nodes, clients and Spark with TLS and a token.")
@dry_run_option
def command(keep: Path | None, events: int, seconds: float, tls: bool, dry_run: bool) -> Outcome:
    """Run the pipeline on the 336,776 flights that left New York in 2013, and check the result."""
    check_versions()
    messages = flight_messages().slice(0, events)
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise ConfigError("the directory is not empty", str(keep), "name a new one with --keep")
    if dry_run:
        return Outcome({"status": "ok", "dry_run": True, "events": len(messages)})
    with _directory(keep) as directory:
        results = _run(directory, messages, seconds, with_tls=tls)
    _show(results)
    if keep is not None:
        progress(f"cluster, tables and the stream's log are in {results['directory']}")
    return Outcome(results, EXIT_OK if all(results["checks"].values()) else EXIT_FINDING)


@contextlib.contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="dledger-demo-", ignore_cleanup_errors=True) as name:
            yield Path(name)
    else:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()


def _run(directory: Path, messages: pa.Table, seconds: float, *, with_tls: bool) -> dict[str, Any]:
    table = directory / "departures"
    progress("starting three nodes, and a stream into Delta")
    with LocalCluster(3, directory / "cluster", tls=with_tls, data_segment_bytes=_SEGMENT_BYTES) as cluster:
        nodes = ["--peers", cluster.peers]
        if cluster.tls is not None:
            nodes += ["--tls-ca", str(cluster.tls.ca), "--token-file", str(cluster.token)]
        into_delta = [*nodes, "--table", str(table), "--checkpoint", str(directory / "checkpoint")]
        into_delta += ["--decode", "message"]
        with IngestProcess([*into_delta, "--trigger", "1 second"], table, directory / "ingest.log") as stream:
            report = append_with_failover(cluster, messages, seconds=seconds, before_kill=stream.wait_for_rows)
            progress("stopping the stream with SIGTERM")
            streamed = stream.stop()
        with spark_session("dledger-demo") as spark:
            progress("continuing the stream where it stopped")
            rest = _job(ingest.command, *into_delta)
            progress("comparing the table with the events")
            found = run_stoppable(spark, lambda: _read(spark, table))
            checks = _compare(found, messages)
            progress("rebuilding the consume queues")
            queues = _job(rebuild_consume_queue.command, *nodes, "--table", str(directory / "consume_queue"))
            progress("auditing the three replicas")
            audit = _job(audit_replicas.command, *nodes, "--table", str(directory / "audit"))
        with cluster.client() as client:
            log_bytes = max(node.data_bytes for node in client.metadata().nodes)
    checks |= {
        "stream stopped on SIGTERM": streamed.get("exit_reason") == "stopped",
        "consume queues dense": bool(queues.get("dense")) and queues.get("rows") == len(messages),
        "replicas consistent": audit.get("verdict") == "CONSISTENT",
    }
    return _measurements(report) | {
        "log_bytes_per_node": log_bytes,
        "rows_in_delta": len(found),
        "micro_batches": streamed["batches"] + rest["batches"],
        "consume_queues": queues.get("queues"),
        "audit_verdict": audit.get("verdict"),
        "checks": checks,
        "directory": str(directory),
    }


def _job(job: click.Command, *arguments: str) -> dict[str, Any]:
    """Run another job in this process and its Spark session; return its summary."""
    outcome: Outcome = job.main(args=list(arguments), standalone_mode=False)
    if outcome.summary.get("exit_reason") == "stopped":
        raise StoppedError
    return outcome.summary


def _read(spark: SparkSession, table: Path) -> pa.Table:
    return spark.read.format("delta").load(str(table)).select("index", "body").orderBy("index").toArrow()


def _compare(rows: pa.Table, messages: pa.Table) -> dict[str, bool]:
    return {
        "each event in Delta exactly once": len(rows) == len(messages) == pc.count_distinct(rows["index"]).as_py(),
        "contents equal, in order": rows["body"].cast(pa.binary()).equals(messages["body"]),
    }


def _measurements(report: AppendReport) -> dict[str, Any]:
    return {
        "events": report.events,
        "appends_per_s": round(report.events / report.duration_s),
        "append_latency_p50_ms": report.percentile(50),
        "append_latency_p99_ms": report.percentile(99),
        "leader_killed": report.killed,
        "leader": report.leader,
        "seconds_without_leader": round(report.without_leader_s, 3),
    }


def _show(results: dict[str, Any]) -> None:
    lines = {name.replace("_", " "): value for name, value in results.items() if name not in ("checks", "directory")}
    lines |= {name: "yes" if passed else "NO" for name, passed in results["checks"].items()}
    for name, value in lines.items():
        progress(f"{name:<34} {f'{value:,}' if isinstance(value, (int, float)) else value}")


def main() -> None:
    """Run the job."""
    run_job(command)


if __name__ == "__main__":
    main()
