"""A measure for CPU time that rises as the product's does: requests between two processes, with no code of the product.

CPU time of the same work varies by a factor of two: other processes take the caches, the memory's bandwidth and the
core's other half, and the kernel wakes a process for each request or for sixty. A loop of arithmetic feels none of it.
So what is measured and its measure alternate, and both are the same kind of work: loops of uvloop, sockets, msgpack,
small objects. ``one_core`` gives both one core, and SCHED_BATCH, under which a process that gets a request lets the
sender go on: else the size of the batches, and so the cost of a request, depends on what else runs.

``python -m tests.support.calibration`` is the process that replies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgpack
import uvloop

ROOT: Final = Path(__file__).resolve().parents[2]
_OBJECTS: Final = 6
_HEADER: Final = {"t": 12, "r": 1, "g": "default", "n": 1}


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Keep this thread, and the processes that it starts, on one core and in SCHED_BATCH."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        os.sched_setaffinity(0, cores)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process; Linux counts it in nanoseconds."""
    found = [path.read_text().split()[0] for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(map(int, found)) / 1e9


async def together(request: Callable[[], Awaitable[object]], count: int, in_flight: int) -> None:
    """Make ``count`` requests, so many at a time."""

    async def some() -> None:
        for _ in range(count // in_flight):
            await request()

    await asyncio.gather(*(some() for _ in range(in_flight)))


async def cost(pid: int, request: Callable[[], Awaitable[object]], count: int, in_flight: int) -> tuple[float, float]:
    """Return the CPU seconds per request of another process, and of this thread."""
    other, own = cpu_seconds(pid), time.thread_time()
    await together(request, count, in_flight)
    own, other = time.thread_time() - own, cpu_seconds(pid) - other
    return other / count, own / count


class _Object:
    __slots__ = ("body", "number", "type")

    def __init__(self, number: int, type_: int, body: bytes) -> None:
        self.number, self.type, self.body = number, type_, body


def _work() -> None:
    found = {}
    for _ in range(_OBJECTS):
        packed = msgpack.packb(_HEADER)
        header = msgpack.unpackb(packed)
        found[header["r"]] = _Object(header["r"], header["t"], packed)


class _Messages(asyncio.Protocol):
    """Maps as msgpack, each after its length, in both directions."""

    def __init__(self, received: Callable[[_Messages, dict[str, Any]], object]) -> None:
        self._received = received
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        data, at = self._rest + data, 0
        while len(data) >= at + 4 and len(data) >= (end := at + 4 + int.from_bytes(data[at : at + 4], "big")):
            self._received(self, msgpack.unpackb(data[at + 4 : end]))
            at = end
        self._rest = data[at:]

    def send(self, message: dict[str, Any]) -> None:
        packed = msgpack.packb(message)
        self.transport.write(len(packed).to_bytes(4, "big") + packed)


class Replies:
    """The requests of the measure: a context manager, with a process that replies."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._number = 0
        command = [sys.executable, "-m", "tests.support.calibration"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    async def __aenter__(self) -> Replies:
        port = int(self._process.stdout.readline())
        make = lambda: _Messages(lambda _, reply: self._waiting.pop(reply["r"]).set_result(None))  # noqa: E731
        _, self._messages = await asyncio.get_running_loop().create_connection(make, "127.0.0.1", port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._messages.transport.close()
        self._process.communicate()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def request(self) -> None:
        self._number += 1
        reply = self._waiting[self._number] = asyncio.get_running_loop().create_future()
        _work()
        self._messages.send({"r": self._number, "g": "default", "t": 12, "b": bytes(100)})
        await reply


async def _serve() -> None:
    loop = asyncio.get_running_loop()

    async def respond(messages: _Messages, request: dict[str, Any]) -> None:
        _work()
        messages.send({"r": request["r"], "i": 1, "t": 2})

    running: set[asyncio.Task[None]] = set()

    def received(messages: _Messages, request: dict[str, Any]) -> None:
        task = loop.create_task(respond(messages, request))
        running.add(task)
        task.add_done_callback(running.discard)

    server = await loop.create_server(lambda: _Messages(received), "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(_serve())
