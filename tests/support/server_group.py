"""Real ``NodeServer``s of one group in this process, on loopback ports, with real stores; and one raw client."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from dledger_core.client.routing.channel import Channel
from dledger_core.cluster import free_ports
from dledger_core.config import Peer, RaftConfig, StorageConfig
from dledger_core.control import Part, column_crc
from dledger_core.ids import NodeId
from dledger_core.net import codec
from dledger_core.net.frame import Frame
from dledger_core.net.protocol import Type
from dledger_core.record import Columns
from dledger_core.server.config import ServerConfig
from dledger_core.server.hosted import HostedGroup
from dledger_core.server.node import NodeServer
from tests.support.logs import rows_of

T = TypeVar("T")

RAFT = RaftConfig(election_ticks_min=25, election_ticks_max=50, heartbeat_ticks=2)
STORAGE = StorageConfig(data_segment_bytes=16 << 20, index_segment_bytes=1 << 20, preallocate_bytes=0)
TIMEOUT_S = 60.0


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a test's coroutine as the server runs: on uvloop."""
    return uvloop.run(work)


def free_peers(count: int) -> tuple[Peer, ...]:
    return tuple(Peer(NodeId(f"n{i}"), "127.0.0.1", port) for i, port in enumerate(free_ports(count)))


async def eventually(condition: Callable[[], T], timeout_s: float = TIMEOUT_S) -> T:
    """Waits, without blocking the loop, until ``condition`` is true."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "this never became true"
        await asyncio.sleep(0.005)
    return value


def stall(run_on_disk: Callable[[Callable[[], None]], None]) -> threading.Event:
    """Make the thread that writes wait until the returned event is set; return once it waits."""
    waiting, free = threading.Event(), threading.Event()

    def wait() -> None:
        waiting.set()
        free.wait(120)

    run_on_disk(wait)
    assert waiting.wait(60)
    return free


class ServerGroup:
    """``nodes`` servers; an async context manager that starts and closes them."""

    def __init__(self, directory: Path, nodes: int = 3, **options: Any) -> None:
        parts = ("on_role", "foreign_port", "open_log_prefix", "messages", "site")
        self.parts = {name: options.pop(name, None) for name in parts}
        self.peers = free_peers(nodes)
        self.directory = directory
        self.options = {"raft": RAFT, "storage": STORAGE, "tick_ms": 10} | options
        self.nodes: dict[str, NodeServer] = {}
        self.channels: list[Channel] = []

    async def __aenter__(self) -> ServerGroup:
        for peer in self.peers:
            await self.start(peer.node_id)
        await eventually(self.is_bootstrapped)
        return self

    def is_bootstrapped(self) -> bool:
        """Whether no group of a running node waits to be bootstrapped."""
        return not any(group.is_waiting for node in self.nodes.values() for group in node.groups.values())

    async def __aexit__(self, *_: object) -> None:
        for channel in self.channels:
            await channel.close()
        for node_id in list(self.nodes):
            await self.stop(node_id)

    def config(self, node_id: str, **options: Any) -> ServerConfig:
        settings = {"self_id": NodeId(node_id), "peers": self.peers, "directory": self.directory}
        return ServerConfig(**(settings | self.options | options))

    async def start(self, node_id: str, **options: Any) -> NodeServer:
        node = NodeServer(self.config(node_id, **options), **self.parts)
        await node.start()
        self.nodes[node_id] = node
        return node

    async def stop(self, node_id: str) -> None:
        await self.nodes.pop(node_id).close()

    def hosted(self, node_id: str, group: str = "default") -> HostedGroup:
        return self.nodes[node_id].hosted[group]

    async def leader(self, group: str = "default") -> str:
        """Returns the node that leads and has committed in its term."""

        def found() -> str | None:
            return next((n for n, s in self.nodes.items() if s.hosted[group].replica.leader_ready), None)

        return str(await eventually(found))

    async def followers(self, group: str = "default") -> list[str]:
        leader = await self.leader(group)
        return [node for node in self.nodes if node != leader]

    async def channel(self, node_id: str) -> Channel:
        channel = Channel(next(peer for peer in self.peers if peer.node_id == node_id))
        await channel.open(TIMEOUT_S)
        self.channels.append(channel)
        return channel

    async def client(self) -> RawClient:
        """Returns a connection to the leader."""
        return RawClient(await self.channel(await self.leader()))


class RawClient:
    """Requests as they go over the wire: no retries, no second node."""

    def __init__(self, channel: Channel, group: str = "default") -> None:
        self.channel = channel
        self.group = group

    async def ask(self, kind: Type, *payload: Any, timeout_s: float = TIMEOUT_S, **fields: Any) -> Frame:
        return await self.channel.request({"t": kind, "g": self.group} | fields, *payload, timeout_s=timeout_s)

    async def append(self, bodies: list[bytes], timeout_s: float = TIMEOUT_S, **fields: Any) -> tuple[int, int, int]:
        columns = Columns.from_bodies(bodies)
        payload = codec.columns_payload(columns)
        header = (await self.ask(Type.APPEND, *payload, n=columns.count, timeout_s=timeout_s, **fields)).header
        return header["first"], header["last"], header["term"]

    async def produce(self, *appends: tuple[str, int, int, list[bytes]]) -> list[tuple[int, int]]:
        """Send appends of several producers (id, epoch, sequence, bodies); return first and last index of each."""
        columns = Columns.from_bodies([body for *_, bodies in appends for body in bodies])
        ids, epochs, sequences, bodies = (list(each) for each in zip(*appends, strict=True))
        fields = {"n": columns.count, "ns": [len(each) for each in bodies], "p": ids, "pe": epochs, "ps": sequences}
        frame = await self.ask(Type.PRODUCE, *codec.columns_payload(columns), **fields, po=[False] * len(ids))
        return list(zip(frame.header["first"], frame.header["last"], strict=True))

    async def attempt(self, bodies: list[bytes], key: dict[str, Any], attempt: str = "a") -> Part:
        first, last, _ = await self.append(bodies, x=key | {"a": attempt})
        return Part(first, last, len(bodies), column_crc(Columns.from_bodies(bodies).crcs))

    async def transact(
        self, operation: str, key: dict[str, Any], parts: list[Part] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Ask for, commit or abort a transaction; return the response's header."""
        payload = () if parts is None else codec.parts_payload(parts)
        count = {} if parts is None else {"n": len(parts)}
        return (await self.ask(Type.TRANSACTION, *payload, op=operation, x=key, **count, **fields)).header

    async def read(self, start: int, end: int, timeout_s: float = TIMEOUT_S, **fields: Any) -> tuple[dict, list]:
        """Returns the answer's header and its (index, magic, body) rows."""
        frame = await self.ask(Type.READ, start=start, end=end, timeout_s=timeout_s, **fields)
        rows = rows_of(codec.parse_records(frame.payload, frame.header["n"]))
        return frame.header, [(row.index, row.magic, row.body) for row in rows]
