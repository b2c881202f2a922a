"""The bound next to which ``python -m benchmarks`` measures: a replicated append without Raft.

A client sends requests to one process, which joins those that arrived meanwhile into one batch, encodes it as DLedger's
records and index rows, and sends it to two other processes. All three write the batch to a data file and an index file
and sync the data file; the client gets its acknowledgement when two of the three have. There are no terms, elections,
checks of the log, retries and reads, and nothing is ever deleted or limited: it is not a log, it is what the same files
and the same sockets allow on this machine. In two variants:

- ``growing``: sparse files that grow, as those of a log do;
- ``zeroed``: files that were zeroed and synced before the clock starts, and are overwritten from their start again when
  they are full. So neither blocks nor pages are allocated: what the disk allows.

Each request has entries of one size. The client never joins requests.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from isal import isal_zlib

from benchmarks.lines import Load, figures
from dledger_core.record.layout import HEADER, HEADER_BYTES, INDEX_RECORD, pack_header, pack_index_record

VARIANTS = ("zeroed", "growing")
HEAD = struct.Struct("<IIIQI")
"""Bytes of the payload, entries, bytes of a body, number of the request or batch, CRC-32 of the payload."""
CRC_BYTES = 4
BATCH_BYTES = 1 << 20
BATCHES_IN_FLIGHT = 4
FEW = 24
"""Up to this many entries, numpy's calls cost more than a step of Python for each entry."""
FILE_BYTES = 1 << 30
"""Bytes that the zeroed variant writes before it starts again at the beginning."""


class Frames(asyncio.BufferedProtocol):
    """A connection of frames: a head, then a payload that is received into a buffer of its own.

    Args:
        on_frame: called with the connection, entries, bytes of a body, number and payload; the payload may be used
            until ``release``.
        on_end: called when the connection ends.
    """

    def __init__(
        self, on_frame: Callable[[Frames, int, int, int, memoryview], None], on_end: Callable[[], None] = lambda: None
    ) -> None:
        self._on_frame, self._on_end = on_frame, on_end
        self._head = bytearray(HEAD.size)
        self._into, self._got = memoryview(self._head), 0
        self._fields: tuple[int, int, int, int] | None = None
        self._free: dict[int, list[memoryview]] = collections.defaultdict(list)

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.set_write_buffer_limits(high=64 << 20)

    def connection_lost(self, _: Exception | None) -> None:
        self._on_end()

    def get_buffer(self, _: int) -> memoryview:
        return self._into[self._got :]

    def buffer_updated(self, nbytes: int) -> None:
        self._got += nbytes
        if self._got < len(self._into):
            return
        payload = self._into
        self._got = 0
        if self._fields is None:
            nbytes, *fields = HEAD.unpack(self._head)
            self._fields = tuple(fields)
            if nbytes:
                free = self._free[nbytes]
                self._into = free.pop() if free else memoryview(bytearray(nbytes))
                return
            payload = memoryview(b"")
        entries, size, number, crc = self._fields
        self._fields, self._into = None, memoryview(self._head)
        if isal_zlib.crc32(payload) != crc:
            raise ValueError("a frame is damaged")
        self._on_frame(self, entries, size, number, payload)

    def release(self, payload: memoryview) -> None:
        """Receive into this buffer again."""
        self._free[len(payload)].append(payload)


class Disk:
    """A thread that writes all batches that arrived meanwhile, then syncs once.

    Args:
        path: of the data file; the index file is next to it.
        variant: one of VARIANTS.
        file_bytes: as FILE_BYTES.
        on_synced: called in the event loop with the tokens of the batches.
    """

    def __init__(
        self, path: Path, variant: str, file_bytes: int, on_synced: Callable[[list[tuple[int, memoryview]]], None]
    ) -> None:
        self._loop, self._on_synced = asyncio.get_running_loop(), on_synced
        self._queue: queue.SimpleQueue[tuple[Any, Any, tuple[int, memoryview]]] = queue.SimpleQueue()
        self._full = file_bytes if variant == "zeroed" else 1 << 62
        self._fds = [os.open(path.with_suffix(f".{suffix}"), os.O_RDWR | os.O_CREAT) for suffix in ("data", "index")]
        for fd in self._fds:
            if variant == "growing":
                os.ftruncate(fd, 0)
                continue
            for offset in range(os.fstat(fd).st_size, file_bytes, BATCH_BYTES):
                os.pwrite(fd, bytes(min(BATCH_BYTES, file_bytes - offset)), offset)
            os.fsync(fd)
        self._offsets = [0, 0]
        threading.Thread(target=self._run, daemon=True).start()

    def write(self, data: Any, rows: Any, token: tuple[int, memoryview]) -> None:
        """Write a batch."""
        self._queue.put((data, rows, token))

    def _run(self) -> None:
        while True:
            batches = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while len(batches) < 64:
                    batches.append(self._queue.get_nowait())
            for data, rows, _ in batches:
                for which, buffer in enumerate((data, rows)):
                    offset = self._offsets[which]
                    offset = 0 if offset + len(buffer) > self._full else offset
                    os.pwrite(self._fds[which], buffer, offset)
                    self._offsets[which] = offset + len(buffer)
            os.fdatasync(self._fds[0])  # the index can be made from the data
            self._loop.call_soon_threadsafe(self._on_synced, [token for _, _, token in batches])


class Follower:
    """Writes batches and acknowledges them."""

    def __init__(self, path: Path, variant: str, file_bytes: int) -> None:
        self._disk = Disk(path, variant, file_bytes, self._synced)
        self._connection: Frames | None = None

    def received(self, connection: Frames, entries: int, _: int, number: int, payload: memoryview) -> None:
        """Check the order of a batch and write it."""
        self._connection = connection
        rows = np.frombuffer(payload[: entries * INDEX_RECORD.itemsize], INDEX_RECORD)
        data = payload[entries * INDEX_RECORD.itemsize :]
        ends = rows["position"].astype(np.int64) + rows["size"]
        if (rows["position"][1:] != ends[:-1]).any() or int(ends[-1] - rows["position"][0]) != len(data):
            raise ValueError("a batch has a gap")
        self._disk.write(data, payload[: entries * INDEX_RECORD.itemsize], (number, payload))

    def _synced(self, tokens: list[tuple[int, memoryview]]) -> None:
        assert self._connection is not None
        for _, payload in tokens:
            self._connection.release(payload)
        self._connection.transport.write(HEAD.pack(0, 0, 0, tokens[-1][0], 0))


class Leader:
    """Joins requests, encodes and sends them, and acknowledges what two of three have synced."""

    def __init__(self, path: Path, variant: str, file_bytes: int) -> None:
        self._disk = Disk(path, variant, file_bytes, lambda tokens: self._advance(0, tokens[-1][0]))
        self._followers: list[Frames] = []
        self._synced = [-1, -1, -1]
        self._waiting: collections.deque[tuple[Frames, int, int, int, memoryview]] = collections.deque()
        self._in_flight: collections.deque[tuple[int, list[tuple[Frames, int]]]] = collections.deque()
        self._batches = self._index = self._position = 0
        self._scheduled = False

    async def connect(self, ports: list[int]) -> None:
        """Connect to the followers."""
        for which, port in enumerate(ports, 1):
            _, follower = await asyncio.get_running_loop().create_connection(
                lambda which=which: Frames(lambda *frame: self._advance(which, frame[3])), "127.0.0.1", port
            )
            self._followers.append(follower)

    def received(self, connection: Frames, entries: int, size: int, number: int, payload: memoryview) -> None:
        """Queue a request."""
        self._waiting.append((connection, entries, size, number, payload))
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._scheduled and len(self._in_flight) < BATCHES_IN_FLIGHT:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        taken = [self._waiting.popleft()]
        nbytes = len(taken[0][4])
        while self._waiting and nbytes < BATCH_BYTES and self._waiting[0][2] == taken[0][2]:
            taken.append(self._waiting.popleft())
            nbytes += len(taken[-1][4])
        data, rows, entries = self._encode(taken)
        number, self._batches = self._batches, self._batches + 1
        crc = isal_zlib.crc32(data, isal_zlib.crc32(rows))
        head = HEAD.pack(len(rows) + len(data), entries, taken[0][2], number, crc)
        for follower in self._followers:
            follower.transport.writelines([head, rows, data])
        self._disk.write(data, rows, (number, memoryview(b"")))
        self._in_flight.append((number, [(connection, own) for connection, _, _, own, _ in taken]))
        for connection, _, _, _, payload in taken:
            connection.release(payload)
        self._schedule()

    def _encode(self, taken: list[tuple[Frames, int, int, int, memoryview]]) -> tuple[Any, Any, int]:
        entries, size = sum(each[1] for each in taken), taken[0][2]
        first, position, step = self._index, self._position, HEADER_BYTES + size
        self._index += entries
        self._position += entries * step
        if entries <= FEW:
            parts, rows = [], []
            for _, count, _, _, payload in taken:
                for at in range(count):
                    (crc,) = struct.unpack_from("<I", payload, CRC_BYTES * at)
                    begin = CRC_BYTES * count + at * size
                    parts += [pack_header(1, step, first, 1, position, 0, crc, size), payload[begin : begin + size]]
                    rows.append(pack_index_record(1, position, step, first, 1))
                    first, position = first + 1, position + step
            return b"".join(parts), b"".join(rows), entries
        headers, index = np.zeros(entries, HEADER), np.empty(entries, INDEX_RECORD)
        headers["magic"] = headers["term"] = index["magic"] = index["term"] = 1
        headers["size"] = index["size"] = step
        headers["length"] = size
        headers["index"] = index["index"] = np.arange(first, first + entries)
        headers["position"] = index["position"] = np.arange(position, position + entries * step, step)
        headers["crc"] = np.frombuffer(b"".join([each[4][: CRC_BYTES * each[1]] for each in taken]), "<u4")
        records = np.empty((entries, step), np.uint8)
        records[:, :HEADER_BYTES] = headers.view(np.uint8).reshape(entries, HEADER_BYTES)
        at = 0
        for _, count, _, _, payload in taken:
            records[at : at + count, HEADER_BYTES:] = np.frombuffer(payload[CRC_BYTES * count :], np.uint8).reshape(
                count, size
            )
            at += count
        return records.reshape(-1).data, index.view(np.uint8).data, entries

    def _advance(self, which: int, number: int) -> None:
        self._synced[which] = number
        committed = sorted(self._synced)[1]
        acknowledged: dict[Frames, list[bytes]] = collections.defaultdict(list)
        while self._in_flight and self._in_flight[0][0] <= committed:
            for connection, own in self._in_flight.popleft()[1]:
                acknowledged[connection].append(HEAD.pack(0, 0, 0, own, 0))
        for connection, frames in acknowledged.items():
            connection.transport.write(b"".join(frames))
        self._schedule()


async def serve(path: Path, variant: str, file_bytes: int, ports: list[int]) -> None:
    """Run a leader of followers at these ports, or a follower; print the port, end with the first connection."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    node: Leader | Follower
    if ports:
        node = Leader(path, variant, file_bytes)
        await node.connect(ports)
    else:
        node = Follower(path, variant, file_bytes)
    server = await loop.create_server(lambda: Frames(node.received, ended.set), "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await ended.wait()


async def drive(port: int, load: Load) -> dict[str, float]:
    """Keep requests in flight, or send them when they are due; return the figures without the warm-up."""
    loop = asyncio.get_running_loop()
    bodies = [os.urandom(load.size) for _ in range(load.entries)]
    crcs = b"".join(struct.pack("<I", isal_zlib.crc32(body)) for body in bodies)
    payload = crcs + b"".join(bodies)
    crc = isal_zlib.crc32(payload)
    sent: dict[int, float] = {}
    latencies: list[float] = []
    begun = time.perf_counter()
    counts_from, end = begun + load.warm_up_s, begun + load.warm_up_s + load.seconds
    finished, last, number = loop.create_future(), begun, 0

    def send(due: float) -> None:
        nonlocal number
        sent[number] = due
        head = HEAD.pack(len(payload), load.entries, load.size, number, crc)
        connection.transport.writelines([head, payload])
        number += 1

    def acknowledged(_: Frames, __: int, ___: int, own: int, ____: memoryview) -> None:
        nonlocal last
        last, due = time.perf_counter(), sent.pop(own)
        if due >= counts_from:
            latencies.append(last - due)
        if load.rate is None and last < end:
            send(last)
        elif not sent and last >= end and not finished.done():
            finished.set_result(None)

    _, connection = await loop.create_connection(lambda: Frames(acknowledged), "127.0.0.1", port)
    if load.rate is None:
        for _ in range(load.in_flight):
            send(time.perf_counter())
    else:
        due, interval = begun, load.entries / load.rate
        while due < end:
            await asyncio.sleep(due - time.perf_counter())
            send(due)
            due += interval
        await asyncio.sleep(end - time.perf_counter())
        if not sent:
            finished.set_result(None)
    await asyncio.wait_for(finished, load.seconds + 30)
    connection.transport.close()
    return figures(latencies, load.entries, last - counts_from)


class _Node:
    """A process of ``serve``, which waits for the ports of its followers."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "benchmarks.skeletons", *map(str, arguments)]
        pipe, root = subprocess.PIPE, Path(__file__).parents[1]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=root, text=True)

    def start(self, ports: list[int]) -> int:
        """Return its own port."""
        asked, answered = self._process.stdin, self._process.stdout
        assert asked is not None
        assert answered is not None
        asked.write(" ".join(map(str, ports)) + "\n")
        asked.flush()
        return int(answered.readline())

    def stop(self) -> None:
        """Kill it."""
        with self._process:  # closes the pipes, and waits
            self._process.kill()


def measure(variant: str, directory: Path, load: Load, file_bytes: int = FILE_BYTES) -> dict[str, float]:
    """Measure one of VARIANTS; its zeroed files stay in the directory for the next time."""
    with contextlib.ExitStack() as stack:
        nodes = [_Node(directory / f"{variant}{number}", variant, file_bytes) for number in range(3)]
        for node in nodes:
            stack.callback(node.stop)
        leader, *followers = nodes
        port = leader.start([node.start([]) for node in followers])
        return uvloop.run(drive(port, load))


def main() -> None:
    path, variant, file_bytes = sys.argv[1:]
    ports = [int(port) for port in sys.stdin.readline().split()]
    uvloop.run(serve(Path(path), variant, int(file_bytes), ports))


if __name__ == "__main__":
    main()
