"""Links between nodes over real sockets: loss, reconnection, and messages that are dropped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise

import pytest

from dledger_core.config import LIMITS, Peer
from dledger_core.errors import ProtocolError, UnreachableError
from dledger_core.ids import Index, NodeId, Term
from dledger_core.net import codec
from dledger_core.net.connection import connect, serve
from dledger_core.net.hello import Hello
from dledger_core.raft import Heartbeat, RequestVote, Role
from dledger_core.server.replica.peers import Members, PeerLinks
from tests.support.server_group import RawClient, ServerGroup, eventually, free_peers

IDLE_TICKS = 40
TICK_S = 0.005


class Node:
    """The links of one node with its listening port, and a clock that ticks while ``ticking``."""

    def __init__(self, me: Peer, peers: tuple[Peer, ...], check_hello=lambda _: None, **options) -> None:
        self.me = me
        self.got = []
        self.lost = []
        self.opened = 0
        self.dialled_at = []
        self.links = PeerLinks(
            me.node_id,
            Members(me.node_id, peers),
            hello=self.hello,
            check_hello=check_hello,
            deliver=lambda group, message: self.got.append((group, message)),
            on_lost=self.lost.append,
            idle_ticks_max=IDLE_TICKS,
            **options,
        )

    def hello(self) -> Hello:
        self.dialled_at.append(asyncio.get_running_loop().time())
        return Hello(role="peer", node_id=self.me.node_id)

    def handler_for(self, connection):
        self.opened += 1
        self.links.adopt(connection)
        return self.links

    async def __aenter__(self):
        self.server = await serve(
            self.me.host,
            self.me.port,
            accept=lambda _: Hello(role="peer", node_id=self.me.node_id),
            handler_for=self.handler_for,
        )
        self.links.start()
        self.clock = asyncio.create_task(self._tick())
        return self

    async def _tick(self):
        while True:
            await asyncio.sleep(TICK_S)
            self.links.tick()

    async def __aexit__(self, *_):
        self.clock.cancel()
        await self.links.close()
        await self.server.close()


class Proxy:
    """Forwards one port to another; ``swallow`` makes the connections of this moment half-open."""

    def __init__(self, target: Peer) -> None:
        self.target = target
        self.pairs = []
        self.swallowed = set()

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self.server.close()
        for task, *writers in self.pairs:
            task.cancel()
            for writer in writers:
                writer.close()

    async def _accept(self, reader, writer):
        there_reader, there_writer = await asyncio.open_connection(self.target.host, self.target.port)
        number = len(self.pairs)
        self.pairs.append((asyncio.current_task(), writer, there_writer))
        await asyncio.gather(self._forward(number, reader, there_writer), self._forward(number, there_reader, writer))

    async def _forward(self, number, reader, writer):
        try:
            while data := await reader.read(65536):
                if number not in self.swallowed:
                    writer.write(data)
        except ConnectionError:
            pass
        if number not in self.swallowed:
            writer.close()

    def swallow(self):
        self.swallowed |= set(range(len(self.pairs)))


def beat(sender, target, number=1):
    return Heartbeat(sender=sender, target=target, term=Term(1), commit_index=Index(-1), round=number)


async def both_connected(one, other):
    await eventually(lambda: one.links.connected() and other.links.connected())


@asynccontextmanager
async def pair():
    """Two nodes with a link."""
    peers = free_peers(2)
    async with Node(peers[0], peers) as n0, Node(peers[1], peers) as n1:
        await both_connected(n0, n1)
        yield n0, n1


async def test_idle_link_stays_open():
    async with pair() as (n0, n1):
        await asyncio.sleep(4 * IDLE_TICKS * TICK_S)
        assert (n0.lost, n1.lost, n1.opened) == ([], [], 1)
        n0.links.send("g", beat("n0", "n1"))
        n1.links.send("g", beat("n1", "n0"))
        await eventually(lambda: n0.got and n1.got)
        assert (n0.got, n1.got) == ([("g", beat("n1", "n0"))], [("g", beat("n0", "n1"))])


async def test_half_open_link_is_closed_and_connected_again():
    peers = free_peers(2)
    async with Node(peers[1], peers) as n1, Proxy(peers[1]) as proxy:
        around = (peers[0], Peer(NodeId("n1"), "127.0.0.1", proxy.port))
        async with Node(peers[0], around) as n0:
            await both_connected(n0, n1)
            proxy.swallow()
            await eventually(lambda: n0.lost and n1.lost)
            await both_connected(n0, n1)
            n0.links.send("g", beat("n0", "n1", 7))
            await eventually(lambda: n1.got)
            assert n1.got == [("g", beat("n0", "n1", 7))]
            assert len(proxy.pairs) == n1.opened == 2


async def test_peer_whose_clock_differs_is_reported(caplog):
    day_ms, limits = 86_400_000, replace(LIMITS, clock_compare_ms=50)
    peers = free_peers(3)
    clocks = [lambda: day_ms, lambda: 2 * day_ms, lambda: day_ms + limits.clock_difference_ms]
    with caplog.at_level(logging.WARNING, "dledger_core.server.replica.peers"):
        async with contextlib.AsyncExitStack() as nodes:
            for peer, clock in zip(peers, clocks, strict=True):
                await nodes.enter_async_context(Node(peer, peers, wall_ms=clock, limits=limits))
            await eventually(lambda: len(caplog.records) == 4)
    found = {(record.args[0], abs(record.args[1])) for record in caplog.records}
    assert found == {("n0", day_ms), ("n1", day_ms), ("n1", day_ms - 2000), ("n2", day_ms - 2000)}


async def test_many_heartbeats_in_one_iteration_arrive_in_order():
    async with pair() as (n0, n1):
        groups = [f"g{number}" for number in range(20_000)]
        for group in groups:
            n0.links.send(group, beat("n0", "n1"))
        await eventually(lambda: len(n1.got) == len(groups))
        assert [group for group, _ in n1.got] == groups
        assert n1.lost == []


async def test_pause_grows_while_link_breaks_at_once():
    async with pair() as (n0, n1):
        for number in range(5):
            await eventually(n1.links.connected)
            for connection in list(n1.server.connections):
                connection.abort()
            await eventually(lambda number=number: len(n0.lost) > number)
        await eventually(lambda: len(n0.dialled_at) == 6)
        pauses = [b - a for a, b in pairwise(n0.dialled_at)]
        least = [LIMITS.link_pause_s * 1.5**n * 0.75 for n in range(5)]
        assert all(pause > bound - 0.005 for pause, bound in zip(pauses, least, strict=True)), pauses


INVALID_NAMES = {
    "empty label": "bad..name",
    "long label": "x" * 70 + ".example",
    "surrogate": "\udcff",
    "nul": "nul\0byte",
}


@pytest.mark.parametrize("host", INVALID_NAMES.values(), ids=INVALID_NAMES)
async def test_invalid_host_name_does_not_stop_reconnecting(host, caplog, monkeypatch):
    # A worker cannot send pytest's report of a log that holds half a surrogate pair, so pytest gets none.
    logger = logging.getLogger("dledger_core.server.replica.peers")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    peers = free_peers(2)
    wrong = (peers[0], Peer(NodeId("n1"), host, peers[1].port))
    with caplog.at_level(logging.INFO, "dledger_core.server.replica.peers"):
        async with Node(peers[0], wrong) as n0:
            await eventually(lambda: len(n0.dialled_at) >= 3)
    assert any("peer=n1" in record.getMessage() for record in caplog.records)


async def test_links_reconnect_after_unexpected_error(caplog):
    peers = free_peers(2)
    errors = [RuntimeError("broken on purpose"), RuntimeError("again")]

    def check(_):
        if errors:
            raise errors.pop()

    async with Node(peers[1], peers) as n1, Node(peers[0], peers, check_hello=check) as n0:
        await both_connected(n0, n1)
    assert not errors
    assert any("broken on purpose" in str(record.exc_info) for record in caplog.records)


async def test_messages_for_unhosted_groups_are_dropped(tmp_path, caplog):
    cluster = ServerGroup(tmp_path, groups=("shared",))
    async with cluster:
        await cluster.stop("n0")
        with caplog.at_level(logging.WARNING, "dledger_core.server.node"):
            await cluster.start("n0", groups=("shared", "mine", "alone"))
            extra = [cluster.hosted("n0", name).replica for name in ("mine", "alone")]
            await cluster.leader("shared")
            links = cluster.nodes["n0"].links
            await eventually(lambda: len(links.connected()) == 2)
            # Their vote requests get no response: nodes that do not host them drop these.
            await eventually(lambda: all(replica.soft_state.role is Role.PRE_CANDIDATE for replica in extra))
            await asyncio.sleep(0.5)
            client = RawClient(await cluster.channel(await cluster.leader("shared")), "shared")
            await client.append([b"the others continue"])
            assert len(links.connected()) == 2
            assert all(replica.soft_state.role is not Role.LEADER for replica in extra)
    lines = [record.getMessage() for record in caplog.records if "not hosted here" in record.getMessage()]
    assert {sum(f"'{name}'" in line for line in lines) for name in ("mine", "alone")} == {2}, lines


async def test_message_from_another_node_closes_link():
    peers = free_peers(2)
    async with Node(peers[1], peers) as n1:
        connection = await connect(
            peers[1].host, peers[1].port, Hello(role="peer", node_id="n0"), n1.links, timeout_s=60
        )
        stranger = RequestVote(
            sender=NodeId("n7"),
            target=NodeId("n1"),
            term=Term(1),
            last_index=Index(-1),
            last_term=Term(-1),
            pre=True,
        )
        connection.send_buffers(codec.message_to_frame("g", stranger))
        await connection.closed
        assert n1.got == []


async def as_n0(n1: Node, handler=None):
    """Connect as n0, which says nothing more."""
    return await connect(
        n1.me.host, n1.me.port, Hello(role="peer", node_id="n0"), handler or SilentHandler(), timeout_s=60
    )


class SilentHandler:
    def on_frame(self, connection, frame):
        pass

    def on_close(self, connection, error):
        pass


async def test_newcomer_displaces_no_link_that_works():
    async with pair() as (n0, n1):
        newcomer = await as_n0(n1)
        newcomer.send_buffers(codec.message_to_frame("g", beat("n0", "n1", 666)))
        await newcomer.closed
        assert (n0.lost, n1.lost) == ([], [])
        n0.links.send("g", beat("n0", "n1", 1))
        await eventually(lambda: n1.got)
        assert n1.got == [("g", beat("n0", "n1", 1))], "a newcomer's messages are dropped"


async def test_newcomer_replaces_silent_link_and_one_newcomer_waits():
    peers = free_peers(2)
    async with Node(peers[1], peers) as n1:
        silent, newcomer = await as_n0(n1), await as_n0(n1)
        with pytest.raises(UnreachableError):
            await as_n0(n1)
        await silent.closed
        assert newcomer.is_open
        newcomer.send_buffers(codec.message_to_frame("g", beat("n0", "n1", 2)))
        await eventually(lambda: n1.got)


async def test_newcomer_replaces_closed_link_at_once():
    peers = free_peers(2)
    async with Node(peers[1], peers) as n1:
        n1.clock.cancel()
        first, newcomer = await as_n0(n1), await as_n0(n1)
        first.close()
        await eventually(lambda: n1.lost)
        newcomer.send_buffers(codec.message_to_frame("g", beat("n0", "n1", 2)))
        await eventually(lambda: n1.got)


async def test_node_accepts_no_link_from_larger_id():
    peers = free_peers(2)
    async with Node(peers[0], peers) as n0:
        with pytest.raises(ProtocolError):
            await connect(n0.me.host, n0.me.port, Hello(role="peer", node_id="n1"), SilentHandler(), timeout_s=60)


@pytest.mark.parametrize(
    ("kind", "reported"), [("swapped", "the node at this address is"), ("stranger", "a0 is not a peer of n1")]
)
async def test_node_with_another_peers_string_is_reported_and_left_alone(tmp_path, caplog, kind, reported):
    async with ServerGroup(tmp_path) as cluster:
        await cluster.leader()
        await cluster.stop("n0")
        n0, n1, n2 = cluster.peers
        if kind == "swapped":
            wrong = (n0, Peer(n1.node_id, n2.host, n2.port), Peer(n2.node_id, n1.host, n1.port))
        else:
            wrong = (Peer(NodeId("a0"), n0.host, n0.port), n1, n2)
        with caplog.at_level(logging.INFO, "dledger_core.server.replica.peers"):
            await cluster.start(wrong[0].node_id, peers=wrong)
            alone = cluster.nodes.pop(wrong[0].node_id)
            await eventually(lambda: reported in caplog.text)
            client = await cluster.client()
            await client.append([b"the others continue"])
            assert alone.links.connected() == []
            assert not alone.hosted["default"].replica.is_leader
            await alone.close()
