"""Three real nodes for attacks, with a good and a bad principal if they have security."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from dledger_core import Client, LocalCluster
from dledger_core.certificates import digest_of
from dledger_core.config import parse_peers
from dledger_core.net.credentials import PLAINTEXT, Credentials
from tests.server.attacks.attackers import Target
from tests.support.slow_elections import SLOW_ELECTIONS

GROUPS = ("default", "tenant")
STORED_BYTES = 24 << 20
"""Content of the log that greedy readers ask for."""
_PRINCIPALS = {"good": ('["*"]', "[]"), "bad": ('["tenant"]', "[]"), "dev": ('["*"]', '["*"]')}


class AttackedCluster:
    """Nodes of which one leads both groups; anyone may attack it, and with security the principal ``bad`` does.

    The attacker may read everything and append to the group ``tenant``.
    """

    def __init__(self, nodes: LocalCluster, tokens: dict[str, str]) -> None:
        self.nodes = nodes
        self._tokens = tokens

    def credentials(self, principal: str) -> Credentials:
        return PLAINTEXT if self.nodes.tls is None else Credentials(self.nodes.tls, self._tokens[principal])

    def client(self, timeout_ms: int = 60_000) -> Client:
        """Return the good principal's client of the group ``default``."""
        token = None if self.nodes.tls is None else self._tokens["good"]
        return Client(self.nodes.peers, tls=self.nodes.tls, token=token, timeout_ms=timeout_ms)

    def target(self) -> Target:
        leader = self.nodes.leader()
        [peer] = [peer for peer in parse_peers(self.nodes.peers) if peer.node_id == leader]
        return Target(node=peer, credentials=self.credentials("bad"))

    def pids(self) -> list[int]:
        return [self.nodes.pid(node) for node in self.nodes.node_ids]

    def log_lines(self) -> list[str]:
        return [line for node in self.nodes.node_ids for line in self.nodes.log_path(node).read_text().splitlines()]


@contextlib.contextmanager
def attacked_cluster(directory: Path, *, secure: bool) -> Iterator[AttackedCluster]:
    """Run three nodes with some content; their elections are slow, because an attack takes processors too."""
    options = {**SLOW_ELECTIONS, "preferred_leaders": "n0", "preallocate_bytes": 0}
    with contextlib.ExitStack() as stack:
        cluster = LocalCluster(3, directory, GROUPS, tls=secure, **options)
        tokens = {}
        if secure:
            assert cluster.token is not None
            tokens = {name: name for name in _PRINCIPALS} | {"dev": cluster.token.read_text().strip()}
            entries = (
                f'["{name}"]\ntoken-sha256 = ["{digest_of(tokens[name])}"]\nread = ["*"]\n'
                f"append = {append}\nadmin = {admin}\n"
                for name, (append, admin) in _PRINCIPALS.items()
            )
            cluster.token.with_name("principals.toml").write_text("".join(entries))
        stack.enter_context(cluster)
        found = AttackedCluster(cluster, tokens)
        with found.client() as client:
            for _ in range(STORED_BYTES >> 20):
                client.append([bytes(1 << 20)])
        yield found
