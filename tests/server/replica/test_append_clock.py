"""Append times while clocks jump, and the comparison of the nodes' clocks."""

from __future__ import annotations

from dledger_core.server.replica.clock_comparison import ClockComparison
from tests.support.replica_group import Asker, HandDriven

DAY = 24 * 3_600_000
THREE = ("n0", "n1", "n2")
BEGIN = 1_700_000_000_000


def appended(n0: HandDriven) -> int:
    """Append an entry; return its append time, ms since ``BEGIN``."""
    Asker(n0).plain(b"x")
    n0.run()
    n0.acknowledge()
    return n0.log.last_time_ms - BEGIN


def test_append_time_follows_no_jump_of_a_leaders_clock(tmp_path) -> None:
    with HandDriven(tmp_path, voters=THREE) as n0:
        n0.wall_ms = BEGIN
        n0.lead()
        found = []
        for jump in (30 * DAY, -60 * DAY):
            n0.wall_ms += jump
            n0.monotonic_ms += 1000
            found.append(appended(n0))
        assert found == [1000, 2000]
        n0.depose()
        n0.wall_ms = BEGIN + DAY
        n0.lead()
        n0.monotonic_ms += 1
        assert appended(n0) == DAY + 1, "a new leadership starts with the present clock"
        n0.depose()
        n0.wall_ms = BEGIN
        n0.lead()
        assert appended(n0) == DAY + 1, "times never decrease"


def test_log_whose_times_are_ahead_of_leaders_clock_is_reported(tmp_path, caplog) -> None:
    with HandDriven(tmp_path, voters=THREE) as n0:
        n0.wall_ms = BEGIN + 400 * DAY
        n0.lead()
        appended(n0)
        assert "ahead_ms=" not in caplog.text
        n0.depose()
        n0.wall_ms = BEGIN
        n0.lead()
        assert f"ahead_ms={400 * DAY}" in caplog.text
        assert appended(n0) == 400 * DAY


def test_clocks_that_differ_for_a_while_are_reported_once() -> None:
    comparison = ClockComparison(limit_ms=2000, period_ms=10_000)

    def observe(ahead_ms: int, seconds: int, late_ms: int = 0) -> list[int]:
        nonlocal now
        found = []
        for at in range(seconds):
            now += 1000
            found.append(comparison.observe(BEGIN + now + ahead_ms - late_ms * (at % 2), BEGIN + now, now))
        return [ahead for ahead in found if ahead is not None]

    now = 0
    assert observe(2000, 30) == []
    assert observe(0, 30, late_ms=9000) == [], "some messages are late, the clock is right"
    assert observe(-9000, 60) == [-9000]
    assert observe(100, 30) == []
    assert observe(30 * DAY, 60, late_ms=500) == [30 * DAY - 500]
