"""Seeds through a simulated group, of Raft cores alone and of complete replicas (see ``simulator``)."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sim.member import CoreMember
from tests.sim.replica_member import ReplicaMember
from tests.sim.runs import minimal
from tests.sim.simulator import run_seed
from tests.support.soak_record import ROOT, SoakRecord

HAPPENED: dict[type[Any], tuple[str, ...]] = {
    CoreMember: (
        *("elections", "crashes", "partitions", "lost", "duplicated", "truncations", "acknowledged", "reads"),
        *("trims", "stalls", "disk stalls", "snapshots installed", "writes lost"),
        *("lies refused", "lies without effect", "lies quarantined"),
        *("changes: AddLearner", "changes: Promote", "changes: Remove", "changes undone", "stores lost"),
        *("voters replaced", "groups of one", "changes refused: no-commit-in-term", "ends lost below the members"),
    ),
    ReplicaMember: (
        *("elections", "crashes", "power losses", "disk errors", "partitions", "lost", "truncations", "acknowledged"),
        *("appends repeated", "transactions committed", "runs replaced", "tables compared", "reads", "deletions"),
        *("quarantined starts", "damaged starts", "repaired starts", "live repairs", "crashes in a repair"),
        *("repaired: bits flipped", "repaired: rows flipped", "fetches failed", "ends lost"),
        *("copies lost", "checkpoints lost", "preallocations", "lies refused", "lies without effect"),
        *("changes: AddLearner", "changes: Promote", "changes: Remove", "groups of one", "snapshots installed"),
        *("stores lost", "members files lost", "starts after crashes only"),
        *("logs continued", "stores continued"),
        *("ranges recorded", "ranges that do not count", "trims of an archived log", "installs of an archived log"),
    ),
}
"""In enough seeds each of these happens; a simulation in which nothing happens proves nothing."""
CHUNKS = {CoreMember: 40, ReplicaMember: 20}
RARE: dict[type[Any], tuple[int, ...]] = {CoreMember: (), ReplicaMember: (11,)}
"""Seeds that install snapshots of an archived log, which a chunk of twenty may not do."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Replicas log each failure of their disks; here these are expected."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("member_type", [CoreMember, ReplicaMember])
def test_seed_zero_is_safe_and_live(member_type: type[Any]) -> None:
    run_seed(0, member_type)


@pytest.mark.sim
@pytest.mark.parametrize("chunk", [0, *(pytest.param(chunk, marks=pytest.mark.soak) for chunk in range(1, 5))])
@pytest.mark.parametrize("member_type", [CoreMember, ReplicaMember])
def test_seeds_are_safe_and_live(member_type: type[Any], chunk: int) -> None:
    size = CHUNKS[member_type]
    totals: Counter[str] = Counter()
    for seed in (*range(chunk * size, (chunk + 1) * size), *RARE[member_type]):
        totals += run_seed(seed, member_type)
    assert {name for name in HAPPENED[member_type] if not totals[name]} == set()


@pytest.mark.sim
@pytest.mark.parametrize("core", [True, False], ids=["core", "replica"])
def test_trace_is_equal_for_different_hash_seeds(core: bool) -> None:
    command = [sys.executable, "-m", "tests.sim", "--trace", "--seeds", "3..4", *["--core"] * core]
    runs = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for hash_seed in (1, 2)
    ]
    first, second = (run.communicate()[0] for run in runs)
    assert len(first.splitlines()) == 2
    assert first == second


@pytest.mark.sim
def test_seeds_run_in_several_processes() -> None:
    command = [sys.executable, "-m", "tests.sim", "--core", "--seeds", "0..2", "--jobs", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    assert re.search(r"\bseeds +3$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("needed", [(), (3,), (0, 17), (5, 6, 7, 40), tuple(range(50))])
def test_minimal_returns_exactly_needed_items(needed: tuple[int, ...]) -> None:
    assert minimal(range(50), lambda items: set(needed) <= set(items)) == list(needed)


def test_soak_record_returns_rows_until_code_changes(tmp_path: Path) -> None:
    record = SoakRecord(tmp_path / "SOAK.jsonl", "this")
    assert record.rows() == []
    record.add(seed=7, verdict="ok")
    record.add(seed=8, verdict="violated")
    assert [(row["seed"], row["verdict"]) for row in record.rows()] == [(7, "ok"), (8, "violated")]
    assert SoakRecord(record.path, "another").rows() == []


@pytest.mark.parametrize("path", ["tests/sim/SOAK.jsonl", "tests/chaos/SOAK.jsonl"])
def test_committed_soak_record_is_readable(path: str) -> None:
    record = SoakRecord(ROOT / path)
    assert all({"commit", "at"} <= row.keys() for row in record.rows())
