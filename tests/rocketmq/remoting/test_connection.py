"""Remoting on the port of our own protocol: real sockets on loopback, our client of Java groups as the other side."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from typing import Any

import pytest
import uvloop

from dledger_core.client import AsyncLogClient
from dledger_core.client.routing.retry import Timeouts
from dledger_core.config import parse_peers
from dledger_core.connect import AsyncClient, JavaOptions
from dledger_core.errors import IndexOutOfRangeError, StoreMismatchError
from dledger_core.net.dialing import connect
from dledger_core.net.hello import Hello
from dledger_core.rocketmq.client import JavaClient
from dledger_core.rocketmq.remoting.frame import FrameDecoder, RemotingFrame, encode_frame
from dledger_core.rocketmq.remoting.messages import (
    AppendRequest,
    GetRequest,
    GetResponse,
    MetadataRequest,
    decode_response,
    encode_request,
)
from tests.rocketmq.remoting.fake_nodes import NAME, Nothing, RunningGroup
from tests.support.server_group import eventually


def client_of(running: RunningGroup) -> AsyncClient:
    java = JavaOptions(safety_lag_ms=0)
    return AsyncClient(running.peers, NAME, protocol="dledger-java", java=java, timeout_ms=5000)


async def responses(reader: asyncio.StreamReader, count: int) -> list[RemotingFrame]:
    decoder, found = FrameDecoder(), []
    while len(found) < count:
        data = await reader.read(1 << 16)
        assert data, "the connection was closed"
        decoder.receive_data(data)
        while (frame := decoder.next_frame()) is not None:
            found.append(frame)
    return found


async def closed(reader: asyncio.StreamReader) -> None:
    """Wait until the node has closed the connection without a response."""
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""


METADATA = MetadataRequest(group=NAME, remote_id="n0")


@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
async def test_both_protocols_share_one_port(new_loop: Any) -> None:
    async with RunningGroup() as running:
        own = await connect("127.0.0.1", running.servers["n0"].port, Hello(), Nothing(), timeout_s=60)
        async with client_of(running) as client:
            result = await client.append([b"%d" % number for number in range(500)])
            assert result.last_index == 499
            rows = await client.read(0, 500)
            assert rows.column("body").to_pylist() == [b"%d" % number for number in range(500)]
        assert len(running.servers["n0"].connections) == 1
        own.close()
        await own.closed


async def test_request_arrives_byte_by_byte() -> None:
    async with RunningGroup() as running, running.raw() as (reader, writer):
        for byte in encode_frame(encode_request(METADATA, 1)):
            writer.write(bytes([byte]))
            await writer.drain()
        [frame] = await responses(reader, 1)
        assert b'"leaderId":"n0"' in frame.body


async def test_responses_leave_when_ready() -> None:
    async with RunningGroup() as running:
        running.group.gate = asyncio.Event()
        async with running.raw() as (reader, writer):
            append = AppendRequest(group=NAME, remote_id="n0", bodies=(b"x",))
            writer.write(encode_frame(encode_request(append, 1)))
            writer.write(encode_frame(encode_request(METADATA, 2)))
            assert [frame.opaque for frame in await responses(reader, 1)] == [2]
            running.group.gate.set()
            assert [frame.opaque for frame in await responses(reader, 1)] == [1]


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">i", 3),
        struct.pack(">iI", 100, 9 << 24),
        struct.pack(">iI", 1 << 24, 1 << 20),
        encode_frame(RemotingFrame(code=50001, opaque=1, body=b"{")),
    ],
    ids=["length", "type", "header", "body"],
)
async def test_malformed_input_closes_only_its_connection(data: bytes) -> None:
    async with RunningGroup() as running, client_of(running) as client:
        await client.append([b"x"])
        async with running.raw() as (reader, writer):
            writer.write(data)
            await closed(reader)
        assert (await client.get(0)).body == b"x"


async def test_connection_without_request_is_closed() -> None:
    async with RunningGroup(first_request_s=0.05) as running, running.raw() as (reader, writer):
        writer.write(b"\0")
        await closed(reader)


async def test_connection_with_partial_request_is_closed() -> None:
    async with RunningGroup(rest_of_request_s=0.2) as running:
        whole = encode_frame(encode_request(METADATA, 1))
        async with running.raw() as (reader, writer), running.raw() as (other_reader, other):
            for sender in (writer, other):
                sender.write(whole + whole[:9])
            other.write(whole[9:])
            assert len(await responses(other_reader, 2)) == 2
            [answer] = await responses(reader, 1)
            assert answer.opaque == 1
            await closed(reader)
            other.write(whole)
            assert len(await responses(other_reader, 1)) == 1


async def test_requests_above_limit_are_all_served() -> None:
    async with RunningGroup(requests=4) as running:
        async with running.raw() as (reader, writer):
            asked = [AppendRequest(group=NAME, remote_id="n0", bodies=(b"%d" % n,)) for n in range(3000)]
            writer.write(b"".join(encode_frame(encode_request(r, n)) for n, r in enumerate(asked)))
            assert sorted(frame.opaque for frame in await responses(reader, 3000)) == list(range(3000))
        assert len(running.group.entries) == 3000


@pytest.mark.slow
async def test_connection_pauses_reading_for_slow_client() -> None:
    async with RunningGroup() as running:
        running.group.write(bytes(1 << 20))
        async with running.raw() as (reader, writer):
            get = GetRequest(group=NAME, remote_id="n0", index=0)
            for number in range(200):
                writer.write(encode_frame(encode_request(get, number)))
            await asyncio.sleep(0.2)
            assert 0 < running.group.gets < 32, "it answers no more than the buffers have room for"
            found = await responses(reader, 200)
            assert {len(decode_response(GetResponse, frame, "").entries[0].body) for frame in found} == {1 << 20}


async def test_server_close_ends_requests_in_progress() -> None:
    async with RunningGroup() as running:
        running.group.gate = asyncio.Event()
        async with running.raw() as (reader, writer):
            writer.write(encode_frame(encode_request(GetRequest(group=NAME, remote_id="n0", index=0), 1)))
            await eventually(lambda: running.group.at_gate)
            await running.servers["n0"].close()
            assert await reader.read() == b""


# --- our client of Java groups, against nodes that behave as a test says -----------------------------------------


async def test_replaced_entry_after_read_is_store_mismatch() -> None:
    async with RunningGroup() as running:
        group = running.group
        async with client_of(running) as client:
            await client.append([b"a", b"b", b"c"])
            first = await client.fetch(0, 3)
            assert first.next_index == 3
            # A new leader that never had the last entry has another one there.
            group.leader_id, group.term = "n1", 5
            del group.entries[2:]
            group.write(b"other")
            group.write(b"more")
            found = await asyncio.gather(client.fetch(3, 4), client.fetch(3, 4), return_exceptions=True)
            assert [type(error) for error in found] == [StoreMismatchError] * 2


async def test_truncated_log_lowers_safe_end() -> None:
    async with RunningGroup() as running:
        log = JavaClient(parse_peers(running.peers), NAME, Timeouts(5.0), safety_lag_ms=50, observe_s=0.0)
        async with AsyncLogClient(log) as client:
            await client.append([b"a", b"b", b"c"])
            assert (await client.bounds()).end == 3
            del running.group.entries[1:]
            assert (await client.fetch(0, 4)).batch.num_rows == 1
            assert (await client.bounds()).end == 1
            assert (await client.fetch(1, 3)).next_index == 1
            with pytest.raises(IndexOutOfRangeError):
                await client.get(2)
