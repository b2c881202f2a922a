"""Links with a data rate and a latency of their own, and a group whose nodes are connected by them, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from tests.support.links import Link, LinkedGroup, Streams

CHUNK_BYTES = 8 << 10


class SlowLink(Link):
    """Forwards a port to an address; both directions of each connection have the same rate and latency.

    Args:
        target: the address that is reached through it.
        bytes_per_s: the rate.
        latency_s: from the arrival of a byte to its departure, in addition.
        queue_bytes: size of the receive buffer: what waits there delays all that follows.
    """

    def __init__(
        self, target: tuple[str, int], *, bytes_per_s: float, latency_s: float = 0.0, queue_bytes: int = 64 << 10
    ) -> None:
        super().__init__(target)
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._queue_bytes = queue_bytes

    async def listen(self, host: str, port: int) -> None:
        """Start to listen."""
        listener = socket.create_server((host, port))
        # Accepted sockets inherit it; set later it would not limit the window of an open connection.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._queue_bytes)
        self.server = await asyncio.start_server(self.accept, sock=listener, limit=CHUNK_BYTES)

    async def dial(self) -> Streams:
        """Connect to the target; raise OSError."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._queue_bytes)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, self.target)
        except OSError:
            sock.close()
            raise
        return await asyncio.open_connection(sock=sock, limit=CHUNK_BYTES)

    def ways(self, near: Streams, far: Streams) -> Sequence[Coroutine[Any, Any, None]]:
        """Return a coroutine per direction that forwards until the connection ends."""
        return self._forward(near[0], far[1]), self._forward(far[0], near[1])

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        queue: deque[tuple[float, bytes]] = deque()
        arrived = asyncio.Event()

        async def leave() -> None:
            while True:
                await arrived.wait()
                arrived.clear()
                while queue:
                    at, data = queue.popleft()
                    await asyncio.sleep(at - loop.time())
                    writer.write(data)

        leaving = asyncio.create_task(leave())
        free_at = loop.time()
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(CHUNK_BYTES):
                    free_at = max(free_at, loop.time()) + len(data) / self._bytes_per_s
                    queue.append((free_at + self._latency_s, data))
                    arrived.set()
                    await asyncio.sleep(free_at - loop.time())
        finally:
            leaving.cancel()


class SlowGroup(LinkedGroup):
    """Nodes that reach each other through slow links only.

    Args:
        directory: as for ServerGroup.
        link: arguments of each SlowLink.
        options: as for ServerGroup.
    """

    def __init__(self, directory: Path, link: dict[str, Any], **options: Any) -> None:
        super().__init__(directory, SlowLink, link, **options)

    def term(self) -> int:
        """Return the highest term of a node."""
        return max(self.hosted(node).replica.soft_state.term for node in self.nodes)
