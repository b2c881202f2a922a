"""Reads and queries of a client against scripted nodes: by index, by position, by time, and about the log."""

import asyncio
import zlib
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest

from dledger_core.checksum import crc32
from dledger_core.errors import (
    BadRequestError,
    BehindError,
    CorruptRecordError,
    IndexOutOfRangeError,
    NoLeaderError,
    ProtocolError,
    UnknownGroupError,
    UnsupportedError,
)
from dledger_core.net.codec import fields_payload, numbers_payload
from dledger_core.net.messages import SPLIT_MAX
from dledger_core.net.protocol import Type
from dledger_core.record import READ_SCHEMA, RECORD_SCHEMA
from tests.client.fake_group import SHORT_MS, FakeFormat, answering, on_group


@on_group(is_filled=True)
async def test_read_skips_control_entries_and_orphaned_attempts(group, client):
    batch = await client.read(0, 100)
    assert batch.column("index").to_pylist() == [1, 2, 3, 4, 8, 9]
    assert batch.column("body").to_pylist() == [f"body {i}".encode() for i in (1, 2, 3, 4, 8, 9)]
    assert batch.column("timestamp")[0].as_py() == datetime.fromtimestamp(1_700_000_000.001, UTC)
    uncommitted = await client.read(0, 100, isolation="read_uncommitted")
    assert uncommitted.column("index").to_pylist() == [1, 2, 3, 4, 6, 7, 8, 9]
    records = (await client.records(0, 100)).batch
    assert records.schema == RECORD_SCHEMA
    assert records.column("index").to_pylist() == list(range(10))
    assert records.column("magic").to_pylist() == [2, 1, 1, 1, 1, 2, 1, 1, 1, 1]
    hidden = await client.fetch(5, 8)
    assert (hidden.batch.num_rows, hidden.batch.schema) == (0, READ_SCHEMA)
    assert (hidden.next_index, hidden.commit_index, hidden.visible_end, hidden.first_index) == (8, 9, 10, 0)
    for index in (0, 5, 6):
        with pytest.raises(IndexOutOfRangeError):
            await client.get(index)


@on_group(is_filled=True)
async def test_columns_of_node_without_the_feature_are_selected_here(group, client):
    for node in group:
        node.features = frozenset()
    found = await client.fetch(0, 100, columns=["length", "index"])
    assert found.batch.to_pylist() == [{"length": 6, "index": index} for index in (1, 2, 3, 4, 8, 9)]
    assert found.next_index == 10
    assert {tuple(header["fields"]) for header in group.asked(Type.READ)} == {("length", "index")}
    records = (await client.records(0, 100, columns=["magic"])).batch
    assert records.to_pydict() == {"magic": [2, 1, 1, 1, 1, 2, 1, 1, 1, 1]}
    tailed = [batch async for batch in client.tail(8, 10, columns=["index"])]
    assert [batch.to_pydict() for batch in tailed] == [{"index": [8, 9]}]


@on_group(is_filled=True)
async def test_body_is_read_as_record(group, client):
    batch = await client.read(1, 2, columns=["body", "index", "crc"])
    assert batch.to_pylist() == [{"body": b"body 1", "index": 1, "crc": zlib.crc32(b"body 1")}]
    assert [header["fields"] for header in group.asked(Type.READ)] == [None]


def sent(batch, **fields):
    """A step that responds with columns of the entries 1 to 3."""
    payload = fields_payload(batch)
    header = {"n": 3, "next": 4, "commit": 9, "visible": 10, "first": 0, "skip": [], "crc": crc32(payload)}
    return answering(payload, **(header | fields))


@pytest.mark.parametrize(
    "wrong",
    [
        sent(pa.record_batch({"index": pa.array([1, 2, 3])}), crc=7),
        sent(pa.record_batch({"index": pa.array([1, 2, 4])})),
        sent(pa.record_batch({"index": pa.array([0, 2, 3])})),
        sent(pa.record_batch({"index": pa.array(["1", "2", "3"])})),
        answering(b"\xff" * 40, n=3, next=4, commit=9, visible=10, first=0, skip=[], crc=crc32(b"\xff" * 40)),
        answering(b"", n=3, next=4, commit=9, visible=10, first=0, skip=[], crc=0),
    ],
    ids=["crc", "after", "before", "type", "not Arrow", "empty"],
)
@on_group(is_filled=True)
async def test_wrong_columns_count_as_failure_of_their_node(group, client, wrong):
    group.always(Type.READ, wrong, "n0 n1")
    assert (await client.read(1, 4, columns=["index"])).to_pydict() == {"index": [1, 2, 3]}
    group.always(Type.READ, wrong)
    with pytest.raises((CorruptRecordError, ProtocolError)):
        await client.read(1, 4, columns=["index"])


@on_group(is_filled=True)
async def test_get_asks_leader_after_lagging_follower(group, client):
    behind = answering(n=0, next=3, commit=2, visible=3, first=0, skip=[])
    group.always(Type.READ, lambda n, c, f: n.answer(f) if f.header.get("cons") == "linearizable" else behind(n, c, f))
    assert (await client.get(3)).body == b"body 3"
    group.leader = None
    group.nodes.n0.script[Type.READ] = group.nodes.n2.script[Type.READ] = []
    with pytest.raises(IndexOutOfRangeError):
        await client.get(99)


@on_group(is_filled=True)
async def test_tail_long_polls_for_new_entries(group, client):
    seen = []
    async for batch in client.tail(2, max_bytes=200):
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

    group.always(Type.READ, answer_later)
    assert (await client.fetch(0, 10, wait_ms=4 * SHORT_MS)).next_index == 0
    assert len(group.asked(Type.READ)) == 1


@on_group()
async def test_reads_are_monotonic(group, client):
    await client.append([b"a", b"b", b"c"])
    await client.fetch(0, 1, min_commit=1)
    group.log.append_bodies(b"d")
    await client.fetch(0, 1)
    await client.records(0, 1)
    assert [header["min_commit"] for header in group.asked(Type.READ)] == [2, 2, 3]


@on_group(is_filled=True)
async def test_linearizable_read_asks_leader(group, client):
    await client.read(0, 10, consistency="linearizable")
    group.leader = "n2"
    assert (await client.read(0, 10, consistency="linearizable")).num_rows == 6
    assert group.asked_by_node(Type.READ) == [0, 2, 1]


# --- queries ----------------------------------------------------------------------------------------------------------


@on_group(is_filled=True, group="other")
async def test_wait_for_entries_sends_one_request_for_groups(group, client):
    assert await client.wait_for_entries({"a": 9, "b": 10, "c": 0}, wait_ms=50) == {"a", "c"}
    [asked] = group.asked(Type.AWAIT)
    assert (asked["n"], asked["iso"], asked["wait"]) == (3, "committed", 50)
    assert await client.wait_for_entries({"b": 10}, wait_ms=0, isolation="read_uncommitted") == frozenset()
    for node, error in zip(group, (NoLeaderError("none is known"), UnknownGroupError("no b")), strict=False):
        node.script[Type.AWAIT] = [error]
    assert await client.wait_for_entries({"b": 9}, wait_ms=50) == {"b"}
    with pytest.raises(BadRequestError):
        await client.wait_for_entries({"b": 9}, wait_ms=50, isolation="all")


@on_group()
async def test_offset_for_time_converts_times(group, client):
    assert await client.offset_for_time(1_234_567) == 67
    assert await client.offset_for_time(datetime.fromtimestamp(1.234, UTC)) == 34
    with pytest.raises(BadRequestError):
        await client.offset_for_time(datetime(2025, 1, 1))  # noqa: DTZ001 - the point of the test


@on_group(is_filled=True)
async def test_split_points_of_many_positions_take_one_request(group, client):
    ends = np.cumsum([records.nbytes for records in group.log.records]).tolist()
    assert await client.split_points(0, 10, ends) == list(range(1, 11))
    assert len(group.asked(Type.SPLIT)) == 1
    assert await client.split_points(2, 5, [0, 0, *ends]) == [2, 2, 2, 2, 3, 4, *[5] * 6]
    many = [ends[3]] * (SPLIT_MAX + 1)
    assert await client.split_points(0, 10, many) == [4] * len(many)
    assert [asked["n"] for asked in group.asked(Type.SPLIT)[2:]] == [SPLIT_MAX, 1]
    assert await client.split_points(0, 10, []) == []
    assert len(group.asked(Type.SPLIT)) == 4


@pytest.mark.parametrize(
    ("start", "end", "positions"), [(0, 10, [5, 4]), (5, 5, [0]), (-1, 5, [0])], ids=["descend", "empty", "negative"]
)
@on_group(is_filled=True)
async def test_split_points_of_wrong_range_are_refused_before_any_request(group, client, start, end, positions):
    with pytest.raises(BadRequestError):
        await client.split_points(start, end, positions)
    assert not group.asked(Type.SPLIT)


@pytest.mark.parametrize("payload", [[], [1], [1, 11], [-1, 1], [1, 2, 3]], ids=str)
@on_group(is_filled=True)
async def test_response_with_wrong_split_points_is_refused(group, client, payload):
    def answer(node, connection, frame):
        return {"t": Type.SPLIT_OK}, numbers_payload(payload)

    group.always(Type.SPLIT, answer)
    with pytest.raises(ProtocolError):
        await client.split_points(0, 10, [5, 6])


@on_group(is_filled=True)
async def test_node_of_earlier_release_gets_no_request_for_split_points_and_all_others(group):
    for node in group:
        node.features = frozenset()
    async with group.client() as earlier:
        with pytest.raises(UnsupportedError):
            await earlier.split_points(0, 10, [5])
        assert not group.asked(Type.SPLIT)
        assert (await earlier.read(0, 10)).num_rows == 6
    assert len(group.asked(Type.READ)) == 1


@on_group()
async def test_digest_asks_named_node(group, client):
    report = await client.digest(0, 8, span=8, node="n2")
    assert group.asked_by_node(Type.DIGEST) == [0, 0, 1]
    (found,) = report.ranges
    assert (found.start, found.end, found.nbytes, found.content) == (0, 8, 100, b"c" * 32)
    assert (report.next_index, report.commit_index, report.damaged) == (8, 9, (3,))


@on_group(timeout_ms=SHORT_MS)
async def test_digest_may_be_empty_where_no_entry_is_known_to_be_readable(group, client):
    group.always(Type.DIGEST, answering(ranges=[], next=4, commit=3, damaged=[], cut=False))
    assert (await client.digest(4, 8, span=4, node="n0", min_end=4)).next_index == 4
    with pytest.raises(BehindError):
        await client.digest(4, 8, span=4, node="n0", min_end=5)


@on_group()
async def test_groups_merges_nodes_and_prefers_known_uuid(group, client):
    group.nodes.n0.script[Type.GROUPS] = [answering(logs={"b": "u", "a": None})]
    group.nodes.n1.script[Type.GROUPS] = [answering(logs={"b": None, "c": "w"})]
    await group.nodes.n2.stop()
    assert list((await client.groups()).items()) == [("a", None), ("b", "u"), ("c", "w")]


@on_group()
async def test_describe_continues_after_last_key(group, client):
    pages = [
        ([["a", "producer", 1, None, 2, 0, 1, 5, False]], True),
        ([["b", "query", None, "r", 2, 2, 3, None, False]], False),
    ]
    group.nodes.n0.script[Type.DESCRIBE] = [answering(rows=rows, more=more) for rows, more in pages]
    found = (await client.describe("producers", "n0")).to_pylist()
    assert [row["producer_id"] for row in found] == ["a", "b"]
    assert [header["after"] for header in group.asked(Type.DESCRIBE)] == [None, ["a", "producer"]]
    with pytest.raises(BadRequestError):
        await client.describe("groups")


@pytest.mark.parametrize(
    ("kind", "fields", "call"),
    [
        (Type.AWAIT, {"grown": ["c"]}, lambda c: c.wait_for_entries({"b": 9}, wait_ms=0)),
        (Type.DIGEST, {"ranges": [[1, 2]], "next": 8, "commit": 9, "damaged": []}, lambda c: c.digest(0, 8, span=8)),
        (Type.GROUPS, {"logs": {"a": 1}}, lambda c: c.groups()),
        (Type.DESCRIBE, {"rows": [[1, 2]], "more": False}, lambda c: c.describe("terms")),
        (Type.DESCRIBE, {"rows": [["x", 2, 3]], "more": False}, lambda c: c.describe("terms")),
        (Type.DESCRIBE, {"rows": [1], "more": False}, lambda c: c.describe("terms")),
        (Type.DESCRIBE, {"rows": [], "more": True}, lambda c: c.describe("terms")),
    ],
    ids=["other group", "digest", "uuid", "short row", "text in row", "no row", "no rows, more"],
)
@on_group(timeout_ms=SHORT_MS)
async def test_malformed_response_is_rejected(group, client, kind, fields, call):
    group.always(kind, answering(**fields))
    with pytest.raises(ProtocolError):
        await call(client)


@on_group(is_filled=True)
async def test_metadata_merges_responses(group, client):
    group.nodes.n2.names = "n0"  # does not know of the election
    await group.nodes.n0.stop()
    found = await client.metadata()
    assert (found.leader_id, found.term, found.log_uuid) == ("n1", 1, "uuid")
    assert [node.node_id for node in found.nodes] == ["n0", "n1", "n2"]
    assert [node.role for node in found.nodes] == ["unreachable", "leader", "follower"]
    assert [node.reachable for node in found.nodes] == [False, True, True]
    assert found.nodes[1].address == f"127.0.0.1:{group.nodes.n1.port}"
    assert [(node.commit_index, node.visible_end) for node in found.nodes] == [(-1, -1), (9, 10), (9, 10)]
    await group.nodes.n0.start()
    assert (await client.metadata()).nodes[0].reachable
    group.always(Type.METADATA, UnknownGroupError("no such group"))
    with pytest.raises(UnknownGroupError):
        await client.metadata()


# --- reads by position ------------------------------------------------------------------------------------------------

SIZES = (200, 90, 300)
OLD = [FakeFormat.message(at, bytes(size - 12)) for at, size in zip((0, 200, 290), SIZES, strict=True)]
END = sum(SIZES)
FLIPPED = OLD[0][:100] + bytes([OLD[0][100] ^ 1]) + OLD[0][101:]


def at_ok(messages=OLD, **fields):
    """A step that responds to AT; by default with the first messages of a CommitLog."""
    payload = np.array([len(data) for data in messages], "<u4").tobytes() + b"".join(messages)
    return answering(payload, **({"index": None, "n": len(messages), "next": END} | fields))


@on_group()
async def test_prefix_messages_have_position_and_body_only(group, client):
    group.nodes.n0.script[Type.AT] = [at_ok()]
    found = await client.fetch_at(0, node="n0")
    assert (found.next_position, found.next_index) == (END, None)
    assert found.batch.to_pylist() == [
        {"index": None, "term": None, "position": at, "timestamp": None, "body": data}
        for at, data in zip((0, 200, 290), OLD, strict=True)
    ]
    assert group.asked(Type.READ) == []


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (at_ok([]), ProtocolError),
        (at_ok(n=4), ProtocolError),
        (at_ok(next=END - 1), ProtocolError),
        (at_ok(index="1"), ProtocolError),
        (at_ok(next=END + 1), CorruptRecordError),
        (at_ok([FLIPPED], next=SIZES[0]), CorruptRecordError),
    ],
    ids=["no messages", "one more", "before position", "no index", "other place", "damaged"],
)
@on_group()
async def test_wrong_position_response_fails_over(group, client, step, error):
    group.always(Type.AT, step)
    with pytest.raises(error):
        await client.read_at(0, node="n0")
    group.always(Type.AT, at_ok(), "n2")
    assert (await client.read_at(0)).column("body").to_pylist() == OLD


@on_group()
async def test_fetch_at_continues_after_lagging_replica(group, client):
    group.log.append_bodies(*(bytes([number]) * 100 for number in range(50)))
    place = 148 * 40
    for node in group:
        node.script[Type.AT] = [at_ok([], index=3)] * 2
    found = await client.fetch_at(place + 60, max_bytes=1000)
    assert found.batch.column("index")[0].as_py() == 40
    assert found.next_index > 40
    assert (await client.read_at(place + 148)).column("index")[0].as_py() == 41
    assert (await client.fetch_at(148 * 50)).batch.num_rows == 0


@on_group()
async def test_fetch_at_asks_leader_after_lagging_follower(group, client):
    group.log.append_bodies(*(bytes([number]) * 100 for number in range(50)))

    def nothing_yet(node, connection, frame):
        if frame.header.get("cons") == "linearizable":
            return node.answer(frame)
        next_index = max(30, frame.header["start"])
        response = answering(n=0, next=next_index, commit=29, visible=30, first=0, skip=[])
        return response(node, connection, frame)

    group.always(Type.READ, nothing_yet)
    group.always(Type.AT, at_ok([], index=30), "n0 n2")
    for _ in range(4):
        found = await client.fetch_at(148 * 40)
        assert (found.batch.column("index")[0].as_py(), found.next_index) == (40, 50)
    assert (await client.fetch_at(148 * 40, node="n0")).batch.num_rows == 0


@pytest.mark.parametrize(
    ("position", "max_bytes", "error"),
    [(-1, 1, BadRequestError), (0, 0, BadRequestError), (7, 1, IndexOutOfRangeError)],
)
@on_group()
async def test_fetch_at_rejects_bad_numbers_before_sending(group, client, position, max_bytes, error):
    group.always(Type.AT, IndexOutOfRangeError("deleted"))
    with pytest.raises(error):
        await client.read_at(position, max_bytes=max_bytes)
    assert (group.asked(Type.AT) == []) is (error is BadRequestError)
