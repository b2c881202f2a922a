"""Requests over the wire: wrong fields of every request, edges of reads, and their waits."""

from __future__ import annotations

import asyncio

import pytest

from dledger_core.client.routing.channel import ConnectionLostError
from dledger_core.config import LIMITS, Limits
from dledger_core.control import Part
from dledger_core.errors import BadRequestError, BehindError, DLedgerError
from dledger_core.net import codec
from dledger_core.net.messages import READ, TABLES, ReadRequest
from dledger_core.net.protocol import Type
from dledger_core.record import Columns
from tests.support.field_values import MISSING, wrong_values
from tests.support.server_group import TIMEOUT_S, RawClient, ServerGroup, eventually, run

KEY = {"q": "query", "b": 0, "r": "run"}
BODIES = codec.columns_payload(Columns.from_bodies([b"one", b"two"]))
TOP = (1 << 63) - 1
GOOD: dict[int, dict] = {
    Type.METADATA: {},
    Type.APPEND: {"n": 2},
    Type.READ: {"start": 0, "end": 1},
    Type.TIME: {"ms": 0, "min_commit": -1},
    Type.PRODUCER: {"p": "producer"},
    Type.TRANSACTION: {"op": "state", "x": KEY},
    Type.DIGEST: {"start": 0, "end": 1, "span": 1024},
    Type.TRANSFER: {"node": "n0"},
    Type.WATCH: {"wait": 0},
    Type.GROUPS: {},
    Type.DESCRIBE: {"table": "terms"},
    Type.AWAIT: {"seen": {"default": 0}, "wait": 0},
    Type.AT: {"position": 0, "max": 1},
}
BEYOND_THE_TABLE = [
    (Type.APPEND, {"n": 1}),
    (Type.APPEND, {"n": 1 << 40}),
    (Type.APPEND, {"p": "producer", "pe": 0}),
    (Type.APPEND, {"p": "x" * 600, "pe": 0, "ps": 0}),
    (Type.APPEND, {"x": KEY}),
    (Type.APPEND, {"x": KEY | {"a": 1}}),
    (Type.DIGEST, {"span": 3}),
    (Type.DIGEST, {"span": 2 * LIMITS.digest_entries}),
    (Type.TRANSACTION, {"op": "commit", "x": KEY | {"b": 7}}),
    (Type.TRANSACTION, {"op": "commit", "x": KEY | {"b": 7}, "parts": [list(Part(-2, -1, 1, 1))]}),
    (Type.TRANSFER, {"node": "n7"}),
    (Type.DESCRIBE, {"table": "groups"}),
    (Type.DESCRIBE, {"table": "producers", "after": [1, 2]}),
    (Type.DESCRIBE, {"table": "terms", "after": {}}),
    (Type.METADATA, {"pin": ["reader"]}),
    (Type.AWAIT, {"seen": dict.fromkeys(map(str, range(5000)), 0)}),
    (Type.AWAIT, {"seen": {"other": 0}}),
]


@pytest.fixture
def wrong_requests():
    """Every request with every value that its table rejects, and values that only the service can reject."""
    found = [
        (table.number, {field.key: value})
        for table in TABLES
        if table.number in GOOD
        for field in table.fields
        for value in wrong_values(field)
    ]
    return found + BEYOND_THE_TABLE + [(kind, {"g": value}) for kind in GOOD for value in (1, None, "", "other")]


async def ask(channel, kind, fields):
    """Return "ok", the error's name, or "closed"."""
    fields = {key: value for key, value in ({"g": "default"} | GOOD[kind] | fields).items() if value is not MISSING}
    try:
        await channel.request({"t": kind} | fields, *(BODIES if kind == Type.APPEND else ()), timeout_s=TIMEOUT_S)
    except ConnectionLostError:
        return "closed"
    except DLedgerError as error:
        return error.name
    return "ok"


def test_wrong_request_is_refused_and_node_continues(tmp_path, wrong_requests, caplog):
    async def main():
        async with ServerGroup(tmp_path, nodes=1) as cluster:
            await cluster.leader()
            channel = await cluster.channel("n0")
            for kind, fields in wrong_requests:
                if "g" in fields and kind in (Type.GROUPS, Type.AWAIT):
                    continue
                got = await ask(channel, kind, fields)
                expected = ("BAD_REQUEST", "PROTOCOL", "UNKNOWN_GROUP", "TRANSACTION", "closed")
                assert got in expected, (kind, fields, got)
                if not channel.is_open:
                    channel = await cluster.channel("n0")
            for kind in GOOD:
                assert await ask(channel, kind, {}) == "ok"

    run(main())
    assert "request failed" not in caplog.text


def test_reads_and_digests_at_edges(tmp_path):
    async def main():
        async with ServerGroup(tmp_path, nodes=1, limits=Limits(read_wait_ms=1)) as cluster:
            client = await cluster.client()
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

    run(main())


def test_read_decode_accepts_largest_numbers_and_requires_range():
    request = READ.decode(dict.fromkeys(("start", "end", "max", "min_commit", "wait"), TOP))
    assert (request.start, request.max_bytes, request.isolation) == (TOP, TOP, "committed")
    with pytest.raises(BadRequestError):
        READ.decode({})


@pytest.mark.slow
def test_read_waits_once_for_commit_index_and_entries_together(tmp_path):
    """The commit index arrives after half of the wait; the requested entry never does."""

    async def main():
        async with ServerGroup(tmp_path, nodes=1) as cluster:
            client = await cluster.client()
            _, last, _ = await client.append([b"first"])
            reads = cluster.hosted("n0").reads
            request = ReadRequest(start=last + 2, end=last + 3, min_commit=last + 1, wait_ms=1600)
            asked = asyncio.create_task(reads.read(request))
            await asyncio.sleep(1.0)
            assert not asked.done()
            await client.append([b"second"])
            too_long = asyncio.create_task(asyncio.sleep(1.3))
            await asyncio.wait({asked, too_long}, return_when=asyncio.FIRST_COMPLETED)
            assert asked.done(), "the wait started again"
            assert (await asked).next_index == last + 2
            await too_long

    run(main())


def test_waiting_read_returns_new_entry(tmp_path):
    async def main():
        async with ServerGroup(tmp_path, nodes=1) as cluster:
            client = await cluster.client()
            _, last, _ = await client.append([b"first"])
            waiting = asyncio.create_task(client.read(last + 1, last + 9, wait=20_000))
            await eventually(lambda: client.channel.in_flight)
            await RawClient(await cluster.channel("n0")).append([b"second"])
            assert [body for _, _, body in (await waiting)[1]] == [b"second"]

    run(main())
