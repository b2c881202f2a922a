"""A comparison with the files of a running broker: what it adds during the run is no difference."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dledger_core.rocketmq import UNIT, encode_messages
from jobs._rebuild.plan import RebuildOptions, RebuildPlan, plan_for
from jobs.rebuild_consume_queue import rebuild
from tests.jobs.broker_store import write_broker_store, write_commitlog

pytestmark = pytest.mark.spark

_READ, _ALL = 20, 26
"""Messages that are there when the job looks, and when the broker stops."""


def bodies(count: int) -> list[bytes]:
    found: list[bytes] = encode_messages("T", 0, [b"x" * 900] * _ALL, queue_offset=list(range(_ALL))).to_pylist()
    return found[:count]


def write_log(root: Path, kind: str, count: int) -> list[int]:
    """Write the log, over the one that is there; it is the same up to where that ended."""
    if kind == "commitlog":
        return write_commitlog(root / "log", bodies(count))
    shutil.rmtree(root / "made", ignore_errors=True)
    places = write_broker_store(root / "made", bodies(count))
    shutil.copytree(root / "made", root / "log", dirs_exist_ok=True)
    return places


def write_units(root: Path, places: list[int]) -> None:
    units = np.zeros(100, UNIT)
    for slot, (place, body) in enumerate(zip(places, bodies(len(places)), strict=True)):
        units[slot] = (place, len(body), 0)
    path = root / "consumequeue" / "T" / "0" / f"{0:020d}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(units.tobytes())


def planned(root: Path, kind: str) -> RebuildPlan:
    given = {kind: str(root / "log"), "table": str(root.parent / "t"), "compared": str(root)}
    return plan_for(RebuildOptions.parse(given))


@pytest.mark.parametrize("kind", ["store", "commitlog"])
def test_units_that_broker_adds_during_run(spark: Any, tmp_path: Path, kind: str) -> None:
    """Units that point after the present end of the log are still extra."""
    root = tmp_path / "in"
    write_log(root, kind, _READ)
    write_units(root, [])
    plan = planned(root, kind)
    places = write_log(root, kind, _ALL)
    write_units(root, places)
    outcome = rebuild(spark, plan)
    compared = outcome.summary["compare"]
    assert outcome.summary["rows"] == _READ
    assert (outcome.exit_code, compared["differences"], compared["findings"]) == (0, {}, [])
    assert compared["newer_units"] == _ALL - _READ
    write_log(root, kind, _ALL - 2)
    outcome = rebuild(spark, plan)
    compared = outcome.summary["compare"]
    assert (outcome.exit_code, compared["differences"]) == (1, {"CQ_EXTRA": 2})
    assert [(found["start"], found["end"]) for found in compared["findings"]] == [(_ALL - 2, _ALL)]
    assert compared["newer_units"] == _ALL - 2 - _READ


def test_log_that_was_cut(spark: Any, tmp_path: Path) -> None:
    """The log has not changed, so no unit is newer; a unit that points after its end stays a difference."""
    root = tmp_path / "in"
    places = write_log(root, "commitlog", _ALL)
    write_units(root, [*places[:3], places[-1], *places[4:]])
    write_log(root, "commitlog", _READ)
    compared = rebuild(spark, planned(root, "commitlog")).summary["compare"]
    assert compared["differences"] == {"CQ_EXTRA": _ALL - _READ, "CQ_WRONG_POSITION": 1}
    assert compared["newer_units"] == 0
