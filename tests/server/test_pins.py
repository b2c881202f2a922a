"""Readers that hold retention back: by name, bounded in number and time."""

from __future__ import annotations

import time

import pytest

from dledger_core.config import LIMITS, format_peers
from dledger_core.connect import AsyncClient
from dledger_core.errors import BadRequestError, BusyError
from dledger_core.server.maintenance.retention import Pins
from tests.support.server_group import ServerGroup, run


def test_a_pin_holds_for_its_time_and_is_renewed() -> None:
    pins = Pins()
    pins.set(["a", 1000], 5, now_ms=0)
    pins.set(["b", 2000], 9, now_ms=0)
    assert sorted(pins.starts(999)) == [5, 9]
    pins.set(["a", 1000], 7, now_ms=999)
    assert sorted(pins.starts(1500)) == [7, 9]
    assert pins.starts(1999) == [9]
    assert pins.starts(2000) == []


def test_a_pin_is_given_up() -> None:
    pins = Pins()
    pins.set(["a", 1000], 5, now_ms=0)
    pins.set(["a", 0], 5, now_ms=0)
    pins.set(["never there", 0], 5, now_ms=0)
    pins.set(None, 5, now_ms=0)
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
        ["a", LIMITS.pin_ms + 1],
        ["é" * LIMITS.pin_name_bytes, 1],
    ],
)
def test_malformed_pins_are_refused(asked: object) -> None:
    pins = Pins()
    with pytest.raises(BadRequestError):
        pins.set(asked, 5, now_ms=0)
    assert pins.starts(0) == []


def test_pins_are_bounded_in_number_and_old_ones_make_room() -> None:
    pins = Pins()
    for at in range(LIMITS.pins):
        pins.set([f"r{at}", 10], at, now_ms=0)
    with pytest.raises(BusyError):
        pins.set(["one more", 10], 1, now_ms=9)
    pins.set(["r0", 10], 1, now_ms=9)
    pins.set(["one more", 10], 1, now_ms=10)
    assert len(pins.starts(10)) == 2


def test_clients_pin_on_all_nodes_and_a_reader_as_it_reads(tmp_path) -> None:
    async def work() -> None:
        async with ServerGroup(tmp_path) as group:
            client = await group.client()
            await client.append([b"x"] * 5)
            peers = format_peers(group.peers)
            async with AsyncClient(peers) as asking:
                assert await asking.pin("tail", 3, 60) == ("n0", "n1", "n2")
                assert [starts(group, node) for node in group.nodes] == [[3], [3], [3]]
                assert await asking.pin("tail", 3, 0) == ("n0", "n1", "n2")
                assert [starts(group, node) for node in group.nodes] == [[], [], []]
                with pytest.raises(BadRequestError):
                    await asking.pin("", 3, 60)
            leader = await group.leader()
            await client.read(2, 5, pin=["stream", 60_000])
            assert starts(group, leader) == [2]
            await client.read(4, 5, pin=["stream", 60_000])
            assert starts(group, leader) == [4]
            with pytest.raises(BadRequestError):
                await client.read(4, 5, pin=["stream"])

    run(work())


def starts(group: ServerGroup, node_id: str) -> list[int]:
    return group.hosted(node_id).replica.pins.starts(int(time.time() * 1000))
