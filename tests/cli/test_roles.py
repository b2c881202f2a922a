"""Several groups on real nodes: preferred leaders, and notifications of role changes."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dledger_core.cluster import LocalCluster
from tests.cli.command import DLEDGER, run
from tests.support.soon import soon

pytestmark = pytest.mark.integration

GROUPS = ("audit", "events", "orders")
HOMES = dict(zip(GROUPS, ("n0", "n1", "n2"), strict=True))


@pytest.fixture(scope="module")
def notified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("command") / "notified"


@pytest.fixture(scope="module")
def cluster(notified: Path) -> Iterator[LocalCluster]:
    line = '"$DLEDGER_GROUP $DLEDGER_NODE $DLEDGER_ROLE $DLEDGER_BROKER_ROLE $DLEDGER_TERM $DLEDGER_LEADER"'
    command = shlex.join(["sh", "-c", f"echo {line} >>{shlex.quote(str(notified))}"])
    # The order of the groups differs from that of the spread.
    with LocalCluster(3, groups=GROUPS[::-1], data_segment_bytes=1 << 20, on_role_change=command) as running:
        yield running


def status(cluster: LocalCluster, group: str) -> dict[str, Any]:
    result = run("status", "--peers", cluster.peers, "--group", group, "--format", "json", code=None)
    return dict(json.loads(result.stdout))


def leaders(cluster: LocalCluster) -> dict[str, Any]:
    return {group: status(cluster, group)["leader_id"] for group in GROUPS}


@contextmanager
def watching(cluster: LocalCluster, group: str, output: Path, form: str) -> Iterator[None]:
    """Run ``dledger status --watch``; its lines are in ``output``."""
    command = [*DLEDGER, "status", "--watch", "--peers", cluster.peers, "--group", group, "--format", form]
    with output.open("wb") as file, subprocess.Popen([*command], stdout=file) as process:
        try:
            yield
        finally:
            process.terminate()
            assert process.wait(120) == 130


def test_leaders_of_three_groups_spread_over_three_nodes(cluster: LocalCluster) -> None:
    soon(lambda: leaders(cluster) == HOMES)
    for group, home in HOMES.items():
        found = status(cluster, group)
        assert (found["preferred_leaders"], found["leader_id"]) == ([home], home)


def test_role_change_reaches_watch_and_command_after_kill_9(
    cluster: LocalCluster, notified: Path, tmp_path: Path
) -> None:
    def newest() -> dict[str, dict[str, Any]]:
        lines = [json.loads(line) for line in (tmp_path / "watch").read_text().splitlines()]
        return {line["node_id"]: line for line in lines}

    def commands() -> list[list[str]]:
        return [line.split() for line in notified.read_text().splitlines()]

    soon(lambda: leaders(cluster) == HOMES)
    with watching(cluster, "events", tmp_path / "watch", "json"):
        soon(lambda: newest().get("n1", {}).get("broker_role") == "master")
        soon(lambda: set(newest()) == {"n0", "n1", "n2"})
        term, count = newest()["n1"]["term"], len(commands())
        cluster.kill("n1")
        soon(lambda: newest()["n1"]["role"] == "unreachable")
        new = soon(lambda: next((n for n in ("n0", "n2") if newest()[n]["role"] == "leader"), None))
        seen = newest()[new]
        assert (seen["broker_role"], seen["leader_id"], seen["group"]) == ("master", new, "events")
        assert seen["term"] > term
        other = "n2" if new == "n0" else "n0"
        soon(lambda: newest()[other]["leader_id"] == new)
        soon(lambda: ["events", new, "leader", "master", str(seen["term"]), new] in commands()[count:])
        soon(lambda: ["events", other, "follower", "slave", str(seen["term"]), new] in commands()[count:])
        assert {row[0] for row in commands()[count:]} == {"events"}, "the other groups' leaders live"
        cluster.restart("n1")
        soon(lambda: newest()["n1"]["role"] not in ("unreachable", "leader"))


def test_watch_as_text_shows_broker_roles(cluster: LocalCluster, tmp_path: Path) -> None:
    soon(lambda: leaders(cluster) == HOMES)
    with watching(cluster, "audit", tmp_path / "watch", "table"):
        soon(lambda: "n0  leader (master)" in (tmp_path / "watch").read_text())
