"""Whole rebuilds: damaged or inconsistent stores, a broker that keeps running, native logs, and an earlier table.

Damage is a classified finding or one line, and never a change to the store.
"""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from dledger_core import Client, LocalCluster, open_store
from dledger_core.rocketmq import encode_messages
from jobs._rebuild.plan import RebuildOptions, RebuildPlan, plan_for
from jobs.rebuild_consume_queue import rebuild
from tests.jobs.broker_store import (
    DELAY_LEVELS,
    DELAY_TOPIC,
    STORED_MS,
    delayed_messages,
    messages,
    write_broker_store,
    write_commitlog,
    write_queue,
)
from tests.jobs.conftest import Rebuild
from tests.jobs.test_rebuild_slots import state
from tests.support.damage import overwrite
from tests.support.slow_elections import SLOW_ELECTIONS

pytestmark = pytest.mark.spark


# --- damaged stores -------------------------------------------------------------------------------------------------

COUNT, DATA_BYTES, BODY = 200, 1 << 12, 50


@pytest.fixture
def store(tmp_path: Path) -> tuple[Path, list[int]]:
    """A broker's store, and where each of its messages begins."""
    path = tmp_path / "in" / "dledger-n0"
    bodies = messages(
        [number // 3 for number in range(COUNT)], "T", [number % 3 for number in range(COUNT)], body=b"x" * BODY
    )
    return path, write_broker_store(path, bodies, committed=COUNT - 1, data_bytes=DATA_BYTES)


def file_of(store: Path, position: int) -> tuple[Path, int]:
    return store / "data" / f"{position // DATA_BYTES * DATA_BYTES:020d}", position % DATA_BYTES


def cut(store: Path, position: int) -> None:
    """Shorten the last file."""
    last = max((store / "data").iterdir())
    os.truncate(last, max(position - int(last.name), 0))


def test_messages_that_lie(store: tuple[Path, list[int]], tmp_path: Path, run_rebuild: Rebuild) -> None:
    """Magic, body length, properties length, queue offset: each message is named, all others are in the table."""
    path, places = store
    lies = {
        30: (4, bytes(4)),
        60: (84, b"\x7f\xff\xff\xff"),
        90: (88 + BODY + 2, b"\x7f\xff"),
        120: (20, b"\x7f" + b"\xff" * 7),
    }
    for number, (begin, value) in lies.items():
        overwrite(*file_of(path, places[number] + begin), value)
    before = state(path)
    code, summary = run_rebuild(store=path, table=tmp_path / "t")
    assert (code, summary["rows"], summary["slots"], summary["dense"]) == (1, COUNT - 4, COUNT - 4, False)
    skipped = {"not_messages": 3, "impossible_queue_offsets": 1, "prepared_or_rolled_back": 0}
    assert summary["skipped"] == skipped
    assert summary["not_messages_at"] == [places[30], places[60], places[90]]
    assert summary["impossible_queue_offsets_at"] == [places[120]]
    assert state(path) == before


def test_message_with_damaged_body_is_named_and_keeps_its_slot(
    store: tuple[Path, list[int]], tmp_path: Path, run_rebuild: Rebuild
) -> None:
    path, places = store
    overwrite(*file_of(path, places[70] + 88 + 7), b"y")
    code, summary = run_rebuild(store=path, table=tmp_path / "t")
    assert (code, summary["rows"], summary["slots"], summary["dense"]) == (1, COUNT, COUNT, True)
    assert (summary["damaged_messages"], summary["damaged_messages_at"]) == (1, [places[70]])


ENDS = ("cut", "emptied without checkpoint")
SOAK_ENDS = ("cut without checkpoint", "header without it")


@pytest.mark.parametrize("how", [*ENDS, *(pytest.param(each, marks=pytest.mark.soak) for each in SOAK_ENDS)])
def test_lost_end_is_a_finding(store: tuple[Path, list[int]], tmp_path: Path, run_rebuild: Rebuild, how: str) -> None:
    """Recovered entries are rebuilt. Without a checkpoint, as in generation B, the index shows the loss."""
    path, places = store
    if how != "cut":
        (path / "checkpoint").unlink()
    if how.startswith("header"):
        overwrite(*file_of(path, places[-3] - 48), bytes(4))
    else:
        cut(path, 0 if how.startswith("emptied") else places[-3] + 40)
    with open_store(path) as reader:
        end = min([int(reader.last_index) + 1, *(start for start, _ in reader.damaged)])
    before = state(path)
    code, summary = run_rebuild(store=path, table=tmp_path / "t")
    assert (code, summary["end"], summary["rows"] + summary["skipped"]["not_messages"]) == (1, end, end)
    assert end < COUNT
    assert summary["lost_end"] == [{"group": "in", "recorded_end": COUNT}]
    assert state(path) == before


def test_damage_before_end(store: tuple[Path, list[int]], tmp_path: Path, run_rebuild: Rebuild) -> None:
    """The entries after it cannot be trusted: one line names file and index, and the table stays empty."""
    path, places = store
    overwrite(*file_of(path, places[100] - 48), struct.pack(">ii", 1, 1 << 30))
    before = state(path)
    code, summary = run_rebuild(store=path, table=tmp_path / "t")
    assert (code, summary["error"]) == (4, "CORRUPT")
    assert "index=100" in summary["message"]
    assert state(path) == before
    assert not list((tmp_path / "t").glob("*.parquet"))


# --- a broker that keeps running ------------------------------------------------------------------------------------

READ, ALL = 20, 26
"""Messages that are there when the job looks, and when the broker stops."""


def write_log(root: Path, kind: str, count: int) -> list[tuple[int, int, int]]:
    """Write the log, over the one that is there; it is the same up to where that ended. Return the units."""
    bodies = messages(range(count), body=b"x" * 900)
    if kind == "commitlog":
        places = write_commitlog(root / "log", bodies)
    else:
        shutil.rmtree(root / "made", ignore_errors=True)
        places = write_broker_store(root / "made", bodies)
        shutil.copytree(root / "made", root / "log", dirs_exist_ok=True)
    return [(place, len(body), 0) for place, body in zip(places, bodies, strict=True)]


def planned(root: Path, kind: str) -> RebuildPlan:
    given = {kind: str(root / "log"), "table": str(root.parent / "t"), "compared": str(root)}
    return plan_for(RebuildOptions.parse(given))


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["store", "commitlog"])
def test_units_that_broker_adds_during_run(spark: Any, tmp_path: Path, kind: str) -> None:
    """Units that point after the present end of the log are still extra."""
    root = tmp_path / "in"
    write_log(root, kind, READ)
    write_queue(root, [])
    plan = planned(root, kind)
    write_queue(root, write_log(root, kind, ALL))
    outcome = rebuild(spark, plan)
    compared = outcome.summary["compare"]
    assert outcome.summary["rows"] == READ
    assert (outcome.exit_code, compared["differences"], compared["findings"]) == (0, {}, [])
    assert compared["newer_units"] == ALL - READ
    write_log(root, kind, ALL - 2)
    outcome = rebuild(spark, plan)
    compared = outcome.summary["compare"]
    assert (outcome.exit_code, compared["differences"]) == (1, {"CQ_EXTRA": 2})
    assert [(found["start"], found["end"]) for found in compared["findings"]] == [(ALL - 2, ALL)]
    assert compared["newer_units"] == ALL - 2 - READ


@pytest.mark.soak
def test_log_that_was_cut(spark: Any, tmp_path: Path) -> None:
    """The log has not changed, so no unit is newer; a unit that points after its end stays a difference."""
    root = tmp_path / "in"
    units = write_log(root, "commitlog", ALL)
    write_queue(root, [*units[:3], units[-1], *units[4:]])
    write_log(root, "commitlog", READ)
    compared = rebuild(spark, planned(root, "commitlog")).summary["compare"]
    assert compared["differences"] == {"CQ_EXTRA": ALL - READ, "CQ_WRONG_POSITION": 1}
    assert compared["newer_units"] == 0


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["store", "commitlog"])
def test_comparison_says_whose_delay_levels_it_needs(tmp_path: Path, run_rebuild: Rebuild, kind: str) -> None:
    """A DLedger store is rebuilt with RocketMQ's levels, a CommitLog with the broker's own."""
    bodies = delayed_messages([1, 2, 3, 4])
    write = write_broker_store if kind == "store" else write_commitlog
    places = write(tmp_path / "in" / "log", bodies)
    delivered = [STORED_MS + seconds * 1000 for seconds in (1, 2, 3, 7)]
    units = [(place, len(body), at) for place, body, at in zip(places, bodies, delivered, strict=True)]
    write_queue(tmp_path / "in", units, DELAY_TOPIC, size=10)
    own = {"delay_levels": DELAY_LEVELS} if kind == "commitlog" else {}
    code, summary = run_rebuild(**{kind: tmp_path / "in" / "log"}, table=tmp_path / "t", compare=tmp_path / "in", **own)
    compared = summary["compare"]
    if own:
        assert (code, compared["differences"]) == (0, {})
        return
    assert (code, compared["differences"]) == (1, {"CQ_WRONG_TAG": 3})
    (finding,) = compared["findings"]
    assert finding["cause"]
    assert "--delay-levels" in finding["next"]


# --- native logs, and an earlier table ------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.soak
def test_logs_of_cluster(spark: Any, tmp_path: Path, run_rebuild: Rebuild) -> None:
    """Native logs: offsets are assigned per group, topic and queue in index order; other entries have none."""
    table = tmp_path / "table"
    with LocalCluster(groups=("a", "b"), **SLOW_ELECTIONS) as cluster:
        for group in ("a", "b"):
            with Client(cluster.peers, group) as client:
                client.append([b"no message", *encode_messages("T", [0, 1, 0], [b"x", b"y", b"z"]).to_pylist()])
                client.append(encode_messages(["T", "U"], 0, [b"x", b"y"]))
        code, summary = run_rebuild(peers=cluster.peers, groups="a,b", table=table)
    assert (code, summary["rows"], summary["queues"], summary["dense"]) == (0, 10, 6, True)
    assert summary["skipped"]["not_messages"] == 2
    rows = spark.read.format("delta").load(str(table)).orderBy("group", "index").collect()
    for group in ("a", "b"):
        found = [(row["topic"], row["queue_id"], row["queue_offset"]) for row in rows if row["group"] == group]
        assert found == [("T", 0, 0), ("T", 1, 0), ("T", 0, 1), ("T", 0, 2), ("U", 0, 0)]


@pytest.mark.soak
def test_second_run_replaces_only_a_table_with_its_own_columns(
    spark: Any, tmp_path: Path, run_rebuild: Rebuild
) -> None:
    store, table = tmp_path / "n0" / "dledger-n0", tmp_path / "table"
    write_broker_store(store, messages(range(50)))
    for end in (50, 40):
        plan = RebuildPlan(source={"path": str(store)}, ranges={"n0": (0, end)}, table=str(table))
        assert rebuild(spark, plan).summary["rows"] == end
    spark.range(3).write.format("delta").save(str(tmp_path / "other"))
    code, summary = run_rebuild(store=store, table=tmp_path / "other")
    assert (code, summary["error"]) == (3, "CONFIG")
    assert spark.read.format("delta").load(str(tmp_path / "other")).count() == 3
