"""A live group of three real Java nodes, in the JVM that the tests of one version share."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dledger_core import Client
from dledger_core.cluster import free_ports
from tests.interop.java_dledger import JavaDLedger
from tests.support.soon import soon

_DATA_BYTES, _INDEX_BYTES = 16 << 20, 1 << 20
_START_S = 240.0


@dataclass
class JavaGroup:
    """Nodes by id; group ``g``."""

    peers: str
    servers: dict[str, Any]

    def leader(self) -> str:
        """Waits until one node leads and the others follow it."""

        def found() -> str | None:
            states = {node: server.getMemberState() for node, server in self.servers.items()}
            leading = [node for node, state in states.items() if state.isLeader()]
            named = {state.getLeaderId() for state in states.values()}
            return leading[0] if len(leading) == 1 and named == set(leading) else None

        return str(soon(found, _START_S, every_s=0.05))

    def client(self, **options: Any) -> Client:
        return Client(self.peers, "g", protocol="dledger-java", **options)

    def follower(self) -> str:
        leader = self.leader()
        return next(node for node in self.servers if node != leader)

    def stop(self, node: str) -> None:
        self.servers.pop(node).shutdown()


@contextmanager
def java_group(java: JavaDLedger, directory: Path) -> Iterator[JavaGroup]:
    """Runs three nodes; ends with the block."""
    peers = ";".join(f"n{number}-127.0.0.1:{port}" for number, port in enumerate(free_ports(3)))
    servers = {}
    for node in ("n0", "n1", "n2"):
        config = java.config(directory, node, _DATA_BYTES, _INDEX_BYTES)
        config.setPeers(peers)
        servers[node] = java.classes.DLedgerServer(config)
    group = JavaGroup(peers, servers)
    try:
        for server in servers.values():
            server.startup()
        group.leader()
        yield group
    finally:
        with ThreadPoolExecutor(3) as pool:  # each waits for its threads for seconds
            list(pool.map(group.stop, list(group.servers)))
