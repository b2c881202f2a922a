"""Links that forward a port to a node, and a group whose nodes are connected by such links, in this process."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from dledger_core.server.config import ServerConfig
from tests.support.server_group import ServerGroup

NODES_HOST = "127.0.0.2"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Link(ABC):
    """Forwards a port to an address; both directions of a connection end together.

    Args:
        target: the address that is reached through it.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int) -> None:
        """Start to listen."""
        self.server = await asyncio.start_server(self.accept, host, port)

    async def dial(self) -> Streams:
        """Connect to the target; raise OSError."""
        return await asyncio.open_connection(*self.target)

    @abstractmethod
    def ways(self, near: Streams, far: Streams) -> Sequence[Coroutine[Any, Any, None]]:
        """Return a coroutine per direction that forwards until the connection ends."""

    async def close(self) -> None:
        """End all connections."""
        if self.server is not None:
            self.server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        open_ones = [writer]
        try:
            far = await self.dial()
            open_ones.append(far[1])
            ways = self.ways((reader, writer), far)
            for way in asyncio.as_completed([asyncio.create_task(each) for each in ways]):
                await way
                break
        except OSError:
            pass
        finally:
            for each in open_ones:
                each.close()
            self._tasks.discard(task)


class LinkedGroup(ServerGroup):
    """Nodes that reach each other through links only; they themselves listen at another address.

    Args:
        directory: as for ServerGroup.
        kind: the class of the links.
        link: arguments of each link, in addition to its target.
        options: as for ServerGroup.
    """

    def __init__(self, directory: Path, kind: type[Link], link: dict[str, Any], **options: Any) -> None:
        super().__init__(directory, **options)
        self.links = [kind((NODES_HOST, peer.port), **link) for peer in self.peers]

    def config(self, node_id: str, **options: Any) -> ServerConfig:
        return super().config(node_id, host=NODES_HOST, **options)

    async def __aenter__(self) -> LinkedGroup:
        for link, peer in zip(self.links, self.peers, strict=True):
            await link.listen(peer.host, peer.port)
        await super().__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        for link in self.links:
            await link.close()
