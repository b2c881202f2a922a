"""Processes of release 0.2.0 and of this version in one group: upgraded under load, recovered, and back again."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pyarrow as pa
import pytest

from dledger_core import Client
from dledger_core.cluster import LocalCluster, free_ports
from dledger_core.digest import rows_digest
from dledger_core.errors import DLedgerError
from tests.cli.command import DLEDGER
from tests.support.bodies import bodies_of
from tests.support.release import COMMIT, ROOT, extract_release
from tests.support.soon import soon

pytestmark = pytest.mark.integration

NODES: Final = ("n0", "n1", "n2", "n3")
TIMEOUT_MS: Final = 60_000


@pytest.fixture(scope="module")
def old_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as 0.2.0 has it."""
    directory = tmp_path_factory.mktemp("0.2.0")
    extract_release(directory)
    return directory


def test_changelog_names_the_commit_of_the_release() -> None:
    assert f"Commit {COMMIT}, tag `v0.2.0`" in (ROOT / "CHANGELOG.md").read_text()


class Group:
    """Four nodes, each of one of the versions."""

    def __init__(self, directory: Path, old_code: Path) -> None:
        self.directory, self.old_code = directory, old_code
        self.ports = dict(zip(NODES, free_ports(len(NODES)), strict=True))
        self.peers = ";".join(f"{node}-127.0.0.1:{port}" for node, port in self.ports.items())
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, node: str, *, is_old: bool = False) -> None:
        """Start a node, and wait until it listens."""
        command = [*DLEDGER, "serve", "--self-id", node, "--peers", self.peers, "--dir", str(self.directory / node)]
        environment = os.environ | ({"PYTHONPATH": str(self.old_code)} if is_old else {})
        path = self.directory / f"{node}.log"
        start = path.stat().st_size if path.exists() else 0
        with path.open("ab") as log:
            self.processes[node] = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, cwd=self.directory
            )
        soon(lambda: b"listening" in path.read_bytes()[start:])

    def stop(self, node: str) -> None:
        process = self.processes.pop(node)
        process.terminate()
        assert process.wait(60) == 0

    def change(self, node: str, *, is_old: bool = False) -> None:
        """Start a node with the other version, and wait until it has the log."""
        self.stop(node)
        self.start(node, is_old=is_old)
        with Client(self.peers, timeout_ms=TIMEOUT_MS) as client:
            soon(lambda: node in {each.node_id for each in client.metadata().nodes if each.commit_index >= 0})


@contextmanager
def running(group: Group) -> Iterator[Group]:
    try:
        yield group
    finally:
        for process in group.processes.values():
            process.kill()
            process.wait()


@contextmanager
def load(peers: str, acknowledged: list[bytes]) -> Iterator[None]:
    """Append one entry after the other; the acknowledged ones are added to the list."""
    stop, failures = threading.Event(), list[DLedgerError]()

    def work() -> None:
        with Client(peers, timeout_ms=TIMEOUT_MS) as client:
            while not stop.is_set():
                body = b"entry %d" % len(acknowledged)
                try:
                    client.append([body])
                except DLedgerError as error:
                    failures.append(error)
                    return
                acknowledged.append(body)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert failures == []


def check(group: Group, acknowledged: list[bytes]) -> None:
    """The log has each acknowledged entry once, in order."""
    with Client(group.peers, timeout_ms=TIMEOUT_MS) as client:
        assert bodies_of(client) == acknowledged


def recovers(group: Group, *arguments: str) -> bool:
    """Whether the command succeeds; until the last leader has stepped down, it says that it must be run again."""
    command = [*DLEDGER, "recover", "--yes", "--peers", group.peers, *arguments]
    done = subprocess.run(command, check=False, capture_output=True)
    assert done.returncode == 0 or b"can elect" in done.stderr or b"run the command again" in done.stderr, done.stderr
    return done.returncode == 0


def test_group_is_upgraded_under_load_recovers_with_both_versions_and_goes_back(tmp_path: Path, old_code: Path) -> None:
    acknowledged: list[bytes] = []
    with running(Group(tmp_path, old_code)) as group:
        for node in NODES:
            group.start(node, is_old=True)
        with load(group.peers, acknowledged):
            soon(lambda: len(acknowledged) > 50)
            for node in ("n0", "n1", "n2"):
                group.change(node)
        check(group, acknowledged)
        with Client(group.peers, timeout_ms=TIMEOUT_MS) as client:
            soon(lambda: len({each.last_index for each in client.metadata().nodes}) == 1)
        for node in ("n0", "n1"):
            lost = group.processes.pop(node)
            lost.kill()
            lost.wait()
            shutil.rmtree(tmp_path / node)
        # A survivor of each version: the command of this one asks both.
        soon(lambda: recovers(group, "--lost", "n0,n1"), timeout_s=60)
        with load(group.peers, acknowledged):
            before = len(acknowledged)
            soon(lambda: len(acknowledged) > before + 20)
        group.start("n0")
        address = f"127.0.0.1:{group.ports['n0']}"
        with Client(group.peers, timeout_ms=TIMEOUT_MS) as client:
            client.add_member("n0", address)
            soon(lambda: [each.role for each in client.members().members] == ["voter"] * 3)
        with load(group.peers, acknowledged):
            before = len(acknowledged)
            group.change("n2", is_old=True)  # the way back
            soon(lambda: len(acknowledged) > before + 20)
        check(group, acknowledged)
        for node in list(group.processes):
            group.stop(node)


def test_store_of_a_log_with_an_archive_is_refused_by_0_2_0(tmp_path: Path, old_code: Path) -> None:
    """It would trim entries that are not archived, by its own rules."""
    with LocalCluster(1, tmp_path) as cluster, cluster.client() as client:
        client.append([b"row"])
        end = client.bounds().end
        rows = rows_digest(pa.Table.from_batches([client.read(0, end)]))
        assert client.prove_archived(0, end, rows, table="file:///archive").equal
        cluster.stop("n0")
        environment = os.environ | {"PYTHONPATH": str(old_code)}
        command = [*DLEDGER, *cluster.serve_command("n0")[3:]]
        done = subprocess.run(command, check=False, capture_output=True, env=environment, cwd=tmp_path, timeout=60)
    assert done.returncode == 3, done.stderr
    assert b"STORE_MISMATCH" in done.stdout + done.stderr


def test_recovery_command_of_0_2_0_is_refused_by_nodes_of_this_version(tmp_path: Path, old_code: Path) -> None:
    """It gave votes back: it must not believe that this worked."""
    with running(Group(tmp_path, old_code)) as group:
        for node in NODES[:3]:
            group.start(node)
        command = [*DLEDGER, "recover", "--peers", group.peers]
        environment = os.environ | {"PYTHONPATH": str(old_code)}
        done = subprocess.run(command, check=False, capture_output=True, env=environment, cwd=tmp_path)
        assert done.returncode != 0, (done.stdout, done.stderr)
        for node in NODES[:3]:
            group.stop(node)
