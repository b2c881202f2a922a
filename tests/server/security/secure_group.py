"""Nodes with security in this process, and their clients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from dledger_core.certificates import CertificateFiles
from dledger_core.client.routing.channel import Channel
from dledger_core.connect import AsyncClient
from dledger_core.net.connection import Connection
from dledger_core.net.credentials import Credentials
from dledger_core.net.dialing import connect
from dledger_core.net.frame import Frame
from dledger_core.net.hello import Hello
from dledger_core.net.tls import TlsOptions
from dledger_core.server.config import ServerConfig
from dledger_core.server.security.authentication import SecurityFiles
from tests.support.server_group import RawClient, ServerGroup

TIMEOUT_S = 20


def security(made: CertificateFiles, node: str) -> SecurityFiles:
    return SecurityFiles(
        cert=made.cert(node), key=made.key(node), peer_ca=made.nodes_ca, tokens=made.tokens, client_ca=made.clients_ca
    )


class Silent:
    """A handler that keeps the frames, and the error that closed the connection."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.error: Exception | None = None

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        self.frames.append(frame)

    def on_close(self, connection: Connection, error: Exception | None) -> None:
        self.error = error


class SecureGroup(ServerGroup):
    """A group whose nodes have the certificates of ``made``; ``files`` overrides some."""

    def __init__(self, directory: Path, made: CertificateFiles, nodes: int = 1, **options: Any) -> None:
        self.files = options.pop("files", {})
        super().__init__(directory, nodes, **options)
        self.made = made
        self.tls = TlsOptions(ca=made.nodes_ca)

    def config(self, node_id: str, **options: Any) -> ServerConfig:
        files = {"security": replace(security(self.made, node_id), **self.files)}
        return super().config(node_id, **(files | options))

    def open(self, token: str | None = None, cert: str | None = None) -> AsyncClient:
        tls = self.tls
        if cert is not None:
            tls = replace(tls, cert=self.made.cert(cert), key=self.made.key(cert))
        return AsyncClient(self.peers, tls=tls, token=token, timeout_ms=TIMEOUT_S * 1000)

    async def raw(self, token: str) -> RawClient:
        channel = Channel(self.peers[0], credentials=Credentials(self.tls, token))
        await channel.open(TIMEOUT_S)
        self.channels.append(channel)
        return RawClient(channel)

    async def dial(self, hello: Hello, credentials: Credentials, identity: str | None = None) -> Connection:
        peer = self.peers[0]
        return await connect(
            peer.host,
            peer.port,
            hello,
            Silent(),
            timeout_s=TIMEOUT_S,
            credentials=credentials,
            identity=peer.node_id if identity is None else identity,
        )
