"""Each fault of the proxy, in its direction only."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from tests.chaos.proxy import Network

QUIET_S = 0.15
"""How long no held byte may arrive; a longer wait makes the test stricter, never flaky."""


class Ends:
    """A connection from ``a`` to ``b`` through the network."""

    def __init__(self, network: Network) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.settimeout(10)
        self.port = network.link("a", "b", self.server.getsockname()[1])
        self.sockets: list[socket.socket] = []

    def connect(self) -> tuple[socket.socket, socket.socket]:
        a = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        b, _ = self.server.accept()
        b.settimeout(10)
        self.sockets += [a, b]
        return a, b

    def dial(self) -> socket.socket:
        a = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        self.sockets.append(a)
        return a

    def close(self) -> None:
        for each in [*self.sockets, self.server]:
            each.close()


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    yield made
    made.close()


@pytest.fixture
def ends(network: Network) -> Iterator[Ends]:
    made = Ends(network)
    yield made
    made.close()


def silent(sock: socket.socket) -> bool:
    sock.settimeout(QUIET_S)
    try:
        return sock.recv(1) is None
    except TimeoutError:
        return True
    finally:
        sock.settimeout(10)


def passes(sender: socket.socket, receiver: socket.socket, data: bytes = b"x") -> bool:
    sender.sendall(data)
    return receiver.recv(len(data)) == data


def test_proxy_passes_bytes_and_end_both_ways(ends: Ends) -> None:
    a, b = ends.connect()
    assert passes(a, b)
    assert passes(b, a)
    a.close()
    assert b.recv(1) == b""


@pytest.mark.parametrize("sender", ["a", "b"])
def test_stall_holds_one_direction_until_healed(network: Network, ends: Ends, sender: str) -> None:
    a, b = ends.connect()
    held, free = (a, b) if sender == "a" else (b, a)
    network.stall(sender, "b" if sender == "a" else "a")
    assert passes(free, held)
    held.sendall(b"late")
    assert silent(free)
    network.heal()
    assert free.recv(4) == b"late"


def test_stall_holds_back_end_of_connection(network: Network, ends: Ends) -> None:
    a, b = ends.connect()
    network.stall("a", "b")
    a.close()
    assert silent(b)
    network.heal()
    assert b.recv(1) == b""


def test_stall_holds_back_new_connection(network: Network, ends: Ends) -> None:
    network.stall("a", "b")
    ends.dial()
    ends.server.settimeout(QUIET_S)
    with pytest.raises(TimeoutError):
        ends.server.accept()
    network.heal()
    ends.server.settimeout(10)
    ends.sockets.append(ends.server.accept()[0])


def test_drop_closes_and_rejects_connections(network: Network, ends: Ends) -> None:
    a, b = ends.connect()
    network.refuse("b", "a", "drop")
    assert a.recv(1) == b""
    assert b.recv(1) == b""
    assert ends.dial().recv(1) == b""
    network.heal()
    assert passes(*ends.connect())


def test_connection_rejected_while_dialling_is_dropped_on_far_side(network: Network, ends: Ends) -> None:
    network.stall("a", "b")
    a = ends.dial()
    while not network.accepted("a", "b"):
        time.sleep(0.01)
    network.refuse("a", "b", "drop")
    assert a.recv(1) == b""
    network.flow("a", "b")
    b, _ = ends.server.accept()
    ends.sockets.append(b)
    b.settimeout(10)
    assert b.recv(1) == b""


def test_reset_resets_and_rejects_connections(network: Network, ends: Ends) -> None:
    a, b = ends.connect()
    network.refuse("a", "b", "reset")
    for each in (a, b):
        with pytest.raises(ConnectionResetError):
            each.recv(1)
    with pytest.raises(ConnectionResetError):
        ends.dial().recv(1)
    network.heal()
    assert passes(*ends.connect())


def test_end_connections_ends_them_once(network: Network, ends: Ends) -> None:
    a, _ = ends.connect()
    network.end_connections("a", "b", "reset")
    with pytest.raises(ConnectionResetError):
        a.recv(1)
    assert passes(*ends.connect())


def test_delay_keeps_order(network: Network, ends: Ends) -> None:
    a, b = ends.connect()
    network.delay("a", "b", QUIET_S * 2)
    a.sendall(b"first")
    assert silent(b)
    a.sendall(b"second")
    got = b""
    while len(got) < 11:
        got += b.recv(64)
    assert got == b"firstsecond"


def test_connection_ends_without_server(network: Network) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    port = network.link("a", "closed", free)
    with (
        pytest.raises(ConnectionResetError),
        socket.create_connection(("127.0.0.1", port), timeout=10) as sock,
    ):
        sock.recv(1)
