"""Remoting on the port of our own protocol: real sockets on loopback, our client of Java groups as the other side."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from dledger_core.client import AsyncLogClient
from dledger_core.client.routing.retry import Timeouts
from dledger_core.config import parse_peers
from dledger_core.connect import AsyncClient, JavaOptions
from dledger_core.errors import ConfigError, IndexOutOfRangeError, StoreMismatchError, UnreachableError
from dledger_core.net.transport import Hello, connect, serve
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
from tests.rocketmq.remoting.fake_nodes import HELLO, NAME, Nothing, RunningGroup


def client_of(running: RunningGroup) -> AsyncClient:
    java = JavaOptions(safety_lag_ms=0)
    return AsyncClient(running.peers, NAME, protocol="dledger-java", java=java, timeout_ms=5000)


def run(test: Callable[[RunningGroup], Awaitable[None]], loop: Any = uvloop.new_event_loop, **limits: float) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), RunningGroup(**limits) as running:
            await test(running)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


async def responses(reader: asyncio.StreamReader, count: int) -> list[RemotingFrame]:
    decoder, found = FrameDecoder(), []
    while len(found) < count:
        data = await reader.read(1 << 16)
        assert data, "the connection was closed"
        decoder.receive_data(data)
        while (frame := decoder.next_frame()) is not None:
            found.append(frame)
    return found


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def test_both_protocols_on_one_port(loop: Any) -> None:
    async def test(running: RunningGroup) -> None:
        own = await connect("127.0.0.1", running.servers["n0"].port, Hello(), Nothing(), timeout_s=60)
        async with client_of(running) as client:
            result = await client.append([b"%d" % number for number in range(500)])
            assert result.last_index == 499
            rows = await client.read(0, 500)
            assert rows.column("body").to_pylist() == [b"%d" % number for number in range(500)]
        stats = running.servers["n0"].stats
        assert (stats.accepted, stats.foreign, stats.refused) == (1, 1, 0)
        own.close()
        await own.closed

    run(test, loop)


def test_without_a_foreign_side_remoting_is_refused() -> None:
    async def main() -> None:
        server = await serve("127.0.0.1", 0, accept=lambda _: HELLO, handler_for=lambda _: Nothing())
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(encode_frame(RemotingFrame(code=50000, opaque=1)))
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        assert (server.stats.refused, server.stats.foreign) == (1, 0)
        await server.close()

    asyncio.run(main())


def test_a_request_byte_by_byte() -> None:
    async def test(running: RunningGroup) -> None:
        async with running.raw() as (reader, writer):
            for byte in encode_frame(encode_request(MetadataRequest(group=NAME, remote_id="n0"), 1)):
                writer.write(bytes([byte]))
                await writer.drain()
            [frame] = await responses(reader, 1)
            assert b'"leaderId":"n0"' in frame.body

    run(test)


def test_answers_come_as_they_are_ready() -> None:
    async def test(running: RunningGroup) -> None:
        running.group.gate = asyncio.Event()
        async with running.raw() as (reader, writer):
            append = AppendRequest(group=NAME, remote_id="n0", bodies=(b"x",))
            writer.write(encode_frame(encode_request(append, 1)))
            writer.write(encode_frame(encode_request(MetadataRequest(group=NAME, remote_id="n0"), 2)))
            assert [frame.opaque for frame in await responses(reader, 1)] == [2]
            running.group.gate.set()
            assert [frame.opaque for frame in await responses(reader, 1)] == [1]

    run(test)


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
def test_malformed_input_closes_that_connection_only(data: bytes) -> None:
    async def test(running: RunningGroup) -> None:
        async with client_of(running) as client:
            await client.append([b"x"])
            async with running.raw() as (reader, writer):
                writer.write(data)
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
            assert (await client.get(0)).body == b"x"

    run(test)


def test_who_asks_nothing_is_not_kept() -> None:
    async def test(running: RunningGroup) -> None:
        async with running.raw() as (reader, writer):
            writer.write(b"\0")
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""

    run(test, first_request_s=0.05)


def test_who_sends_half_a_request_is_not_kept_either() -> None:
    async def test(running: RunningGroup) -> None:
        whole = encode_frame(encode_request(MetadataRequest(group=NAME, remote_id="n0"), 1))
        async with running.raw() as (reader, writer), running.raw() as (patient, other):
            for sender, sent in ((writer, whole + whole[:9]), (other, whole + whole[:9])):
                sender.write(sent)
            other.write(whole[9:])
            assert len(await responses(patient, 2)) == 2
            [answer] = await responses(reader, 1)
            assert answer.opaque == 1
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            other.write(whole)
            assert len(await responses(patient, 1)) == 1

    run(test, rest_of_request_s=0.2)


def test_more_requests_than_are_served_at_once_are_all_answered() -> None:
    async def test(running: RunningGroup) -> None:
        async with running.raw() as (reader, writer):
            asked = [AppendRequest(group=NAME, remote_id="n0", bodies=(b"%d" % n,)) for n in range(3000)]
            writer.write(b"".join(encode_frame(encode_request(r, n)) for n, r in enumerate(asked)))
            assert sorted(frame.opaque for frame in await responses(reader, 3000)) == list(range(3000))
        assert len(running.group.entries) == 3000

    run(test, requests=4)


@pytest.mark.slow
def test_a_client_that_does_not_take_its_answers_is_not_read_from() -> None:
    async def test(running: RunningGroup) -> None:
        running.group.write(bytes(1 << 20))
        async with running.raw() as (reader, writer):
            get = GetRequest(group=NAME, remote_id="n0", index=0)
            for number in range(200):
                writer.write(encode_frame(encode_request(get, number)))
            await asyncio.sleep(0.2)
            [link] = running.servers["n0"]._all
            assert link.write_buffer_bytes < 32 << 20  # 200 answers would be 280 MB
            found = await responses(reader, 200)
            assert {len(decode_response(GetResponse, frame, "").entries[0].body) for frame in found} == {1 << 20}

    run(test)


def test_closing_the_server_ends_what_is_under_way() -> None:
    async def test(running: RunningGroup) -> None:
        running.group.gate = asyncio.Event()
        async with running.raw() as (reader, writer):
            writer.write(encode_frame(encode_request(GetRequest(group=NAME, remote_id="n0", index=0), 1)))
            await asyncio.sleep(0.05)
            await running.servers["n0"].close()
            assert await reader.read() == b""

    run(test)


# --- our client of Java groups, against nodes that behave as a test says -----------------------------------------


def test_the_client_follows_redirects_and_transfers() -> None:
    async def test(running: RunningGroup) -> None:
        async with client_of(running) as client:
            await client.append([b"one"])
            running.group.leader_id = "n2"
            assert (await client.append([b"two"])).first_index == 1
            await client.transfer_leadership("n1")
            assert (running.group.leader_id, running.group.term) == ("n1", 4)
            assert (await client.metadata()).leader_id == "n1"
            assert await client.groups() == {NAME: None}

    run(test)


def test_an_entry_that_was_replaced_after_it_was_read_is_told() -> None:
    async def test(running: RunningGroup) -> None:
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
            with pytest.raises(StoreMismatchError, match="has changed since it was read"):
                await client.fetch(3, 4)

    run(test)


def test_a_log_that_was_cut_ends_earlier() -> None:
    async def test(running: RunningGroup) -> None:
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

    run(test)


def test_what_retention_has_deleted_is_an_error_with_the_first_index() -> None:
    async def test(running: RunningGroup) -> None:
        async with client_of(running) as client:
            await client.append([b"%d" % number for number in range(100)])
            running.group.first = 37
            assert (await client.bounds()).first_index == 37
            with pytest.raises(IndexOutOfRangeError) as caught:
                await client.fetch(10, 100)
            assert caught.value.values["first_index"] == 37
            assert (await client.fetch(37, 100)).batch.num_rows == 63

    run(test)


def test_no_node_and_no_such_protocol_are_errors() -> None:
    async def main() -> None:
        async with AsyncClient("n0-127.0.0.1:1", NAME, protocol="dledger-java", timeout_ms=300) as client:
            with pytest.raises(UnreachableError):
                await client.append([b"x"])
        with pytest.raises(ConfigError):
            AsyncClient("n0-127.0.0.1:1", NAME, protocol="java")

    asyncio.run(main())
