"""A node with few descriptors: shares for connections and files, more segments and clients than it may open files."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from dledger_core import Client
from dledger_core.config import format_peers
from dledger_core.errors import DLedgerError
from dledger_core.net.connection import PREFACE
from dledger_core.server.descriptors import DescriptorShares
from tests.support.server_group import free_peers
from tests.support.soon import soon

LIMIT = 256
SEGMENT_BYTES = 64 << 10


@pytest.mark.parametrize("groups", [1, 16])
@pytest.mark.parametrize("limit", [256, 1024, 4096, 1 << 20])
def test_shares_fit_limit_and_leave_reserve(limit: int, groups: int) -> None:
    shares = DescriptorShares.of(limit, groups, 10_000)
    used = shares.connections + 2 * groups * shares.open_segments
    assert used <= max(limit - 64, 2 * groups * 4 + 16)
    assert shares.connections >= 16
    assert shares.open_segments >= 4


class Node(NamedTuple):
    """A node's process."""

    peers: str
    pid: int


@contextlib.contextmanager
def running_node(tmp_path: Path) -> Iterator[Node]:
    """A node that starts with 64 descriptors and may have 256."""
    peers = format_peers(free_peers(1))
    options = ["--peers", peers, "--self-id", "n0", "--dir", str(tmp_path), "--format", "json"]
    options += ["--data-segment-bytes", str(SEGMENT_BYTES), "--index-segment-bytes", "4096"]
    serve = [sys.executable, "-m", "dledger_core.cli", "serve", *options]
    command = ["sh", "-c", f'ulimit -Sn 64 && ulimit -Hn {LIMIT} && exec "$@"', "sh", *serve]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["node"] == "n0"
        try:
            yield Node(peers, process.pid)
            assert process.poll() is None, "the node ended"
        finally:
            process.terminate()
            process.wait(120)
    assert process.returncode == 0


@pytest.mark.integration
def test_node_with_few_descriptors_serves_many_segments_and_clients(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        check_service(node)


def check_service(node: Node) -> None:
    assert psutil.Process(node.pid).rlimit(psutil.RLIMIT_NOFILE) == (LIMIT, LIMIT)
    with Client(node.peers) as client, contextlib.ExitStack() as idle:
        body = bytes(SEGMENT_BYTES // 2)  # with its header more than half of a segment
        results = [client.append([body] * 100) for _ in range(LIMIT // 100 + 1)]
        first, last = results[0].first_index, results[-1].last_index
        port = int(node.peers.rpartition(":")[2])
        for _ in range(LIMIT + 20):
            connection = idle.enter_context(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(OSError):
                connection.sendall(PREFACE)
        assert client.append([b"after"]).first_index == last + 1
        found = first
        while found <= last:
            found += len(client.read(found, last + 1))
        with pytest.raises(DLedgerError) as caught, Client(node.peers, timeout_ms=300) as another:
            another.metadata()
        assert caught.value.retriable

    def is_served() -> bool:
        with Client(node.peers, timeout_ms=2000) as client:
            return client.metadata().leader_id == "n0"

    assert soon(is_served)
