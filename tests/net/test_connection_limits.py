"""Limits on the connections of clients to a port."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dledger_core.errors import BusyError, QuotaExceededError
from dledger_core.net.limits.connection_limits import ConnectionLimits, source_of


@pytest.fixture
def limits() -> ConnectionLimits:
    return ConnectionLimits(total=4, per_address=2)


def enter(limits: ConnectionLimits, *sources: str) -> None:
    for source in sources:
        limits.enter()
        limits.enter_from(source)
        limits.check_client(source)


def repeat(times: int, action: Callable[[], None]) -> None:
    for _ in range(times):
        action()


def test_address_is_limited_before_the_total(limits: ConnectionLimits) -> None:
    enter(limits, "a", "a", "b")
    with pytest.raises(QuotaExceededError):
        enter(limits, "a")
    limits.leave("a", is_node=False)
    enter(limits, "b")
    with pytest.raises(BusyError) as raised:
        enter(limits, "c")
    assert raised.value.name == "BUSY"
    assert limits.address_refusals == 1


def test_connections_of_nodes_do_not_count_as_clients(limits: ConnectionLimits) -> None:
    for _ in range(3):
        limits.enter()
        limits.enter_from("a")
        limits.enter_as_node("a")
    enter(limits, "a", "a")
    for _ in range(3):
        limits.leave("a", is_node=True)
    with pytest.raises(QuotaExceededError):
        enter(limits, "a")


def test_connections_without_hello_are_limited_too(limits: ConnectionLimits) -> None:
    with pytest.raises(QuotaExceededError):
        repeat(1000, lambda: limits.enter_from("a"))
    with pytest.raises(BusyError):
        repeat(1000, limits.enter)


def test_connection_that_ends_in_its_handshake_leaves_nothing_behind(limits: ConnectionLimits) -> None:
    for _ in range(1000):
        limits.enter()
        limits.leave("", is_node=False)
    enter(limits, "a", "a", "b", "b")


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("host", "host"),
    ],
)
def test_source_of_ipv6_is_its_network(address: str, source: str) -> None:
    assert source_of(address) == source
