"""The incremental rebuild gives the table that a full one gives, whatever is run twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dledger_core import Client, LocalCluster
from dledger_core.errors import ConfigError
from dledger_core.rocketmq import encode_messages
from jobs import rebuild_consume_queue
from jobs._rebuild import queue_ends
from jobs._rebuild.incremental import extend
from jobs._rebuild.queue_ends import Ends, advanced, from_history, to_metadata
from jobs._rebuild.table import make_table
from jobs._rebuild.units import EntryRules
from tests.support.patience import PATIENT
from tests.support.run_job import run_in_process

pytestmark = [
    pytest.mark.spark,
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas"),
]

OURS = EntryRules(broker_end=0)
_ENTRIES = "`group` string, index long, position long, body binary"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    return run_in_process(rebuild_consume_queue.command, capsys, *arguments)[:2]


def rows_of(spark: Any, table: Path) -> list[Any]:
    rows: list[Any] = spark.read.format("delta").load(str(table)).orderBy("group", "index").collect()
    return rows


def test_a_batch_that_is_run_again_writes_nothing(spark: Any, tmp_path: Path) -> None:
    chance = random.Random(3)
    topics, ids = [chance.choice("AB") for _ in range(60)], [chance.randrange(2) for _ in range(60)]
    bodies = encode_messages(topics, ids, [b"x"] * 60).to_pylist()
    entries = [("g", i, i * 100, body) for i, body in enumerate(bodies)]
    table = str(tmp_path / "table")
    for number, (start, end) in enumerate([(0, 25), (25, 60), (25, 60)]):
        batch = spark.createDataFrame(entries[start:end], _ENTRIES)
        extend(batch, min(number, 1), "query", table, make_table, OURS)
        assert spark.read.format("delta").load(table).count() == end
    counts: dict[tuple[str, int], int] = {}
    for row in rows_of(spark, tmp_path / "table"):
        key = row["topic"], row["queue_id"]
        assert row["queue_offset"] == counts.setdefault(key, 0)
        counts[key] += 1
    with pytest.raises(ConfigError, match="was not made with this checkpoint"):
        extend(batch, 0, "another query", table, make_table, OURS)


def commit(metadata: str | None, operation: str = "WRITE") -> dict[str, str | None]:
    return {"operation": operation, "userMetadata": metadata}


ENDS: Ends = {("g", "T", 0): 3, ("g", "%RETRY%ü", 7): 1 << 40}


@pytest.mark.parametrize(
    ("commits", "known"),
    [
        ([commit(to_metadata(ENDS))], True),
        ([commit(None, "OPTIMIZE"), commit("by hand", "VACUUM END"), commit(to_metadata(ENDS))], True),
        ([commit(None, "DELETE"), commit(to_metadata(ENDS))], False),
        ([commit(None), commit(to_metadata(ENDS))], False),
        ([commit('{"other": 1}'), commit(to_metadata(ENDS))], False),
        ([commit("[]"), commit(to_metadata(ENDS))], False),
        ([commit(None, "OPTIMIZE")], False),
        ([], False),
    ],
)
def test_the_last_commit_that_changed_rows_says_where_queues_end(
    commits: list[dict[str, str | None]], known: bool
) -> None:
    assert from_history(commits) == (ENDS if known else None)


def test_ends_go_on_behind_what_a_broker_gave() -> None:
    queues: list[dict[str, Any]] = [
        {"group": "g", "topic": "T", "queue_id": 0, "high": 0, "fresh": 2},
        {"group": "g", "topic": "T", "queue_id": 1, "high": 9, "fresh": 0},
        {"group": "h", "topic": "T", "queue_id": 0, "high": 4, "fresh": 1},
    ]
    assert advanced(ENDS, queues) == ENDS | {("g", "T", 0): 5, ("g", "T", 1): 9, ("h", "T", 0): 5}


def test_very_many_queues_are_not_written_into_each_commit() -> None:
    assert to_metadata({("g", "T", number): 1 for number in range(20_001)}) is None


def test_each_commit_says_where_the_queues_end(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is read for it only after somebody else changed its rows."""
    table, reads = str(tmp_path / "table"), list[int]()
    read = queue_ends._read
    monkeypatch.setattr(queue_ends, "_read", lambda rows: reads.append(1) or read(rows))

    def add(number: int, ids: list[int]) -> None:
        bodies = encode_messages("T", ids, [b"x"] * len(ids)).to_pylist()
        entries = [("g", 100 * number + i, 10_000 * number + i * 100, body) for i, body in enumerate(bodies)]
        extend(spark.createDataFrame(entries, _ENTRIES), number, "query", table, make_table, OURS)

    def ends() -> Ends:
        known, rows = queue_ends.ends_at(spark, table)
        assert known == read(rows)
        return known

    add(0, [0, 1, 0])
    assert len(reads) == 1  # nobody has said anything of the empty table
    add(1, [1, 2])
    spark.sql(f"OPTIMIZE delta.`{table}`")
    add(2, [0])
    assert ends() == {("g", "T", 0): 3, ("g", "T", 1): 2, ("g", "T", 2): 1}
    assert len(reads) == 1
    spark.sql(f"DELETE FROM delta.`{table}` WHERE queue_id = 0 AND queue_offset = 2")
    add(3, [0])
    assert len(reads) == 2
    assert ends() == {("g", "T", 0): 3, ("g", "T", 1): 2, ("g", "T", 2): 1}


@pytest.mark.integration
def test_runs_add_up_to_a_full_rebuild(spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Between the runs entries are added; the last run first does a micro-batch again that was written already."""
    table, checkpoint = tmp_path / "table", tmp_path / "checkpoint"
    with LocalCluster(**PATIENT) as cluster, Client(cluster.peers) as client:
        common = ("--peers", cluster.peers, "--checkpoint", str(checkpoint))
        append: Callable[[list[int]], Any] = lambda ids: client.append(  # noqa: E731
            [b"no message", *encode_messages("T", ids, [b"x"] * len(ids)).to_pylist()]
        )
        append([0, 1, 0])
        code, summary = run(capsys, *common, "--table", str(table))
        assert (code, summary["rows"], summary["exit_reason"]) == (0, 3, "available data read")
        last = max(int(path.name) for path in (checkpoint / "commits").iterdir() if path.name.isdecimal())
        (checkpoint / "commits" / str(last)).unlink()
        (checkpoint / "commits" / f".{last}.crc").unlink()
        append([1, 0, 2, 1, 0])
        code, summary = run(capsys, *common, "--table", str(table), "--files", str(tmp_path / "out"))
        assert (code, summary["rows"], summary["dense"]) == (0, 8, True)
        assert summary["files"]["files"] == 3
        run(capsys, "--peers", cluster.peers, "--table", str(tmp_path / "full"))
        assert rows_of(spark, table) == rows_of(spark, tmp_path / "full")
        for arguments, part in (
            ((*common, "--table", str(tmp_path / "full")), "was rebuilt as a whole"),
            (("--peers", cluster.peers, "--table", str(table)), "kept up to date by a stream"),
            (
                ("--peers", cluster.peers, "--table", str(table), "--checkpoint", str(tmp_path / "other")),
                "was not made with this checkpoint",
            ),
        ):
            code, summary = run(capsys, *arguments)
            assert (code, part in summary["message"]) == (3, True)
        assert len(rows_of(spark, table)) == 8
