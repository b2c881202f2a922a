"""Groups of real processes whose members change while a producer appends: no entry is lost, no append fails."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from dledger_core.client import Producer
from dledger_core.client.members import GroupMembers
from dledger_core.config import Peer, format_peers
from dledger_core.connect import Client
from dledger_core.errors import DLedgerError, MemberChangeRefusedError
from tests.support.server_group import free_peers
from tests.support.soon import soon

pytestmark = pytest.mark.integration
RETRIED = {"change-pending", "no-commit-in-term", "majority-not-active", "still-active", "store-unknown"}


class Processes:
    """Nodes as processes, each in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self, peer: Peer, peers: tuple[Peer, ...], directory: str = "", dies_after: tuple[str, int] | None = None
    ) -> None:
        """Start a node; ``dies_after`` names a file and the number of its replacements after which the node dies."""
        dying = ["tests.support.dying_node", dies_after[0], str(dies_after[1])] if dies_after else []
        command = [sys.executable, "-m", *(dying or ["dledger_core.cli"]), "serve", "--self-id", peer.node_id]
        command += ["--dir", str(self._directory / (directory or peer.node_id)), "--peers", format_peers(peers)]
        command += ["--data-segment-bytes", "1MiB", "--index-segment-bytes", "32KiB"]
        with (self._directory / f"{peer.node_id}.log").open("ab") as log:
            self._running[peer.node_id] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def died(self, node_id: str) -> None:
        """Wait until a node has ended itself."""
        assert self._running.pop(node_id).wait(60) == -signal.SIGKILL

    def kill(self, node_id: str) -> None:
        process = self._running.pop(node_id)
        process.kill()
        process.wait()

    def close(self) -> None:
        for node_id in list(self._running):
            self.kill(node_id)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    running = Processes(tmp_path)
    yield running
    running.close()


@contextmanager
def load(client: Client) -> Iterator[dict[int, bytes]]:
    """Append by an idempotent producer until the block ends; yield the acknowledged entries."""
    acknowledged: dict[int, bytes] = {}
    failures: list[BaseException] = []
    done = threading.Event()

    def append() -> None:
        producer = Producer(client, "load")
        number = 0
        while not done.is_set():
            body = b"%d" % number
            try:
                acknowledged[producer.append([body]).first_index] = body
            except BaseException as error:  # noqa: BLE001 - the test fails with it
                failures.append(error)
                return
            number += 1
            done.wait(0.005)

    thread = threading.Thread(target=append)
    thread.start()
    try:
        soon(lambda: acknowledged or failures)
        yield acknowledged
    finally:
        done.set()
        thread.join()
    assert failures == []


def leads(client: Client) -> bool:
    with suppress(DLedgerError):
        return client.metadata().leader_id is not None
    return False


def change(client: Client, request: Callable[[], GroupMembers], is_done: Callable[[GroupMembers], bool]) -> None:
    """Ask for a change until it is accepted, then wait until it is complete."""

    def accepted() -> bool:
        try:
            request()
        except MemberChangeRefusedError as error:
            if error.reason not in RETRIED:
                raise
            return False
        return True

    soon(accepted, every_s=0.2)

    def complete() -> bool:
        try:
            found = client.members()
        except DLedgerError:
            return False
        return not found.is_change_pending and is_done(found)

    soon(complete, every_s=0.1)


def check_nothing_is_lost(client: Client, acknowledged: dict[int, bytes]) -> None:
    batch = client.fetch(0, max(acknowledged) + 1, wait_ms=5000, min_commit=max(acknowledged)).batch
    found = dict(zip(batch["index"].to_pylist(), batch["body"].to_pylist(), strict=True))
    assert {index: found.get(index) for index in acknowledged} == acknowledged


def test_group_grows_to_five_and_shrinks_while_a_client_appends(processes: Processes) -> None:
    """1 → 3 → 5 → 3; the client's list has the first three only, and two of them leave."""
    peers = free_peers(5)
    processes.start(peers[0], peers[:1])
    with Client(format_peers(peers[:3]), timeout_ms=60_000) as client:
        soon(lambda: leads(client))
        with load(client) as acknowledged:
            for count, peer in enumerate(peers[1:], 2):
                processes.start(peer, peers)
                change(
                    client,
                    lambda peer=peer: client.add_member(peer.node_id, peer.address),
                    lambda found, count=count: len(found.voters) == count,
                )
            for node in ("n0", "n1"):
                change(
                    client,
                    lambda node=node: client.remove_member(node),
                    lambda found, node=node: node not in found.voters,
                )
                processes.kill(node)
            grown = len(acknowledged)
            soon(lambda: len(acknowledged) > grown + 10)
        assert client.members().voters == ("n2", "n3", "n4")
        check_nothing_is_lost(client, acknowledged)


def test_each_node_in_turn_loses_its_disk_and_moves_while_a_client_appends(processes: Processes) -> None:
    """At the end no node of the client's list is left, and each of the new ones is needed for a majority."""
    first = free_peers(6)
    current = {peer.node_id: peer for peer in first[:3]}
    for peer in first[:3]:
        processes.start(peer, first[:3])
    with Client(format_peers(first[:3]), timeout_ms=60_000) as client:
        soon(lambda: leads(client))
        with load(client) as acknowledged:
            for node, free in zip(list(current), first[3:], strict=True):
                (lost,) = [each.store_uuid for each in client.members().members if each.node_id == node]
                processes.kill(node)
                newcomer = current[node] = replace(free, node_id=node)
                processes.start(newcomer, tuple(current.values()), f"{node}, another disk")
                change(
                    client,
                    lambda node=node, newcomer=newcomer: client.replace_member(node, newcomer.address),
                    lambda found, lost=lost: (
                        len(found.voters) == 3 and lost not in {each.store_uuid for each in found.members}
                    ),
                )
            processes.kill("n1")
            before = len(acknowledged)
            soon(lambda: len(acknowledged) > before + 10)
        check_nothing_is_lost(client, acknowledged)


BOOTSTRAP = [("identity.2", 2), ("log.json", 1), ("members", 1), ("identity", 3)]
"""Files that a node replaces while its group is bootstrapped: it has the record, makes its store, is a member."""


def test_bootstrap_survives_kill_of_a_node_between_any_two_files(processes: Processes, tmp_path: Path) -> None:
    for number, point in enumerate(BOOTSTRAP):
        peers = free_peers(3)
        for peer in peers[:2]:
            processes.start(peer, peers, f"{number}-{peer.node_id}")
        processes.start(peers[2], peers, f"{number}-n2", dies_after=point)
        processes.died("n2")
        processes.start(peers[2], peers, f"{number}-n2")
        with Client(format_peers(peers), timeout_ms=60_000) as client:
            soon(lambda client=client: leads(client))
            assert client.append([b"x"]).last_index >= 0
            soon(lambda client=client: all(each.is_active for each in client.members().members))
            assert client.members().voters == ("n0", "n1", "n2")
        processes.close()


@pytest.mark.parametrize(
    "point", [("members", 2), pytest.param(("members.2", 3), marks=pytest.mark.soak)], ids="{0[0]} {0[1]}".format
)
def test_change_of_members_survives_kill_of_the_new_node_at(processes: Processes, point: tuple[str, int]) -> None:
    """The new node has the entry that admits it, and the one that promotes it, in the first copy or in both."""
    peers = free_peers(2)
    processes.start(peers[0], peers[:1])
    with Client(format_peers(peers[:1]), timeout_ms=60_000) as client:
        soon(lambda: leads(client))
        acknowledged = {client.append([b"before"]).first_index: b"before"}
        processes.start(peers[1], peers, dies_after=point)
        soon(lambda: is_accepted(client, peers[1]), every_s=0.2)
        processes.died("n1")
        processes.start(peers[1], peers)
        soon(lambda: is_voter(client, "n1"), every_s=0.1)
        acknowledged[Producer(client, "after").append([b"after"]).first_index] = b"after"
        check_nothing_is_lost(client, acknowledged)


def is_accepted(client: Client, peer: Peer) -> bool:
    with suppress(DLedgerError):
        client.add_member(peer.node_id, peer.address)
    with suppress(DLedgerError):
        return len(client.members().members) == 2
    return False


def is_voter(client: Client, node: str) -> bool:
    with suppress(DLedgerError):
        return node in client.members().voters
    return False
