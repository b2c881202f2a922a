"""A network with faults: one TCP proxy per target, which tells its diallers apart, with a fault per direction.

Every end dials a target at the same address, the one in the log: a proxy listens there. The hello of a connection,
which the dialler sends first, names the node; a connection without one is a client's.

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
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

from dledger_core.errors import ProtocolError
from dledger_core.net.frame import FrameDecoder
from dledger_core.net.protocol import FRAME_BYTES_MAX, PREFACE
from tests.support.frames import receive

CLIENTS: Final = "clients"
"""The name of the clients as an end of the network."""
HELD_BYTES_MAX = 8 << 20
"""A stalled direction reads this much from its sender (twice, by the stream's own rule), then stops."""
CHUNK_BYTES = 1 << 20
NO_LINGER = struct.pack("ii", 1, 0)

Ending = Literal["drop", "reset"]
Address = tuple[str, int]
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
    """The way from one end to the other; belongs to the proxy's loop."""

    def __init__(self, target: Address) -> None:
        self.target = target
        self.forward = Direction()
        self.backward = Direction()
        self.refusing: Ending | None = None
        self.accepted = 0
        self._writers: set[asyncio.StreamWriter] = set()

    def end(self, how: Ending) -> None:
        """End the open connections."""
        for writer in self._writers:
            _end(writer, how)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, received: bytes) -> None:
        """Connect a dialler, from which some bytes were received already, with the target."""
        self.accepted += 1
        if self.refusing is not None:
            _end(writer, self.refusing)
            return
        self._writers.add(writer)
        far: asyncio.StreamWriter | None = None
        try:
            await self.forward.passage()  # also the first packet of a connection is held back
            far_reader, far = await asyncio.open_connection(*self.target, limit=HELD_BYTES_MAX)
            self._writers.add(far)
            if self.refusing is not None:  # since this connection began
                _end(far, self.refusing)
                return
            far.write(received)
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


class Entrance:
    """The address at which all ends dial one target; belongs to the proxy's loop."""

    def __init__(self, link_of: Callable[[str], Link]) -> None:
        self._link_of = link_of
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, port: int) -> int:
        """Start to listen, and return the port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port, limit=HELD_BYTES_MAX)
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            received, dialler = await _hello(reader)
        except (OSError, ProtocolError):  # a stranger dials too, for example one whose port this was before
            _end(writer, "reset")
        else:
            await self._link_of(dialler).serve(reader, writer, received)


async def _hello(reader: asyncio.StreamReader) -> tuple[bytes, str]:
    """Return the first bytes of a connection, and the end that dialled it."""
    decoder, received = FrameDecoder(FRAME_BYTES_MAX), b""
    while data := await reader.read(CHUNK_BYTES):
        received += data
        new = received[max(len(received) - len(data), len(PREFACE)) :]
        for frame in receive(decoder, new):
            return received, str(frame.header.get("node") or CLIENTS)
    return received, CLIENTS


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
        self._entrances: list[Entrance] = []

    def enter(self, target: str, address: Address, diallers: Iterable[str], port: int = 0) -> int:
        """Let ``diallers`` reach ``target``, which listens at ``address``, at a port; return that port.

        A target that moves has another address, and enters again; the earlier port leads nowhere then.
        """

        def link_of(dialler: str) -> Link:
            link = self._links.setdefault((dialler, target), Link(address))
            # Of an earlier port: nothing listens at its address any longer.
            return link if link.target == address else Link(address)

        async def make() -> int:
            for dialler in diallers:
                link = self._links.setdefault((dialler, target), Link(address))
                link.target = address
            self._entrances.append(Entrance(link_of))
            return await self._entrances[-1].listen(port)

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
            for link in self._links.values():
                link.end("reset")
            await asyncio.gather(*(entrance.close() for entrance in self._entrances))

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
