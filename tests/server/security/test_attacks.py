"""Attacks on a node with security; a well-behaved client is served meanwhile, and nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl

import pytest

from dledger_core.certificates import CertificateFiles, digest_of, write_certificates
from dledger_core.errors import BusyError, DLedgerError, ForbiddenError, UnreachableError
from dledger_core.net import codec
from dledger_core.net.credentials import Credentials
from dledger_core.net.hello import Hello
from dledger_core.net.protocol import Type
from tests.server.security.secure_group import SecureGroup
from tests.support.server_group import run

pytest.importorskip("cryptography")

HALF_OPEN = 300


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> CertificateFiles:
    files = write_certificates(tmp_path_factory.mktemp("tls"), [("n0", ["127.0.0.1"])])
    entries = [
        f'["{name}"]\ntoken-sha256 = ["{digest_of(name)}"]\nread = ["*"]\nappend = {groups}\n'
        for name, groups in (("good", '["*"]'), ("bad", "[]"))
    ]
    files.tokens.write_text("".join(entries))
    return files


async def good_client_works(group: SecureGroup) -> None:
    async with group.open("good") as client:
        appended = await client.append([b"a"])
        rows = await client.read(appended.first_index, appended.last_index + 1)
        assert rows["body"].to_pylist() == [b"a"]


def test_half_open_connections_leave_room_for_others(tmp_path, made) -> None:
    async def test() -> None:
        async with SecureGroup(tmp_path, made) as group:
            peer = group.peers[0]
            opened = []
            for _ in range(HALF_OPEN):
                with contextlib.suppress(OSError):
                    opened.append(await asyncio.open_connection(peer.host, peer.port))
            async with asyncio.timeout(60):
                while True:  # its address has used up the rate of handshakes
                    with contextlib.suppress(UnreachableError):
                        await good_client_works(group)
                        break
            for _, writer in opened:
                writer.close()

    run(test())


@pytest.mark.parametrize(
    "content",
    [b"\0" * 100, b"DLGR\1" + b"\xff" * 20, b"\x16\x03\x01\xff\xff" + bytes(range(200))],
    ids=["zeros", "preface", "record of TLS that is too long"],
)
def test_port_survives_connections_with_other_content(tmp_path, made, content) -> None:
    async def test() -> None:
        async with SecureGroup(tmp_path, made) as group:
            peer = group.peers[0]
            for _ in range(20):
                reader, writer = await asyncio.open_connection(peer.host, peer.port)
                writer.write(content)
                with contextlib.suppress(ConnectionError):
                    await asyncio.wait_for(reader.read(), 30)
                writer.close()
            await good_client_works(group)

    run(test())


def test_slow_hello_is_disconnected(tmp_path, made) -> None:
    async def test() -> None:
        async with SecureGroup(tmp_path, made) as group:
            peer = group.peers[0]
            context = ssl.create_default_context(cafile=str(made.nodes_ca))
            context.check_hostname = False
            reader, writer = await asyncio.open_connection(peer.host, peer.port, ssl=context)
            writer.write(b"DLGR\1\0\0")
            assert await asyncio.wait_for(reader.read(), 30) == b""
            writer.close()
            await good_client_works(group)

    run(test())


def test_large_hello_is_disconnected(tmp_path, made) -> None:
    async def test() -> None:
        async with SecureGroup(tmp_path, made) as group:
            with pytest.raises(DLedgerError):
                await group.dial(Hello(features=frozenset({"x" * 8000})), Credentials(group.tls, "good"))
            await good_client_works(group)

    run(test())


@pytest.mark.parametrize("token", ["good", "bad"])
def test_client_that_sends_messages_of_nodes_is_disconnected(tmp_path, made, token) -> None:
    async def test() -> None:
        async with SecureGroup(tmp_path, made) as group:
            await group.leader()
            term = group.hosted("n0").replica.raft.status().term
            connection = await group.dial(Hello(), Credentials(group.tls, token))
            connection.send({"t": Type.VOTE, "a": 1, "term": 99})
            await asyncio.wait_for(connection.closed, 30)
            assert group.hosted("n0").replica.raft.status().term == term
            await good_client_works(group)

    run(test())


def test_forbidden_requests_leave_no_forged_line_in_the_log(tmp_path, made, caplog) -> None:
    async def test() -> None:
        async with SecureGroup(tmp_path, made) as group:
            client = await group.raw("bad")
            with pytest.raises(ForbiddenError), caplog.at_level(logging.WARNING):
                await client.ask(Type.TRANSFER, g="x\n2026-01-01 CRITICAL forged", node="n0\nforged")
            assert [record for record in caplog.records if "\n" in record.getMessage()] == []

    run(test())


def test_thousands_of_waiting_requests_of_one_principal_are_refused(tmp_path, made) -> None:
    async def test() -> None:
        async with SecureGroup(tmp_path, made) as group:
            await group.leader()
            greedy = await group.raw("bad")
            payload = b"".join(codec.seen_payload({"default": codec.SeenLog(10_000, None)}))
            asked = [
                asyncio.ensure_future(greedy.ask(Type.AWAIT, payload, n=1, wait=20_000, timeout_s=30))
                for _ in range(3000)
            ]
            refused = 0
            for each in asyncio.as_completed(asked):
                try:
                    await each
                except BusyError:
                    refused += 1
                if refused >= 1900:
                    break
            await good_client_works(group)
            for each in asked:
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    run(test())
