"""Links with a data rate and a latency of their own, and a group whose nodes are connected by them, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from pathlib import Path
from typing import Any

from dledger_core.server.config import ServerConfig
from tests.support.server_group import ServerGroup

CHUNK_BYTES = 8 << 10
NODES_HOST = "127.0.0.2"


class SlowLink:
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
        self._target = target
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._queue_bytes = queue_bytes
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> None:
        """Start to listen."""
        listener = socket.create_server((host, port))
        # Accepted sockets inherit it; set later it would not limit the window of an open connection.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._queue_bytes)
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=CHUNK_BYTES)

    async def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._queue_bytes)
        sock.setblocking(False)
        far: asyncio.StreamWriter | None = None
        try:
            await asyncio.get_running_loop().sock_connect(sock, self._target)
            far_reader, far = await asyncio.open_connection(sock=sock, limit=CHUNK_BYTES)
            ways = (self._forward(reader, far), self._forward(far_reader, writer))
            for way in asyncio.as_completed([asyncio.create_task(each) for each in ways]):
                await way
                break
        except OSError:
            sock.close()
        finally:
            for each in (writer, far):
                if each is not None:
                    each.close()
            self._tasks.discard(task)

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


class SlowGroup(ServerGroup):
    """Nodes that reach each other through slow links only; they themselves listen at another address.

    Args:
        directory: as for ServerGroup.
        link: arguments of each SlowLink.
        options: as for ServerGroup.
    """

    def __init__(self, directory: Path, link: dict[str, Any], **options: Any) -> None:
        super().__init__(directory, **options)
        self.links = [SlowLink((NODES_HOST, peer.port), **link) for peer in self.peers]

    def config(self, node_id: str, **options: Any) -> ServerConfig:
        return super().config(node_id, host=NODES_HOST, **options)

    async def __aenter__(self) -> SlowGroup:
        for link, peer in zip(self.links, self.peers, strict=True):
            await link.listen(peer.host, peer.port)
        await super().__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        for link in self.links:
            await link.close()

    def term(self) -> int:
        """Return the highest term of a node."""
        return max(self.hosted(node).replica.soft_state.term for node in self.nodes)
