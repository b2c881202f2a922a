"""Columns that a node sends instead of records: which rows, how many bytes, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dledger_core.client.routing.channel import Channel
from dledger_core.config import Peer
from dledger_core.connect import AsyncClient
from dledger_core.control import Part
from dledger_core.errors import BadRequestError, CorruptRecordError
from dledger_core.ids import NodeId
from dledger_core.net.codec import parse_fields
from dledger_core.net.messages import READ_OK
from dledger_core.net.protocol import Type
from dledger_core.record import FIELD_SCHEMA, Chosen
from dledger_core.rocketmq import encode_messages
from dledger_core.rocketmq.message.fields import MessageColumns
from tests.rocketmq.node_group import rocketmq_group
from tests.rocketmq.test_inner_batches import SHORT, UNWRAPPED, batch
from tests.support.damage import flip
from tests.support.server_group import RawClient, ServerGroup

OF_ENTRIES = [name for name in FIELD_SCHEMA.names if name != "body"]
OF_MESSAGES = [*OF_ENTRIES, *MessageColumns.schema.names]


@contextlib.asynccontextmanager
async def one_node(directory: Path) -> AsyncIterator[tuple[ServerGroup, AsyncClient]]:
    async with rocketmq_group(directory, 1) as group, AsyncClient(group.peers) as client:
        yield group, client


async def filled(client: AsyncClient, raw: RawClient) -> int:
    """Append plain bodies, messages, an inner batch, an orphaned attempt and an open transaction; return the end."""
    await client.append([b"plain %d" % number * number for number in range(5)])
    await client.append(encode_messages("Orders", [0, 1], [b"one", b"two" * 50], ["a", None], ["k1", "k2 k3"]))
    key = {"q": "query", "b": 0, "r": "run"}
    won, _ = await raw.attempt([b"won"], key), await raw.attempt([b"lost"] * 3, key, "b")
    await raw.transact("commit", key, [Part(*won)])
    await client.append([batch(0, "ABC"), batch(0, "", body=b"not a message")])
    await raw.attempt([b"open"], key | {"b": 1})
    return (await client.bounds()).end


async def columns_of(raw: RawClient, names: list[str], **fields: Any) -> pa.RecordBatch:
    """Return the columns of a node's response."""
    frame = await raw.ask(Type.READ, fields=names, **({"start": 0, "end": 1 << 40} | fields))
    return parse_fields(frame.payload, Chosen.of(names, MessageColumns()).schema, READ_OK.decode(frame.header).crc)


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
async def test_node_sends_columns_that_client_would_select(tmp_path: Path, isolation: Any) -> None:
    async with one_node(tmp_path) as (group, client):
        raw = await group.client()
        await filled(client, raw)
        options = {"iso": isolation.removeprefix("read_")}
        records = await client.fetch(0, 1 << 40, isolation=isolation)
        for names in (["term", "index"], ["length"], OF_ENTRIES, OF_MESSAGES, ["topic", "keys"]):
            chosen = Chosen.of(names, MessageColumns())
            stored = await client.read(0, 1 << 40, isolation=isolation, columns=[*names, "body"])
            found = await client.fetch(0, 1 << 40, isolation=isolation, columns=names)
            assert found.batch.schema == chosen.schema
            assert found.batch.to_pylist() == stored.select(names).to_pylist()
            assert found.next_index == records.next_index
            if names != OF_MESSAGES:  # more bytes than these short records have
                assert (await columns_of(raw, names, **options)).to_pylist() == found.batch.to_pylist()
        rows = records.batch.to_pylist()
        lengths = (await client.read(0, 1 << 40, isolation=isolation, columns=["index", "length"])).to_pylist()
        assert lengths == [{"index": row["index"], "length": len(row["body"])} for row in rows]


async def test_all_entries_have_columns_too(tmp_path: Path) -> None:
    async with one_node(tmp_path) as (group, client):
        raw = await group.client()
        end = await filled(client, raw)
        names = ["index", "magic", "crc"]
        found = await client.records(0, end, columns=names)
        assert found.batch.to_pylist() == (await columns_of(raw, names, end=end, iso="records")).to_pylist()
        assert found.batch.column("index").to_pylist() == list(range(end))
        assert {2, 1} <= set(found.batch.column("magic").to_pylist())
        empty = await client.fetch(end, end + 1, columns=["topic", "index"])
        assert (empty.batch.num_rows, empty.batch.schema.names, empty.next_index) == (0, ["topic", "index"], end)


async def test_bytes_on_socket_are_those_of_columns(tmp_path: Path) -> None:
    async with one_node(tmp_path) as (group, client):
        count = 2_000
        await client.append([b"x" * 1024] * count)
        bodies = encode_messages("Orders", 0, [b"y" * 1024] * count, "created", "key")
        await client.append(bodies.slice(0, count))
        received = 0

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal received
            theirs, ours = await asyncio.open_connection(group.peers[0].host, group.peers[0].port)

            async def up() -> None:
                while data := await reader.read(1 << 16):
                    ours.write(data)
                ours.close()

            forward = asyncio.create_task(up())
            while data := await theirs.read(1 << 16):
                received += len(data)
                writer.write(data)
            writer.close()
            await forward

        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        channel = Channel(Peer(NodeId("n0"), "127.0.0.1", server.sockets[0].getsockname()[1]))
        await channel.open(60)
        raw = RawClient(channel)
        of_messages = ["index", "topic", "tags", "store_timestamp"]
        for names, start in ((["index", "term", "timestamp"], 0), (of_messages, count + 1)):
            before = received
            found = await columns_of(raw, names, start=start)
            assert found.num_rows >= count
            assert received - before <= 1.1 * found.nbytes
        await channel.close()
        server.close()
        await server.wait_closed()


async def test_limit_of_bytes_counts_records_that_are_read(tmp_path: Path) -> None:
    async with one_node(tmp_path) as (_, client):
        await client.append([b"x" * 1000] * 100)
        found = await client.fetch(1, 1 << 40, max_bytes=10_480, columns=["index"])
        assert (found.batch.num_rows, found.next_index) == (10, 11)
        assert (await client.fetch(1, 1 << 40, max_bytes=1, columns=["index"])).batch.num_rows == 1


async def test_damaged_body_is_an_error_for_columns_too(tmp_path: Path) -> None:
    async with one_node(tmp_path) as (group, client):
        await client.append([b"good", b"damaged", b"good"])
        data = group.hosted("n0").replica.log.directory / "data"
        file = next(iter(sorted(data.iterdir())))
        flip(file, file.read_bytes().index(b"damaged"))
        with pytest.raises(CorruptRecordError):
            await client.fetch(0, 100, columns=["index"])


@pytest.mark.parametrize("names", [["index", "no such column"], [], ["index", "index"], "index"])
async def test_wrong_columns_are_refused_by_client_and_node(tmp_path: Path, names: Any) -> None:
    async with one_node(tmp_path) as (group, client):
        await client.append([b"x"])
        raw = await group.client()
        for call in (client.fetch(0, 1, columns=names), raw.ask(Type.READ, start=0, end=1, fields=names)):
            with pytest.raises(BadRequestError):
                await call


async def test_inner_batches_with_more_columns_than_bytes_are_sent_as_records(tmp_path: Path) -> None:
    forged = batch(0, "", body=SHORT * 32_767)
    bodies = [encode_messages("t" * 200, 0, [SHORT * 32_767], sys_flag=UNWRAPPED)[0].as_py(), forged, forged]
    async with one_node(tmp_path) as (group, client):
        first = (await client.append(bodies)).first_index
        frame = await (await group.client()).ask(Type.READ, start=first, end=first + 3, fields=["index", "topic"])
        assert READ_OK.decode(frame.header).crc is None
        seen = []
        while first < (await client.bounds()).end:
            found = await client.fetch(first, 1 << 40, columns=["index", "topic"])
            seen += found.batch.column("index").to_pylist()
            first = found.next_index
        assert len(seen) == 3 * 32_767
        assert seen == sorted(seen)
