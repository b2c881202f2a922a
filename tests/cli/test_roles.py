"""Several groups on real nodes: preferred leaders, and notifications of role changes."""

from __future__ import annotations

import json
import shlex
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dledger_core.cli import main
from dledger_core.cluster import LocalCluster
from dledger_core.connect import Client
from dledger_core.storage import open_store
from tests.cli.command import DLEDGER, error_of
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
    result = CliRunner().invoke(main, ["status", "--peers", cluster.peers, "--group", group, "--format", "json"])
    assert result.exit_code in (0, 1), result.output
    return dict(json.loads(result.stdout))


def leaders(cluster: LocalCluster) -> dict[str, Any]:
    return {group: status(cluster, group)["leader_id"] for group in GROUPS}


class Watching:
    """A ``dledger status --watch`` and its output so far."""

    def __init__(self, cluster: LocalCluster, group: str) -> None:
        command = [*DLEDGER, "status", "--watch", "--format", "json"]
        self._process = subprocess.Popen(
            [*command, "--peers", cluster.peers, "--group", group], stdout=subprocess.PIPE, text=True
        )
        self.lines: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.lines.extend(map(json.loads, self._process.stdout))

    def __enter__(self) -> Watching:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        assert self._process.wait(120) == 130
        self._thread.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def newest(self) -> dict[str, dict[str, Any]]:
        return {line["node_id"]: line for line in self.lines}


def test_leaders_of_three_groups_spread_over_three_nodes(cluster: LocalCluster) -> None:
    soon(lambda: leaders(cluster) == HOMES)
    for group, home in HOMES.items():
        found = status(cluster, group)
        assert (found["preferred_leaders"], found["leader_id"]) == ([home], home)


def test_each_group_has_its_own_term_and_files(cluster: LocalCluster) -> None:
    soon(lambda: leaders(cluster) == HOMES)
    before = {group: status(cluster, group)["term"] for group in GROUPS}
    with Client(cluster.peers, "orders") as orders:
        last = orders.append([b"for orders alone"]).last_index
        orders.transfer_leadership("n0")
        orders.transfer_leadership("n2")
    after = {group: status(cluster, group)["term"] for group in GROUPS}
    assert after["orders"] >= before["orders"] + 2
    assert (after["audit"], after["events"]) == (before["audit"], before["events"])
    bodies = open_store(cluster.store_path("n2", "orders")).read(last, last + 1)["body"].to_pylist()
    assert bodies == [b"for orders alone"]
    assert len({cluster.store_path(node, group) for node in cluster.node_ids for group in GROUPS}) == 9
    for group in ("audit", "events"):
        found = open_store(cluster.store_path("n2", group))
        assert b"for orders alone" not in found.read(found.first_index, found.last_index + 1)["body"].to_pylist()


def test_role_change_reaches_watch_and_command_after_kill_9(cluster: LocalCluster, notified: Path) -> None:
    soon(lambda: leaders(cluster) == HOMES)
    with Watching(cluster, "events") as watching:
        soon(lambda: watching.newest().get("n1", {}).get("broker_role") == "master")
        soon(lambda: set(watching.newest()) == {"n0", "n1", "n2"})
        term, commands = watching.newest()["n1"]["term"], len(notified.read_text().splitlines())
        cluster.kill("n1")
        soon(lambda: watching.newest()["n1"]["role"] == "unreachable")
        new = soon(lambda: next((n for n in ("n0", "n2") if watching.newest()[n]["role"] == "leader"), None))
        seen = watching.newest()[new]
        assert (seen["broker_role"], seen["leader_id"], seen["group"]) == ("master", new, "events")
        assert seen["term"] > term
        other = "n2" if new == "n0" else "n0"
        soon(lambda: watching.newest()[other]["leader_id"] == new)

        def rows() -> list[list[str]]:
            return [line.split() for line in notified.read_text().splitlines()[commands:]]

        soon(lambda: ["events", new, "leader", "master", str(seen["term"]), new] in rows())
        soon(lambda: ["events", other, "follower", "slave", str(seen["term"]), new] in rows())
        assert not [row for row in rows() if row[0] != "events"], "the other groups' leaders live"
        cluster.restart("n1")
        soon(lambda: watching.newest()["n1"]["role"] not in ("unreachable", "leader"))


def test_leadership_returns_to_preferred_node_after_restart(cluster: LocalCluster) -> None:
    soon(lambda: leaders(cluster) == HOMES)
    cluster.kill("n2")
    soon(lambda: leaders(cluster)["orders"] in ("n0", "n1"))
    with Client(cluster.peers, "orders") as orders:
        result = orders.append([b"while n2 was down"])
        cluster.restart("n2")
        soon(lambda: leaders(cluster) == HOMES)
        assert orders.get(result.first_index).body == b"while n2 was down"


def test_watch_as_text_shows_broker_roles(cluster: LocalCluster) -> None:
    soon(lambda: leaders(cluster) == HOMES)
    command = [*DLEDGER, "status", "--watch", "--peers", cluster.peers]
    with subprocess.Popen([*command, "--group", "audit"], stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        lines = [watching.stdout.readline() for _ in range(3)]
        watching.terminate()
        watching.stdout.read()
    assert any("n0  leader (master)" in line and "leader n0" in line for line in lines), lines


def test_watch_rejects_unknown_group(cluster: LocalCluster) -> None:
    assert "[UNKNOWN_GROUP]" in error_of("status", "--watch", "--peers", cluster.peers, "--group", "nowhere")
