"""Each fault of the proxy, in its direction only."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from dledger_core.ids import NodeId
from dledger_core.net.frame import encode_frame
from dledger_core.net.hello import Hello
from dledger_core.net.protocol import PREFACE
from tests.chaos.proxy import CLIENTS, Ending, Network
from tests.support.soon import soon

HELLO = PREFACE + b"".join(encode_frame(Hello("peer", NodeId("a")).to_header()))
QUIET_S = 0.15
"""How long no held byte may arrive; a longer wait makes the test stricter, never flaky."""


class Ends:
    """A connection from ``a`` to ``b`` through the network."""

    def __init__(self, network: Network) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = network.enter("b", self.server.getsockname(), ["a", CLIENTS])
        self.sockets = [self.server]

    def dial(self) -> socket.socket:
        self.sockets.append(socket.create_connection(("127.0.0.1", self.port), timeout=10))
        self.sockets[-1].sendall(HELLO)
        return self.sockets[-1]

    def accept(self, timeout_s: float = 10) -> socket.socket:
        self.server.settimeout(timeout_s)
        self.sockets.append(self.server.accept()[0])
        self.sockets[-1].settimeout(10)
        received = self.sockets[-1].recv(len(HELLO), socket.MSG_WAITALL)
        assert received in (HELLO, b"")
        return self.sockets[-1]

    def connect(self) -> tuple[socket.socket, socket.socket]:
        return self.dial(), self.accept()


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    yield made
    made.close()


@pytest.fixture
def ends(network: Network) -> Iterator[Ends]:
    made = Ends(network)
    yield made
    for each in made.sockets:
        each.close()


def state(sock: socket.socket, timeout_s: float = 10) -> str:
    """Return the next event: ``drop``, ``reset``, ``data``, or ``silence`` until the timeout."""
    sock.settimeout(timeout_s)
    try:
        return "data" if sock.recv(1) else "drop"
    except ConnectionResetError:
        return "reset"
    except TimeoutError:
        return "silence"
    finally:
        sock.settimeout(10)


def rejected(ends: Ends) -> str:
    """Return how a new connection ends; a reset may already meet the dialler."""
    try:
        return state(ends.dial())
    except ConnectionResetError:
        return "reset"


def passes(sender: socket.socket, receiver: socket.socket, data: bytes = b"x") -> bool:
    sender.sendall(data)
    return receiver.recv(len(data)) == data


def test_proxy_passes_bytes_and_end_both_ways(ends: Ends) -> None:
    a, b = ends.connect()
    assert passes(a, b)
    assert passes(b, a)
    a.close()
    assert state(b) == "drop"


@pytest.mark.parametrize("sender", ["a", "b"])
def test_stall_holds_one_direction_until_healed(network: Network, ends: Ends, sender: str) -> None:
    a, b = ends.connect()
    held, free = (a, b) if sender == "a" else (b, a)
    network.stall(sender, "b" if sender == "a" else "a")
    assert passes(free, held)
    held.sendall(b"late")
    held.shutdown(socket.SHUT_WR)
    assert state(free, QUIET_S) == "silence"
    network.heal()
    assert free.recv(4) == b"late"
    assert state(free) == "drop"


def test_stall_holds_back_new_connection(network: Network, ends: Ends) -> None:
    network.stall("a", "b")
    ends.dial()
    with pytest.raises(TimeoutError):
        ends.accept(QUIET_S)
    network.heal()
    ends.accept()


@pytest.mark.parametrize("how", ["drop", "reset"])
def test_refusal_ends_and_rejects_connections_until_healed(network: Network, ends: Ends, how: Ending) -> None:
    a, b = ends.connect()
    network.refuse("b", "a", how)
    assert [state(a), state(b), rejected(ends)] == [how] * 3
    network.heal()
    assert passes(*ends.connect())


def test_connection_rejected_while_dialling_is_dropped_on_far_side(network: Network, ends: Ends) -> None:
    network.stall("a", "b")
    a = ends.dial()
    soon(lambda: network.accepted("a", "b"))
    network.refuse("a", "b", "drop")
    assert state(a) == "drop"
    network.flow("a", "b")
    assert state(ends.accept()) == "drop"


def test_end_connections_ends_them_once(network: Network, ends: Ends) -> None:
    a, _ = ends.connect()
    network.end_connections("a", "b", "reset")
    assert state(a) == "reset"
    assert passes(*ends.connect())


def test_delay_keeps_order(network: Network, ends: Ends) -> None:
    a, b = ends.connect()
    network.delay("a", "b", QUIET_S * 2)
    a.sendall(b"first")
    assert state(b, QUIET_S) == "silence"
    a.sendall(b"second")
    got = b""
    while len(got) < 11:
        got += b.recv(64)
    assert got == b"firstsecond"


def test_connection_is_reset_without_server(network: Network, ends: Ends) -> None:
    ends.server.close()
    assert rejected(ends) == "reset"
