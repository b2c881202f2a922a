"""Whether a table and a Spark checkpoint belong together: after RESTORE, deletion, copies; with a new checkpoint."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from dledger_core import Client, LocalCluster
from dledger_core.rocketmq import encode_messages
from jobs import _table_history, ingest, rebuild_consume_queue
from jobs._table_history import (
    Commit,
    Contents,
    Removal,
    TableHistory,
    batches_of,
    contents_of,
    query_progress,
)
from spark_connector.errors import TableMismatchError
from tests.support.run_job import run_in_process
from tests.support.slow_elections import SLOW_ELECTIONS

run = partial(run_in_process, ingest.command)
GUIDE = Path(__file__).parents[2] / "jobs" / "README.md"
START = datetime(2026, 1, 1)  # noqa: DTZ001 - as Spark returns a timestamp
OTHER: dict[str, tuple[str, dict[str, str | None]]] = {
    "optimize": ("OPTIMIZE", {"predicate": "[]"}),
    "vacuum": ("VACUUM END", {"status": "COMPLETED"}),
    "delete": ("DELETE", {"predicate": '["true"]'}),
    "truncate": ("TRUNCATE", {}),
    "column": ("ADD COLUMNS", {}),
    "other query": ("STREAMING UPDATE", {"queryId": "other", "epochId": "9", "outputMode": "Append"}),
    "part": ("WRITE", {"mode": "Overwrite", "partitionBy": "[]", "predicate": "day = 1"}),
    "partitions": ("WRITE", {"mode": "Overwrite", "isDynamicPartitionOverwrite": "true"}),
    "overwrite": ("WRITE", {"mode": "Overwrite", "partitionBy": "[]"}),
    "complete": ("STREAMING UPDATE", {"queryId": "other", "epochId": "0", "outputMode": "Complete"}),
    "replace": ("CREATE OR REPLACE TABLE AS SELECT", {}),
}


def commits(*steps: int | str, first: int = 0) -> list[Commit]:
    """A history: a number is a micro-batch, "->2" a RESTORE to version 2, "@2" one to the time of version 2."""
    found = []
    for version, step in enumerate(steps, first):
        time = START + timedelta(minutes=version)
        operation, parameters = OTHER.get(str(step), ("", dict[str, str | None]()))
        if isinstance(step, int):
            operation = "STREAMING UPDATE"
            parameters = {"queryId": "q", "epochId": str(step), "outputMode": "Append"}
        elif step.startswith("->"):
            operation, parameters = "RESTORE", {"version": step[2:], "timestamp": None}
        elif step.startswith("@"):
            moment = START + timedelta(minutes=int(step[1:]))
            operation, parameters = "RESTORE", {"version": None, "timestamp": str(moment)}
        found.append(Commit(version, time, operation, parameters))
    return found


def removed(version: int, first: int, last: int | None) -> tuple[int, int, int | None]:
    return version, first, last


@pytest.mark.parametrize(
    ("history", "last", "expected"),
    [
        pytest.param(commits(0, 1, 2), 2, None, id="nothing else"),
        pytest.param(commits(0, 1, *list(OTHER)[:8], 2), 2, None, id="changes that keep the micro-batches"),
        pytest.param(commits(0, 1, 2, "->1"), 1, removed(3, 2, 2), id="restored"),
        pytest.param(commits(0, 1, 2, "@0"), 0, removed(3, 1, 2), id="restored to a time"),
        pytest.param(commits(0, 1, 2, "->2"), 2, None, id="restored to the newest version"),
        pytest.param(commits(0, 1, "delete", "->1"), 1, None, id="a deletion taken back"),
        pytest.param(commits(0, 1, 2, "->0", "->2"), 2, None, id="restored and taken back"),
        pytest.param(commits(0, 1, 2, "->1", 3, "optimize"), 3, removed(3, 2, 2), id="continued after a restore"),
        pytest.param(commits(0, 1, 2, "->1", 3, "->2"), 2, removed(5, 3, 3), id="continued, then taken back"),
        pytest.param(commits(0, 1, 2, "->0", 3, "->3"), 0, removed(3, 1, 2), id="restored to a restore"),
        pytest.param(commits(0, 1, "overwrite"), -1, removed(2, 0, 1), id="overwritten"),
        pytest.param(commits(0, 1, "replace", 2), 2, removed(2, 0, 1), id="replaced, and continued"),
        pytest.param(commits(0, 1, "complete"), -1, removed(2, 0, 1), id="replaced by another query"),
        pytest.param(commits("overwrite", "->0", 0, 1), 1, None, id="before the query"),
        pytest.param(commits(3, 4), 4, removed(0, 0, 2), id="created again"),
        pytest.param(commits(7, 8, first=90), 8, None, id="history without its begin"),
        pytest.param(commits(7, 8, "->40", first=90), -1, removed(92, 0, 8), id="restored to before the history"),
        pytest.param(commits("optimize", "->90", first=90), None, None, id="none of them in the history"),
        pytest.param(
            commits("optimize", "overwrite", first=90), -1, removed(91, 0, None), id="unknown ones overwritten"
        ),
        pytest.param(commits("overwrite", 0, 1, first=90), 1, None, id="a new query in an old table"),
        pytest.param([], None, None, id="no history"),
    ],
)
def test_contents_follow_from_history(
    history: list[Commit], last: int | None, expected: tuple[int, int, int | None] | None
) -> None:
    found = contents_of(history, batches_of("q"), dense=True)
    assert found.last == last
    removal = found.removal
    assert (removal and (removal.version, removal.first, removal.last)) == expected


def test_sparse_micro_batches_leave_no_gap() -> None:
    def numbered(commit: Commit) -> int | None:
        return commit.version if commit.operation == "OPTIMIZE" else None

    assert contents_of(commits("replace", "column", "optimize"), numbered, dense=False) == Contents(2)
    back = contents_of(commits("replace", "optimize", "optimize", "->1"), numbered, dense=False)
    assert back == Contents(1, Removal(3, "RESTORE", 2, 2))


# --- the jobs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with LocalCluster(1, groups=("a", "b", "m"), data_segment_bytes=1 << 20, **SLOW_ELECTIONS) as running:
        yield running


def append(cluster: Any, count: int, group: str = "a") -> None:
    with Client(cluster.peers, group) as client:
        client.append([b"body"] * count)


def indexes_in(spark: Any, table: Path) -> list[int]:
    return sorted(row[0] for row in spark.read.format("delta").load(str(table)).select("index").collect())


def newest_version(spark: Any, table: Path) -> int:
    return int(spark.sql(f"DESCRIBE HISTORY delta.`{table}`").selectExpr("max(version)").first()[0])


def restore_in(message: str) -> str:
    found = re.search(r"RESTORE TABLE delta\.`[^`]+` TO VERSION AS OF [0-9]+", message)
    assert found is not None, message
    return found[0]


def starting_offsets_in(message: str) -> list[str]:
    """The first printed option, as a shell splits it."""
    found = re.search(r"--starting-offsets '[^']+'", message)
    assert found is not None, message
    return shlex.split(found[0])


@pytest.mark.spark
@pytest.mark.integration
def test_ingest_refuses_table_that_went_back_until_its_remedy_is_typed(
    spark: Any, cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, checkpoint, older = tmp_path / "table", tmp_path / "checkpoint", tmp_path / "older"
    given = ["--peers", cluster.peers, "--groups", "a", "--table", str(table)]
    arguments = [*given, "--checkpoint", str(checkpoint)]

    def refused(*arguments: str) -> str:
        before = sorted(table.rglob("*"))
        code, summary, err = run(capsys, *arguments)
        assert (code, summary["status"], summary["error"]) == (3, "error", "DLEDGER_TABLE")
        assert len(err.splitlines()) == 1
        assert sorted(table.rglob("*")) == before
        return str(summary["message"])

    append(cluster, 10)
    assert run(capsys, *arguments)[0] == 0
    version = newest_version(spark, table)
    shutil.copytree(checkpoint, older)
    append(cluster, 10)
    assert run(capsys, *arguments)[0] == 0

    spark.sql(f"RESTORE TABLE delta.`{table}` TO VERSION AS OF {version}")
    message = refused(*arguments)
    assert f"version {version + 2} " in message
    kept = indexes_in(spark, table)
    assert starting_offsets_in(message) == ["--starting-offsets", json.dumps({"a": kept[-1] + 1})]
    spark.sql(restore_in(message))

    append(cluster, 1)
    message = refused(*given, "--checkpoint", str(tmp_path / "new"))
    code, summary, _ = run(capsys, *given, "--checkpoint", str(tmp_path / "new"), *starting_offsets_in(message))
    assert (code, summary["rows"]) == (0, 1)
    found = indexes_in(spark, table)
    assert len(found) == len(set(found)) == 21

    def check(table: Path, checkpoint: Path, starts: dict[str, int] | None = None) -> None:
        TableHistory(spark, str(table), str(checkpoint)).check(["a"], starts or {})

    check(table, checkpoint)
    check(table, checkpoint, {"b": 0})
    check(table, tmp_path / "of another group", {"b": 0})
    for place, known, starts in (
        (table, older, {}),
        (tmp_path / "absent", checkpoint, {}),
        (table, checkpoint, {"a": found[-1]}),  # a group that another query has written
    ):
        with pytest.raises(TableMismatchError):
            check(place, known, starts)

    (snippet,) = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    exec(snippet.replace("/tmp/events", str(table)), {"spark": spark})
    assert len(re.findall(r"\|\s*body\|", capsys.readouterr().out)) == 1 + 20


@pytest.mark.spark
@pytest.mark.integration
@pytest.mark.soak
def test_rebuild_refuses_table_that_went_back(
    spark: Any, cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rebuild = partial(run_in_process, rebuild_consume_queue.command, capsys)
    table, checkpoint, older = tmp_path / "table", tmp_path / "checkpoint", tmp_path / "older"
    arguments = ["--peers", cluster.peers, "--groups", "m", "--table", str(table), "--checkpoint", str(checkpoint)]
    version = 0
    with Client(cluster.peers, "m") as client:
        for number in range(2):
            client.append(encode_messages(topic=["t"], queue_id=[0], body=[b"%d" % number]))
            assert rebuild(*arguments)[0] == 0
            if number == 0:
                shutil.copytree(checkpoint, older)
                version = newest_version(spark, table)
    spark.sql(f"RESTORE TABLE delta.`{table}` TO VERSION AS OF {version}")
    code, summary, _ = rebuild(*arguments)
    assert (code, summary["error"]) == (3, "DLEDGER_TABLE")
    spark.sql(restore_in(summary["message"]))
    TableHistory(spark, str(table), str(checkpoint)).check_appends()
    for place, known in ((table, older), (tmp_path / "absent", checkpoint)):
        with pytest.raises(TableMismatchError):
            TableHistory(spark, str(place), str(known)).check_appends()

    # the same from a file system that only Spark reads
    local = query_progress(spark, str(checkpoint))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_table_history, "local_path", lambda _: None)
        assert query_progress(spark, str(checkpoint)) == local is not None
        assert query_progress(spark, str(tmp_path / "absent")) is None


@pytest.mark.spark
def test_micro_batch_is_found_in_checkpoint_of_table_log(spark: Any, tmp_path: Path) -> None:
    log = tmp_path / "a [table]" / "_delta_log"
    log.mkdir(parents=True)
    history = TableHistory(spark, str(log.parent), str(tmp_path / "checkpoint"))
    assert history.recorded_batch("q") == -1
    rows = [{"txn": None}, {"txn": {"appId": "q", "version": 7}}, {"txn": {"appId": "other", "version": 9}}]
    parquet.write_table(pa.Table.from_pylist(rows[::-1]), log / f"{20:020}.checkpoint.parquet")
    for version, batch in ((19, 8), (21, 3)):  # version 19 is in the checkpoint
        action = {"txn": {"appId": "other" if version == 21 else "q", "version": batch}}
        (log / f"{version:020}.json").write_text(json.dumps(action) + "\n" + json.dumps({"commitInfo": {}}))
    assert history.recorded_batch("q") == 7
    (log / f"{22:020}.json").write_text(json.dumps({"txn": {"appId": "q", "version": 8}}))
    assert history.recorded_batch("q") == 8
