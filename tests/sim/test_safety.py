"""Seeds through the simulated group: safety after every step, then liveness (see ``cluster_sim``)."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.cluster_sim import ClusterSim, run_seed

QUICK = range(10)
MORE = range(10, 250)
CHUNK = 20


@pytest.mark.sim
@pytest.mark.parametrize("seed", QUICK)
def test_a_few_seeds(seed: int) -> None:
    run_seed(seed)


@pytest.mark.sim
@pytest.mark.parametrize("first", MORE[::CHUNK])
def test_many_seeds(first: int) -> None:
    totals: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        totals += run_seed(seed)
    # A simulation in which nothing happens proves nothing.
    for what in ("elections", "crashes", "partitions", "lost", "duplicated", "cuts", "acknowledged", "reads"):
        assert totals[what] > 0, f"no {what} in {CHUNK} seeds from {first} on"


def test_a_seed_replays_exactly() -> None:
    first, second = ClusterSim(3), ClusterSim(3)
    assert first.run() == second.run()
    assert [batch.payload for batch in first.checker.committed] == [batch.payload for batch in second.checker.committed]
