"""One side with TLS and the other one without: the error names the side that needs another option."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dledger_core.certificates import write_certificates
from dledger_core.errors import UnauthenticatedError, UnreachableError
from dledger_core.net.connection import Connection
from dledger_core.net.credentials import PLAINTEXT, Credentials
from dledger_core.net.dialing import connect
from dledger_core.net.hello import Hello
from dledger_core.net.listening import serve
from dledger_core.net.tls import TlsOptions, listening_context, speaks_tls

NODE = Hello("peer", "n0", "uuid-0", (1, 1), "127.0.0.1:1")


class Deaf:
    def on_frame(self, connection: Connection, frame: Any) -> None:
        pass

    def on_close(self, connection: Connection, error: Exception | None) -> None:
        pass


@pytest.mark.parametrize("has_tls", [True, False])
@pytest.mark.parametrize("role", ["client", "peer"])
async def test_connection_with_tls_on_one_side_names_the_remedy(has_tls: bool, role: str, tmp_path: Path) -> None:
    made = write_certificates(tmp_path, [("n0", ["127.0.0.1"])])

    def context() -> Any:
        return listening_context(made.cert("n0"), made.key("n0"), [made.nodes_ca, made.clients_ca])

    tokens: list[str] = []

    def accept(hello: Hello) -> Hello:
        tokens.append(hello.token)
        return NODE

    tls = context if has_tls else None
    node = await serve("127.0.0.1", 0, accept=accept, handler_for=lambda _: Deaf(), tls=tls)
    credentials = PLAINTEXT if has_tls else Credentials(TlsOptions(ca=made.nodes_ca), "secret")
    hello = Hello() if role == "client" else Hello("peer", "n1", "uuid-1", (1, 1), "127.0.0.1:2")
    try:
        with pytest.raises(UnauthenticatedError) as caught:
            await connect("127.0.0.1", node.port, hello, Deaf(), timeout_s=20, credentials=credentials)
    finally:
        await node.close()
    assert ("--tls-ca" in caught.value.remedy) == (role == "client")
    assert "secret" not in tokens


async def test_port_that_closes_every_connection_is_unreachable() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        assert not await speaks_tls("127.0.0.1", port, 5)
        with pytest.raises(UnreachableError):
            await connect("127.0.0.1", port, Hello(), Deaf(), timeout_s=20)
