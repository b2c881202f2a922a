"""Room for connections at a port."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dledger_core.errors import BusyError, QuotaExceededError
from dledger_core.net.room import Room, RoomLimits, source_of

LIMITS = RoomLimits(total=4, per_address=2)


def enter(room: Room, *sources: str) -> None:
    for source in sources:
        room.enter()
        room.enter_from(source)
        room.check_client(source)


def repeat(times: int, action: Callable[[], None]) -> None:
    for _ in range(times):
        action()


def test_address_is_limited_before_the_total() -> None:
    room = Room(LIMITS)
    enter(room, "a", "a", "b")
    with pytest.raises(QuotaExceededError):
        enter(room, "a")
    room.leave("a", is_node=False)
    enter(room, "b")
    with pytest.raises(BusyError) as raised:
        enter(room, "c")
    assert raised.value.name == "BUSY"
    assert room.address_refusals == 1


def test_connections_of_nodes_take_no_room() -> None:
    room = Room(LIMITS)
    for _ in range(3):
        room.enter()
        room.enter_from("a")
        room.enter_as_node("a")
    enter(room, "a", "a")
    for _ in range(3):
        room.leave("a", is_node=True)
    with pytest.raises(QuotaExceededError):
        enter(room, "a")


def test_connections_without_hello_are_limited_too() -> None:
    room = Room(LIMITS)
    with pytest.raises(QuotaExceededError):
        repeat(1000, lambda: room.enter_from("a"))
    with pytest.raises(BusyError):
        repeat(1000, room.enter)


def test_connection_that_ends_in_its_handshake_leaves_nothing_behind() -> None:
    room = Room(LIMITS)
    for _ in range(1000):
        room.enter()
        room.leave("", is_node=False)
    enter(room, "a", "a", "b", "b")


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
