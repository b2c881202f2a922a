"""A short run of the soak: the answers are judged as in the long one, the figures are not."""

from __future__ import annotations

import pytest

from benchmarks.endurance.plot import save_plot
from benchmarks.endurance.soak import Plan, Soak

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SMALL = Plan(minutes=0.25, days=10, producers=900, queries=150, timeout_s=4.0, starts_per_quarter=1, seed=32)


def test_ids_that_come_and_go_are_known_until_log_time_expires_them(tmp_path) -> None:
    soak = Soak(SMALL, tmp_path / "run")
    soak.run()
    assert soak.ledger.violations == []
    counts = soak.ledger.counts
    for answer in (
        "producers used once: expired",
        "producers used once: repeats answered",
        "producers that stay: repeats answered",
        "queries used once: replays answered",
        "streams: replays answered",
        "veterans: repeats answered",
        "refused with QUERY_UNKNOWN",
        "refused with FENCED",
    ):
        assert counts[answer] > 0, f"{answer}: {counts}"
    save_plot(soak.row(), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
