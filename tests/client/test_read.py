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
    UnknownGroupError,
    UnreachableError,
)
from dledger_core.net.protocol import Type
from dledger_core.record import READ_SCHEMA, RECORD_SCHEMA
from tests.client.fake_group import SHORT_MS, on_group


@on_group(is_filled=True)
async def test_read_skips_control_entries_and_orphaned_attempts(group, client):
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


@on_group(is_filled=True)
async def test_fetch_returns_next_index(group, client):
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
@on_group(is_filled=True, timeout_ms=4000)
async def test_read_fails_over_to_another_replica(group, client, failure):
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


@on_group(is_filled=True)
async def test_read_prefers_last_good_replica(group, client):
    for _ in range(10):
        await client.fetch(0, 1)
    assert sorted(len(node.asked(Type.READ)) for node in group) == [0, 0, 10]


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
@on_group(timeout_ms=SHORT_MS)
async def test_read_raises_error_of_all_replicas(group, client, error, expected):
    for node in group:
        node.script[Type.READ] = [error] * 1000
    with pytest.raises(expected) as caught:
        await client.fetch(0, 1)
    assert caught.value.values == error.values


@on_group(is_filled=True)
async def test_read_of_named_node_asks_no_other(group, client):
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


@on_group()
async def test_reads_are_monotonic(group, client):
    await client.append([b"a", b"b", b"c"])
    await client.fetch(0, 1, min_commit=1)
    group.log.append_bodies(b"d")
    await client.fetch(0, 1)
    await client.records(0, 1)
    assert [header["min_commit"] for header in group.asked(Type.READ)] == [2, 2, 3]


@on_group(leader="n1", is_filled=True)
async def test_linearizable_read_asks_leader(group, client):
    await client.read(0, 10, consistency="linearizable")
    group.leader = "n2"
    assert (await client.read(0, 10, consistency="linearizable")).num_rows == 6
    assert [len(node.asked(Type.READ)) for node in group] == [0, 2, 1]


@on_group(is_filled=True, group="other")
async def test_wait_for_entries_sends_one_request_for_groups(group, client):
    assert await client.wait_for_entries({"a": 9, "b": 10, "c": 0}, wait_ms=50) == {"a", "c"}
    [asked] = group.asked(Type.AWAIT)
    assert (asked["seen"], asked["iso"], asked["wait"]) == ({"a": 9, "b": 10, "c": 0}, "committed", 50)
    assert await client.wait_for_entries({"b": 10}, wait_ms=0, isolation="read_uncommitted") == frozenset()
    for node, error in zip(group, (NoLeaderError("none is known"), UnknownGroupError("no b")), strict=False):
        node.script[Type.AWAIT] = [error]
    assert await client.wait_for_entries({"b": 9}, wait_ms=50) == {"b"}
    with pytest.raises(BadRequestError):
        await client.wait_for_entries({"b": 9}, wait_ms=50, isolation="all")


@pytest.mark.parametrize("grown", [None, "b", [1], ["c"]])
@on_group(timeout_ms=SHORT_MS)
async def test_malformed_wait_response_is_rejected(group, client, grown):
    for node in group:
        node.script[Type.AWAIT] = [lambda *_: ({"t": Type.AWAIT_OK, "grown": grown}, [])] * 99
    with pytest.raises(ProtocolError):
        await client.wait_for_entries({"b": 9}, wait_ms=0)


@on_group(is_filled=True)
async def test_get_rejects_hidden_and_uncommitted_entries(group, client):
    entry = await client.get(3)
    assert (entry.index, entry.term, entry.body) == (3, 1, b"body 3")
    assert entry.timestamp == datetime.fromtimestamp(1_700_000_000.001, UTC)
    with pytest.raises(IndexOutOfRangeError) as caught:
        await client.get(10)
    assert caught.value.values == {"index": 10, "first_index": 0, "last_index": 9}
    for hidden in (0, 5, 6):
        with pytest.raises(IndexOutOfRangeError):
            await client.get(hidden)


@on_group(leader="n1", is_filled=True)
async def test_get_asks_leader_after_lagging_follower(group, client):
    behind = {"t": Type.READ_OK, "n": 0, "next": 3, "commit": 2, "visible": 3, "first": 0, "skip": []}, []
    for node in group:
        node.script[Type.READ] = [lambda n, c, f: n.answer(f) if f.header.get("cons") == "linearizable" else behind]
    assert (await client.get(3)).body == b"body 3"
    group.leader = None
    group.nodes.n0.script[Type.READ] = group.nodes.n2.script[Type.READ] = []
    with pytest.raises(IndexOutOfRangeError):
        await AsyncClient.get(client, 99)


@on_group(is_filled=True)
async def test_tail_long_polls_for_new_entries(group, client):
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


@on_group(timeout_ms=SHORT_MS)
async def test_long_poll_extends_timeout(group, client):
    def answer_later(node, connection, frame):
        header, payload = node.answer(frame)
        send = {"r": frame.header["r"], **header}
        asyncio.get_running_loop().call_later(2 * SHORT_MS / 1000, lambda: connection.send(send, *payload))

    for node in group:
        node.script[Type.READ] = [answer_later]
    found = await client.fetch(0, 10, wait_ms=4 * SHORT_MS)
    assert found.next_index == 0
    assert len(group.asked(Type.READ)) == 1


@on_group()
async def test_offset_for_time_converts_times(group, client):
    assert await client.offset_for_time(1_234_567) == 67
    assert await client.offset_for_time(datetime.fromtimestamp(1.234, UTC)) == 34
    with pytest.raises(BadRequestError):
        await client.offset_for_time(datetime(2025, 1, 1))  # noqa: DTZ001 - the point of the test


@on_group()
async def test_digest_asks_named_node(group, client):
    report = await client.digest(0, 8, span=8, node="n2")
    assert len(group.nodes.n2.asked(Type.DIGEST)) == 1
    (found,) = report.ranges
    assert (found.start, found.end, found.nbytes, found.content) == (0, 8, 100, b"c" * 32)
    assert (report.next_index, report.commit_index, report.damaged) == (8, 9, (3,))
    bad = {"t": Type.DIGEST_OK, "ranges": [[1, 2]], "next": 8, "commit": 9, "damaged": []}, []
    group.nodes.n2.script[Type.DIGEST] = [lambda *_: bad]
    with pytest.raises(ProtocolError):
        await client.digest(0, 8, span=8, node="n2")


@on_group(leader="n1", is_filled=True)
async def test_metadata_merges_responses(group, client):
    group.nodes.n2.names = "n0"  # does not know of the election
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


@on_group()
async def test_metadata_without_leader(group, client):
    for node in group:
        node.script[Type.METADATA] = [UnknownGroupError("no such group")]
    with pytest.raises(UnknownGroupError):
        await client.metadata()
    for node in group:
        await node.stop()
    with pytest.raises(UnreachableError) as caught:
        await client.metadata()
    assert all(f"127.0.0.1:{node.port}" in str(caught.value) for node in group)


@on_group(is_filled=True)
async def test_client_follows_changed_members(group, client, log):
    await client.append([b"x"])
    nodes = log.peers
    await log.set_members(tuple(peer for peer in nodes if peer.node_id != group.leader))
    assert [str(peer.node_id) for peer in client.peers] == ["n0", "n2"]
    asked = len(group.nodes.n1.requests)
    group.leader = "n2"
    await client.append([b"y"])
    assert (await client.metadata()).leader_id == "n2"
    with pytest.raises(BadRequestError):
        await client.read(0, 10, node="n1")
    assert len(group.nodes.n1.requests) == asked
    await log.set_members(nodes)
    assert (await client.read(0, 10, node="n1")).num_rows > 0
