"""Reads and queries while a node hangs: who is asked, who is waited for, and what the process remembers."""

import asyncio
import contextlib

import pytest

from dledger_core.client.routing.node_health import (
    HEDGE_DELAY_MIN_S,
    HEDGE_DELAY_S,
    HEDGES_FIRST,
    UNRESPONSIVE_S,
    NodeHealth,
)
from dledger_core.errors import BehindError
from dledger_core.net.protocol import Type
from tests.client.fake_group import FakeGroup, filled

HOUR_MS = 3_600_000
"""No attempt ends by its own timeout."""


@contextlib.asynccontextmanager
async def connected(health):
    """A filled group, and a client of it that is connected to all its nodes."""
    async with FakeGroup() as group, filled(group).client(timeout_ms=HOUR_MS, health=health) as client:
        await client.metadata()
        yield group, client


def told(group):
    """The number of requests of each node, without those about itself."""
    kinds = (Type.METADATA, Type.ALIVE)
    return [sum(frame.header["t"] not in kinds for frame in node.requests) for node in group]


@pytest.fixture
def health():
    return NodeHealth()


# --- reads ------------------------------------------------------------------------------------------------------------

READS = {
    "fetch": lambda client: client.fetch(0, 10),
    "records": lambda client: client.records(0, 10),
    "get": lambda client: client.get(1),
    "offset_for_time": lambda client: client.offset_for_time(5),
    "fetch_at": lambda client: client.fetch_at(0),
    "describe": lambda client: client.describe("terms"),
}


@pytest.mark.parametrize("name", READS)
async def test_read_of_hung_node_is_asked_of_second_one(health, name):
    async with connected(health) as (group, client):
        found = await READS[name](client)
        (serving,) = [node for node, count in zip(group, told(group), strict=True) if count]
        serving.frozen = True
        asked = len(serving.asked(Type.ALIVE))
        assert await READS[name](client) == found
        assert len(serving.asked(Type.ALIVE)) == asked, "before its silence was noticed"
        assert health.unresponsive() == (serving.address,)


async def test_other_clients_of_the_process_ask_a_hung_node_last(health):
    async with connected(health) as (group, client):
        n0 = group.nodes.n0
        n0.frozen = True
        await client.fetch(0, 10, spread=0)
        assert told(group) == [1, 1, 0]
        async with group.client(timeout_ms=HOUR_MS, health=health) as other:
            for _ in range(3):
                await other.fetch(0, 10, spread=0)
        assert told(group)[0] == 1
        n0.thaw()
        await client.metadata()
        await client.fetch(0, 10, spread=0)
        assert told(group)[0] == 2, "it has responded since"


async def test_late_response_shows_that_a_node_is_back(health):
    async with connected(health) as (group, client):
        n0 = group.nodes.n0
        n0.frozen = True
        await client.fetch(0, 10, spread=0)
        assert health.is_unresponsive(n0.address)
        n0.thaw()
        async with asyncio.timeout(60):
            while health.is_unresponsive(n0.address):
                await client.fetch(0, 10, spread=1)


@pytest.mark.parametrize("fails", ["first", "second"])
async def test_read_whose_two_nodes_fail_or_hang_is_asked_of_third(health, fails):
    async with connected(health) as (group, client):
        hung, failing = ("n1", "n0") if fails == "first" else ("n0", "n1")
        getattr(group.nodes, hung).frozen = True
        getattr(group.nodes, failing).script[Type.READ] = [BehindError("behind")]
        asked = len(getattr(group.nodes, hung).asked(Type.ALIVE))
        assert (await client.fetch(0, 10, spread=0)).batch.num_rows == 6
        assert told(group) == [1, 1, 1]
        assert len(getattr(group.nodes, hung).asked(Type.ALIVE)) == asked, "before its silence was noticed"


async def test_without_budget_a_read_leaves_a_hung_node_by_its_silence(health):
    while health.take_hedge():
        pass
    async with connected(health) as (group, client):
        group.nodes.n0.frozen = True
        reading = asyncio.ensure_future(client.fetch(0, 10, spread=0))
        await group.until(lambda: group.nodes.n0.asked(Type.ALIVE))
        assert told(group) == [1, 0, 0]
        assert (await reading).batch.num_rows == 6
        assert told(group) == [1, 1, 0]


NOT_HEDGED = {
    "plain append": lambda client: client.append([b"x"]),
    "producer's append": lambda client: client.append([b"x"], producer_id="p", sequence=0),
    "linearizable read": lambda client: client.read(0, 10, consistency="linearizable"),
    "named node": lambda client: client.fetch(0, 10, node="n1"),
    "long poll": lambda client: client.fetch(10, 20, wait_ms=HOUR_MS, read_from="leader", spread=0),
    "wait": lambda client: client.wait_for_entries({"default": 10}, wait_ms=HOUR_MS),
    "digest": lambda client: client.digest(0, 8, span=8),
}


@pytest.mark.parametrize("name", NOT_HEDGED)
async def test_request_that_may_take_long_or_has_effects_is_sent_once(health, name):
    async with connected(health) as (group, client):
        for kind in (Type.APPEND, Type.READ, Type.AWAIT, Type.DIGEST):
            group.always(kind, "ignore")
        asking = asyncio.ensure_future(NOT_HEDGED[name](client))
        await group.until(lambda: sum(len(node.asked(Type.ALIVE)) for node in group) > 1)
        assert sum(told(group)) == 1
        assert health.unresponsive() == ()
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking


# --- queries of all nodes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("query", ["bounds", "groups", "pin"])
async def test_hung_node_delays_bounds_once(health, query):
    calls = {"bounds": lambda c: c.bounds(), "groups": lambda c: c.groups(), "pin": lambda c: c.pin("reader", 0, 60)}
    async with connected(health) as (group, client):
        n2 = group.nodes.n2
        n2.frozen = True
        await calls[query](client)
        assert health.unresponsive() == (n2.address,)
        asked = len(n2.asked(Type.ALIVE))
        for _ in range(3):
            await calls[query](client)
        assert len(n2.asked(Type.ALIVE)) == asked, "not even until its silence was noticed"
        n2.thaw()
        async with asyncio.timeout(60):
            while health.unresponsive():
                await calls[query](client)


async def test_bounds_wait_for_a_slow_leader_and_not_for_a_follower(health):
    async with connected(health) as (group, client):
        group.nodes.n1.frozen = True
        asking = asyncio.ensure_future(client.bounds())
        await group.until(lambda: group.nodes.n1.asked(Type.ALIVE))
        assert not asking.done(), "a follower may not know the newest commit index"
        group.nodes.n1.thaw()
        assert (await asking).end == 10
        assert health.unresponsive() == ()


async def test_one_response_of_three_is_no_majority(health):
    async with connected(health) as (group, client):
        slow = group.nodes.n0, group.nodes.n1
        for node in slow:
            node.frozen = True
        asking = asyncio.ensure_future(client.groups())
        await group.until(lambda: all(node.asked(Type.ALIVE) for node in slow))
        assert not asking.done()
        for node in slow:
            node.thaw()
        await asking


async def test_unresponsive_leader_is_waited_for_a_moment_only(health):
    async with connected(health) as (group, client):
        group.nodes.n1.frozen = True
        health.missed(group.nodes.n1.address)
        assert (await client.bounds()).end == 10
        assert not group.nodes.n1.asked(Type.ALIVE), "not until its silence was noticed"


# --- what a process knows ---------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_delay_is_the_99th_percentile_of_the_reads_of_a_node():
    health = NodeHealth(clock=Clock())
    assert health.hedge_delay_s("a") == HEDGE_DELAY_S
    for _ in range(99):
        health.responded("a", 0.001)
    assert health.hedge_delay_s("a") == HEDGE_DELAY_S, "few reads are known"
    for _ in range(1000):
        health.responded("a", 0.001)
    assert health.hedge_delay_s("a") == HEDGE_DELAY_MIN_S
    for number in range(1000):
        health.responded("a", 0.5 if number % 50 == 0 else 0.002)
    assert health.hedge_delay_s("a") == 0.5
    assert health.hedge_delay_s("b") == HEDGE_DELAY_S
    for number in range(1000):
        health.responded("b", 0.5 if number % 200 == 0 else 0.04)
    assert health.hedge_delay_s("b") == 0.04


def test_few_long_reads_raise_the_delay_at_once():
    health = NodeHealth(clock=Clock())
    health.responded("far", 0.3)
    assert health.hedge_delay_s("far") == 0.3


def test_less_than_every_tenth_read_is_asked_of_a_second_node():
    health = NodeHealth(clock=Clock())
    hedges = sum(health.take_hedge() for _ in range(100))
    assert hedges == HEDGES_FIRST
    found = 0
    for _ in range(1000):
        health.responded("a", 0.001)
        found += health.take_hedge()
    assert 50 < found < 100


def test_node_is_unresponsive_until_a_response_or_for_a_while():
    clock = Clock()
    health = NodeHealth(clock=clock)
    health.missed("a", "b")
    health.responded("a")
    assert health.unresponsive() == ("b",)
    clock.now = UNRESPONSIVE_S / 2
    health.missed("c")
    clock.now = UNRESPONSIVE_S
    assert health.unresponsive() == ("c",)
    assert [health.is_unresponsive(each) for each in "abc"] == [False, False, True]
