"""The second port's HTTP: what it serves, what it refuses, and what a stranger cannot occupy."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from http import HTTPStatus

import pytest

from dledger_core.config import ListenAddress, parse_listen
from dledger_core.errors import ConfigError
from dledger_core.server.monitoring.http_port import HttpPort, HttpRequest, HttpResponse
from tests.support.http import afetch


async def echo(request: HttpRequest) -> HttpResponse:
    if request.path == "/broken":
        raise RuntimeError("no")
    return HttpResponse(f"{request.path} {dict(request.query)}".encode())


@asynccontextmanager
async def serving(**options):
    port = HttpPort(echo, **options)
    await port.start("127.0.0.1", 0)
    try:
        yield port.port
    finally:
        await port.close()


async def exchange(port, *sent):
    """Send bytes on one connection and return all that arrives until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for data in sent:
            writer.write(data)
        return await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()


async def test_get_and_head_are_served_with_safe_headers() -> None:
    async with serving() as port:
        got = await afetch(port, "/a b", x="1&2")
        assert (got.status, got.text) == (200, "/a%20b {'x': '1&2'}")
        assert (got.headers["x-content-type-options"], got.headers["cache-control"]) == ("nosniff", "no-store")
        head = await afetch(port, "/a", method="HEAD")
        assert (head.status, head.body, head.headers["content-length"]) == (200, b"", "5")


async def test_connection_serves_several_requests() -> None:
    async with serving() as port:
        request = b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n"
        last = b"GET /3 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        found = await exchange(port, request % 1 + request % 2, last)
        assert [found.count(b"/%d {}" % number) for number in (1, 2, 3)] == [1, 1, 1]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
async def test_other_methods_are_refused(method: str) -> None:
    async with serving() as port:
        assert (await afetch(port, "/", method=method)).status == HTTPStatus.METHOD_NOT_ALLOWED


async def test_request_with_body_is_answered_and_closed() -> None:
    async with serving() as port:
        found = await exchange(port, b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\nxyz")
        assert found.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"\x16\x03\x01 no http\r\n\r\n", b"400"), (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 40_000, b"431")],
)
async def test_wrong_request_closes_only_its_connection(sent: bytes, status: bytes) -> None:
    async with serving() as port:
        assert (await exchange(port, sent)).startswith(b"HTTP/1.1 " + status)
        assert (await afetch(port, "/")).status == 200


async def test_error_of_page_is_status_500() -> None:
    async with serving() as port:
        assert (await afetch(port, "/broken")).status == 500
        assert (await afetch(port, "/")).status == 200


async def test_slow_and_idle_connections_are_closed() -> None:
    async with serving(request_s=0.05, idle_s=0.05) as port:
        assert await exchange(port, b"GET / HT") == b""
        assert await exchange(port) == b""


async def test_connections_are_limited() -> None:
    async with serving(connections_max=2) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for _, writer in held:
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        for reader, _ in held:
            assert await reader.readline() == b"HTTP/1.1 200 \r\n"
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await exchange_exactly(port)
        for _, writer in held:
            writer.close()


async def exchange_exactly(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readexactly(8)
    finally:
        writer.close()


async def test_port_in_use_is_config_error() -> None:
    async with serving() as port:
        with pytest.raises(ConfigError):
            await HttpPort(echo).start("127.0.0.1", port)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("9095", ListenAddress("127.0.0.1", 9095)),
        ("0", ListenAddress("127.0.0.1", 0)),
        ("0.0.0.0:9095", ListenAddress("0.0.0.0", 9095)),
        ("[::1]:9095", ListenAddress("::1", 9095)),
    ],
)
def test_address_is_parsed(text: str, found: ListenAddress) -> None:
    assert parse_listen(text, "http") == found


@pytest.mark.parametrize("text", ["", "a", ":1", "h:", "h:65536", "h:-1", "h:1x"])
def test_wrong_address_is_config_error(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_listen(text, "http")
