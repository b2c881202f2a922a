"""A network with faults: one TCP proxy per (dialler, target), with a fault per direction.

Bytes from a to b travel forward through the link that a dials and backward through the one that b dials. `Network`
treats both the same, so a fault names the sender and the receiver, whichever of them dialled. The bytes of a stalled
direction are delivered when it heals, as TCP does after a partition. The end of a connection is held back with them,
so a peer that exits on the far side of a stalled direction leaves a half-open connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

HELD_BYTES_MAX = 8 << 20
"""A stalled direction reads this much from its sender (twice, by the stream's own rule), then stops."""
CHUNK_BYTES = 1 << 20
NO_LINGER = struct.pack("ii", 1, 0)

Ending = Literal["drop", "reset"]
T = TypeVar("T")


@dataclass
class Direction:
    """One way through a link; belongs to the proxy's loop."""

    delay_s: float = 0.0
    flowing: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.flowing.set()

    async def passage(self) -> None:
        """Wait until bytes may pass."""
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        await self.flowing.wait()


class Link:
    """The port that one end dials to reach the other; belongs to the proxy's loop."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.forward = Direction()
        self.backward = Direction()
        self.refusing: Ending | None = None
        self.accepted = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self) -> int:
        """Start to listen, and return the port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=HELD_BYTES_MAX)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.end("reset")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def end(self, how: Ending) -> None:
        """End the open connections."""
        for writer in self._writers:
            _end(writer, how)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self.refusing is not None:
            _end(writer, self.refusing)
            return
        self._writers.add(writer)
        far: asyncio.StreamWriter | None = None
        try:
            await self.forward.passage()  # also the first packet of a connection is held back
            far_reader, far = await asyncio.open_connection("127.0.0.1", self.target_port, limit=HELD_BYTES_MAX)
            self._writers.add(far)
            if self.refusing is not None:  # since this connection began
                _end(far, self.refusing)
                return
            await asyncio.gather(_pump(reader, far, self.forward), _pump(far_reader, writer, self.backward))
        except OSError:
            pass  # no server listens there: the dialler's connection ends below
        finally:
            for each in (writer, far):
                if each is None:
                    continue
                if not each.is_closing():  # a reset would overtake a close that has not reached the socket yet
                    _end(each, "reset")
                self._writers.discard(each)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction) -> None:
    """Copy bytes one way until one side ends, then end the other side."""
    ending: Ending = "drop"
    try:
        while data := await reader.read(CHUNK_BYTES):
            await direction.passage()
            writer.write(data)
            await writer.drain()
    except OSError:
        ending = "reset"
    await direction.passage()
    _end(writer, ending)


def _end(writer: asyncio.StreamWriter, how: Ending) -> None:
    if how == "drop":
        writer.close()
        return
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
    writer.transport.abort()


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float | None = 60.0) -> T:
        """Run a coroutine there and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def close(self) -> None:
        """Cancel the tasks that still run there and stop the thread."""

        async def cancel() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.call(cancel())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Network:
    """All links between the named ends; methods may be called from any thread."""

    def __init__(self) -> None:
        self._thread = LoopThread("network")
        self._links: dict[tuple[str, str], Link] = {}

    def link(self, dialler: str, target: str, target_port: int) -> int:
        """Make the link that ``dialler`` uses to reach ``target``; return the port to dial."""

        async def make() -> int:
            link = self._links[dialler, target] = Link(target_port)
            return await link.listen()

        return self._thread.call(make())

    def stall(self, sender: str, receiver: str) -> None:
        """Hold back the bytes from ``sender`` to ``receiver``; the other direction is unchanged."""
        self._do(lambda: [direction.flowing.clear() for direction in self._directions(sender, receiver)])

    def flow(self, sender: str, receiver: str) -> None:
        """End a stall."""
        self._do(lambda: [direction.flowing.set() for direction in self._directions(sender, receiver)])

    def delay(self, sender: str, receiver: str, seconds: float) -> None:
        """Delay each chunk of data."""

        def change() -> None:
            for direction in self._directions(sender, receiver):
                direction.delay_s = seconds

        self._do(change)

    def refuse(self, one: str, other: str, how: Ending) -> None:
        """End the connections between two ends, and every new one, until healed."""

        def change() -> None:
            for link in self._between(one, other):
                link.refusing = how
                link.end(how)

        self._do(change)

    def accepted(self, dialler: str, target: str) -> int:
        """Return how many connections the link has accepted so far."""
        return self._links[dialler, target].accepted

    def end_connections(self, one: str, other: str, how: Ending) -> None:
        """End the connections between two ends once; new ones are accepted."""
        self._do(lambda: [link.end(how) for link in self._between(one, other)])

    def heal(self) -> None:
        """Remove all faults."""

        def change() -> None:
            for link in self._links.values():
                link.refusing = None
                for direction in (link.forward, link.backward):
                    direction.delay_s = 0.0
                    direction.flowing.set()

        self._do(change)

    def close(self) -> None:
        async def close_all() -> None:
            await asyncio.gather(*(link.close() for link in self._links.values()))

        self._thread.call(close_all())
        self._thread.close()

    def _directions(self, sender: str, receiver: str) -> list[Direction]:
        found = []
        if (sender, receiver) in self._links:
            found.append(self._links[sender, receiver].forward)
        if (receiver, sender) in self._links:
            found.append(self._links[receiver, sender].backward)
        return found

    def _between(self, one: str, other: str) -> list[Link]:
        return [self._links[pair] for pair in ((one, other), (other, one)) if pair in self._links]

    def _do(self, change: Callable[[], object]) -> None:
        async def run() -> None:
            change()

        self._thread.call(run())
