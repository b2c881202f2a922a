"""The pace of catching up follows the latency of the leader's appends."""

from __future__ import annotations

from dledger_core.ids import Index
from dledger_core.server.replica.pace import CatchUpPace


class Leader:
    """A leader that appends once per tick; the test sets how long an append takes."""

    def __init__(self) -> None:
        self.now_ms, self.index, self.end = 0, 0, 0
        self.pace = CatchUpPace(lambda: self.now_ms, lambda: self.end)

    def run(self, windows: int, latency_ms: int = 5, *, used: bool = False, nbytes: int = 0) -> int:
        """Return the pace after some windows of ten ticks."""
        for _ in range(10 * windows):
            self.index += 1
            self.end += nbytes
            self.pace.proposed(Index(self.index))
            self.now_ms += latency_ms
            self.pace.committed(Index(self.index))
            self.pace.tick(used=used)
        return self.pace.bytes_per_tick


def test_pace_stays_while_no_member_lags() -> None:
    leader = Leader()
    before = leader.pace.bytes_per_tick
    assert leader.run(50) == leader.run(50, 100) == before


def test_pace_falls_with_slow_appends_and_rises_with_usual_ones() -> None:
    leader = Leader()
    leader.run(50)
    before = leader.run(1, used=True)
    slow = leader.run(2, 50, used=True)
    assert slow <= before // 4
    assert leader.run(10, 9, used=True) > 4 * slow, "less than twice the usual time"
    assert leader.run(100, used=True) == leader.run(1, used=True), "there is a highest pace"


def test_usual_latency_is_not_that_of_catching_up() -> None:
    leader = Leader()
    leader.run(50)
    leader.run(30, used=True)
    paces = [leader.run(1, 50, used=True) for _ in range(8)]
    assert paces == sorted(paces, reverse=True), "slow appends do not become usual above the lowest pace"
    assert paces[-1] < paces[0] / 8


def test_lowest_pace_is_above_rate_of_appends() -> None:
    leader = Leader()
    leader.run(50, nbytes=1 << 20)
    assert leader.run(20, 200, used=True, nbytes=1 << 20) >= 2 << 20


def test_append_that_hangs_counts_before_it_ends() -> None:
    leader = Leader()
    leader.run(50)
    before = leader.pace.bytes_per_tick
    leader.pace.proposed(Index(leader.index + 1))
    for _ in range(10):
        leader.now_ms += 20
        leader.pace.tick(used=True)
    assert leader.pace.bytes_per_tick == before // 2


def test_pace_rises_while_nothing_is_appended() -> None:
    pace = CatchUpPace(lambda: 0, lambda: 0)
    before = pace.bytes_per_tick
    for _ in range(20):
        pace.tick(used=True)
    assert pace.bytes_per_tick > before


def test_usual_latency_is_soon_that_of_small_appends_after_large_ones() -> None:
    leader = Leader()
    leader.run(50, 40)
    before = leader.run(5, used=True)
    assert leader.run(2, 15, used=True) < before, "three times the usual time of a small append"
