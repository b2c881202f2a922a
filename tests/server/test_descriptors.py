"""A node with few descriptors: shares for connections and files, more segments and clients than it may open files.

With TLS, connections without a handshake or without a hello must leave descriptors for the node's own files.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import ssl
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from dledger_core import Client
from dledger_core.certificates import CertificateFiles, write_certificates
from dledger_core.config import format_peers
from dledger_core.errors import DLedgerError
from dledger_core.net.protocol import PREFACE
from dledger_core.net.tls import TlsOptions
from dledger_core.net.tls_listener import HandshakeLimits
from dledger_core.server.descriptors import DescriptorShares
from tests.support.server_group import free_peers
from tests.support.soon import soon

LIMIT = 256
HANDSHAKES = HandshakeLimits().in_progress
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
    made: CertificateFiles | None

    def client(self, timeout_ms: int = 60_000) -> Client:
        if self.made is None:
            return Client(self.peers, timeout_ms=timeout_ms)
        return Client(self.peers, tls=TlsOptions(ca=self.made.nodes_ca), token=self.made.token, timeout_ms=timeout_ms)


@contextlib.contextmanager
def running_node(tmp_path: Path, *, secure: bool = False) -> Iterator[Node]:
    """A node that starts with 64 descriptors and may have 256."""
    peers = format_peers(free_peers(1))
    made = write_certificates(tmp_path / "tls", [("n0", ["127.0.0.1"])]) if secure else None
    options = ["--peers", peers, "--self-id", "n0", "--dir", str(tmp_path), "--format", "json"]
    options += ["--data-segment-bytes", str(SEGMENT_BYTES), "--index-segment-bytes", "4096"]
    if made is not None:
        options += ["--tls-cert", str(made.cert("n0")), "--tls-key", str(made.key("n0"))]
        options += ["--peer-ca", str(made.nodes_ca), "--tokens", str(made.tokens)]
    serve = [sys.executable, "-m", "dledger_core.cli", "serve", *options]
    command = ["sh", "-c", f'ulimit -Sn 64 && ulimit -Hn {LIMIT} && exec "$@"', "sh", *serve]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["node"] == "n0"
        try:
            yield Node(peers, process.pid, made)
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


class Flood:
    """Connections from many addresses, opened as fast as they can be until the context ends; none sends a hello.

    Every second one does the TLS handshake, the others send nothing.
    """

    def __init__(self, node: Node) -> None:
        assert node.made is not None
        self._address = ("127.0.0.1", int(node.peers.rpartition(":")[2]))
        self._tls = ssl.create_default_context(cafile=str(node.made.nodes_ca))
        self._tls.check_hostname = False
        self._ends = threading.Event()
        self._opened: deque[socket.socket] = deque()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(4)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()
        for connection in self._opened:
            connection.close()

    def _run(self, number: int) -> None:
        for count in itertools.count():
            if self._ends.wait(0.01):
                return
            while len(self._opened) > 2 * LIMIT:
                self._opened.popleft().close()
            source = (f"127.{8 + number}.{count >> 6 & 255}.{1 + (count & 63)}", 0)
            with contextlib.suppress(OSError):
                connection = socket.create_connection(self._address, 5, source_address=source)
                self._opened.append(connection)
                if number % 2:
                    self._opened.append(self._tls.wrap_socket(connection))


@pytest.mark.integration
@pytest.mark.slow
def test_node_with_few_descriptors_survives_flood_with_tls(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    body = bytes(SEGMENT_BYTES // 2)
    with running_node(tmp_path, secure=True) as node, node.client() as client:
        before = client.append([b"before"])
        with Flood(node):
            used = psutil.Process(node.pid).num_fds
            idle = used()
            soon(lambda: used() > idle + HANDSHAKES // 2)
            results = [client.append([body] * 8) for _ in range(20)]
            assert used() < LIMIT
        found = before.first_index
        while found <= results[-1].last_index:
            found += len(client.read(found, results[-1].last_index + 1))
        assert client.metadata().term == before.term
        with node.client() as another:
            assert another.append([b"after"]).first_index == results[-1].last_index + 1
