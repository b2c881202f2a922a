"""Kills of leaders under load, and of all nodes at once: no voter loses its vote, and no command is needed.

What a power cut takes from the disks as well is simulated: ``ReplicaMember.host`` checks it for every crash.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dledger_core import Client, LocalCluster
from dledger_core.ids import NO_TERM
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.meta_files import load_floor
from tests.support.bodies import bodies_of
from tests.support.soon import soon

pytestmark = pytest.mark.integration


def check_votes(cluster: LocalCluster) -> None:
    for node in cluster.node_ids:
        floor = load_floor(OsFiles(), Layout(cluster.store_path(node)), NO_TERM)
        assert floor is None or not floor.is_open, node


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.soak)])
def test_leaders_that_are_killed_keep_their_votes_without_any_command(tmp_path: Path, kills: int) -> None:
    stop, acknowledged = threading.Event(), list[bytes]()

    def load() -> None:
        with Client(cluster.peers, timeout_ms=120_000) as client:
            while not stop.is_set():
                body = b"entry %d" % len(acknowledged)
                client.append([body], producer_id="load", epoch=0, sequence=len(acknowledged))
                acknowledged.append(body)

    with LocalCluster(3, tmp_path, preallocate_bytes=0) as cluster:
        thread = threading.Thread(target=load)
        thread.start()
        try:
            for _ in range(kills):
                count = len(acknowledged)
                soon(lambda count=count: len(acknowledged) > count + 20)  # type: ignore[misc]
                leader = cluster.leader()
                cluster.kill(leader)
                count = len(acknowledged)
                soon(lambda count=count: len(acknowledged) > count + 1)  # type: ignore[misc]
                cluster.restart(leader)
                check_votes(cluster)
            for node in cluster.node_ids:  # the rack
                cluster.kill(node)
            for node in cluster.node_ids:
                cluster.restart(node)
            count = len(acknowledged)
            soon(lambda: len(acknowledged) > count + 20)
        finally:
            stop.set()
            thread.join()
        check_votes(cluster)
        with Client(cluster.peers, timeout_ms=120_000) as client:
            assert bodies_of(client) == acknowledged
