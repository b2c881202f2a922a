"""Nodes that stop responding while their connections stay open, as a frozen process and a lost network do."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from dledger_core.client.routing.silence import SILENT_TICKS, Silence
from dledger_core.errors import RequestTimedOutError
from dledger_core.net.protocol import Type
from tests.client.fake_group import SHORT_MS, on_group

HOUR_MS = 3_600_000
"""No attempt ends by its own timeout."""


async def elect(group, client):
    """Let the others elect n2 once n1 is silent; return when the client has followed."""
    following = asyncio.ensure_future(client.append([b"follows"], producer_id="p", sequence=0))
    await silent(group)
    group.leader = "n2"
    await following


async def silent(group):
    """Wait until the client has asked the other nodes several times whether they still follow n1, which is frozen."""
    asked = len(group.nodes.n2.asked(Type.METADATA))
    await group.until(lambda: len(group.nodes.n2.asked(Type.METADATA)) > asked + 3)


def told(node):
    """The requests that a node received, without those about itself."""
    return [frame for frame in node.requests if frame.header["t"] not in (Type.METADATA, Type.ALIVE)]


@on_group(is_filled=True, timeout_ms=HOUR_MS)
async def test_read_leaves_silent_node(group, client):
    found = await client.get(1)
    (serving,) = [node for node in group if node.asked(Type.READ)]
    serving.frozen = True
    assert await client.get(1) == found
    assert len(serving.asked(Type.READ)) == 2


@on_group(is_filled=True, timeout_ms=HOUR_MS)
async def test_tail_leaves_silent_node(group, client):
    tail = client.tail(1)
    await anext(tail)
    (serving,) = [node for node in group if node.asked(Type.READ)]
    serving.frozen = True
    waiting = asyncio.ensure_future(anext(tail))
    await group.until(lambda: serving.held)
    group.log.append_bodies(b"new")
    assert (await waiting).column("body").to_pylist() == [b"new"]
    await tail.aclose()


@pytest.mark.parametrize("kind", ["linearizable read", "producer's append"])
@on_group(is_filled=True, timeout_ms=HOUR_MS)
async def test_idempotent_request_follows_the_leader_only_once_another_leads(group, client, kind):
    await client.append([b"first"])
    n1 = group.nodes.n1
    n1.frozen = True
    if kind == "linearizable read":
        request = asyncio.ensure_future(client.read(1, 3, consistency="linearizable"))
    else:
        request = asyncio.ensure_future(client.append([b"x"], producer_id="p", sequence=0))
    await silent(group)
    assert (len(told(n1)), request.done()) == (2, False), "the others still follow n1"
    group.leader = "n2"
    await request
    assert len(told(n1)) == 2


@on_group(timeout_ms=HOUR_MS)
async def test_plain_append_in_flight_waits_for_its_outcome_and_later_ones_follow(group, client):
    await client.append([b"first"])
    n1 = group.nodes.n1
    n1.frozen = True
    in_flight = asyncio.ensure_future(client.append([b"in flight"]))
    await elect(group, client)
    assert (await client.append([b"later"])).first_index == 3
    assert not in_flight.done()
    n1.names = "n1"  # it appends what it has received
    n1.thaw()
    assert (await in_flight).first_index == 4


@on_group(timeout_ms=HOUR_MS)
async def test_no_new_append_is_sent_to_silent_leader(group, client):
    await client.append([b"first"])
    n1 = group.nodes.n1
    n1.frozen = True
    in_flight = asyncio.ensure_future(client.append([b"in flight"], producer_id="p", sequence=0))
    await silent(group)
    sent = len(told(n1))
    later = asyncio.ensure_future(client.append([b"later"]))
    await silent(group)
    assert len(told(n1)) == sent
    group.leader = "n2"
    await asyncio.gather(in_flight, later)


@on_group(timeout_ms=4 * SHORT_MS)
async def test_plain_append_at_silent_leader_ends_by_its_deadline_as_unknown(group, client):
    await client.append([b"first"])
    group.nodes.n1.frozen = True
    request = asyncio.ensure_future(client.append([b"x"]))
    await elect(group, client)
    with pytest.raises(RequestTimedOutError) as caught:
        await request
    assert caught.value.outcome_unknown
    assert group.log.end == 3


@on_group(is_filled=True, timeout_ms=HOUR_MS)
async def test_quiet_node_that_runs_is_not_left(group, client):
    await client.append([b"first"])
    n1 = group.nodes.n1
    n1.script[Type.APPEND] = ["ignore"]
    request = asyncio.ensure_future(client.append([b"x"], producer_id="p", sequence=0))
    await group.until(lambda: len(n1.asked(Type.ALIVE)) == 2)
    assert not group.nodes.n2.asked(Type.APPEND)
    assert not request.done()
    request.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await request


@on_group(is_filled=True, timeout_ms=HOUR_MS)
async def test_replica_without_contact_to_a_leader_is_read_last(group, client):
    await client.get(1)
    (serving,) = [node for node in group if node.asked(Type.READ)]

    def alone(node, connection, frame):
        header, payload = node.answer(frame)
        return header | {"hl": -1}, payload

    serving.script[Type.READ] = [alone]
    await client.get(1)
    await client.get(1)
    assert len(serving.asked(Type.READ)) == 2


def test_bytes_that_move_are_no_silence():
    """A large response on a slow network, or a large request."""
    silence, connection = Silence(), SimpleNamespace(received_bytes=0, write_buffer_bytes=1000, is_open=True)
    for number in range(2 * SILENT_TICKS):
        connection.received_bytes += number % 2
        connection.write_buffer_bytes -= 1 - number % 2
        assert silence.tick(connection, waits=True) == 0
    ticks = [silence.tick(connection, waits=True) for _ in range(SILENT_TICKS)]
    assert ticks == list(range(1, SILENT_TICKS + 1))
    assert silence.is_silent(connection)
    connection.received_bytes += 1
    assert not silence.is_silent(connection)
    assert silence.tick(connection, waits=True) == 0
    assert [silence.tick(connection, waits=waits) for waits in (True, False, True)] == [1, 0, 1]
