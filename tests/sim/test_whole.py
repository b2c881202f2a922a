"""Seeds through a whole simulated group: replicas, stores, clients (see ``replica_sim``)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.replica_sim import ReplicaSim, run_whole_seed

QUICK = range(4)
MORE = range(4, 64)
CHUNK = 10


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Replicas whose disks fail say so; here that is the weather."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.sim
@pytest.mark.parametrize("seed", QUICK)
def test_a_few_seeds(seed: int) -> None:
    run_whole_seed(seed)


@pytest.mark.sim
@pytest.mark.parametrize("first", MORE[::CHUNK])
def test_many_seeds(first: int) -> None:
    totals: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        totals += run_whole_seed(seed)
    # A simulation in which nothing happens proves nothing.
    for what in (
        *("elections", "crashes", "power losses", "disk errors", "partitions", "lost", "cuts", "acknowledged"),
        *("appends repeated", "transactions committed", "runs replaced", "tables compared", "reads", "deletions"),
        *("suspect starts", "damaged starts", "repaired starts", "live repairs", "crashes in a repair"),
        *("repaired: bits flipped", "repaired: rows flipped", "fetches failed", "ends lost"),
    ):
        assert totals[what] > 0, f"no {what} in {CHUNK} seeds from {first} on"


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(50, id="a file that a killed process had made was not durable"),
        pytest.param(115, id="a NOOP torn inside its append time was believed"),
        pytest.param(18, id="a failed sync whose mark the disk refused was forgotten"),
        pytest.param(23, id="a row lost in the middle of a batch stopped its leader"),
        pytest.param(29, id="a checkpoint believed a damaged row"),
        pytest.param(190, id="a suspect store in the middle of a new start was refused"),
        pytest.param(488, id="a damaged leader that no other could replace was never repaired"),
        pytest.param(560, id="a log that begins inside a batch told another where"),
        pytest.param(534, id="a leader that was replaced without noticing refused a producer for good"),
    ],
)
def test_once_failed(seed: int) -> None:
    run_whole_seed(seed)


@pytest.mark.sim
def test_a_seed_replays_exactly() -> None:
    first, second = ReplicaSim(3), ReplicaSim(3)
    assert first.run() == second.run()
    assert [batch.payload for batch in first.checker.committed] == [batch.payload for batch in second.checker.committed]
