"""Handshakes: their rate of an address, and those in progress."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator

import pytest

from dledger_core.certificates import CertificateFiles, write_certificates
from dledger_core.net.limits.rates import TokenBucket
from dledger_core.net.tls_listener import HandshakeLimits, TlsListener
from tests.support.server_group import eventually, run


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> CertificateFiles:
    pytest.importorskip("cryptography")
    return write_certificates(tmp_path_factory.mktemp("tls"), [("n0", ["127.0.0.1"])])


@contextlib.asynccontextmanager
async def listening(made: CertificateFiles, limits: HandshakeLimits) -> AsyncIterator[tuple[int, TlsListener]]:
    """A port that accepts connections with TLS: its number, and its listener."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.cert("n0"), made.key("n0"))
    listener = TlsListener(asyncio.Protocol, lambda: context, limits, timeout_s=300)
    await listener.start("127.0.0.1", 0, 1024)
    try:
        yield listener.sockets[0].getsockname()[1], listener
    finally:
        listener.close()
        await listener.wait_closed()


async def shakes_hands(made: CertificateFiles, port: int, address: str) -> None:
    context = ssl.create_default_context(cafile=str(made.nodes_ca))
    context.check_hostname = False
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, local_addr=(address, 0))
    writer.close()


def test_flood_from_one_address_leaves_turns_to_others(made) -> None:
    async def test() -> None:
        async with listening(made, HandshakeLimits(per_s=0.1, burst=10, address_per_s=0.1, address_burst=2)) as (
            port,
            listener,
        ):
            opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
            await shakes_hands(made, port, "127.0.0.2")
            assert listener.results["refused"] == 98
            for _, writer in opened:
                writer.close()

    run(test())


def test_silent_connections_end_for_handshakes_that_wait(made) -> None:
    async def test() -> None:
        async with listening(made, HandshakeLimits(in_progress=4, least_s=0.05)) as (port, listener):
            opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            await shakes_hands(made, port, "127.0.0.2")
            for reader, _ in opened[:16]:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
            await eventually(lambda: listener.results["completed"] == 1)
            assert listener.results["displaced"] >= 16
            for _, writer in opened:
                writer.close()

    run(test())


def test_failed_handshake_does_not_count_as_completed(made) -> None:
    async def test() -> None:
        async with listening(made, HandshakeLimits()) as (port, listener):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"no handshake")
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 60)
            writer.close()
            await eventually(lambda: listener.results["failed"] == 1)
            assert listener.results["completed"] == 0

    run(test())


def test_handshake_that_is_ended_before_it_begins_closes_its_socket(made, monkeypatch) -> None:
    async def test() -> None:
        async with listening(made, HandshakeLimits()) as (port, listener):
            loop, take = asyncio.get_running_loop(), TokenBucket.take

            def take_and_end(bucket: TokenBucket, now: float, tokens: int = 1) -> float:
                loop.call_soon(listener.close)  # before the first step of the handshake's task
                return take(bucket, now, tokens)

            monkeypatch.setattr(TokenBucket, "take", take_and_end)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()

    run(test())
