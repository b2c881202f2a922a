"""Attacks on three real nodes while a well-behaved client appends and reads: it is served, and nothing is lost.

Each row of ``ATTACKS`` runs with a count for ``make test`` and with the full one in ``make soak``. How long the client
waits is measured by ``benchmarks.bench_attacks``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import uvloop

from dledger_core.config import parse_peers
from dledger_core.ids import NodeId
from dledger_core.server.config import ServerConfig
from tests.server.attacks.attacked_cluster import GROUPS, AttackedCluster, attacked_cluster
from tests.server.attacks.attackers import ATTACKS, FORGED, Enemy, Run
from tests.server.attacks.bystander import Bystander, Memory

pytest.importorskip("cryptography")
pytestmark = [pytest.mark.integration, pytest.mark.slow]

IDLE_BYTES = 256 << 20
"""A node of two groups without clients: interpreter, libraries, tables, and memory that the allocator keeps."""
DEFAULTS = ServerConfig(self_id=NodeId("n0"), peers=parse_peers("n0-127.0.0.1:1"))
DECLARED_BYTES = IDLE_BYTES + 2 * DEFAULTS.inflight_bytes_max + len(GROUPS) * DEFAULTS.raft.recent_bytes_max
"""The memory of a node by its settings: appends and responses in flight, and recent entries of each group."""
REQUESTS = 10


def cases(*, secure: bool) -> list[object]:
    """Return the rows with the counts of ``make test``, and the larger ones as soak."""
    return [
        pytest.param(attack.run, count, id=f"{attack.run.__name__}-{count}", marks=marks)
        for attack in ATTACKS
        if attack.secure is secure
        for count, marks in {attack.full: [pytest.mark.soak], attack.count: []}.items()
    ]


@pytest.fixture(scope="module")
def plaintext(tmp_path_factory) -> Iterator[AttackedCluster]:
    """A cluster without security."""
    with attacked_cluster(tmp_path_factory.mktemp("plaintext"), secure=False) as found:
        yield found


@pytest.fixture(scope="module")
def secured(tmp_path_factory) -> Iterator[AttackedCluster]:
    """A cluster with security."""
    with attacked_cluster(tmp_path_factory.mktemp("secured"), secure=True) as found:
        yield found


@pytest.mark.parametrize(("attack", "count"), cases(secure=False))
def test_client_without_security_is_served_during_attack(plaintext: AttackedCluster, attack: Run, count: int) -> None:
    check_service(plaintext, attack, count)


@pytest.mark.parametrize(("attack", "count"), cases(secure=True))
def test_client_is_served_during_attack(secured: AttackedCluster, attack: Run, count: int) -> None:
    check_service(secured, attack, count)


def check_service(cluster: AttackedCluster, attack: Run, count: int) -> None:
    with cluster.client() as client, Bystander(client) as bystander, Memory(cluster.pids()) as memory:
        before = client.metadata()
        bystander.proceeds(1)

        async def run() -> None:
            async with Enemy(cluster.target()) as enemy:
                await attack(enemy, count)
                bystander.proceeds(REQUESTS)
                with cluster.client() as newcomer:
                    newcomer.append([b"of a client that connects meanwhile"])

        uvloop.run(run())
        bystander.proceeds(REQUESTS)
        after = client.metadata()
    assert (after.leader_id, after.term) == (before.leader_id, before.term)
    assert memory.highest_bytes <= DECLARED_BYTES
    assert [line for line in cluster.log_lines() if line.startswith(FORGED)] == []
    with cluster.client() as another:
        assert bystander.lost(another) == []
