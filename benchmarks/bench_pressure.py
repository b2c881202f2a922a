"""How a log behaves when pages of the disk, memory, or time are scarce.

Method, each part in one run on this machine, three nodes on loopback, entries of 1 KB in requests of 1 MiB:

* cold: one store of ``--megabytes``; each round evicts its data files from the page cache, reads them with ``dd``,
  evicts them again and reads all entries with all checks. The median of the ratios of ``--rounds`` rounds counts.
* full: 6 requests in flight for ``--minutes``, with retention; RSS of each node, every second. ``growth`` is the
  median of the last fifth divided by that of the second fifth: the first one fills buffers. Calls that fail, as they
  do where other programs take the processors for long, are counted.
* larger: with ``--cgroup DIR`` the nodes are in this memory cgroup, whose limit the user has set; one reader reads the
  log from its start again and again while entries are appended. Appends per second once the log is three times the
  limit, divided by those of the same nodes while the log still fits, without a reader.
* overload: the rate that 6 requests in flight reach; then requests of ``--clients`` clients that are due at twice that
  rate, whatever becomes of the earlier ones, each with a timeout of 2 seconds. Acknowledged entries per second of both,
  their latencies, and how many calls failed with which error.
* idle: ``--groups`` groups without a client. CPU time of each node for 20 seconds, in percent of a core, and the bytes
  of a frame of heartbeats of all groups and of its responses.

Run: ``python -m benchmarks.bench_pressure cold full overload [--minutes 10]``. Prints one JSON object per part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.timing import seconds
from dledger_core import DLedgerError, LocalCluster
from dledger_core.config import StorageConfig
from dledger_core.connect import AsyncClient
from dledger_core.ids import Index, MemberId, Term
from dledger_core.net import codec
from dledger_core.raft import Heartbeat, HeartbeatResponse
from dledger_core.raft.ready import HardState
from dledger_core.record import Columns, ProposedBatch
from dledger_core.storage import CommitLog, open_store

MIB, BODY, IN_FLIGHT = 1 << 20, 1000, 6
COUNT = MIB // BODY
COLUMNS = Columns.from_bodies([os.urandom(BODY) for _ in range(COUNT)])
RETAINED = 2 << 30
OVERLOAD_TIMEOUT_MS = 2000


def evict(directory: Path) -> None:
    """Remove the files of a store from the page cache."""
    for path in (path for path in directory.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cold(options: argparse.Namespace) -> dict[str, Any]:
    """Compare a scan of a store with ``dd``."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "dledger-n0"
        log = CommitLog.open(path, group="bench", node_id="n0", config=StorageConfig(durability="page-cache"))
        log.persist(HardState(Term(1), None), None, [])
        for number in range(options.megabytes):
            log.persist(None, None, [log.place(ProposedBatch(COLUMNS), Index(number * COUNT), Term(1), 1)])
        end = int(log.last_index()) + 1
        log.close(end - 1)
        files = sorted((path / "data").iterdir())
        nbytes = options.megabytes * COUNT * (BODY + 48)
        rounds = []
        for _ in range(options.rounds):
            evict(path)
            dd = seconds(lambda: _dd(files, nbytes))
            evict(path)
            rounds.append((dd, seconds(lambda: _scan(path, end))))
    rates = {
        name: round(statistics.median(nbytes / took[at] / 1e6 for took in rounds))
        for at, name in enumerate(("dd_mb_per_s", "scan_mb_per_s"))
    }
    return {**rates, "scan_through_dd": round(statistics.median(dd / scan for dd, scan in rounds), 2)}


def _dd(files: list[Path], nbytes: int) -> None:
    for path in files:
        count = -(-min(nbytes, path.stat().st_size) // MIB)  # what follows the entries was written ahead
        nbytes -= count * MIB
        if count > 0:
            command = ["dd", f"if={path}", "of=/dev/null", "bs=1M", f"count={count}"]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def _scan(path: Path, end: int) -> None:
    with open_store(path) as reader:
        at = 0
        while at < end:
            at += reader.read(at, end).num_rows


@contextmanager
def cluster(**options: Any) -> Iterator[LocalCluster]:
    """Run three nodes in ``TMPDIR``."""
    with tempfile.TemporaryDirectory() as directory, LocalCluster(3, directory, **options) as running:
        yield running


async def closed_loop(
    client: AsyncClient, length_s: float, latencies: list[float] | None = None, failed: Counter[str] | None = None
) -> float:
    """Keep the requests in flight for a time; return entries per second. Calls that fail are counted, or end it."""
    end, done = time.monotonic() + length_s, 0

    async def send() -> None:
        nonlocal done
        while (began := time.monotonic()) < end:
            try:
                await client.append_columns(COLUMNS)
            except DLedgerError as error:
                if failed is None:
                    raise
                failed[error.name] += 1
                continue
            done += COUNT
            if latencies is not None:
                latencies.append(time.monotonic() - began)

    began = time.monotonic()
    await asyncio.gather(*(send() for _ in range(IN_FLIGHT)))
    return done / (time.monotonic() - began)


def full(options: argparse.Namespace) -> dict[str, Any]:
    """Sample RSS under full load."""
    samples: dict[str, list[int]] = {}
    failed: Counter[str] = Counter()

    async def run(running: LocalCluster) -> float:
        async with AsyncClient(running.peers, "default") as client:
            await closed_loop(client, 5, failed=failed)
            loading = asyncio.create_task(closed_loop(client, 60 * options.minutes, failed=failed))
            while not loading.done():
                for node in running.node_ids:
                    samples.setdefault(node, []).append(_rss(running.pid(node)))
                await asyncio.wait([loading], timeout=1)
            return await loading

    with cluster(retain_bytes=RETAINED, data_segment_bytes=256 << 20) as running:
        rate = uvloop.run(run(running))
    fifths = {node: np.array_split(np.array(found), 5) for node, found in samples.items()}
    memory = {
        node: {
            "rss_mib": [round(float(np.median(part)) / MIB) for part in parts],
            "growth": round(float(np.median(parts[-1]) / np.median(parts[1])), 3),
        }
        for node, parts in fifths.items()
    }
    return {"entries_per_s": round(rate), "minutes": options.minutes, "failed": dict(failed), **memory}


def _rss(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def larger(options: argparse.Namespace) -> dict[str, Any]:
    """Append to a log larger than memory while a reader reads it from its start."""
    group: Path = options.cgroup
    limits = [group / name for name in ("memory.max", "memory.limit_in_bytes") if (group / name).exists()]
    limit = int(limits[0].read_text(encoding="utf-8"))
    if limit > 8 << 30:
        raise SystemExit(f"set a limit below 8 GiB in {limits[0]}: the log is made three times as large")

    async def run(running: LocalCluster) -> dict[str, Any]:
        async with AsyncClient(running.peers, "default") as client, AsyncClient(running.peers, "default") as other:
            await closed_loop(client, 3)
            latencies: tuple[list[float], list[float]] = ([], [])
            before = await closed_loop(client, 10, latencies[0])
            while (await client.bounds()).end * (BODY + 48) < 3 * limit:
                await closed_loop(client, 5)
            read = 0

            async def scan() -> None:
                nonlocal read
                while True:
                    at, end = 0, (await other.bounds()).end
                    while at < end:
                        found = await other.fetch(at, end, max_bytes=MIB)
                        read, at = read + found.batch.num_rows, found.next_index

            reading = asyncio.create_task(scan())
            began = time.monotonic()
            rate = await closed_loop(client, 30, latencies[1])
            took = time.monotonic() - began
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
            return {
                "limit_mib": limit >> 20,
                "entries_per_s": round(before),
                "entries_per_s_with_cold_reader": round(rate),
                "ratio": round(rate / before, 2),
                "entries_read_per_s": round(read / took),
                "p99_ms": [_ms(times, 99) for times in latencies],
            }

    with cluster() as running:
        for node in running.node_ids:
            (group / "cgroup.procs").write_text(f"{running.pid(node)}\n", encoding="utf-8")
        return uvloop.run(run(running))


def idle(options: argparse.Namespace) -> dict[str, Any]:
    """Measure nodes that host many groups and send their heartbeats only."""
    names = tuple(f"group-{number:03}" for number in range(options.groups))
    with cluster(groups=names) as running:
        for name in names:
            running.leader(name)
        time.sleep(10)
        before, began = _cpu_s(running), time.monotonic()
        time.sleep(20)
        after, took = _cpu_s(running), time.monotonic() - began
    sent, received = _frame_bytes(options.groups)
    return {
        "groups": options.groups,
        "percent_of_a_core": {node: round(100 * (after[node] - before[node]) / took, 1) for node in after},
        "heartbeat_frame_bytes": sent,
        "response_frame_bytes": received,
    }


def _cpu_s(running: LocalCluster) -> dict[str, float]:
    """Return the CPU time of each node, all threads, user and system."""
    stats = {
        node: Path(f"/proc/{running.pid(node)}/stat").read_text().rpartition(")")[2].split()
        for node in running.node_ids
    }
    return {node: (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK") for node, stat in stats.items()}


def _frame_bytes(groups: int) -> tuple[int, int]:
    """Return the bytes of one frame of heartbeats, and of its responses."""
    ends = {"sender": MemberId("n0"), "target": MemberId("n1"), "term": Term(12), "round": 500_000}
    beats = [
        (n, Heartbeat(**ends, commit_index=Index(1_000_000), log_time_ms=86_400_000)) for n in range(1, groups + 1)
    ]
    responses = [(n, HeartbeatResponse(**ends, last_index=Index(1_000_000))) for n in range(1, groups + 1)]
    sent, received = codec.heartbeats_frames(beats, 1_700_000_000_000), codec.heartbeat_responses_frames(responses)
    return sum(map(len, sent)), sum(map(len, received))


def _ms(latencies_s: list[float], percent: float) -> float:
    return round(float(np.percentile(latencies_s, percent)) * 1000, 1)


def overload(options: argparse.Namespace) -> dict[str, Any]:
    """Offer twice the rate that the log sustains."""

    async def run(running: LocalCluster) -> dict[str, Any]:
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(AsyncClient(running.peers, "default", timeout_ms=OVERLOAD_TIMEOUT_MS))
                for _ in range(options.clients)
            ]
            client, turns = clients[0], cycle(clients)
            await closed_loop(client, 3)
            latencies: tuple[list[float], list[float]] = ([], [])
            sustained = await closed_loop(client, 15, latencies[0], Counter())
            failed: Counter[str] = Counter()
            acknowledged = 0

            async def send(end: float) -> None:
                nonlocal acknowledged
                began = time.monotonic()
                try:
                    await next(turns).append_columns(COLUMNS)
                except DLedgerError as error:
                    failed[error.name] += 1
                else:
                    latencies[1].append(time.monotonic() - began)
                    acknowledged += COUNT if time.monotonic() < end else 0

            interval, began = COUNT / (2 * sustained), time.monotonic()
            end, due = began + 15, began
            async with asyncio.TaskGroup() as sending:
                while due < end:
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                    sending.create_task(send(end))
                    due += interval
            return {
                "sustained_per_s": round(sustained),
                "offered_per_s": round(2 * sustained),
                "acknowledged_per_s": round(acknowledged / 15),
                "ratio": round(acknowledged / 15 / sustained, 2),
                "p50_ms": [_ms(times, 50) for times in latencies],
                "p99_ms": [_ms(times, 99) for times in latencies],
                "failed": dict(failed),
            }

    with cluster(retain_bytes=RETAINED, data_segment_bytes=256 << 20) as running:
        return uvloop.run(run(running))


PARTS = {"cold": cold, "full": full, "larger": larger, "overload": overload, "idle": idle}


def main() -> None:
    """Measures the parts that are named, in this order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=2048)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=1, help="for overload")
    parser.add_argument("--groups", type=int, default=256)
    parser.add_argument("--cgroup", type=Path, help="memory cgroup with a limit, for larger")
    options = parser.parse_args()
    if "larger" in options.parts and options.cgroup is None:
        parser.error("larger needs --cgroup DIR")
    for part in options.parts:
        sys.stdout.write(json.dumps({part: PARTS[part](options)}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
