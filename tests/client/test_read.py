import asyncio
from datetime import UTC, datetime

import pytest

from dledger_core.connect import AsyncClient
from dledger_core.errors import (
    BadRequestError,
    BehindError,
    CorruptRecordError,
    IndexOutOfRangeError,
    NoLeaderError,
    ProtocolError,
    TransferringError,
    UnknownGroupError,
    UnreachableError,
)
from dledger_core.net.protocol import Type
from dledger_core.record import READ_SCHEMA, RECORD_SCHEMA
from tests.client.fake_group import SHORT_MS, FakeGroup, run


def filled(group):
    """Entries 0-9: 0 and 5 are control entries, 6 and 7 lose."""
    group.log.append_control()
    group.log.append_bodies(*(f"body {i}".encode() for i in range(1, 5)))
    group.log.append_control()
    group.log.append_bodies(*(f"body {i}".encode() for i in range(6, 10)))
    group.log.skip = [[6, 8], [20, 30]]
    return group


def test_a_read_leaves_out_control_entries_and_losers():
    async def main():
        async with FakeGroup() as group, AsyncClient(filled(group).peers) as client:
            batch = await client.read(0, 100)
            assert batch.schema == READ_SCHEMA
            assert batch.column("index").to_pylist() == [1, 2, 3, 4, 8, 9]
            assert batch.column("body").to_pylist() == [f"body {i}".encode() for i in (1, 2, 3, 4, 8, 9)]
            assert batch.column("timestamp")[0].as_py() == datetime.fromtimestamp(1_700_000_000.001, UTC)
            uncommitted = await client.read(0, 100, isolation="read_uncommitted")
            assert uncommitted.column("index").to_pylist() == [1, 2, 3, 4, 6, 7, 8, 9]
            records = await client.records(0, 100)
            assert records.batch.schema == RECORD_SCHEMA
            assert records.batch.column("index").to_pylist() == list(range(10))
            assert records.batch.column("magic").to_pylist() == [2, 1, 1, 1, 1, 2, 1, 1, 1, 1]

    run(main())


def test_a_fetch_tells_where_to_go_on():
    async def main():
        async with FakeGroup() as group, AsyncClient(filled(group).peers) as client:
            hidden = await client.fetch(5, 8)
            assert hidden.batch.num_rows == 0
            assert hidden.batch.schema == READ_SCHEMA
            assert (hidden.next_index, hidden.commit_index, hidden.visible_end, hidden.first_index) == (8, 9, 10, 0)
            start, seen = 0, []
            while start < 10:
                found = await client.fetch(start, 10, max_bytes=120)
                assert found.next_index > start
                start, seen = found.next_index, seen + found.batch.column("index").to_pylist()
            assert seen == [1, 2, 3, 4, 8, 9]
            nothing = await client.fetch(10, 20)
            assert (nothing.batch.num_rows, nothing.next_index) == (0, 10)

    run(main())


@pytest.mark.parametrize(
    "arguments",
    [
        {"isolation": "records"},
        {"isolation": "serializable"},
        {"consistency": "eventual"},
        {"start": -1},
        {"max_bytes": 0},
        {"wait_ms": -1},
        {"node": "n7"},
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(arguments):
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers) as client:
            if arguments == {"isolation": "records"}:
                arguments["isolation"] = "dirty"
            with pytest.raises(BadRequestError):
                await client.fetch(**({"start": 0, "end": 1} | arguments))
            assert not group.asked(Type.READ)

    run(main())


FAILURES = {
    "stopped": lambda node: node.stop(),
    "drops": lambda node: node.script.update({Type.READ: ["drop"]}),
    "hangs": lambda node: node.script.update({Type.READ: ["ignore"]}),
    "behind": lambda node: node.script.update({Type.READ: [BehindError("behind")]}),
    "damaged": lambda node: setattr(node, "damaged", True),
    "refuses damage": lambda node: node.script.update({Type.READ: [CorruptRecordError("bad record")]}),
    "deleted": lambda node: node.script.update({Type.READ: [IndexOutOfRangeError("deleted")]}),
    "no such group": lambda node: node.script.update({Type.READ: [UnknownGroupError("none")]}),
    "nonsense": lambda node: node.script.update({Type.READ: [lambda *_: ({"t": Type.READ_OK, "n": 7}, [])]}),
    "other range": lambda node: node.script.update(
        {Type.READ: [lambda n, c, f: (n.on_read(f.header | {"start": 0, "end": 2}, b"")[0], n.answer(f)[1])]}
    ),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_another_replica_serves(failure):
    async def main():
        async with FakeGroup() as group, AsyncClient(filled(group).peers, timeout_ms=4000) as client:
            await client.fetch(0, 1)
            (good,) = (node.node_id for node in group if node.asked(Type.READ))
            done = FAILURES[failure](getattr(group.nodes, good))
            if asyncio.iscoroutine(done):
                await done
            batch = await client.read(3, 100)
            assert batch.column("index").to_pylist() == [3, 4, 8, 9]
            asked = len(getattr(group.nodes, good).asked(Type.READ))
            assert await client.read(3, 100) == batch
            assert len(getattr(group.nodes, good).asked(Type.READ)) == asked

    run(main())


def test_the_last_good_replica_is_asked_again():
    async def main():
        async with FakeGroup() as group, AsyncClient(filled(group).peers) as client:
            for _ in range(10):
                await client.fetch(0, 1)
            assert sorted(len(node.asked(Type.READ)) for node in group) == [0, 0, 10]

    run(main())


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (IndexOutOfRangeError("too old", "", "", {"first_index": 5, "last_index": 9}), IndexOutOfRangeError),
        (CorruptRecordError("bad"), CorruptRecordError),
        (UnknownGroupError("none"), UnknownGroupError),
        (BehindError("behind"), BehindError),
        (BadRequestError("bad"), BadRequestError),
    ],
    ids=str,
)
def test_what_all_replicas_say_is_raised(error, expected):
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers, timeout_ms=SHORT_MS) as client:
            for node in group:
                node.script[Type.READ] = [error] * 1000
            with pytest.raises(expected) as caught:
                await client.fetch(0, 1)
            assert caught.value.values == error.values

    run(main())


def test_no_replica_answers():
    async def main():
        async with FakeGroup() as group:
            peers = group.peers
        async with AsyncClient(peers, timeout_ms=SHORT_MS) as client:
            with pytest.raises(UnreachableError) as caught:
                await client.read(0, 1)
            assert all(f"127.0.0.1:{node.port}" in str(caught.value) for node in group)

    run(main())


def test_a_pinned_read_asks_this_node_only():
    async def main():
        async with FakeGroup() as group, AsyncClient(filled(group).peers) as client:
            await client.fetch(0, 10, node="n2", min_commit=4)
            await client.records(0, 10, node="n2")
            assert [len(node.asked(Type.READ)) for node in group] == [0, 0, 2]
            assert [header["min_commit"] for header in group.nodes.n2.asked(Type.READ)] == [4, -1]
            group.nodes.n2.script[Type.READ] = [BehindError("behind")]
            with pytest.raises(BehindError):
                await client.fetch(0, 10, node="n2")
            await group.nodes.n2.stop()
            with pytest.raises(UnreachableError):
                await client.fetch(0, 10, node="n2")

    run(main())


def test_reads_never_go_back():
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers) as client:
            await client.append([b"a", b"b", b"c"])
            await client.fetch(0, 1, min_commit=1)
            group.log.append_bodies(b"d")
            await client.fetch(0, 1)
            await client.records(0, 1)
            assert [header["min_commit"] for header in group.asked(Type.READ)] == [2, 2, 3]

    run(main())


def test_a_linearizable_read_asks_the_leader():
    async def main():
        async with FakeGroup("n1") as group, AsyncClient(filled(group).peers) as client:
            await client.read(0, 10, consistency="linearizable")
            group.leader = "n2"
            assert (await client.read(0, 10, consistency="linearizable")).num_rows == 6
            assert [len(node.asked(Type.READ)) for node in group] == [0, 2, 1]

    run(main())


def test_a_wait_for_many_groups_is_one_question_to_any_node_that_knows_a_leader():
    async def main():
        async with FakeGroup() as group, AsyncClient(filled(group).peers, "other") as client:
            assert await client.wait_for_entries({"a": 9, "b": 10, "c": 0}, wait_ms=50) == {"a", "c"}
            [asked] = group.asked(Type.AWAIT)
            assert (asked["seen"], asked["iso"], asked["wait"]) == ({"a": 9, "b": 10, "c": 0}, "committed", 50)
            assert await client.wait_for_entries({"b": 10}, wait_ms=0, isolation="read_uncommitted") == frozenset()
            for node, error in zip(group, (NoLeaderError("none is known"), UnknownGroupError("no b")), strict=False):
                node.script[Type.AWAIT] = [error]
            assert await client.wait_for_entries({"b": 9}, wait_ms=50) == {"b"}
            with pytest.raises(BadRequestError, match="isolation"):
                await client.wait_for_entries({"b": 9}, wait_ms=50, isolation="all")

    run(main())


@pytest.mark.parametrize("grown", [None, "b", [1], ["c"]])
def test_a_malformed_answer_to_a_wait_is_refused(grown):
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers, timeout_ms=SHORT_MS) as client:
            for node in group:
                node.script[Type.AWAIT] = [lambda *_: ({"t": Type.AWAIT_OK, "grown": grown}, [])] * 99
            with pytest.raises(ProtocolError, match="response to await"):
                await client.wait_for_entries({"b": 9}, wait_ms=0)

    run(main())


def test_one_entry():
    async def main():
        async with FakeGroup() as group, AsyncClient(filled(group).peers) as client:
            entry = await client.get(3)
            assert (entry.index, entry.term, entry.body) == (3, 1, b"body 3")
            assert entry.timestamp == datetime.fromtimestamp(1_700_000_000.001, UTC)
            with pytest.raises(IndexOutOfRangeError, match="not committed") as caught:
                await client.get(10)
            assert caught.value.values == {"index": 10, "first_index": 0, "last_index": 9}
            for hidden in (0, 5, 6):
                with pytest.raises(IndexOutOfRangeError, match="not a visible data entry"):
                    await client.get(hidden)

    run(main())


def test_get_asks_the_leader_where_a_follower_is_behind():
    async def main():
        async with FakeGroup("n1") as group, AsyncClient(filled(group).peers) as client:
            behind = {"t": Type.READ_OK, "n": 0, "next": 3, "commit": 2, "visible": 3, "first": 0, "skip": []}, []
            for node in group:
                node.script[Type.READ] = [lambda n, c, f: n.answer(f) if f.header["cons"] != "committed" else behind]
            assert (await client.get(3)).body == b"body 3"
            group.leader = None
            group.nodes.n0.script[Type.READ] = group.nodes.n2.script[Type.READ] = []
            with pytest.raises(IndexOutOfRangeError):
                await AsyncClient.get(client, 99)

    run(main())


def test_tail_goes_on_for_ever():
    async def main():
        async with FakeGroup() as group, AsyncClient(filled(group).peers) as client:
            seen = []
            async for batch in client.tail(2, max_bytes=200):
                assert batch.num_rows
                seen += batch.column("index").to_pylist()
                if seen[-1] == 9:
                    group.log.append_bodies(b"late")
                if seen[-1] == 10:
                    break
            assert seen == [2, 3, 4, 8, 9, 10]
            assert all(header["wait"] > 0 for header in group.asked(Type.READ))

    run(main())


def test_a_long_poll_outlasts_the_timeout():
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers, timeout_ms=SHORT_MS) as client:

            def answer_later(node, connection, frame):
                header, payload = node.answer(frame)
                send = {"r": frame.header["r"], **header}
                asyncio.get_running_loop().call_later(2 * SHORT_MS / 1000, lambda: connection.send(send, *payload))

            for node in group:
                node.script[Type.READ] = [answer_later]
            found = await client.fetch(0, 10, wait_ms=4 * SHORT_MS)
            assert found.next_index == 0
            assert len(group.asked(Type.READ)) == 1

    run(main())


def test_offset_for_time():
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers) as client:
            assert await client.offset_for_time(1_234_567) == 67
            assert await client.offset_for_time(datetime.fromtimestamp(1.234, UTC)) == 34
            with pytest.raises(BadRequestError, match="time zone"):
                await client.offset_for_time(datetime(2025, 1, 1))  # noqa: DTZ001 - the point of the test

    run(main())


def test_digest():
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers) as client:
            report = await client.digest(0, 8, span=8, node="n2")
            assert len(group.nodes.n2.asked(Type.DIGEST)) == 1
            (found,) = report.ranges
            assert (found.start, found.end, found.nbytes, found.content) == (0, 8, 100, b"c" * 32)
            assert (report.next_index, report.commit_index, report.damaged) == (8, 9, (3,))
            bad = {"t": Type.DIGEST_OK, "ranges": [[1, 2]], "next": 8, "commit": 9, "damaged": []}, []
            group.nodes.n2.script[Type.DIGEST] = [lambda *_: bad]
            with pytest.raises(ProtocolError):
                await client.digest(0, 8, span=8, node="n2")

    run(main())


def test_metadata_merges_what_the_nodes_say():
    async def main():
        async with FakeGroup("n1") as group, AsyncClient(filled(group).peers) as client:
            group.nodes.n2.names = "n0"  # has not heard of the election
            await group.nodes.n0.stop()
            found = await client.metadata()
            assert (found.leader_id, found.term, found.log_uuid) == ("n1", 1, "uuid")
            assert [node.node_id for node in found.nodes] == ["n0", "n1", "n2"]
            assert [node.role for node in found.nodes] == ["unreachable", "leader", "follower"]
            assert [node.reachable for node in found.nodes] == [False, True, True]
            assert found.nodes[1].address == f"127.0.0.1:{group.nodes.n1.port}"
            assert (found.nodes[1].commit_index, found.nodes[1].visible_end) == (9, 10)
            assert found.nodes[0].commit_index == -1
            await group.nodes.n0.start()
            assert (await client.metadata()).nodes[0].reachable

    run(main())


def test_metadata_of_nobody():
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers) as client:
            for node in group:
                node.script[Type.METADATA] = [UnknownGroupError("no such group")]
            with pytest.raises(UnknownGroupError):
                await client.metadata()
            for node in group:
                await node.stop()
            with pytest.raises(UnreachableError) as caught:
                await client.metadata()
            assert all(f"127.0.0.1:{node.port}" in str(caught.value) for node in group)

    run(main())


def test_leadership_is_handed_over():
    async def main():
        async with FakeGroup("n1") as group, AsyncClient(group.peers) as client:
            group.nodes.n1.script[Type.TRANSFER] = [TransferringError("not yet")]
            await client.transfer_leadership("n2")
            assert group.leader == "n2"
            await client.append([b"x"])
            assert len(group.nodes.n2.asked(Type.APPEND)) == 1
            with pytest.raises(BadRequestError, match="n7"):
                await client.transfer_leadership("n7")

    run(main())
