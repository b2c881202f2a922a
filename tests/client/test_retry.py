"""Retries of a client: on which replicas, for how long, and which error ends them."""

import asyncio
import time

import pytest

from dledger_core import (
    AsyncClient,
    BehindError,
    BusyError,
    IndexOutOfRangeError,
    RequestTimedOutError,
    UnreachableError,
)
from dledger_core.client.routing.retry import Retry, Timeouts
from dledger_core.net.protocol import Type
from tests.client.fake_group import on_group, run

UNREACHABLE = "n0-127.0.0.1:1"
DELETED = {"first_index": 5, "last_index": 9}


def filled(group, count=10):
    group.log.append_bodies(*(b"body %d" % number for number in range(count)))


def always(nodes, kind, step, times=1000):
    for node in nodes:
        node.script[kind] = [step] * times


def reads(group):
    """Number of reads at each node."""
    return [len(node.asked(Type.READ)) for node in group]


def shows_less(node, connection, frame):
    """Respond as a replica whose log ends at the requested start."""
    start = frame.header["start"]
    fields = {"t": Type.READ_OK, "n": 0, "next": start, "commit": start - 1, "visible": start, "first": 0, "skip": []}
    return fields, []


@pytest.mark.parametrize("node", [None, "n1"])
@on_group(timeout_ms=300)
async def test_read_is_retried_only_with_retry_timeout(group, client, node):
    filled(group)
    always(group, Type.READ, BusyError("busy"))
    with pytest.raises(BusyError):
        await client.read(0, 10, node=node)
    assert node is None or reads(group) == [0, 1, 0], "a call for one node is made once"
    always(group, Type.READ, BusyError("busy"), times=3)
    async with group.client(timeout_ms=300, retry_timeout_ms=30_000) as retrying:
        assert (await retrying.read(0, 10, node=node)).num_rows == 10
    assert node is None or reads(group) == [0, 5, 0]


@pytest.mark.parametrize("method", ["metadata", "groups"])
@on_group(timeout_ms=5_000)
async def test_query_of_all_nodes_is_retried_only_with_timeout(group, client, method):
    for node in group:
        await node.stop()
    began = time.monotonic()
    with pytest.raises(UnreachableError):
        await getattr(client, method)()
    assert time.monotonic() - began < 3
    async with group.client(timeout_ms=5_000, retry_timeout_ms=30_000) as retrying:
        asking = asyncio.create_task(getattr(retrying, method)())
        await asyncio.sleep(0.3)
        for node in group:
            await node.start()
        assert await asking


def test_wrong_peers_are_reported_within_connect_timeout():
    async def main():
        began = time.monotonic()
        async with AsyncClient(UNREACHABLE, retry_timeout_ms=60_000, connect_timeout_ms=300) as client:
            for call in (client.metadata(), client.read(0, 1), client.producer("p")):
                with pytest.raises(UnreachableError):
                    await call
        assert time.monotonic() - began < 10

    run(main())


@on_group(retry_timeout_ms=30_000, connect_timeout_ms=200)
async def test_connect_timeout_applies_before_first_response(group, client):
    filled(group)
    await client.metadata()
    for node in group:
        await node.stop()
    reading = asyncio.create_task(client.read(0, 10))
    await asyncio.sleep(0.6)
    for node in group:
        await node.start()
    assert (await reading).num_rows == 10


@on_group(timeout_ms=2_000)
async def test_replica_without_known_entries_is_behind(group, client):
    filled(group)
    always([group.nodes.n0], Type.READ, shows_less)
    assert (await client.fetch(3, 10, min_end=10, spread=0)).batch.num_rows == 7
    assert reads(group) == [1, 1, 0]
    assert group.asked(Type.READ)[0]["wait"] == 1000, "a lagging replica is given a moment"
    assert (await client.fetch(3, 10, node="n0")).next_index == 3, "not an error where the end is unknown"
    always(group, Type.READ, shows_less)
    with pytest.raises(BehindError):
        await client.fetch(3, 10, min_end=10)


@pytest.mark.parametrize("read_from", ["leader", "follower"])
@on_group()
async def test_preferred_role_is_asked_first(group, client, read_from):
    filled(group)
    for spread in range(6):
        await client.fetch(0, 10, read_from=read_from, spread=spread)
    asked = {node.node_id for node in group if node.asked(Type.READ)}
    assert asked == ({group.leader} if read_from == "leader" else {"n0", "n1", "n2"} - {group.leader})
    for node in asked:
        await getattr(group.nodes, node).stop()
    assert (await client.fetch(0, 10, read_from=read_from)).batch.num_rows == 10


@on_group()
async def test_readers_with_spread_start_at_different_replicas(group, client):
    filled(group)
    for spread in range(6):
        await client.fetch(0, 10, spread=spread)
    assert reads(group) == [2, 2, 2]


@on_group()
async def test_failed_replica_is_asked_last_for_a_while(group, client):
    filled(group)
    always([group.nodes.n0], Type.READ, BehindError("behind"))
    for _ in range(5):
        await client.fetch(0, 10, spread=0)
    assert reads(group) == [1, 5, 0]


@on_group(timeout_ms=500)
async def test_entries_count_as_deleted_only_without_other_replica(group, client):
    filled(group)
    always([group.nodes.n0], Type.READ, IndexOutOfRangeError("deleted", "", "", DELETED))
    always([group.nodes.n1], Type.READ, IndexOutOfRangeError("deleted", "", "", DELETED | {"first_index": 4}))
    await group.nodes.n2.stop()
    with pytest.raises(IndexOutOfRangeError) as caught:
        await client.fetch(3, 10)
    assert caught.value.values["first_index"] == 4
    async with group.client(timeout_ms=500, retry_timeout_ms=30_000) as retrying:
        reading = asyncio.create_task(retrying.fetch(3, 10))
        await asyncio.sleep(0.3)
        assert not reading.done()
        await group.nodes.n2.start()
        assert (await reading).batch.num_rows == 7


@on_group(retry_timeout_ms=60_000)
async def test_deleted_entries_are_reported_at_once_by_all_replicas(group, client):
    filled(group)
    group.first, began = 5, time.monotonic()
    with pytest.raises(IndexOutOfRangeError):
        await client.fetch(3, 10)
    assert time.monotonic() - began < 10


@on_group(timeout_ms=300, retry_timeout_ms=30_000)
async def test_plain_append_is_not_retried_after_unknown_outcome(group, client):
    always(group, Type.APPEND, "apply and drop")
    with pytest.raises(RequestTimedOutError):
        await client.append([b"x"])
    assert group.log.end == 1


def test_attempt_timeouts_grow_to_request_timeout():
    async def main():
        retrying = Retry(Timeouts(10.0, 60.0), idempotent=True)
        found = []
        for _ in range(3):
            found.append(round(retrying.attempt_s, 1))
            await retrying.failed(RequestTimedOutError("slow"))
        assert found == [2.5, 5.0, 10.0]
        within = Retry(Timeouts(10.0), idempotent=True)
        await within.failed(RequestTimedOutError("slow"))
        assert round(within.attempt_s, 1) == 2.5, "without a retry timeout four attempts fit"
        assert round(Retry(Timeouts(10.0, 60.0), idempotent=False).attempt_s, 1) == 10.0

    run(main())
