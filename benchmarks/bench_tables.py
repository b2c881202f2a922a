"""A million producers: start-up, appends while the log rolls and the tables are stored, memory.

Method: two clusters of one real node on loopback. The log and the tables of one contain ``--producers`` producers, each
with one append of 100 bytes; the other one is the control. Both nodes start again, which is measured until they lead;
then a few producers append 4 KiB each without a pause, for ``--seconds``, in turns. Segments have 8 MiB, so the log
rolls often, and each second a checkpoint stores what changed in the tables. Each number is the median of ``--rounds``
rounds.
``load_s`` is the time to open the store and read its tables within this process; ``rss_mb`` is of the node's process.

Run: ``python -m benchmarks.bench_tables [--producers 1000000] [--seconds 10] [--rounds 3]``. Prints one JSON
object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dledger_core import control
from dledger_core.client import AsyncProducer
from dledger_core.cluster import LocalCluster
from dledger_core.connect import AsyncClient
from dledger_core.ids import Index, Term
from dledger_core.raft import Batch
from dledger_core.record import Columns, ProposedBatch
from dledger_core.storage import CommitLog

NODE, GROUP, APPENDERS = "n0", "default", 16


def open_log(directory: Path) -> CommitLog:
    return CommitLog.open(directory / GROUP / f"dledger-{NODE}", group=GROUP, node_id=NODE)


def fill(directory: Path, producers: int) -> None:
    """Append one entry of each producer to the store of a stopped node, as its replica would."""
    log, batches = open_log(directory), list[Batch]()
    tables, columns = log.load_tables(), Columns.from_bodies([bytes(100)])
    for index, time_ms, body in log.control_entries(log.first_index(), Index(log.last_index() + 1)):
        tables.apply(index, time_ms, body)
    first = log.last_index() + 1
    term = Term(log.hard_state.term)
    for number in range(producers):
        index = Index(first + 2 * number)
        fields = {"k": "producer", "p": f"importer-{number:08}", "e": 0, "s": 0, "n": 1, "c": number, "t": 1}
        body = control.pack(fields)
        batches.append(log.place(ProposedBatch(columns, control=body), index, term))
        tables.apply(index, 0, body)
        if len(batches) == 4000 or number == producers - 1:
            log.persist(None, None, batches)
            batches = []
    log.save_tables(tables.take_changes())
    log.close(log.last_index())


async def append(peers: str, duration_s: float) -> list[float]:
    """Append without a pause; return the milliseconds that each append took."""
    took: list[float] = []
    until = time.perf_counter() + duration_s

    async def appender(client: AsyncClient, number: int) -> None:
        producer = AsyncProducer(client, f"appender-{number}")
        while (began := time.perf_counter()) < until:
            await producer.append([bytes(4096)])
            took.append((time.perf_counter() - began) * 1000)

    async with AsyncClient(peers, GROUP) as client:
        await client.append([b"x"])
        await asyncio.gather(*(appender(client, number) for number in range(APPENDERS)))
    return sorted(took)


def rss_mb(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def main() -> None:
    """Fills the store, runs the rounds and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--producers", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        clusters: dict[str, LocalCluster] = {}
        for name, producers in ((f"{options.producers} producers", options.producers), ("control", 0)):
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            cluster = clusters[name] = LocalCluster(1, directory, (GROUP,), data_segment_bytes=8 << 20)
            with cluster:
                pass
            figures = found[name] = {}
            if producers:
                fill(directory, producers - APPENDERS)  # together they fill the table
                began = time.perf_counter()
                log = open_log(directory)
                figures["load_s"] = [time.perf_counter() - began]
                log.close()
            began = time.perf_counter()
            stack.enter_context(cluster)
            cluster.leader(GROUP)
            figures["start_s"] = [time.perf_counter() - began]
        for _ in range(options.rounds):
            for name, cluster in clusters.items():
                took = asyncio.run(append(cluster.peers, options.seconds))
                shown = {"p50_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999}
                for figure, part in shown.items():
                    found[name].setdefault(figure, []).append(took[int(part * (len(took) - 1))])
                found[name].setdefault("max_ms", []).append(took[-1])
                found[name].setdefault("appends_per_s", []).append(len(took) / options.seconds)
                found[name].setdefault("rss_mb", []).append(rss_mb(cluster.pid(NODE)))
    report: dict[str, Any] = {
        name: {figure: round(statistics.median(values), 2) for figure, values in figures.items()}
        for name, figures in found.items()
    }
    sys.stdout.write(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
