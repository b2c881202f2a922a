"""A node under a service manager: it reports that it is ready, alive and stopping, by systemd's protocol."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dledger_core.cluster import free_ports
from dledger_core.server.systemd import notify, watchdog_s
from tests.cli.command import DLEDGER

DEADLINE_S = 60


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The manager's end of the socket that the environment names."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(tmp_path / "notify"))
        channel.settimeout(DEADLINE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield channel


@pytest.mark.integration
@pytest.mark.slow
def test_node_reports_ready_alive_and_stopping(manager: socket.socket, tmp_path: Path) -> None:
    port = free_ports(1)[0]
    command = [*DLEDGER, "serve", "--self-id", "n0", "--peers", f"n0-127.0.0.1:{port}", "--dir", str(tmp_path / "n0")]
    environment = os.environ | {"WATCHDOG_USEC": "300000"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True
    ) as node:
        try:
            assert manager.recv(100) == b"READY=1"
            socket.create_connection(("127.0.0.1", port), DEADLINE_S).close()
            assert manager.recv(100) == b"WATCHDOG=1"
            node.send_signal(signal.SIGTERM)
            while (state := manager.recv(100)) == b"WATCHDOG=1":
                pass
            assert state == b"STOPPING=1"
            assert node.wait(DEADLINE_S) == 0
        finally:
            node.kill()


def test_abstract_socket_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"dledger-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind("\0" + name)
        channel.settimeout(DEADLINE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        notify("READY=1")
        assert channel.recv(100) == b"READY=1"


@pytest.mark.parametrize("address", ["", "/nowhere/notify"])
def test_manager_that_is_not_there_is_ignored(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    notify("READY=1")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_watchdog_counts_for_this_process_only(
    environment: dict[str, str], expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert watchdog_s() == expected
