"""Requests as they come over the wire: every field of every kind with every wrong value; how long a read waits."""

from __future__ import annotations

import asyncio
import math
from functools import partial

import pytest

from dledger_core.client.routing.channel import ConnectionLostError
from dledger_core.errors import BadRequestError, BehindError, DLedgerError
from dledger_core.net import codec
from dledger_core.net.protocol import Type
from dledger_core.record import Columns
from dledger_core.server.services.reads import DIGEST_ENTRIES_MAX, WAIT_MS_MAX, ReadRequest
from tests.support.server_group import TIMEOUT_S, ServerGroup, eventually, run

MISSING = object()
NO_INTEGER = (
    "1",
    1.5,
    math.nan,
    math.inf,
    -math.inf,
    True,
    [],
    [1],
    {},
    b"\x01",
    None,
    MISSING,
    -2,
    1 << 63,
    (1 << 64) - 1,
)
NO_STRING = (1, 1.5, math.nan, True, [], {}, b"n0", None, MISSING)
OPTIONAL = (None, MISSING)

KEY = {"q": "query", "b": 0, "r": "run"}
COLUMNS = Columns.from_bodies([b"one", b"two"])
BODIES = codec.columns_payload(COLUMNS)
READ = {"start": 0, "end": 1}

# kind, what is right, payload, field -> values that are wrong
REQUESTS = {
    "metadata": (Type.METADATA, {}, (), {}),
    "append": (Type.APPEND, {"n": 2}, BODIES, {"n": (*NO_INTEGER, -1, 0, 1, 3, 1 << 40)}),
    "produced": (
        Type.APPEND,
        {"n": 2, "p": "producer", "pe": 0, "ps": 0},
        BODIES,
        {
            "p": [v for v in NO_STRING if v not in OPTIONAL] + ["x" * 600],
            "pe": (*NO_INTEGER, -1),
            "ps": (*NO_INTEGER, -1),
        },
    ),
    "attempt": (
        Type.APPEND,
        {"n": 2, "x": KEY | {"a": "attempt"}},
        BODIES,
        {
            "x": [v for v in NO_STRING if v not in OPTIONAL]
            + [KEY | {"a": v} for v in NO_STRING if v is not MISSING]
            + [KEY | {"a": "a", "q": v} for v in NO_STRING if v is not MISSING]
            + [KEY | {"a": "a", "r": v} for v in NO_STRING if v is not MISSING]
            + [KEY | {"a": "a", "b": v} for v in NO_INTEGER if v is not MISSING]
            + [KEY],
        },
    ),
    "read": (
        Type.READ,
        READ,
        (),
        {
            "start": NO_INTEGER,
            "end": NO_INTEGER,
            "max": [v for v in NO_INTEGER if v is not MISSING],
            "min_commit": [v for v in NO_INTEGER if v is not MISSING],
            "wait": [v for v in NO_INTEGER if v is not MISSING],
            "iso": [*(v for v in NO_STRING if v is not MISSING), "", "read_committed"],
            "cons": [*(v for v in NO_STRING if v is not MISSING), "", "linear"],
        },
    ),
    "time": (Type.TIME, {"ms": 0, "min_commit": -1}, (), {"ms": NO_INTEGER, "min_commit": NO_INTEGER}),
    "at": (
        Type.AT,
        {"position": 0, "max": 1},
        (),
        {"position": (*NO_INTEGER, -1), "max": (*NO_INTEGER, -1, 0)},
    ),
    "digest": (
        Type.DIGEST,
        {"start": 0, "end": 1, "span": 1024},
        (),
        {"start": NO_INTEGER, "end": NO_INTEGER, "span": (*NO_INTEGER, 0, 3, 2 * DIGEST_ENTRIES_MAX, 1 << 62)},
    ),
    "producer": (Type.PRODUCER, {"p": "producer"}, (), {"p": NO_STRING}),
    "transaction": (
        Type.TRANSACTION,
        {"op": "state", "x": KEY},
        (),
        {
            "op": (*NO_STRING, "", "delete"),
            "x": [
                *NO_STRING,
                *(KEY | {"q": v} for v in NO_STRING if v is not MISSING),
                *(KEY | {"b": v} for v in NO_INTEGER if v is not MISSING),
            ],
        },
    ),
    "commit": (
        Type.TRANSACTION,
        {"op": "commit", "x": KEY | {"b": 7}, "parts": []},
        (),
        {
            "parts": [
                *(v for v in NO_STRING if v != []),
                [1],
                [[1, 2, 3]],
                [["a", 1, 1, 1]],
                [[1.5, 1, 1, 1]],
                [[-2, -1, 1, 1]],
                [[0, 1 << 63, 1, 1]],
            ]
        },
    ),
    "transfer": (Type.TRANSFER, {"node": "n0"}, (), {"node": (*NO_STRING, "", "n7")}),
    "describe": (
        Type.DESCRIBE,
        {"table": "producers", "after": ["p", "producer"]},
        (),
        {"table": (*NO_STRING, "", "groups"), "after": (1, "x", [], [1, 2], ["x"], [["x"], "y"], {})},
    ),
    "watch": (Type.WATCH, {"wait": 0}, (), {"wait": NO_INTEGER, "seen": (1, "x", [], {}, [1, 2], [[]] * 4)}),
}


async def answer(cluster, kind, payload, fields):
    """Returns "ok", the error's name, or "closed"."""
    channel = await cluster.channel("n0")
    fields = {key: value for key, value in ({"g": "default"} | fields).items() if value is not MISSING}
    try:
        await channel.request({"t": kind} | fields, *payload, timeout_s=TIMEOUT_S)
    except ConnectionLostError:
        return "closed"
    except DLedgerError as error:
        return error.name
    finally:
        await channel.close()
    return "ok"


@pytest.mark.parametrize("name", REQUESTS)
def test_a_wrong_field_is_refused_as_such_and_the_node_goes_on(tmp_path, name, caplog):
    kind, right, payload, wrong = REQUESTS[name]

    async def main():
        async with ServerGroup(tmp_path, nodes=1) as cluster:
            await cluster.leader()
            ask = partial(answer, cluster, kind, payload)
            assert await ask(right) == "ok"
            for field, values in ({"g": (*NO_STRING, "", "other")} | wrong).items():
                for value in values:
                    got = await ask(right | {field: value})
                    assert got in ("BAD_REQUEST", "PROTOCOL", "UNKNOWN_GROUP", "TRANSACTION", "closed"), (
                        field,
                        value,
                        got,
                    )
            assert await ask(right) == "ok"

    run(main())
    assert "request failed" not in caplog.text


def test_a_read_with_the_largest_numbers_is_answered():
    request = ReadRequest.parse(dict.fromkeys(("start", "end", "max", "min_commit", "wait"), (1 << 63) - 1))
    assert (request.wait_ms, request.max_bytes) == (WAIT_MS_MAX, 16 << 20)
    with pytest.raises(BadRequestError):
        ReadRequest.parse({})


def test_reads_and_digests_at_the_edges(tmp_path):
    top = (1 << 63) - 1

    async def main():
        async with ServerGroup(tmp_path, nodes=1) as cluster:
            client = await cluster.client()
            _, last, _ = await client.append([b"a", b"b"])
            header, rows = await client.read(top, top)
            assert (rows, header["next"]) == ([], top)
            header, rows = await client.read(0, top, max=0)
            assert len(rows) >= 1
            header, rows = await client.read(last + 1, last)
            assert rows == []
            digest = (await client.ask(Type.DIGEST, start=0, end=top, span=DIGEST_ENTRIES_MAX)).header
            assert digest["next"] == last + 1
            digest = (await client.ask(Type.DIGEST, start=top, end=top, span=1)).header
            assert digest["ranges"] == []
            assert (await client.ask(Type.TIME, ms=top, min_commit=-1)).header["index"] == last + 1
            with pytest.raises(BehindError):
                await client.read(0, 1, min_commit=top)

    run(main())


@pytest.mark.slow
def test_a_read_waits_once_for_its_commit_index_and_its_entries_together(tmp_path):
    """The commit index comes when half of the wait is over; what is asked for never does."""

    async def main():
        async with ServerGroup(tmp_path, nodes=1) as cluster:
            client = await cluster.client()
            _, last, _ = await client.append([b"first"])
            reads = cluster.hosted("n0").reads
            request = ReadRequest.parse({"start": last + 2, "end": last + 3, "min_commit": last + 1, "wait": 1600})
            asked = asyncio.create_task(reads.read(request))
            await asyncio.sleep(1.0)
            assert not asked.done()
            await client.append([b"second"])
            too_long = asyncio.create_task(asyncio.sleep(1.3))
            await asyncio.wait({asked, too_long}, return_when=asyncio.FIRST_COMPLETED)
            assert asked.done(), "it began to wait anew"
            assert (await asked).next_index == last + 2
            await too_long

    run(main())


def test_a_read_that_waits_gets_what_comes(tmp_path):
    async def main():
        async with ServerGroup(tmp_path, nodes=1) as cluster:
            client = await cluster.client()
            _, last, _ = await client.append([b"first"])
            waiting = asyncio.create_task(client.read(last + 1, last + 9, wait=20_000))
            other = await cluster.client()
            await eventually(lambda: client.channel.in_flight)
            await other.append([b"second"])
            _, rows = await waiting
            assert [body for _, _, body in rows] == [b"second"]

    run(main())
