"""Seeds that once found a bug, one line each."""

from __future__ import annotations

import pytest

from tests.support.cluster_sim import run_seed


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(4, id="a lost answer with a window of one message stopped replication"),
        pytest.param(1204, id="a straggler far behind with a small window"),
        pytest.param(1315, id="a transfer in profile A leaves a leader with nothing of its own"),
    ],
)
def test_once_failed(seed: int) -> None:
    run_seed(seed)
