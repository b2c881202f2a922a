"""Reading and appending entry by entry, many in flight: against functions that stand for a node."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dledger_core.connect import JavaOptions
from dledger_core.errors import ConfigError, IndexOutOfRangeError, ProtocolError, RequestTimedOutError
from dledger_core.rocketmq.client.entries import PROBE_PREFIX, append_all, batch_of, read_entries
from dledger_core.rocketmq.remoting.messages import AppendResponse, WireEntry


class Node:
    """Holds entries; counts the requests in flight."""

    def __init__(self, entries: list[WireEntry]) -> None:
        self.entries = entries
        self.in_flight_now = self.most = self.asked = 0

    async def get(self, index: int) -> WireEntry:
        self.asked += 1
        self.in_flight_now += 1
        self.most = max(self.most, self.in_flight_now)
        try:
            await asyncio.sleep(0)
            if index >= len(self.entries):
                raise IndexOutOfRangeError("behind", "", "", {"code": 410})
            return self.entries[index]
        finally:
            self.in_flight_now -= 1


def entries(count: int, size: int = 100, term: int = 1) -> list[WireEntry]:
    return [WireEntry(index, term, 1, index * (48 + size), b"x" * size) for index in range(count)]


def read(node: Node, start: int, end: int, max_bytes: int = 1 << 20, in_flight: int = 8) -> list[WireEntry]:
    return asyncio.run(read_entries(node.get, start, end, max_bytes=max_bytes, in_flight=in_flight))


def test_entries_are_read_in_order_with_several_in_flight() -> None:
    node = Node(entries(100))
    assert read(node, 3, 90) == node.entries[3:90]
    assert node.most == 8
    assert node.in_flight_now == 0


def test_read_ends_at_end_of_log() -> None:
    node = Node(entries(10))
    assert read(node, 5, 1000) == node.entries[5:]
    assert node.in_flight_now == 0
    with pytest.raises(IndexOutOfRangeError):
        read(node, 10, 11)


@pytest.mark.slow
def test_read_limits_bytes_and_requests_in_flight() -> None:
    node = Node(entries(100, size=952))
    assert len(read(node, 0, 100, max_bytes=10_000)) == 10
    assert len(read(node, 0, 100, max_bytes=1)) == 1
    node = Node(entries(100, size=4 << 20))
    assert len(read(node, 0, 100, max_bytes=40 << 20, in_flight=64)) == 10
    assert node.asked < 10 + 64 + 4
    node = Node(entries(3))
    read(node, 0, 3, max_bytes=1)
    assert node.asked == 1


def test_decreasing_terms_are_rejected() -> None:
    node = Node([*entries(5, term=2), WireEntry(5, 1, 1, 0, b"")])
    with pytest.raises(ProtocolError):
        read(node, 0, 6)


def test_batch_skips_noops_and_probes() -> None:
    found = [
        WireEntry(0, 1, 1, 0, b"a"),
        WireEntry(1, 2, 2, 49, b""),
        WireEntry(2, 2, 1, 97, PROBE_PREFIX + b"some uuid"),
        WireEntry(3, 2, 1, 200, b""),
    ]
    rows = batch_of(found, records=False).to_pylist()
    assert [row["index"] for row in rows] == [0, 3]
    assert rows[0] == {"index": 0, "term": 1, "position": 0, "timestamp": None, "body": b"a"}
    assert [row["magic"] for row in batch_of(found, records=True).to_pylist()] == [1, 2, 1, 1]
    assert batch_of([], records=False).num_rows == 0


class Leader:
    """Takes appends; ``order`` says which index each gets, ``fails`` which of them fail."""

    def __init__(self, first: int = 0, order: list[int] | None = None, fails: tuple[int, ...] = ()) -> None:
        self.bodies: list[bytes] = []
        self._first, self._order, self._fails = first, order, fails

    async def append(self, body: bytes) -> AppendResponse:
        place = len(self.bodies)
        self.bodies.append(body)
        await asyncio.sleep(0)
        if place in self._fails:
            raise RequestTimedOutError("no answer", "n0")
        return AppendResponse(index=self._first + (self._order[place] if self._order else place), term=3)


def append(leader: Leader, count: int, in_flight: int) -> Any:
    return asyncio.run(append_all(leader.append, [b"%d" % i for i in range(count)], in_flight))


def test_append_in_order_returns_range() -> None:
    found = append(Leader(first=7), 20, 4)
    assert (found.first_index, found.last_index, found.term, found.indexes) == (7, 26, 3, ())


def test_append_in_other_order_returns_each_index() -> None:
    found = append(Leader(first=10, order=[1, 0, 5]), 3, 3)
    assert (found.first_index, found.last_index, found.indexes) == (10, 15, (11, 10, 15))


def test_one_append_in_flight_keeps_order() -> None:
    leader = Leader()
    append(leader, 20, 1)
    assert leader.bodies == [b"%d" % i for i in range(20)]


def test_failed_append_counts_acknowledged_bodies() -> None:
    leader = Leader(first=5, fails=(6,))
    with pytest.raises(RequestTimedOutError) as caught:
        append(leader, 100, 4)
    assert caught.value.values["bodies"] == 100
    assert len(leader.bodies) < 12
    assert caught.value.values["appended"] == len(leader.bodies) - 1
    assert caught.value.values["first_index"] == 5


@pytest.mark.parametrize(
    "wrong", [{"safety_lag_ms": -1}, {"safety_lag_ms": 1 << 40}, {"appends_in_flight": 0}, {"reads_in_flight": 5000}]
)
def test_java_options_reject_values_out_of_range(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        JavaOptions(**wrong)  # type: ignore[arg-type]
