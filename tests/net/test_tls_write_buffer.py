"""Frames that TLS has not encrypted yet: in parts, in order, and no more than the other side takes."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger_core.certificates import write_certificates
from dledger_core.net.connection import Connection
from dledger_core.net.credentials import Credentials
from dledger_core.net.dialing import connect
from dledger_core.net.frame import Frame
from dledger_core.net.hello import Hello
from dledger_core.net.limits.tls_write_buffer import PART_BYTES, TlsWriteBuffer
from dledger_core.net.listening import serve
from dledger_core.net.protocol import Type
from dledger_core.net.tls import TlsOptions

MIB = 1 << 20
NODE = Hello("peer", "n0", "uuid-0", (1, 1), "127.0.0.1:1")


@given(st.lists(st.integers(0, 3 * PART_BYTES), max_size=6))
def test_parts_are_the_buffers_in_order(sizes: list[int]) -> None:
    buffers = [bytes([number]) * size for number, size in enumerate(sizes)]
    waiting = TlsWriteBuffer()
    waiting.add(buffers)
    assert waiting.nbytes == sum(sizes)
    parts = []
    while waiting:
        parts.append(waiting.take())
    assert b"".join(parts) == b"".join(buffers)
    assert all(part.nbytes <= PART_BYTES for part in parts)
    assert waiting.nbytes == 0


def test_small_buffers_wait_only_behind_others() -> None:
    waiting = TlsWriteBuffer()
    assert not waiting.must_wait([bytes(PART_BYTES), b"x"])
    assert waiting.must_wait([bytes(PART_BYTES + 1)])
    waiting.add([b"x"])
    assert waiting.must_wait([b"y"])
    assert waiting.take() == b"x"
    assert not waiting.must_wait([b"y"])
    assert waiting.nbytes == 0


class Keep:
    """Keeps the frames that a connection receives."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.changed = asyncio.Event()

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        del connection
        self.frames.append(frame)
        self.changed.set()

    def on_close(self, connection: Connection, error: Exception | None) -> None:
        pass

    async def until_count(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.frames) < count:
                self.changed.clear()
                await self.changed.wait()


@contextlib.asynccontextmanager
async def pair(directory: Path) -> AsyncIterator[tuple[Connection, Connection, Keep]]:
    """A connection with TLS: a node's side, the client's side, and what the client receives."""
    pytest.importorskip("cryptography")
    made, received, accepted = write_certificates(directory, [("n0", ["127.0.0.1"])]), Keep(), []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.cert("n0"), made.key("n0"))

    def handler_for(side: Connection) -> Keep:
        accepted.append(side)
        return Keep()

    server = await serve("127.0.0.1", 0, accept=lambda _: NODE, handler_for=handler_for, tls=lambda: context)
    credentials = Credentials(TlsOptions(ca=made.nodes_ca))
    client = await connect(
        "127.0.0.1", server.port, Hello(), received, timeout_s=60, credentials=credentials, identity="n0"
    )
    try:
        yield accepted[0], client, received
    finally:
        client.close()
        await server.close()


async def test_responses_that_a_client_does_not_take_have_no_second_copy(tmp_path: Path) -> None:
    async with pair(tmp_path) as (node, client, received):
        client.pause_reading()
        body = bytes(range(256)) * (16 * MIB // 256)
        before = psutil.Process().memory_info().rss
        for number in range(8):
            node.send({"t": int(Type.READ_OK), "r": number}, body)
        node.send({"t": int(Type.ALIVE_OK), "r": 8})
        assert node.write_buffer_bytes > 96 * MIB
        assert psutil.Process().memory_info().rss - before < 64 * MIB
        drained = asyncio.ensure_future(node.drained())
        await asyncio.sleep(0)
        assert not drained.done()
        client.resume_reading()
        await received.until_count(9)
        assert [frame.header["r"] for frame in received.frames] == list(range(9))
        assert all(frame.payload == body for frame in received.frames[:8])
        await asyncio.wait_for(drained, 60)
        assert node.write_buffer_bytes == 0


async def test_frames_that_were_sent_arrive_before_the_connection_closes(tmp_path: Path) -> None:
    async with pair(tmp_path) as (node, client, received):
        client.pause_reading()
        node.send({"t": int(Type.READ_OK), "r": 1}, bytes(8 * MIB))
        node.send({"t": int(Type.GOAWAY)})
        node.close()
        client.resume_reading()
        await received.until_count(2)
        assert received.frames[0].payload == bytes(8 * MIB)
        await asyncio.wait_for(client.closed, 60)


async def test_connection_that_breaks_drops_what_it_has_not_sent(tmp_path: Path) -> None:
    async with pair(tmp_path) as (node, client, _):
        client.pause_reading()
        node.send({"t": int(Type.READ_OK), "r": 1}, bytes(16 * MIB))
        drained = asyncio.ensure_future(node.drained())
        client.abort()
        await asyncio.wait_for(drained, 60)
        await asyncio.wait_for(node.closed, 60)
        assert node.write_buffer_bytes == 0
