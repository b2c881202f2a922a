"""Retries and failover of a client: on which replicas, for how long, and which error ends them."""

import asyncio
import time

import pytest

from dledger_core import (
    AsyncClient,
    BadRequestError,
    BehindError,
    BusyError,
    CorruptRecordError,
    IndexOutOfRangeError,
    RequestTimedOutError,
    UnknownGroupError,
    UnreachableError,
)
from dledger_core.client.routing.retry import Retry, Timeouts
from dledger_core.net.protocol import Type
from tests.client.fake_group import answering, on_group

DELETED = {"first_index": 5, "last_index": 9}


def scripted(step):
    return lambda node: node.script.update({Type.READ: [step]})


FAILURES = {
    "stopped": lambda node: node.stop(),
    "drops": scripted("drop"),
    "hangs": scripted("ignore"),
    "behind": scripted(BehindError("behind")),
    "damaged": lambda node: setattr(node, "damaged", True),
    "refuses damage": scripted(CorruptRecordError("bad record")),
    "deleted": scripted(IndexOutOfRangeError("deleted")),
    "no such group": scripted(UnknownGroupError("none")),
    "malformed": scripted(answering(n=7)),
    "other range": scripted(lambda n, c, f: (n.on_read(f.header | {"start": 0, "end": 2}, b"")[0], n.answer(f)[1])),
}


@pytest.mark.parametrize("failure", FAILURES)
@on_group(is_filled=True, timeout_ms=4000)
async def test_read_fails_over_to_another_replica(group, client, failure):
    await client.fetch(0, 1)
    (good,) = (node for node in group if node.asked(Type.READ))
    done = FAILURES[failure](good)
    if asyncio.iscoroutine(done):
        await done
    batch = await client.read(3, 100)
    assert batch.column("index").to_pylist() == [3, 4, 8, 9]
    asked = len(good.asked(Type.READ))
    assert await client.read(3, 100) == batch
    assert len(good.asked(Type.READ)) == asked


@pytest.mark.parametrize(
    "error",
    [
        IndexOutOfRangeError("too old", "", "", DELETED),
        CorruptRecordError("bad"),
        UnknownGroupError("none"),
        BehindError("behind"),
        BadRequestError("bad"),
    ],
    ids=str,
)
@on_group(timeout_ms=300)
async def test_read_raises_error_of_all_replicas(group, client, error):
    group.always(Type.READ, error)
    with pytest.raises(type(error)) as caught:
        await client.fetch(0, 1)
    assert caught.value.values == error.values


@on_group(is_filled=True)
async def test_read_of_named_node_asks_no_other(group, client):
    await client.fetch(0, 10, node="n2", min_commit=4)
    await client.records(0, 10, node="n2")
    assert group.asked_by_node(Type.READ) == [0, 0, 2]
    assert [header["min_commit"] for header in group.asked(Type.READ)] == [4, -1]
    group.nodes.n2.script[Type.READ] = [BehindError("behind")]
    with pytest.raises(BehindError):
        await client.fetch(0, 10, node="n2")
    await group.nodes.n2.stop()
    with pytest.raises(UnreachableError):
        await client.fetch(0, 10, node="n2")


@pytest.mark.parametrize("node", [None, "n1"])
@on_group(is_filled=True, timeout_ms=300)
async def test_read_is_retried_only_with_retry_timeout(group, client, node):
    group.always(Type.READ, BusyError("busy"))
    with pytest.raises(BusyError):
        await client.read(0, 10, node=node)
    assert node is None or group.asked_by_node(Type.READ) == [0, 1, 0], "a call for one node is made once"
    for each in group:
        each.script[Type.READ] = [BusyError("busy")] * 3
    async with group.client(timeout_ms=300, retry_timeout_ms=30_000) as retrying:
        assert (await retrying.read(0, 10, node=node)).num_rows == 6
    assert node is None or group.asked_by_node(Type.READ) == [0, 5, 0]


@pytest.mark.parametrize("method", ["metadata", "groups"])
@on_group(timeout_ms=5_000)
async def test_query_of_all_nodes_is_retried_only_with_timeout(group, client, method):
    for node in group:
        await node.stop()
    began = time.monotonic()
    with pytest.raises(UnreachableError) as caught:
        await getattr(client, method)()
    assert all(f"127.0.0.1:{node.port}" in caught.value.where for node in group)
    assert time.monotonic() - began < 3
    async with group.client(timeout_ms=5_000, retry_timeout_ms=30_000) as retrying:
        asking = asyncio.create_task(getattr(retrying, method)())
        await asyncio.sleep(0.3)
        for node in group:
            await node.start()
        assert await asking


async def test_wrong_peers_are_reported_within_connect_timeout():
    began = time.monotonic()
    async with AsyncClient("n0-127.0.0.1:1", retry_timeout_ms=60_000, connect_timeout_ms=300) as client:
        for call in (client.metadata(), client.read(0, 1), client.producer("p")):
            with pytest.raises(UnreachableError):
                await call
    assert time.monotonic() - began < 10


@on_group(is_filled=True, retry_timeout_ms=30_000, connect_timeout_ms=200)
async def test_connect_timeout_applies_before_first_response(group, client):
    await client.metadata()
    for node in group:
        await node.stop()
    reading = asyncio.create_task(client.read(0, 10))
    await asyncio.sleep(0.6)
    for node in group:
        await node.start()
    assert (await reading).num_rows == 6


@on_group(is_filled=True, timeout_ms=2_000)
async def test_replica_without_known_entries_is_behind(group, client):
    def shows_less(node, connection, frame):
        """Respond as a replica whose log ends at the requested start."""
        start = frame.header["start"]
        response = answering(n=0, next=start, commit=start - 1, visible=start, first=0, skip=[])
        return response(node, connection, frame)

    group.always(Type.READ, shows_less, "n0")
    assert (await client.fetch(3, 10, min_end=10, spread=0)).batch.num_rows == 4
    assert group.asked_by_node(Type.READ) == [1, 1, 0]
    assert group.asked(Type.READ)[0]["wait"] == 1000, "a lagging replica is given a moment"
    assert (await client.fetch(3, 10, node="n0")).next_index == 3, "not an error where the end is unknown"
    group.always(Type.READ, shows_less)
    with pytest.raises(BehindError):
        await client.fetch(3, 10, min_end=10)


@pytest.mark.parametrize("read_from", ["leader", "follower"])
@on_group(is_filled=True)
async def test_preferred_role_is_asked_first(group, client, read_from):
    for spread in range(6):
        await client.fetch(0, 10, read_from=read_from, spread=spread)
    asked = {node.node_id for node in group if node.asked(Type.READ)}
    assert asked == ({group.leader} if read_from == "leader" else {"n0", "n1", "n2"} - {group.leader})
    for node in asked:
        await getattr(group.nodes, node).stop()
    assert (await client.fetch(0, 10, read_from=read_from)).batch.num_rows == 6


@on_group(is_filled=True)
async def test_readers_with_spread_start_at_different_replicas(group, client):
    for spread in range(6):
        await client.fetch(0, 10, spread=spread)
    assert group.asked_by_node(Type.READ) == [2, 2, 2]
    for _ in range(9):
        await client.fetch(0, 10)
    assert group.asked_by_node(Type.READ) == [2, 2, 11], "without it at the last good one"


@on_group(is_filled=True)
async def test_failed_replica_is_asked_last_for_a_while(group, client):
    group.always(Type.READ, BehindError("behind"), "n0")
    for _ in range(5):
        await client.fetch(0, 10, spread=0)
    assert group.asked_by_node(Type.READ) == [1, 5, 0]


@on_group(is_filled=True, timeout_ms=500)
async def test_entries_count_as_deleted_only_without_other_replica(group, client):
    group.always(Type.READ, IndexOutOfRangeError("deleted", "", "", DELETED), "n0")
    group.always(Type.READ, IndexOutOfRangeError("deleted", "", "", DELETED | {"first_index": 4}), "n1")
    await group.nodes.n2.stop()
    with pytest.raises(IndexOutOfRangeError) as caught:
        await client.fetch(3, 10)
    assert caught.value.values["first_index"] == 4
    async with group.client(timeout_ms=500, retry_timeout_ms=30_000) as retrying:
        asked = len(group.asked(Type.READ))
        reading = asyncio.create_task(retrying.fetch(3, 10))
        await group.until(lambda: len(group.asked(Type.READ)) >= asked + 4)  # each of the two again
        assert not reading.done()
        await group.nodes.n2.start()
        assert (await reading).batch.num_rows == 4


@on_group(is_filled=True, retry_timeout_ms=60_000)
async def test_deleted_entries_are_reported_at_once_by_all_replicas(group, client):
    group.first, began = 5, time.monotonic()
    with pytest.raises(IndexOutOfRangeError):
        await client.fetch(3, 10)
    assert time.monotonic() - began < 10


@on_group()
async def test_unresponsive_node_delays_metadata_once(group, client):
    loop = asyncio.get_running_loop()
    group.always(Type.METADATA, "ignore", "n2")
    took = []
    for _ in range(3):
        began = loop.time()
        assert [node.reachable for node in (await client.metadata()).nodes] == [True, True, False]
        took.append(loop.time() - began)
    assert took[0] >= 1.0
    assert min(took[1:]) < 0.9
    for node in ("n0", "n1"):
        await getattr(group.nodes, node).stop()
    group.nodes.n2.script.clear()
    group.nodes.n2.frozen = True
    asking = asyncio.ensure_future(client.metadata())
    await group.until(lambda: group.nodes.n2.asked(Type.ALIVE))  # later than it is waited for with others
    group.nodes.n2.thaw()
    assert [node.reachable for node in (await asking).nodes] == [False, False, True]


async def test_attempt_timeouts_grow_to_request_timeout():
    retrying = Retry(Timeouts(10.0, 60.0), idempotent=True)
    found = []
    for _ in range(3):
        found.append(round(retrying.attempt_s, 1))
        await retrying.failed(RequestTimedOutError("slow"))
    assert found == [2.5, 5.0, 10.0]
    within = Retry(Timeouts(10.0), idempotent=True)
    await within.failed(RequestTimedOutError("slow"))
    assert round(within.attempt_s, 1) == 2.5, "without a retry timeout four attempts fit"
    for timeouts in (Timeouts(10.0), Timeouts(10.0, 60.0)):
        assert round(Retry(timeouts, idempotent=False).attempt_s, 1) == 10.0, "its only attempt has all the time"
