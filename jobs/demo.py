"""The whole pipeline on real events, with a failover in the middle, checked at the end.

A producer appends to three nodes while ``ingest.py`` streams into Delta. The leader is killed and restarted, the stream
is stopped and continued. Then the table is compared with the events, the consume queues are rebuilt and the three
replicas are audited.
"""

from __future__ import annotations

import contextlib
import shlex
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
from ._cli import Outcome, StoppedError, dry_run_option, format_option, progress, run_job, verbose_option
from ._demo.flights import (
    FLIGHTS_COUNT,
    SPEED_GROUP,
    AppendReport,
    append_with_failover,
    flight_messages,
    measure_appends,
)
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
@format_option
@verbose_option
@dry_run_option
def command(keep: Path | None, events: int, seconds: float, tls: bool, verbose: bool, dry_run: bool) -> Outcome:
    """Run the pipeline on the 336,776 flights that left New York in 2013, and check the result."""
    check_versions()
    messages = flight_messages().slice(0, events)
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise ConfigError("the directory is not empty", str(keep), "name a new one with --keep")
    if dry_run:
        return Outcome({"status": "ok", "dry_run": True, "events": len(messages)})
    with _directory(keep) as directory:
        results = _run(directory, messages, seconds, with_tls=tls, verbose=verbose)
    failed = [name for name, passed in results["checks"].items() if not passed]
    verdict = f"FAILED: {', '.join(failed)}" if failed else f"all {len(results['checks'])} checks passed"
    speed = f"one producer appends {results['appends_per_s_batched']:,} events per second in batches"
    speed += f", and {results['appends_per_s_one_by_one']:,} one by one"
    rate = f"the demo appended {results['appends_per_s']:,} per second, the rate of --seconds {seconds:g}"
    notes = (f"{speed}; {rate}", verdict, *_next_steps(keep))
    return Outcome(results, EXIT_FINDING if failed else EXIT_OK, notes)


def _next_steps(keep: Path | None) -> list[str]:
    """Return where the files are and what to type next."""
    if keep is None:
        return [
            "the files are deleted; keep them with: make demo ARGS='--keep /tmp/dledger-demo'",
            "nodes of your own: .venv/bin/dledger dev",
        ]
    at = keep.absolute()
    store = shlex.quote(str(at / "cluster" / "default" / "dledger-n0"))
    return [
        f"the files are in {at}: cluster (three nodes), departures, consume_queue and audit (Delta tables)",
        f"look at a store: .venv/bin/dledger look {store}",
        f"its first messages: .venv/bin/dledger dump {store} --count 3",
        f'the table, in a session with Delta: spark.read.format("delta").load("{at / "departures"}").show()',
        "nodes of your own: .venv/bin/dledger dev",
    ]


@contextlib.contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="dledger-demo-", ignore_cleanup_errors=True) as name:
            yield Path(name)
    else:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()


def _run(directory: Path, messages: pa.Table, seconds: float, *, with_tls: bool, verbose: bool) -> dict[str, Any]:
    table = directory / "departures"
    progress("starting three nodes")
    groups = ("default", SPEED_GROUP)
    nodes = LocalCluster(3, directory / "cluster", groups=groups, tls=with_tls, data_segment_bytes=_SEGMENT_BYTES)
    with nodes as cluster:
        progress("measuring appends, in batches and one by one")
        speed = measure_appends(cluster, messages)
        progress("starting a stream into Delta")
        access = ["--peers", cluster.peers, "--groups", "default"]  # whatever the environment names
        if cluster.tls is not None:
            access += ["--tls-ca", str(cluster.tls.ca), "--token-file", str(cluster.token)]
        into_delta = [*access, "--table", str(table), "--checkpoint", str(directory / "checkpoint")]
        into_delta += ["--decode", "message"]
        with IngestProcess([*into_delta, "--trigger", "1 second"], table, directory / "ingest.log") as stream:
            report = append_with_failover(cluster, messages, seconds=seconds, before_kill=stream.wait_for_rows)
            progress("stopping the stream with SIGTERM")
            streamed = stream.stop()
        with spark_session("dledger-demo", verbose=verbose) as spark:
            progress("continuing the stream where it stopped")
            rest = _job(ingest.command, *into_delta)
            progress("comparing the table with the events")
            found = run_stoppable(spark, lambda: _read(spark, table))
            checks = _compare(found, messages)
            progress("rebuilding the consume queues")
            queues = _job(rebuild_consume_queue.command, *access, "--table", str(directory / "consume_queue"))
            progress("auditing the three replicas")
            audit = _job(audit_replicas.command, *access, "--table", str(directory / "audit"))
        with cluster.client() as client:
            log_bytes = max(node.data_bytes for node in client.metadata().nodes)
    checks |= {
        "stream stopped on SIGTERM": streamed.get("exit_reason") == "stopped",
        "consume queues dense": bool(queues.get("dense")) and queues.get("rows") == len(messages),
        "replicas consistent": audit.get("verdict") == "CONSISTENT",
    }
    return (
        _measurements(report)
        | speed
        | {
            "log_bytes_per_node": log_bytes,
            "rows_in_delta": len(found),
            "micro_batches": streamed["batches"] + rest["batches"],
            "consume_queues": queues.get("queues"),
            "audit_verdict": audit.get("verdict"),
            "checks": checks,
            "directory": str(directory),
        }
    )


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


def main() -> None:
    """Run the job."""
    run_job(command)


if __name__ == "__main__":
    main()
