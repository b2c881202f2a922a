"""One verdict: command, doctor, page, readiness, metrics and Python agree in each situation, and appends prove it."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dledger_core.client.verdict import Level, ask_health, verdict_of
from dledger_core.config import Limits, ListenAddress, format_peers
from dledger_core.connect import AsyncClient, Client
from dledger_core.errors import DLedgerError
from dledger_core.storage.files.file_system import DiskSpace
from tests.cli import command
from tests.support.http import afetch
from tests.support.server_group import ServerGroup, eventually, run

RESERVE = 8 << 20
ROOM = 1 << 30


class Cluster:
    """Three nodes in this process, whose free disk space a test sets."""

    def __init__(self, group: ServerGroup, leader: str) -> None:
        self.group = group
        self.leader = leader
        self.first, self.second = sorted(set(group.nodes) - {leader})
        self.peers = format_peers(group.peers)

    async def room(self, node: str, nbytes: int) -> None:
        replica = self.group.hosted(node).replica
        replica.log.space = lambda: (replica.log.staged_end, DiskSpace(nbytes, 1 << 40))
        await eventually(lambda: replica.space.free_bytes <= nbytes < replica.space.free_bytes + RESERVE)

    async def followers(self, nbytes: int) -> None:
        for node in (self.first, self.second):
            await self.room(node, nbytes)

    async def stop_second(self) -> None:
        await self.group.stop(self.second)

    async def appends(self) -> bool:
        async with AsyncClient(self.peers, timeout_ms=1500, retry_timeout_ms=1500) as client:
            try:
                await client.append([b"x"])
            except DLedgerError:
                return False
        return True


@dataclass(frozen=True)
class Situation:
    """Steps that change a cluster, and the verdict after them."""

    name: str
    level: Level
    survives: int
    not_ready: tuple[str, ...] = ()
    steps: Callable[[Cluster], list[Awaitable[None]]] = lambda _: []
    is_for_doctor: bool = False


SITUATIONS = [
    Situation("all well", Level.HEALTHY, 1, is_for_doctor=True),
    Situation("a follower would reject appends as leader", Level.DEGRADED, 1, (),
              lambda c: [c.room(c.first, RESERVE - 1)]),
    Situation("both would", Level.DEGRADED, 0, (), lambda c: [c.followers(RESERVE - 1)]),
    Situation("a follower has no space for entries", Level.DEGRADED, 0, ("first",),
              lambda c: [c.followers(ROOM), c.room(c.first, RESERVE // 16)], is_for_doctor=True),
    Situation("no follower has", Level.UNAVAILABLE, -1, ("first", "second", "leader"),
              lambda c: [c.followers(RESERVE // 16)]),
    Situation("the space is free again", Level.HEALTHY, 1, (), lambda c: [c.followers(ROOM)]),
    Situation("one has none, the other one is down", Level.UNAVAILABLE, -1, ("first", "leader"),
              lambda c: [c.room(c.first, RESERVE // 16), c.stop_second()], is_for_doctor=True),
    Situation("one is down", Level.DEGRADED, 0, (), lambda c: [c.room(c.first, ROOM)]),
    Situation("and the leader is full", Level.UNAVAILABLE, -1, ("leader",),
              lambda c: [c.room(c.first, RESERVE - 1), c.room(c.leader, RESERVE - 1)]),
]  # fmt: skip


def test_all_faces_agree_with_appends_in_each_situation(tmp_path: Path) -> None:
    async def scenario() -> None:
        options: dict[str, Any] = {"limits": Limits(space_s=0.02), "disk_full_bytes": RESERVE}
        http = ListenAddress("127.0.0.1", 0)
        async with ServerGroup(tmp_path, http=http, **options) as group:
            cluster = Cluster(group, await group.leader())
            await eventually(lambda: all(len(node.links.connected()) == 2 for node in group.nodes.values()))
            for situation in SITUATIONS:
                for step in situation.steps(cluster):
                    await step
                await check(cluster, situation)

    run(scenario())


async def check(cluster: Cluster, situation: Situation) -> None:
    expected = (situation.level.name.lower(), situation.survives)
    deadline, found = 300, {}
    while deadline and set(found.values()) != {expected}:  # until each node has noticed
        deadline -= 1
        found = await faces(cluster)
    assert found == dict.fromkeys(found, expected), situation.name
    assert await asyncio.to_thread(status, cluster.peers) == expected, situation.name
    if situation.is_for_doctor:  # its other checks take seconds
        assert await asyncio.to_thread(doctor, cluster.peers) == (situation.level is Level.HEALTHY), situation.name
    assert await cluster.appends() == (situation.level is not Level.UNAVAILABLE), situation.name
    for name in ("first", "second", "leader"):
        if (node := getattr(cluster, name)) in cluster.group.nodes:
            ready = await afetch(cluster.group.nodes[node].http_port, "/readyz")
            assert (ready.status != 200) == (name in situation.not_ready), (situation.name, node, ready.text)
            metrics = (await afetch(cluster.group.nodes[node].http_port, "/metrics")).text
            assert number(metrics, "dledger_ready") == (ready.status == 200)
    metrics = (await afetch(cluster.group.nodes[cluster.leader].http_port, "/metrics")).text
    assert number(metrics, "dledger_failures_survived") == situation.survives, situation.name


async def faces(cluster: Cluster) -> dict[str, tuple[str, int]]:
    """Return (level, failures survived) as each of the faces shows it."""
    found = {}
    for name, node in cluster.group.nodes.items():
        page = (await afetch(node.http_port, "/api/status")).json
        found[f"page of {name}"] = (page["verdict"]["level"], page["groups"][0]["survives"])
    found["Python"] = await asyncio.to_thread(verdict, cluster.peers)
    return found


def command_of(*arguments: str) -> tuple[int, Any, str]:
    done = subprocess.run(
        [*command.DLEDGER, *arguments, "--format", "json"], capture_output=True, text=True, timeout=200, check=False
    )
    return done.returncode, json.loads(done.stdout), done.stderr


def status(peers: str) -> tuple[str, int]:
    code, shown, text = command_of("status", "--peers", peers)
    assert code == (shown["verdict"] != "healthy")
    assert all(reason["text"] in text for reason in shown["reasons"])
    return shown["verdict"], shown["survives_failures"]


def doctor(peers: str) -> bool:
    """Return whether the checks of peers and of their group found nothing."""
    _, checks, _ = command_of("doctor", "--peers", peers)
    return not [row for row in checks if row["result"] == "wrong" and row["what"].startswith(("group", "peer"))]


def verdict(peers: str) -> tuple[str, int]:
    with Client(peers) as client:
        _, health = ask_health(client, "default")
    assert health.failures_survived is not None
    return verdict_of([health]).level.name.lower(), health.failures_survived


def number(metrics: str, name: str) -> float:
    (value,) = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", metrics, re.MULTILINE)
    return float(value)
