"""A program that starts a node and appends to it, with the ``dledger_core`` of its PYTHONPATH, whatever its version.

Each line of its input is a number of single appends; each line of its output is the CPU seconds of the node's process
and of this one's thread for them. The store is in memory (``/dev/shm``) and not synced. The arguments are a directory
there, and the number of requests in flight.
"""

import asyncio
import sys
import time
from pathlib import Path

import uvloop

from dledger_core import AsyncClient, LocalCluster
from dledger_core.record import Columns


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process; Linux counts it in nanoseconds."""
    found = [path.read_text().split()[0] for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(map(int, found)) / 1e9


async def append(cluster: LocalCluster, in_flight: int) -> None:
    columns, pid = Columns.from_bodies([bytes(100)]), cluster.pid("n0")
    async with AsyncClient(cluster.peers, timeout_ms=120_000) as client:

        async def share(count: int) -> None:
            for _ in range(count):
                await client.append_columns(columns)

        while line := await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
            node, own = cpu_seconds(pid), time.thread_time()
            await asyncio.gather(*(share(int(line) // in_flight) for _ in range(in_flight)))
            own, node = time.thread_time() - own, cpu_seconds(pid) - node
            sys.stdout.write(f"{node} {own}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    with LocalCluster(1, sys.argv[1], durability="page-cache", preallocate_bytes=0) as started:
        uvloop.run(append(started, int(sys.argv[2])))
