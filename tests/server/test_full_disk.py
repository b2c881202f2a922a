"""A real node on a small disk that fills up: it rejects appends, serves reads, and recovers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dledger_core.config import format_peers
from dledger_core.connect import Client
from dledger_core.errors import DiskFullError
from tests.chaos.cluster import SmallDisk
from tests.support.server_group import free_peers

pytestmark = pytest.mark.integration
RESERVE = 8 << 20


class Disk(SmallDisk):
    """One that is full soon."""

    SIZE = "48m"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    found = Disk(tmp_path / "small")
    refusal = found.refusal() or found.mount()
    if refusal:
        pytest.skip(refusal)
    yield found
    found.unmount()


@pytest.fixture
def client(disk: Disk) -> Iterator[Client]:
    peers = format_peers(free_peers(1))
    settings = {
        "--peers": peers,
        "--self-id": "n0",
        "--dir": str(disk.path),
        "--data-segment-bytes": "4MiB",
        "--index-segment-bytes": "64KiB",
        "--preallocate-bytes": "0",
        "--disk-full-bytes": str(RESERVE),
        "--format": "json",
    }
    arguments = [piece for pair in settings.items() for piece in pair]
    command = [sys.executable, "-m", "dledger_core.cli", "serve", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as node:
        assert node.stdout is not None
        assert json.loads(node.stdout.readline())["node"] == "n0"
        try:
            with Client(peers, timeout_ms=2000) as connected:
                yield connected
            assert node.poll() is None, "the node ended"
        finally:
            node.terminate()
            node.wait(120)
    assert node.returncode == 0


def append_until_full(client: Client) -> int:
    for count in range(100):
        try:
            client.append([bytes([count]) * (1 << 20)])
        except DiskFullError:
            return count
    raise AssertionError("it was never full")


def test_full_disk_rejects_appends_serves_reads_and_recovers(disk: Disk, client: Client) -> None:
    count = append_until_full(client)
    assert count >= 10
    status = client.metadata()
    first = status.nodes[0].first_index
    bodies = client.read(first, status.nodes[0].visible_end)["body"]
    assert bodies[0].as_py()[:1] == b"\0"
    with pytest.raises(DiskFullError) as caught:
        client.append([b"one more"])
    assert caught.value.values["free_bytes"] < RESERVE + RESERVE // 8
    disk._resize("96m").check_returncode()
    assert append_until_full(client) >= 10
    assert client.read(first, first + 2)["body"][0].as_py()[:1] == b"\0"
