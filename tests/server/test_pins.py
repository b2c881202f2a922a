"""Readers that hold retention back: by name, bounded in number and time."""

from __future__ import annotations

import pytest

from dledger_core.errors import BadRequestError, BusyError
from dledger_core.server.pins import NAME_BYTES_MAX, PIN_MS_MAX, PINS_MAX, Pins


def test_a_pin_holds_for_its_time_and_is_renewed() -> None:
    pins = Pins()
    pins.ask(["a", 1000], 5, now_ms=0)
    pins.ask(["b", 2000], 9, now_ms=0)
    assert sorted(pins.starts(999)) == [5, 9]
    pins.ask(["a", 1000], 7, now_ms=999)
    assert sorted(pins.starts(1500)) == [7, 9]
    assert pins.starts(1999) == [9]
    assert pins.starts(2000) == []


def test_a_pin_is_given_up() -> None:
    pins = Pins()
    pins.ask(["a", 1000], 5, now_ms=0)
    pins.ask(["a", 0], 5, now_ms=0)
    pins.ask(["never there", 0], 5, now_ms=0)
    pins.ask(None, 5, now_ms=0)
    assert pins.starts(0) == []


@pytest.mark.parametrize(
    "asked",
    [
        5,
        [],
        ["a"],
        ["a", "1"],
        ["a", True],
        [1, 1],
        ["", 1],
        ["a", -1],
        ["a", PIN_MS_MAX + 1],
        ["é" * NAME_BYTES_MAX, 1],
    ],
)
def test_malformed_pins_are_refused(asked: object) -> None:
    pins = Pins()
    with pytest.raises(BadRequestError):
        pins.ask(asked, 5, now_ms=0)
    assert pins.starts(0) == []


def test_pins_are_bounded_in_number_and_old_ones_make_room() -> None:
    pins = Pins()
    for at in range(PINS_MAX):
        pins.ask([f"r{at}", 10], at, now_ms=0)
    with pytest.raises(BusyError):
        pins.ask(["one more", 10], 1, now_ms=9)
    pins.ask(["r0", 10], 1, now_ms=9)
    pins.ask(["one more", 10], 1, now_ms=10)
    assert len(pins.starts(10)) == 2
