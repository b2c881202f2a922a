"""The rate of catching up follows the latency of the leader's appends."""

from __future__ import annotations

from dledger_core.ids import Index
from dledger_core.server.replica.catch_up_rate import CatchUpRate


class Leader:
    """A leader that appends once per tick; the test sets how long an append takes."""

    def __init__(self) -> None:
        self.now_ms, self.index, self.end = 0, 0, 0
        self.rate = CatchUpRate(lambda: self.now_ms, lambda: self.end)

    def run(self, windows: int, latency_ms: int = 5, *, used: bool = False, nbytes: int = 0) -> int:
        """Return the rate after some windows of ten ticks."""
        for _ in range(10 * windows):
            self.index += 1
            self.end += nbytes
            self.rate.proposed(Index(self.index))
            self.now_ms += latency_ms
            self.rate.committed(Index(self.index))
            self.rate.tick(used=used)
        return self.rate.bytes_per_tick


def test_rate_stays_while_no_member_lags() -> None:
    leader = Leader()
    before = leader.rate.bytes_per_tick
    assert leader.run(50) == leader.run(50, 100) == before


def test_rate_falls_with_slow_appends_and_rises_with_fast_ones() -> None:
    leader = Leader()
    leader.run(50)
    before = leader.run(1, used=True)
    slow = leader.run(2, 50, used=True)
    assert slow <= before // 4
    assert leader.run(10, 9, used=True) > 4 * slow, "less than twice the baseline"
    assert leader.run(100, used=True) == leader.run(1, used=True), "there is a highest rate"


def test_baseline_is_not_latency_while_catching_up() -> None:
    leader = Leader()
    leader.run(50)
    leader.run(30, used=True)
    rates = [leader.run(1, 50, used=True) for _ in range(8)]
    assert rates == sorted(rates, reverse=True), "slow appends do not raise the baseline above the lowest rate"
    assert rates[-1] < rates[0] / 8


def test_lowest_rate_is_above_rate_of_appends() -> None:
    leader = Leader()
    leader.run(50, nbytes=1 << 20)
    assert leader.run(20, 200, used=True, nbytes=1 << 20) >= 2 << 20


def test_append_that_hangs_counts_before_it_ends() -> None:
    leader = Leader()
    leader.run(50)
    before = leader.rate.bytes_per_tick
    leader.rate.proposed(Index(leader.index + 1))
    for _ in range(10):
        leader.now_ms += 20
        leader.rate.tick(used=True)
    assert leader.rate.bytes_per_tick == before // 2


def test_rate_rises_while_nothing_is_appended() -> None:
    rate = CatchUpRate(lambda: 0, lambda: 0)
    before = rate.bytes_per_tick
    for _ in range(20):
        rate.tick(used=True)
    assert rate.bytes_per_tick > before


def test_baseline_falls_soon_with_small_appends_after_large_ones() -> None:
    leader = Leader()
    leader.run(50, 40)
    before = leader.run(5, used=True)
    assert leader.run(2, 15, used=True) < before, "three times the time of a small append"
