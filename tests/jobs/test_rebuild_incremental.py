"""The incremental rebuild makes the same table as a full one, whatever is repeated."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from dledger_core import Client, LocalCluster
from dledger_core.rocketmq import encode_messages
from jobs._rebuild import table as rebuild_table
from jobs._rebuild.plan import RebuildOptions, plan_for
from jobs._rebuild.slots import Queue, Queues, advanced, place, summary_of
from jobs._rebuild.table import TableStream
from tests.jobs.broker_store import messages
from tests.jobs.conftest import Rebuild
from tests.spark_connector.store_writer import StoreWriter
from tests.support.slow_elections import SLOW_ELECTIONS

pytestmark = pytest.mark.spark


def rows_of(spark: Any, table: Path) -> list[Any]:
    rows: list[Any] = spark.read.format("delta").load(str(table)).orderBy("group", "index").collect()
    return rows


def forget_last_commit(checkpoint: Path) -> None:
    """Leave the Spark checkpoint as a driver that was killed after Delta's commit leaves it."""
    last = max(int(path.name) for path in (checkpoint / "commits").iterdir() if path.name.isdecimal())
    (checkpoint / "commits" / str(last)).unlink()
    (checkpoint / "commits" / f".{last}.crc").unlink()


@pytest.mark.soak
def test_micro_batches_continue_queues_and_write_once(spark: Any, tmp_path: Path) -> None:
    """The second run starts with a micro-batch that the table has, then reads several that are new."""
    chance, expected = random.Random(3), list[int]()
    counts: dict[tuple[str, int], int] = {}
    table, checkpoint = tmp_path / "table", tmp_path / "checkpoint"
    with StoreWriter(tmp_path) as writer:
        given = {"store": str(writer.path), "table": str(table), "checkpoint": str(checkpoint)}
        for count in (15, 30):
            topics, ids = [chance.choice("AB") for _ in range(count)], [chance.randrange(2) for _ in range(count)]
            writer.append(encode_messages(topics, ids, [b"x"] * count).to_pylist())
            for queue in zip(topics, ids, strict=True):
                expected.append(counts.setdefault(queue, 0))
                counts[queue] += 1
            plan = plan_for(RebuildOptions.parse(given))
            TableStream(spark, replace(plan, source=plan.source | {"maxOffsetsPerTrigger": "15"})).run(Event())
            assert [row["queue_offset"] for row in rows_of(spark, table)] == expected
            forget_last_commit(checkpoint)
        TableStream(spark, plan_for(RebuildOptions.parse(given))).run(Event())
    assert [row["queue_offset"] for row in rows_of(spark, table)] == expected


def test_ends_of_queues_continue_after_brokers() -> None:
    queues: Queues = {
        ("g", "T", 0): Queue(1, 3, 2, 2, non_monotonic=False),
        ("g", "%RETRY%ü", 7): Queue(0, 1 << 40, 9, 9, non_monotonic=False),
    }
    none = dict.fromkeys(("high", "given", "slots", "fresh"), 0)
    none |= {"group": "g", "topic": "T", "low": None, "non_monotonic": False}
    found: list[dict[str, Any]] = [
        none | {"queue_id": 0, "fresh": 2},
        none | {"queue_id": 1, "low": 4, "high": 9, "given": 6, "slots": 5, "non_monotonic": True},
        none | {"queue_id": 2, "low": 4, "high": 6, "given": 2, "slots": 2, "fresh": 3},
        none | {"group": "h", "queue_id": 0, "fresh": 1},
    ]
    after = advanced(queues, found)
    assert after == queues | {
        ("g", "T", 0): Queue(1, 5, 4, 4, non_monotonic=False),
        ("g", "T", 1): Queue(4, 9, 6, 5, non_monotonic=True),
        ("g", "T", 2): Queue(4, 9, 5, 5, non_monotonic=False),
        ("h", "T", 0): Queue(0, 1, 1, 1, non_monotonic=False),
    }
    holes = {"queues": 5, "rows": 25, "slots": 24, "dense": False, "duplicate_slots": 1}
    assert summary_of(after, ()) == holes
    assert summary_of(after, ("%RETRY%ü",)) == holes | {"dense": True}


def place_after_signal(*arguments: Any) -> Any:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)
    return place(*arguments)


@pytest.mark.soak
def test_signal_keeps_old_rows_until_next_run_completes(
    spark: Any, tmp_path: Path, run_rebuild: Rebuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old rows stay readable, and nothing of a stopped run is in the table."""
    table = tmp_path / "table"
    with StoreWriter(tmp_path) as writer:
        writer.append(messages([0] * 5))
        assert run_rebuild(store=writer.path, table=table)[0] == 0
        writer.append(messages([0] * 5))
        with monkeypatch.context() as patched:
            patched.setattr(rebuild_table, "place", place_after_signal)
            code, summary = run_rebuild(store=writer.path, table=table)
            assert (code, summary["status"]) == (2, "stopped")
        assert len(rows_of(spark, table)) == 5
        assert run_rebuild(store=writer.path, table=table)[1]["rows"] == 10
    assert len(rows_of(spark, table)) == 10


@pytest.mark.integration
def test_runs_add_up_to_full_rebuild(spark: Any, tmp_path: Path, run_rebuild: Rebuild) -> None:
    """Between the runs entries are added; the last run first does a micro-batch again that was written already."""
    table, checkpoint = tmp_path / "table", tmp_path / "checkpoint"
    with LocalCluster(**SLOW_ELECTIONS) as cluster, Client(cluster.peers) as client:
        peers: dict[str, Any] = {"peers": cluster.peers}
        client.append([b"no message", *messages([0] * 3, "T", [0, 1, 0])])
        code, summary = run_rebuild(**peers, table=table, checkpoint=checkpoint)
        assert (code, summary["rows"], summary["skipped"]["not_messages"]) == (0, 3, 1)
        forget_last_commit(checkpoint)
        client.append([b"no message", *messages([0] * 5, "T", [1, 0, 2, 1, 0])])
        code, summary = run_rebuild(**peers, table=table, checkpoint=checkpoint, files=tmp_path / "out")
        assert (code, summary["rows"], summary["dense"]) == (0, 8, True)
        assert summary["files"]["files"] == 3
        full = tmp_path / "full"
        run_rebuild(**peers, table=full)
        assert rows_of(spark, table) == rows_of(spark, full)
        for options in (
            {"table": full, "checkpoint": checkpoint},
            {"table": table},
            {"table": table, "checkpoint": tmp_path / "other"},
        ):
            code, summary = run_rebuild(**peers, **options)
            assert (code, "--checkpoint" in summary["message"] or "full" in summary["message"]) == (3, True)
        assert len(rows_of(spark, table)) == 8
