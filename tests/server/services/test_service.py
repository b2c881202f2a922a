"""Requests of clients to real nodes over the wire: responses, errors, waits, and limits on memory and work."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import asynccontextmanager

import pytest

from dledger_core.client import AsyncProducer, fingerprint_of
from dledger_core.client.routing.channel import ConnectionLostError
from dledger_core.config import LIMITS, Limits, StorageConfig, format_peers
from dledger_core.connect import AsyncClient
from dledger_core.control import PARTS_MAX, Part
from dledger_core.errors import (
    BadRequestError,
    BehindError,
    BusyError,
    CorruptRecordError,
    DLedgerError,
    FencedError,
    NoLeaderError,
    OtherLogError,
    ProducersFullError,
    QueryUnknownError,
    TransactionError,
    UnknownGroupError,
)
from dledger_core.net import codec
from dledger_core.net.connection import CLIENT_WRITE_HIGH_BYTES
from dledger_core.net.dialing import connect
from dledger_core.net.frame import Frame, encode_frame
from dledger_core.net.hello import Hello
from dledger_core.net.messages import TABLES
from dledger_core.net.protocol import CLIENT_CONTAINERS_MAX, CLIENT_HEADER_BYTES_MAX, PREFACE, Type
from dledger_core.record import Columns
from dledger_core.storage import open_store
from tests.support.field_values import MISSING, wrong_values
from tests.support.server_group import TIMEOUT_S, RawClient, ServerGroup, eventually, stall

KEY = {"q": "query", "b": 0, "r": "run"}
NEWER = KEY | {"r": "run2"}
TOP = (1 << 63) - 1
SMALL = StorageConfig(data_segment_bytes=1 << 16, index_segment_bytes=1 << 12, preallocate_bytes=0)


@asynccontextmanager
async def one_node(tmp_path, **options):
    """Start a group of one node; yield it and a client."""
    async with ServerGroup(tmp_path, 1, **options) as group:
        yield group, await group.client()


class Client:
    """A bare connection that may stop reading."""

    def __init__(self):
        self.frames: list[Frame] = []

    @classmethod
    async def open(cls, group):
        self = cls()
        peer = group.peers[0]
        self.connection = await connect(peer.host, peer.port, Hello(), self, timeout_s=60)
        return self

    def on_frame(self, _, frame):
        self.frames.append(frame)

    def on_close(self, *_):
        pass


def server_side(group, known=()):
    """Return the server's connection that is not among ``known``, and its flow."""
    flows = group.nodes["n0"].service.flows
    return next((connection, flow) for connection, flow in flows.items() if connection not in known)


# --- wrong requests -------------------------------------------------------------------------------------------------

BODIES = codec.columns_payload(Columns.from_bodies([b"one", b"two"]))
PAYLOADS = {
    Type.APPEND: BODIES,
    Type.PRODUCE: BODIES,
    Type.SPLIT: codec.numbers_payload([0, 0]),
    Type.AWAIT: codec.seen_payload({"default": codec.SeenLog(0)}),
}
GOOD: dict[int, dict] = {
    Type.METADATA: {},
    Type.APPEND: {"n": 2},
    Type.PRODUCE: {"n": 2, "ns": [1, 1], "p": ["p0", "p1"], "pe": [0, 0], "ps": [0, 0], "po": [False, True]},
    Type.READ: {"start": 0, "end": 1},
    Type.TIME: {"ms": 0, "min_commit": -1},
    Type.SPLIT: {"start": 0, "end": 1, "n": 2},
    Type.PRODUCER: {"p": "producer"},
    Type.TRANSACTION: {"op": "state", "x": KEY},
    Type.DIGEST: {"start": 0, "end": 1, "span": 1024},
    Type.TRANSFER: {"node": "n0"},
    Type.WATCH: {"wait": 0},
    Type.GROUPS: {},
    Type.DESCRIBE: {"table": "terms"},
    Type.AWAIT: {"n": 1, "wait": 0},
    Type.AT: {"position": 0, "max": 1},
    Type.BACKUP: {"op": "start", "name": "backup"},
}
BEYOND_THE_TABLE = [
    (Type.APPEND, {"n": 1}),
    (Type.APPEND, {"n": 1 << 40}),
    (Type.APPEND, {"p": "producer", "pe": 0}),
    (Type.APPEND, {"p": "x" * 600, "pe": 0, "ps": 0}),
    (Type.PRODUCE, {"n": 1}),
    (Type.PRODUCE, {"ns": [1, 2]}),
    (Type.PRODUCE, {"ns": [2]}),
    (Type.PRODUCE, {"ns": [3, -1]}),
    (Type.PRODUCE, {"p": ["p0"]}),
    (Type.PRODUCE, {"pe": [0, 0, 0]}),
    (Type.PRODUCE, {"ps": [0, 1 << 63]}),
    (Type.SPLIT, {"n": 1}),
    (Type.SPLIT, {"n": 3}),
    (Type.SPLIT, {"start": 1}),
    (Type.APPEND, {"x": KEY}),
    (Type.APPEND, {"x": KEY | {"a": 1}}),
    (Type.DIGEST, {"span": 3}),
    (Type.DIGEST, {"span": 2 * LIMITS.digest_entries}),
    (Type.TRANSACTION, {"op": "commit", "x": KEY | {"b": 7}}),
    (Type.TRANSACTION, {"op": "state", "x": KEY | {"o": 1}}),
    (Type.TRANSACTION, {"op": "state", "x": KEY | {"w": -2}}),
    (Type.TRANSACTION, {"op": "state", "x": KEY | {"z": 1}}),
    (Type.TRANSACTION, {"op": "commit", "x": KEY | {"b": 7}, "n": 2}),
    (Type.TRANSACTION, {"op": "commit", "x": KEY | {"b": 7}, "n": 1 << 40}),
    (Type.TRANSFER, {"node": "n7"}),
    (Type.DESCRIBE, {"table": "groups"}),
    (Type.DESCRIBE, {"table": "producers", "after": [1, 2]}),
    (Type.DESCRIBE, {"table": "terms", "after": {}}),
    (Type.METADATA, {"pin": ["reader"]}),
    (Type.BACKUP, {"op": "tables", "name": "another"}),
    (Type.BACKUP, {"op": "start", "name": "x" * 600}),
    (Type.AWAIT, {"n": 2}),
    (Type.AWAIT, {"n": 1 << 40}),
]


def wrong_requests():
    """Every request with every value that its table rejects, and values that only the service can reject."""
    found = [
        (table.number, {field.key: value})
        for table in TABLES
        if table.number in GOOD
        for field in table.fields
        for value in wrong_values(field)
    ]
    of_groups = [kind for kind in GOOD if kind not in (Type.GROUPS, Type.AWAIT)]
    return found + BEYOND_THE_TABLE + [(kind, {"g": value}) for kind in of_groups for value in (1, None, "", "other")]


async def result_of(channel, kind, fields):
    """Return "ok", the error's name, or "closed"."""
    fields = {key: value for key, value in ({"g": "default"} | GOOD[kind] | fields).items() if value is not MISSING}
    try:
        await channel.request({"t": kind} | fields, *PAYLOADS.get(kind, ()), timeout_s=TIMEOUT_S)
    except ConnectionLostError:
        return "closed"
    except DLedgerError as error:
        return error.name
    return "ok"


async def test_wrong_request_is_refused_and_node_continues(tmp_path, caplog):
    async with one_node(tmp_path) as (cluster, _):
        channel = await cluster.channel("n0")
        for kind, fields in wrong_requests():
            got = await result_of(channel, kind, fields)
            expected = ("BAD_REQUEST", "PROTOCOL", "UNKNOWN_GROUP", "TRANSACTION", "closed")
            assert got in expected, (kind, fields, got)
            if not channel.is_open:
                channel = await cluster.channel("n0")
        for kind in GOOD:
            assert await result_of(channel, kind, {}) == "ok"
    assert "request failed" not in caplog.text


async def test_request_that_names_another_log_is_refused_without_effect(tmp_path):
    async with one_node(tmp_path) as (cluster, client):
        await client.append([b"entry"])
        end = cluster.hosted("n0").replica.raft.last_index
        channel, of_log = await cluster.channel("n0"), [kind for kind in GOOD if kind not in (Type.GROUPS, Type.AWAIT)]
        for kind in (*of_log, Type.MEMBER):
            with pytest.raises(OtherLogError):
                await channel.request(
                    {"t": kind, "g": "default", "lu": "another"} | GOOD.get(kind, {}),
                    *PAYLOADS.get(kind, ()),
                    timeout_s=TIMEOUT_S,
                )
        seen = codec.seen_payload({"default": codec.SeenLog(0, "another")})
        with pytest.raises(OtherLogError):
            await channel.request({"t": Type.AWAIT} | GOOD[Type.AWAIT], *seen, timeout_s=TIMEOUT_S)
        assert cluster.hosted("n0").replica.raft.last_index == end


@pytest.mark.parametrize("number", [0, -1, None, "1", True, 1 << 63])
async def test_request_without_valid_number_closes_its_connection(tmp_path, number):
    async with one_node(tmp_path) as (cluster, client):
        other = await Client.open(cluster)
        other.connection.send({"t": Type.METADATA, "g": "default", "r": number})
        async with asyncio.timeout(60):
            await other.connection.closed
        assert other.frames == []
        await client.append([b"continues"])


@pytest.mark.parametrize("header_bytes", [CLIENT_HEADER_BYTES_MAX + 1, 1_000_000])
async def test_header_above_clients_limit_closes_its_connection(tmp_path, header_bytes):
    async with one_node(tmp_path) as (cluster, client):
        other = await Client.open(cluster)
        other.connection.send({"t": Type.METADATA, "g": "default", "r": 1, "x": "x" * header_bytes})
        async with asyncio.timeout(10):
            await other.connection.closed
        assert other.frames == []
        await client.append([b"continues"])


@pytest.mark.parametrize("found", [[], {}, [[[]]], {"a": []}], ids=repr)
async def test_header_with_very_many_lists_or_maps_closes_its_connection(tmp_path, found):
    async with one_node(tmp_path) as (cluster, client):
        other = await Client.open(cluster)
        await client.ask(Type.METADATA, x=[found] * 80)
        other.connection.send({"t": Type.METADATA, "g": "default", "r": 9, "x": [found] * (CLIENT_CONTAINERS_MAX + 1)})
        async with asyncio.timeout(10):
            await other.connection.closed
        await client.append([b"continues"])


async def test_commit_of_impossible_parts_is_refused(tmp_path):
    async with one_node(tmp_path) as (_, client):
        for part in (Part(-2, -1, 1, 1), Part(5, 4, 1, 1), Part(1, 1, 1, 1 << 40)):
            with pytest.raises(DLedgerError):
                await client.transact("commit", KEY | {"b": 7}, [part])
        await client.append([b"continues"])


async def test_await_of_malformed_groups_is_refused(tmp_path):
    good = b"".join(codec.seen_payload({"default": codec.SeenLog(0)}))
    async with one_node(tmp_path) as (_, client):
        for payload in (
            b"",
            good[:-1],
            good + b"x",
            good[:16] + b"\xff" * 7,
            good[:8] + b"\xff\xff\xff\xff" + good[12:],
        ):
            with pytest.raises(BadRequestError):
                await client.ask(Type.AWAIT, payload, n=1, wait=0)
        with pytest.raises(UnknownGroupError):
            await grown(client, {"other": 0})


async def test_appends_of_one_read_have_their_order_and_only_the_wrong_one_is_refused(tmp_path):
    async with one_node(tmp_path) as (cluster, client):
        other, frames = await Client.open(cluster), []
        for number in range(1, 8):
            columns = Columns.from_bodies([b"%d %d" % (number, part) for part in range(number)])
            payload = codec.columns_payload(columns)
            if number == 4:
                payload[1] = bytes(len(columns.bodies))
            frames += encode_frame({"t": Type.APPEND, "g": "default", "n": number, "r": number}, *payload)
        frames += encode_frame({"t": Type.APPEND, "g": "nowhere", "n": 1, "r": 8}, bytes(8))
        other.connection.send_buffers([b"".join(frames)])
        await eventually(lambda: len(other.frames) == 8)
        headers = {frame.header["r"]: frame.header for frame in other.frames}
        refused = {number: header["e"]["code"] for number, header in headers.items() if header["t"] == Type.FAILURE}
        assert refused == {4: CorruptRecordError.code, 8: UnknownGroupError.code}
        for number in (1, 2, 3, 5, 6, 7):
            first, last = headers[number]["first"], headers[number]["last"]
            _, rows = await client.read(first, last + 1)
            assert [body for *_, body in rows] == [b"%d %d" % (number, part) for part in range(number)]
        assert [headers[number]["first"] for number in (1, 2, 3)] == [1, 2, 4]
        assert not cluster.nodes["n0"].budget.taken_bytes
        other.connection.close()


async def test_malformed_append_closes_its_connection_after_those_before_it(tmp_path):
    async with one_node(tmp_path) as (cluster, client):
        other = await Client.open(cluster)
        payload = codec.columns_payload(Columns.from_bodies([b"body"]))
        header = {"t": Type.APPEND, "g": "default", "n": 1}
        frames = [encode_frame(header | {"r": 1}, *payload), encode_frame(header | {"r": 2}, b"short")]
        other.connection.send_buffers([b"".join(map(b"".join, frames))])
        async with asyncio.timeout(10):
            await other.connection.closed
        await client.append([b"continues"])
        assert [body for *_, body in (await client.read(1, 3))[1]] == [b"body", b"continues"]


# --- memory of clients ----------------------------------------------------------------------------------------------


async def unfinished(group, nbytes, number=1):
    """Connect and begin an append of ``nbytes``, of which nothing more arrives."""
    client = await Client.open(group)
    (head, *_) = encode_frame({"t": Type.APPEND, "g": "default", "r": number, "n": 1}, bytes(nbytes))
    client.connection.send_buffers([head, bytes(1 << 10)])
    return client


async def test_begun_frames_are_charged_and_others_get_busy(tmp_path):
    async with one_node(tmp_path, inflight_bytes_max=5 << 20) as (group, client):
        budget = group.nodes["n0"].budget
        first = [await unfinished(group, 2 << 20) for _ in range(2)]
        await eventually(lambda: budget.taken_bytes == 4 << 20, 10)
        refused = await unfinished(group, 2 << 20, number=7)
        await eventually(lambda: refused.frames)
        assert (refused.frames[0].header["t"], refused.frames[0].header["r"]) == (Type.FAILURE, 7)
        assert refused.frames[0].header["e"]["code"] == BusyError.code
        assert budget.taken_bytes == 4 << 20
        with pytest.raises(BusyError):
            await client.append([bytes(2 << 20)])
        assert (await client.append([b"small"]))[0] > 0, "the refused payload was skipped"
        for other in first:
            other.connection.abort()
        await eventually(lambda: not budget.taken_bytes, 10)
        assert (await client.append([bytes(2 << 20)]))[0] > 0


@pytest.mark.parametrize("deadline", ["client_frame_s", "client_idle_s"])
async def test_connection_without_progress_is_closed(tmp_path, deadline):
    async with one_node(tmp_path, limits=Limits(**{deadline: 0.2})) as (group, _):
        other = await unfinished(group, 1 << 20) if deadline == "client_frame_s" else await Client.open(group)
        async with asyncio.timeout(10):
            await other.connection.closed
        await eventually(lambda: not group.nodes["n0"].budget.taken_bytes)


async def test_responses_are_charged_until_the_client_receives_them(tmp_path):
    limits = Limits(client_unsent_s=0.3)
    async with one_node(tmp_path, limits=limits, inflight_bytes_max=16 << 20) as (group, client):
        for _ in range(4):
            await client.append([bytes(2 << 20)])
        request = {"t": Type.READ, "g": "default", "start": 1, "end": 5, "max": 8 << 20}
        stuck = []
        for _ in range(10):
            _, writer = await asyncio.open_connection(group.peers[0].host, group.peers[0].port, limit=1)
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)  # so that the kernel takes little
            writer.writelines([PREFACE, *encode_frame(Hello().to_header()), *encode_frame(request | {"r": 1})])
            stuck.append(writer)
        server = group.nodes["n0"].service
        await eventually(lambda: len(server.flows) == 11)
        most = 0

        def all_is_sent():
            nonlocal most
            unsent = [connection.write_buffer_bytes for connection in server.flows]
            most = max(most, sum(nbytes > CLIENT_WRITE_HIGH_BYTES for nbytes in unsent))
            return most and not any(unsent)

        await eventually(all_is_sent, 10)
        assert most <= 2, "no more responses than the budget admits"
        assert len(server.flows) < 11, "those that received nothing were closed"
        assert (await client.read(1, 2))[0]["n"] == 1
        for writer in stuck:
            writer.transport.abort()


# --- reads and digests ----------------------------------------------------------------------------------------------


async def test_reads_and_digests_at_edges(tmp_path):
    async with one_node(tmp_path, limits=Limits(read_wait_ms=1)) as (_, client):
        _, last, _ = await client.append([b"a", b"b"])
        header, rows = await client.read(TOP, TOP, max=TOP, wait=TOP)
        assert (rows, header["next"]) == ([], TOP)
        assert len((await client.read(0, TOP, max=0))[1]) >= 1
        assert (await client.read(last + 1, last))[1] == []
        assert (await client.read(last + 1, TOP, wait=TOP))[1] == [], "the wait is limited"
        digest = (await client.ask(Type.DIGEST, start=0, end=TOP, span=LIMITS.digest_entries)).header
        assert digest["next"] == last + 1
        assert (await client.ask(Type.DIGEST, start=TOP, end=TOP, span=1)).header["ranges"] == []
        assert (await client.ask(Type.TIME, ms=TOP, min_commit=-1)).header["index"] == last + 1
        with pytest.raises(BehindError):
            await client.read(0, 1, min_commit=TOP)


@pytest.mark.slow
async def test_read_waits_once_for_commit_index_and_entries_together(tmp_path):
    """The commit index arrives after half of the wait; the requested entry never does."""
    async with one_node(tmp_path) as (cluster, client):
        _, last, _ = await client.append([b"first"])
        asked = asyncio.create_task(client.read(last + 2, last + 3, min_commit=last + 1, wait=1600))
        await asyncio.sleep(1.0)
        assert not asked.done()
        await RawClient(await cluster.channel("n0")).append([b"second"])
        async with asyncio.timeout(1.3):  # a wait that starts again takes longer
            assert (await asked)[0]["next"] == last + 2


async def test_waiting_read_returns_new_entry(tmp_path):
    async with one_node(tmp_path) as (cluster, client):
        _, last, _ = await client.append([b"first"])
        waiting = asyncio.create_task(client.read(last + 1, last + 9, wait=20_000))
        await eventually(lambda: client.channel.in_flight)
        await RawClient(await cluster.channel("n0")).append([b"second"])
        assert [body for _, _, body in (await waiting)[1]] == [b"second"]


async def test_digest_lists_damaged_entries_up_to_limit(tmp_path):
    async with one_node(tmp_path) as (_, client):
        first, last, _ = await client.append([b"body"] * 20_000)
        path = next((tmp_path / "default" / "dledger-n0" / "data").iterdir())
        data = path.read_bytes()
        assert data.count(b"body") == 20_000
        path.write_bytes(data.replace(b"body", b"BODY"))
        for span, damaged in ((1024, range(first, 1024)), (16384, range(first, first + 8192))):
            found = (await client.ask(Type.DIGEST, start=0, end=last + 1, span=span)).header
            assert (found["next"], len(found["ranges"]), found["damaged"]) == (span, 1, list(damaged))
            assert found["cut"] is (span == 16384)


# --- AWAIT: one request that waits for new entries of many groups -----------------------------------------------------


def ends(cluster, node_id="n0"):
    """Return the visible end of each group of a node."""
    return {group: hosted.replica.visible_end for group, hosted in cluster.nodes[node_id].hosted.items()}


async def grown(client, seen, wait=30_000, **fields):
    logs = {group: codec.SeenLog(end) for group, end in seen.items()}
    asked = await client.ask(Type.AWAIT, *codec.seen_payload(logs), n=len(seen), wait=wait, **fields)
    return asked.header["grown"]


async def test_await_returns_grown_groups_of_many(tmp_path):
    groups = tuple(f"g{number:03}" for number in range(70))
    async with ServerGroup(tmp_path, 1, groups=groups) as cluster:
        for group in groups:
            await cluster.leader(group)
        client = RawClient(await cluster.channel("n0"), "no such group")
        seen = ends(cluster)
        assert await grown(client, seen | {"g005": seen["g005"] - 1, "g006": 0}) == ["g005", "g006"]
        assert await grown(client, seen, wait=20) == [], "the wait timed out"
        waiting = asyncio.ensure_future(grown(client, seen))
        await eventually(lambda: len(cluster.hosted("n0", "g069").reads.growth) == 1)
        await RawClient(client.channel, "g042").append([b"new"])
        assert await waiting == ["g042"]
        await eventually(lambda: not any(len(h.reads.growth) for h in cluster.nodes["n0"].hosted.values()))


async def test_await_counts_open_attempts_only_without_isolation(tmp_path):
    async with one_node(tmp_path) as (cluster, client):
        seen = ends(cluster)
        part = await client.attempt([b"open"], KEY)
        assert await grown(client, seen, wait=20) == []
        assert await grown(client, seen, iso="uncommitted") == ["default"]
        waiting = asyncio.ensure_future(grown(client, seen))
        await client.transact("commit", KEY, [part])
        assert await waiting == ["default"]


async def test_await_fails_at_once_when_node_knows_no_leader(tmp_path):
    async with ServerGroup(tmp_path) as cluster:
        leader, (left, other) = await cluster.leader(), await cluster.followers()
        await eventually(lambda: cluster.hosted(left).replica.visible_end)
        client = RawClient(await cluster.channel(left))
        waiting = asyncio.ensure_future(grown(client, {"default": ends(cluster, left)["default"] + 1}))
        await eventually(lambda: len(cluster.hosted(left).reads.growth) == 1)
        for node in (leader, other):
            await cluster.stop(node)
        with pytest.raises(NoLeaderError):
            await waiting
        assert await grown(client, {"default": 0}) == ["default"], "present entries need no leader"


# --- DESCRIBE, GROUPS, METADATA: about the logs of a node -------------------------------------------------------------


async def test_responses_show_contact_to_leader_and_polls_without_it_are_short(tmp_path):
    async with ServerGroup(tmp_path) as group:
        leader, (follower, other) = await group.leader(), await group.followers()
        nodes = {node: RawClient(await group.channel(node)) for node in (leader, follower)}
        found = await nodes[leader].read(0, TOP, iso="records")
        assert found[0]["hl"] == 0
        end = found[0]["next"]
        while (found := await nodes[follower].read(0, TOP, iso="records"))[0]["next"] < end:
            pass
        assert found[0]["hl"] >= 0
        polling = asyncio.ensure_future(nodes[follower].read(end, TOP, iso="records", wait=LIMITS.read_wait_ms))
        await group.stop(other)
        await group.stop(leader)
        header, rows = await polling
        assert (header["hl"], rows) == (-1, [])
        assert (await nodes[follower].ask(Type.ALIVE)).header["t"] == Type.ALIVE_OK


async def test_describe_returns_terms_segments_and_producers(tmp_path):
    async with one_node(tmp_path, storage=SMALL) as (group, raw), AsyncClient(format_peers(group.peers)) as client:
        for number in range(5):
            await raw.append([bytes(15_000)] * 2, p="orders", pe=3, ps=number)
        part = await raw.attempt([b"row"], KEY)
        assert (await client.describe("producers")).num_rows == 1, "an open transaction is none of a query's"
        await raw.transact("commit", KEY, [part])
        end = (await client.metadata()).nodes[0].last_index + 1
        found = {table: (await client.describe(table)).to_pylist() for table in ("terms", "segments")}
        producers = (await client.describe("producers", "n0")).to_pylist()
    assert found["terms"] == [{"first_index": 0, "end": end, "term": 1}]
    firsts = [row["first_index"] for row in found["segments"]]
    assert [row["end"] for row in found["segments"]] == [*firsts[1:], end]
    assert [row["position"] for row in found["segments"]] == [0, 1 << 16, 2 << 16]
    assert all(row["bytes"] == 1 << 16 for row in found["segments"][:-1])
    assert all(row["last_timestamp"].year >= 2024 for row in found["segments"])
    assert [row.pop("last_timestamp") is not None for row in producers] == [True, False]
    assert producers == [
        {
            "producer_id": "orders", "kind": "producer", "epoch": 3, "run_id": None, "next_sequence": 5,
            "first_index": 14, "last_index": 15, "once": False,
        },
        {
            "producer_id": "query", "kind": "query", "epoch": None, "run_id": "run", "next_sequence": 1,
            "first_index": part.first, "last_index": part.last, "once": False,
        },
    ]  # fmt: skip
    with open_store(tmp_path / "default" / "dledger-n0") as store:
        for table, rows in found.items():
            assert store.describe(table).to_pylist() == rows
        stored = store.describe("producers").drop_columns("last_timestamp").to_pylist()
        assert [row["producer_id"] for row in stored] == ["orders", "query"]
        assert stored[0] == producers[0]


async def test_describe_leaves_out_uncommitted_entries(tmp_path):
    async with ServerGroup(tmp_path) as group, AsyncClient(format_peers(group.peers)) as client:
        await client.append([b"a"])
        await group.stop(await group.leader())
        index = (await client.append([b"b"])).first_index
        leader = await group.leader()
        rows = (await client.describe("terms", leader)).to_pylist()
        assert [(row["first_index"], row["end"]) for row in rows] == [(0, index - 1), (index - 1, index + 1)]
        assert rows[0]["term"] < rows[1]["term"]
        await group.stop((await group.followers())[0])
        log = group.hosted(leader).replica.log
        asked = asyncio.create_task(RawClient(await group.channel(leader)).append([b"never"]))
        await eventually(lambda: log.last_index() > index)
        for table in ("terms", "segments"):
            assert (await client.describe(table, leader)).to_pylist()[-1]["end"] == index + 1
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


async def test_describe_returns_long_tables_in_pages(tmp_path):
    limits = Limits(describe_rows=3)
    async with (
        one_node(tmp_path, storage=SMALL, limits=limits) as (group, raw),
        AsyncClient(format_peers(group.peers)) as client,
    ):
        names = [f"p{number}" for number in range(7)]
        for name in reversed(names):
            await raw.append([bytes(30_000)], p=name, pe=0, ps=0)
        assert (await client.describe("producers")).column("producer_id").to_pylist() == names
        segments = (await client.describe("segments")).to_pylist()
        assert [row["position"] for row in segments] == [number << 16 for number in range(4)]


async def test_metadata_reports_table_of_producers_before_it_is_full(tmp_path):
    async with (
        one_node(tmp_path, limits=Limits(producers=5)) as (group, _),
        AsyncClient(format_peers(group.peers)) as client,
    ):
        await AsyncProducer(client, "job", once=True).append([b"x"])
        for number in range(2):
            await AsyncProducer(client, f"p{number}").append([b"x"])
        lasting, used_once, *_ = (await client.metadata()).tables
        assert (lasting.rows, lasting.limit, lasting.is_nearly_full) == (3, 5, False)
        assert (used_once.rows, used_once.limit, used_once.is_nearly_full) == (1, 2, False)
        await AsyncProducer(client, "p2").append([b"x"])
        assert (await client.metadata()).tables[0].is_nearly_full
        await AsyncProducer(client, "p3").append([b"x"])
        with pytest.raises(ProducersFullError):
            await AsyncProducer(client, "p4").append([b"x"])
        assert not (await client.expire_producer("p3")).known
        await AsyncProducer(client, "p4").append([b"x"])


async def test_groups_have_separate_logs_and_are_listed_to_client_of_unknown_group(tmp_path):
    async with ServerGroup(tmp_path, 1, groups=("a", "b")) as group:
        await group.leader("a")
        await group.leader("b")
        async with AsyncClient(format_peers(group.peers), "unknown") as client:
            uuids = {name: group.hosted("n0", name).replica.log_uuid for name in "ab"}
            assert await client.groups() == uuids
            assert len(set(uuids.values())) == 2
        channel = await group.channel("n0")
        for name in "ab":
            await RawClient(channel, name).append([name.encode()])
            assert (await RawClient(channel, name).read(0, 9))[1][-1][2] == name.encode()
            assert group.hosted("n0", name).replica.log.last_index() == 1


async def test_metadata_has_time_of_last_entry_and_orphaned_space_on_request(tmp_path):
    async with one_node(tmp_path) as (_, client):

        async def orphaned():
            return (await client.ask(Type.METADATA, space=True)).header["orphaned"]

        before = int(time.time() * 1000)
        assert await orphaned() == [0, 0]
        won = await client.attempt([b"won"], KEY)
        await client.attempt([b"lost", b"too"], KEY, "b")
        assert await orphaned() == [0, 0]
        await client.transact("commit", KEY, [won])
        assert await orphaned() == [2, 2 * 48 + 7]
        header = (await client.ask(Type.METADATA)).header
        assert "orphaned" not in header
        assert before - 1000 <= header["time"] <= int(time.time() * 1000) + 1000


# --- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["read", "await"])
async def test_waiting_requests_end_with_their_connection(tmp_path, kind):
    async with one_node(tmp_path) as (group, _):
        growth = group.hosted("n0").reads.growth
        other = RawClient(await group.channel("n0"))
        ask = {
            "read": lambda: other.read(1 << 30, 1 << 31, wait=30_000),
            "await": lambda: grown(other, ends(group)),
        }[kind]
        asked = [asyncio.create_task(ask()) for _ in range(50)]
        await eventually(lambda: len(growth) == 50)
        _, flow = server_side(group)
        await other.channel.close()
        await eventually(lambda: not flow.tasks)
        assert len(growth) == 0
        assert not group.nodes["n0"].service.flows
        errors = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(error) for error in errors} == {ConnectionLostError}


async def test_requests_of_one_connection_are_limited_in_number(tmp_path):
    async with one_node(tmp_path, limits=Limits(connection_requests=8)) as (group, client):
        asked = [asyncio.create_task(client.read(1 << 30, 1 << 31, wait=30_000)) for _ in range(8)]
        await eventually(lambda: len(group.hosted("n0").reads.growth) == 8)
        with pytest.raises(BusyError) as refused:
            await client.read(0, 1)
        assert refused.value.values["retry_after_ms"] == 50
        assert (await RawClient(await group.channel("n0")).read(0, 1))[0]["n"] == 1
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


@pytest.mark.parametrize("large", [False, True], ids=["small responses", "large responses"])
async def test_client_that_reads_no_responses_occupies_little_memory(tmp_path, large):
    """The node stops reading its requests; others are served meanwhile, and later it gets every response."""
    limits = Limits(connection_unsent_bytes=1 << 20, large_responses_max=2)
    count, body = (40, bytes(1 << 20)) if large else (2000, b"")
    request = {"t": Type.READ, "g": "default", "start": 1, "end": 3, "max": 4 << 20}
    if not large:  # the error repeats the name of the group twice: 12 MB in all
        request = {"t": Type.METADATA, "g": "g" * 3000}
    async with one_node(tmp_path, limits=limits) as (group, client):
        await client.append([body])
        await client.append([body])
        known = server_side(group)[0]
        stuck = await Client.open(group)
        stuck.connection.pause_reading()
        for number in range(1, count + 1):
            stuck.connection.send(request | {"r": number})
        await eventually(lambda: len(group.nodes["n0"].service.flows) == 2)
        connection, _ = server_side(group, known=[known])
        await eventually(lambda: connection.write_buffer_bytes > limits.connection_unsent_bytes / 2)
        for _ in range(20):
            assert (await client.read(1, 2))[0]["n"] == 1
            assert connection.write_buffer_bytes <= (limits.large_responses_max + 1) * (3 << 20)
        await client.append([b"others continue"])
        stuck.connection.resume_reading()
        await eventually(lambda: len(stuck.frames) == count)
        assert {frame.header["t"] for frame in stuck.frames} <= {Type.READ_OK, Type.FAILURE}
        stuck.connection.abort()


async def test_cancelled_append_gives_its_bytes_back(tmp_path):
    async with one_node(tmp_path) as (group, client):
        node, hosted = group.nodes["n0"], group.hosted("n0")
        free = stall(hosted.replica.store.run)
        other = RawClient(await group.channel("n0"))
        asked = asyncio.create_task(other.append([b"abandoned"], p="p", pe=0, ps=0))
        await eventually(lambda: node.budget.taken_bytes > 0)
        asked.cancel()
        await other.channel.close()
        await eventually(lambda: len(node.service.flows) <= 1)
        free.set()
        await eventually(lambda: node.budget.taken_bytes == 0)
        # One that is still in flight would take the repetition to itself, and never settle it.
        assert (await client.append([b"abandoned"], p="p", pe=0, ps=0))[:2] == (2, 2)


async def test_busy_reaches_client_and_ends(tmp_path):
    async with one_node(tmp_path, inflight_bytes_max=1 << 20) as (group, client):
        free = stall(group.hosted("n0").replica.store.run)
        first = asyncio.create_task(client.append([bytes(700 << 10)]))
        await eventually(lambda: group.nodes["n0"].budget.taken_bytes > 0)
        with pytest.raises(BusyError) as refused:
            await client.append([bytes(700 << 10)])
        assert refused.value.retriable
        assert refused.value.values["retry_after_ms"] == 50
        free.set()
        await first
        await client.append([bytes(700 << 10)])


# --- transactions ---------------------------------------------------------------------------------------------------


async def test_transaction_parts_are_limited(tmp_path):
    async with one_node(tmp_path) as (_, client):
        parts = [await client.attempt([b"a"], KEY), await client.attempt([b"b"], KEY)]
        state = await client.transact("state", KEY)
        assert (state["state"], state["rows"], state["f"]) == ("open", 0, 0)
        too_many = [Part(1, 1, 1, 1)] * (PARTS_MAX + 1)
        with pytest.raises(BadRequestError):
            await client.transact("commit", KEY, too_many)
        with pytest.raises(TransactionError):
            await client.transact("commit", KEY, too_many[1:])
        await client.transact("commit", KEY, parts)
        state = await client.transact("state", KEY)
        assert (state["state"], state["rows"], state["f"]) == ("committed", 2, fingerprint_of([b"b", b"a"]))


async def test_transaction_state_has_its_content_and_fences_old_runs(tmp_path):
    async with one_node(tmp_path) as (_, client):
        lost = await client.attempt([b"old"], KEY)
        won = await client.attempt([b"new"], NEWER)
        with pytest.raises(FencedError):
            await client.transact("state", KEY)
        with pytest.raises(FencedError):
            await client.transact("commit", KEY, [lost])
        await client.transact("commit", NEWER, [won])
        header = await client.transact("state", NEWER)
        assert (header["state"], header["rows"], header["f"]) == ("committed", 1, fingerprint_of([b"new"]))
        later = NEWER | {"b": 4}
        await client.transact("commit", later, [])
        assert (await client.transact("state", NEWER))["newest"] == 4
        with pytest.raises(FencedError):
            await client.transact("commit", KEY, [lost])
        with pytest.raises(FencedError):
            await client.attempt([b"another query"], {"q": "query", "b": 1, "r": "copy"})


async def test_unknown_query_is_introduced_by_what_other_groups_know(tmp_path):
    async with one_node(tmp_path) as (group, client):
        key = {"q": "query", "b": 7, "r": "run"}
        for send in (client.attempt([b"a"], key), client.transact("commit", key, [])):
            with pytest.raises(QueryUnknownError):
                await send
        part = await client.attempt([b"a"], key | {"w": 6, "o": True})
        await client.transact("commit", key, [part])
        assert group.hosted("n0").replica.tables.transactions.queries.one_time_count == 1


async def test_commit_overtaken_by_newer_run_is_fenced(tmp_path):
    async with one_node(tmp_path) as (group, client):
        part = await client.attempt([b"old"], KEY)
        replica = group.hosted("n0").replica
        free, last = stall(group.hosted("n0").replica.store.run), replica.raft.last_index
        newer = asyncio.create_task(client.attempt([b"new"], NEWER))
        commit = asyncio.create_task(client.transact("commit", KEY, [part]))
        try:
            await eventually(lambda: replica.raft.last_index == last + 3)
        finally:
            free.set()
        await newer
        with pytest.raises(FencedError):
            await commit
