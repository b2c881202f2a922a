"""Golden stores that many tests read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rocketmq.convert.stores import store_of, unpacked
from tests.rocketmq.golden import MIXED, extract


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """A node's store of generation A; indexes 0 to 266."""
    return store_of(unpacked("dledger-0.3.1.2-three", tmp_path), "n0")[0]


@pytest.fixture
def classic(tmp_path: Path) -> Path:
    """The CommitLog of a broker that was upgraded to DLedger: 325 messages in two files."""
    return extract(MIXED, "n0/commitlog", tmp_path)


@pytest.fixture
def mixed(classic: Path, tmp_path: Path) -> Path:
    """The directory of that broker: the CommitLog and a store of 263 entries."""
    return extract(MIXED, "n0/dledger-n0", tmp_path).parent
