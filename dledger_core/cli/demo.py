"""``dledger demo``: the whole pipeline on real events, with a failover in the middle, checked at the end."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dledger_core.cli.demo_stages import (
    AppendReport,
    Job,
    append_with_failover,
    body_hash,
    check_session,
    delta_bodies_hash,
    delta_row_count,
)
from dledger_core.cli.exit_codes import EXIT_FINDING
from dledger_core.cli.flights import FLIGHTS_COUNT, flight_messages
from dledger_core.cli.options import DurationType, examples, format_option
from dledger_core.cli.output import Format, show_facts
from dledger_core.cli.progress import say
from dledger_core.client import Client
from dledger_core.cluster import LocalCluster
from dledger_core.errors import ConfigError, DLedgerError

__all__ = ["demo"]

INGEST_TIMEOUT_S: Final = 120.0
JOB_TIMEOUT_S: Final = 180.0


@click.command(
    epilog=examples(
        "dledger demo",
        "dledger demo --keep /tmp/dledger-demo --format json",
    )
)
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Put everything into DIR and leave it.",
)
@click.option(
    "--events",
    type=click.IntRange(2000, FLIGHTS_COUNT),
    default=FLIGHTS_COUNT,
    show_default=True,
    help="Use only the first so many flights.",
)
@click.option(
    "--seconds", type=DurationType(0), default=16.0, show_default=True, help="Spread the appends over so long."
)
@format_option
def demo(keep: Path | None, events: int, seconds: float, output: Format) -> int | None:
    """Run the pipeline on the 336,776 flights that left New York in 2013, and check the result.

    Three nodes, a producer, a stream into Delta; the leader is killed in the middle and comes back. Then the rows in
    Delta are compared with the events, the consume queues rebuilt, and the three replicas audited.
    """
    check_session()
    with _directory(keep) as directory:
        facts = _Demo(directory, events, seconds).run()
    failed = [name for name, ok in facts["checks"].items() if not ok]
    if output == "json":
        show_facts(facts, output)
    else:
        _show_table(facts, keep)
    if failed:
        say(f"error: failed checks: {', '.join(failed)}")
        return EXIT_FINDING
    return None


class _Demo:
    """One run: what is running, so that it can be ended whatever happens."""

    def __init__(self, directory: Path, events: int, seconds: float) -> None:
        self._directory = directory
        self._events = events
        self._seconds = seconds
        self._table = directory / "departures"
        self._resources = contextlib.ExitStack()
        self._in_delta = 0

    def run(self) -> dict[str, Any]:
        """Runs all stages; returns the facts."""
        began = time.monotonic()
        with self._resources, _progress() as bars:
            messages = flight_messages().slice(0, self._events)
            cluster = LocalCluster(3, self._directory / "cluster", data_segment_bytes=64 << 20)
            self._resources.enter_context(cluster)
            ingest = self._job("ingest", *self._ingest_arguments(cluster))
            report = self._append(cluster, messages, ingest, bars)
            self._wait_for_delta(ingest, bars)
            ingested = ingest.stop()
            rebuild, audit = self._derive(cluster, bars)
            with Client(cluster.peers) as client:
                nodes = client.metadata().nodes
            facts = self._facts(report, messages, ingested, rebuild, audit)
            facts["log_bytes_per_node"] = max(node.data_bytes for node in nodes)
        facts["duration_s"] = round(time.monotonic() - began, 1)
        return facts

    def _job(self, name: str, *arguments: str) -> Job:
        job = Job(name, list(arguments), self._directory)
        self._resources.callback(job.kill)
        return job

    def _ingest_arguments(self, cluster: LocalCluster) -> list[str]:
        checkpoint = self._directory / "checkpoint"
        arguments = ["--peers", cluster.peers, "--table", str(self._table), "--checkpoint", str(checkpoint)]
        return [*arguments, "--decode", "message", "--trigger", "1 seconds"]

    def _append(self, cluster: LocalCluster, messages: Any, ingest: Job, bars: Progress) -> AppendReport:
        appended = bars.add_task("appended", total=self._events)
        in_delta = bars.add_task("in Delta", total=self._events)
        done = threading.Event()
        watcher = threading.Thread(target=self._watch_delta, args=(bars, in_delta, done), name="watch-delta")
        watcher.start()

        def may_kill() -> bool:
            if not ingest.running:
                raise DLedgerError("ingest ended early", str(ingest.log_path), "see its log")
            return delta_row_count(self._table) > 0

        try:
            return append_with_failover(
                cluster,
                messages,
                pace_s=self._seconds,
                may_kill=may_kill,
                on_progress=lambda rows: bars.update(appended, completed=rows),
            )
        finally:
            done.set()
            watcher.join()

    def _watch_delta(self, bars: Progress, task: Any, done: threading.Event) -> None:
        while not done.wait(0.5):
            self._in_delta = delta_row_count(self._table)
            bars.update(task, completed=self._in_delta)

    def _wait_for_delta(self, ingest: Job, bars: Progress) -> None:
        task = bars.task_ids[-1]
        deadline = time.monotonic() + INGEST_TIMEOUT_S
        while self._in_delta < self._events:
            if not ingest.running or time.monotonic() > deadline:
                raise DLedgerError(
                    f"ingest stopped at {self._in_delta} of {self._events} events", str(ingest.log_path), "see its log"
                )
            time.sleep(0.25)
            self._in_delta = delta_row_count(self._table)
            bars.update(task, completed=self._in_delta)

    def _derive(self, cluster: LocalCluster, bars: Progress) -> tuple[dict[str, Any], dict[str, Any]]:
        task = bars.add_task("rebuild and audit", total=2)
        jobs = [
            self._job(
                "rebuild_consume_queue", "--peers", cluster.peers, "--table", str(self._directory / "consume_queue")
            ),
            self._job("audit_replicas", "--peers", cluster.peers, "--table", str(self._directory / "audit")),
        ]
        results = []
        for job in jobs:
            results.append(job.result(JOB_TIMEOUT_S))
            bars.advance(task)
        return results[0], results[1]

    def _facts(
        self,
        report: AppendReport,
        messages: Any,
        ingested: dict[str, Any],
        rebuild: dict[str, Any],
        audit: dict[str, Any],
    ) -> dict[str, Any]:
        rows, distinct, delta_hash = delta_bodies_hash(self._table)
        checks = {
            "every event in Delta exactly once": rows == distinct == self._events == report.events,
            "contents equal, in order": delta_hash == body_hash(messages["body"]),
            "ingest stopped when told": ingested.get("exit_reason") == "stopped" and ingested["exit_code"] == 0,
            "consume queues dense": bool(rebuild.get("dense")) and rebuild.get("rows") == self._events,
            "replicas consistent": audit.get("verdict") == "CONSISTENT" and audit["exit_code"] == 0,
        }
        return {
            "events": report.events,
            "rows_in_delta": rows,
            "sha256": delta_hash,
            "append_rate_per_s": round(report.events / report.duration_s),
            "commit_latency_p50_ms": round(report.percentile(50), 2),
            "commit_latency_p99_ms": round(report.percentile(99), 2),
            "leader_killed": f"{report.killed[0]}, then {report.killed[1]} led",
            "seconds_without_leader": round(report.without_leader_s, 3),
            "message_bytes": report.body_bytes,
            "micro_batches": ingested.get("batches"),
            "consume_queues": rebuild.get("queues"),
            "audit_verdict": audit.get("verdict"),
            "audit_compared": audit.get("compared"),
            "checks": checks,
            "paths": {
                "cluster": str(self._directory / "cluster"),
                "departures": str(self._table),
                "consume_queue": str(self._directory / "consume_queue"),
                "audit": str(self._directory / "audit"),
            },
        }


def _show_table(facts: dict[str, Any], keep: Path | None) -> None:
    checks = {name: ("yes" if ok else "NO") for name, ok in facts["checks"].items()}
    shown = {
        name: value for name, value in facts.items() if name not in {"checks", "paths", "sha256", "audit_compared"}
    }
    show_facts(shown | checks, "table", "336,776 flights" if facts["events"] == FLIGHTS_COUNT else "flights")
    click.echo("Where to look next")
    if keep is not None:
        for name, path in facts["paths"].items():
            click.echo(f"  {name:<14} {path}")
        click.echo(f"  dledger verify {facts['paths']['cluster']}/default/dledger-n0")
    else:
        click.echo("  dledger demo --keep DIR    run it again and keep cluster, tables and logs")
    click.echo("  dledger dev                three nodes to play with")
    click.echo("  README.md                  a first session by hand; notebooks/explore_log.ipynb  pictures of a log")


@contextlib.contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    """Yields the working folder; without ``keep`` it is a temporary one and goes at the end."""
    if keep is not None:
        if keep.exists() and any(keep.iterdir()):
            raise ConfigError("the folder is not empty", str(keep), "name a new one with --keep")
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()
        return
    folder = Path(tempfile.mkdtemp(prefix="dledger-demo-"))
    try:
        yield folder
    except DLedgerError:
        _show_logs(folder)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _show_logs(folder: Path) -> None:
    """Writes the ends of the logs to stderr before a failed run's folder goes."""
    for log in sorted(folder.glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()[-30:]
        click.echo(f"--- {log.name}", err=True)
        click.echo("\n".join(lines), err=True)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description:<18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
    )
