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
from tests.client.fake_group import FakeGroup, run

UNREACHABLE = "n0-127.0.0.1:1"
DELETED = {"first_index": 5, "last_index": 9}


def filled(group, count=10):
    group.log.append_bodies(*(b"body %d" % number for number in range(count)))
    return group


def always(node, kind, step, times=1000):
    node.script[kind] = [step] * times


def shows_less(node, connection, frame):
    """Respond as a replica whose log ends at the requested start."""
    start = frame.header["start"]
    fields = {"t": Type.READ_OK, "n": 0, "next": start, "commit": start - 1, "visible": start, "first": 0, "skip": []}
    return fields, []


def test_read_is_retried_until_retry_timeout():
    async def main():
        async with FakeGroup() as group:
            peers = filled(group).peers
            for node in group:
                always(node, Type.READ, BusyError("busy"), times=4)
            async with AsyncClient(peers, timeout_ms=100) as once:
                with pytest.raises(BusyError):
                    await once.read(0, 10)
            async with AsyncClient(peers, timeout_ms=100, retry_timeout_ms=30_000) as retrying:
                assert (await retrying.read(0, 10)).num_rows == 10

    run(main())


@pytest.mark.parametrize("method", ["metadata", "groups"])
def test_query_of_all_nodes_is_retried_only_with_timeout(method):
    async def main():
        async with FakeGroup() as group:
            peers = group.peers
            for node in group:
                await node.stop()
            async with AsyncClient(peers, timeout_ms=5_000) as once:
                began = time.monotonic()
                with pytest.raises(UnreachableError):
                    await getattr(once, method)()
                assert time.monotonic() - began < 3
            async with AsyncClient(peers, timeout_ms=5_000, retry_timeout_ms=30_000) as retrying:
                asking = asyncio.create_task(getattr(retrying, method)())
                await asyncio.sleep(0.3)
                for node in group:
                    await node.start()
                assert await asking

    run(main())


def test_wrong_peers_are_reported_within_connect_timeout():
    async def main():
        began = time.monotonic()
        async with AsyncClient(UNREACHABLE, retry_timeout_ms=60_000, connect_timeout_ms=300) as client:
            for call in (client.metadata(), client.read(0, 1), client.producer("p")):
                with pytest.raises(UnreachableError):
                    await call
        assert time.monotonic() - began < 10

    run(main())


def test_connect_timeout_applies_before_first_response():
    async def main():
        async with FakeGroup() as group:
            filled(group)
            async with AsyncClient(group.peers, retry_timeout_ms=30_000, connect_timeout_ms=200) as client:
                await client.metadata()
                for node in group:
                    await node.stop()
                reading = asyncio.create_task(client.read(0, 10))
                await asyncio.sleep(0.6)
                for node in group:
                    await node.start()
                assert (await reading).num_rows == 10

    run(main())


def test_named_node_is_retried_only_with_retry_timeout():
    async def main():
        async with FakeGroup() as group:
            peers = filled(group).peers
            always(group.nodes.n1, Type.READ, BusyError("busy"), times=3)
            async with AsyncClient(peers) as once:
                with pytest.raises(BusyError):
                    await once.read(0, 10, node="n1")
            async with AsyncClient(peers, retry_timeout_ms=30_000) as retrying:
                assert (await retrying.read(0, 10, node="n1")).num_rows == 10
            assert [len(node.asked(Type.READ)) for node in group] == [0, 4, 0]

    run(main())


def test_replica_without_known_entries_is_behind():
    async def main():
        async with FakeGroup() as group:
            peers = filled(group).peers
            always(group.nodes.n0, Type.READ, shows_less)
            async with AsyncClient(peers) as client:
                found = await client.fetch(3, 10, min_end=10, spread=0)
                assert found.batch.num_rows == 7
                assert [len(node.asked(Type.READ)) for node in group] == [1, 1, 0]
                assert group.asked(Type.READ)[0]["wait"] == 1000, "a lagging replica is given a moment"
                nothing = await client.fetch(3, 10, node="n0")
                assert nothing.next_index == 3, "not an error where the end is unknown"
                for node in group:
                    always(node, Type.READ, shows_less)
            async with AsyncClient(peers, timeout_ms=200) as client:
                with pytest.raises(BehindError):
                    await client.fetch(3, 10, min_end=10)

    run(main())


@pytest.mark.parametrize("read_from", ["leader", "follower"])
def test_preferred_role_is_asked_first(read_from):
    async def main():
        async with FakeGroup() as group:
            filled(group)
            async with AsyncClient(group.peers) as client:
                for spread in range(6):
                    await client.fetch(0, 10, read_from=read_from, spread=spread)
                asked = {node.node_id for node in group if node.asked(Type.READ)}
                assert asked == ({group.leader} if read_from == "leader" else {"n0", "n1", "n2"} - {group.leader})
                for node in asked:
                    await getattr(group.nodes, node).stop()
                assert (await client.fetch(0, 10, read_from=read_from)).batch.num_rows == 10

    run(main())


def test_readers_with_spread_start_at_different_replicas():
    async def main():
        async with FakeGroup() as group:
            filled(group)
            async with AsyncClient(group.peers) as client:
                for spread in range(6):
                    await client.fetch(0, 10, spread=spread)
            assert [len(node.asked(Type.READ)) for node in group] == [2, 2, 2]

    run(main())


def test_failed_replica_is_asked_last_for_a_while():
    async def main():
        async with FakeGroup() as group:
            filled(group)
            always(group.nodes.n0, Type.READ, BehindError("behind"))
            async with AsyncClient(group.peers) as client:
                for _ in range(5):
                    await client.fetch(0, 10, spread=0)
            assert [len(node.asked(Type.READ)) for node in group] == [1, 5, 0]

    run(main())


def test_entries_count_as_deleted_only_without_other_replica():
    async def main():
        async with FakeGroup() as group:
            peers = filled(group).peers
            always(group.nodes.n0, Type.READ, IndexOutOfRangeError("deleted", "", "", DELETED))
            always(group.nodes.n1, Type.READ, IndexOutOfRangeError("deleted", "", "", DELETED | {"first_index": 4}))
            await group.nodes.n2.stop()
            async with AsyncClient(peers, timeout_ms=500) as once:
                with pytest.raises(IndexOutOfRangeError) as caught:
                    await once.fetch(3, 10)
                assert caught.value.values["first_index"] == 4
            async with AsyncClient(peers, timeout_ms=500, retry_timeout_ms=30_000) as retrying:
                reading = asyncio.create_task(retrying.fetch(3, 10))
                await asyncio.sleep(0.3)
                assert not reading.done()
                await group.nodes.n2.start()
                assert (await reading).batch.num_rows == 7

    run(main())


def test_deleted_entries_are_reported_at_once_by_all_replicas():
    async def main():
        async with FakeGroup() as group:
            filled(group).first = 5
            async with AsyncClient(group.peers, retry_timeout_ms=60_000) as client:
                began = time.monotonic()
                with pytest.raises(IndexOutOfRangeError):
                    await client.fetch(3, 10)
                assert time.monotonic() - began < 10

    run(main())


def test_plain_append_is_not_retried_after_unknown_outcome():
    async def main():
        async with FakeGroup() as group:
            async with AsyncClient(group.peers, timeout_ms=300, retry_timeout_ms=30_000) as client:
                for node in group:
                    always(node, Type.APPEND, "apply and drop")
                with pytest.raises(RequestTimedOutError):
                    await client.append([b"x"])
            assert group.log.end == 1

    run(main())


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
