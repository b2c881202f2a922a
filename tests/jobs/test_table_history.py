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

import pytest

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
    table, checkpoint = tmp_path / "table", tmp_path / "checkpoint"
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
    assert run(capsys, *arguments)[:1] == (0,)
    older = indexes_in(spark, table)
    version = spark.sql(f"DESCRIBE HISTORY delta.`{table}`").selectExpr("max(version)").first()[0]
    shutil.copytree(checkpoint, tmp_path / "old checkpoint")
    shutil.copytree(table, tmp_path / "old table")
    spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ('delta.checkpointInterval' = '1')")
    append(cluster, 10)
    assert run(capsys, *arguments)[:1] == (0,)
    complete = indexes_in(spark, table)
    assert (len(older), len(complete)) == (10, 20)

    # went back: the remedy in the message brings the rows back
    spark.sql(f"RESTORE TABLE delta.`{table}` TO VERSION AS OF {version}")
    message = refused(*arguments)
    assert f"version {version + 3} of the table (RESTORE)" in message
    assert starting_offsets_in(message) == ["--starting-offsets", json.dumps({"a": older[-1] + 1})]
    spark.sql(restore_in(message))
    spark.sql(f"DELETE FROM delta.`{table}` WHERE index = {older[0]}")
    append(cluster, 1)
    assert run(capsys, *arguments)[1]["rows"] == 1
    assert indexes_in(spark, table)[:-1] == complete[1:]

    # the log of the table no longer has the commits of the query
    spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ('delta.checkpointInterval' = '100')")
    for file in sorted((table / "_delta_log").glob("[0-9]*[0-9].json"))[:-1]:
        file.unlink()
    TableHistory(spark, str(table), str(checkpoint)).check(["a"], {})
    TableHistory(spark, str(table), str(checkpoint)).check(["a", "b"], {"b": 0})
    with pytest.raises(TableMismatchError):  # a group that another query has written into the table
        TableHistory(spark, str(table), str(checkpoint)).check(["a", "b"], {"a": 0})
    TableHistory(spark, str(table), str(tmp_path / "of another group")).check(["b"], {"b": 0})

    # an older checkpoint, and one that is new
    assert "left out" in refused(*given, "--checkpoint", str(tmp_path / "old checkpoint"))
    message = refused(*given, "--checkpoint", str(tmp_path / "new"))
    append(cluster, 1)
    code, summary, _ = run(capsys, *given, "--checkpoint", str(tmp_path / "new"), *starting_offsets_in(message))
    assert (code, summary["rows"]) == (0, 1)
    found = indexes_in(spark, table)
    assert len(found) == len(set(found)) == 21

    (snippet,) = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    exec(snippet.replace("/tmp/events", str(table)), {"spark": spark})
    assert len(re.findall(r"\|\s*body\|", capsys.readouterr().out)) == 1 + 20

    # an older copy of the table, another table, none; without a directory there is nothing to keep
    for other in ("old table", "other", "absent"):
        if other == "other":
            spark.sql(f"CREATE TABLE delta.`{tmp_path / other}` USING delta AS SELECT * FROM delta.`{table}` LIMIT 0")
        message = refused(*given[:-1], str(tmp_path / other), "--checkpoint", str(checkpoint))
        assert ("--checkpoint NEW" in message) == (other != "absent")
        assert (tmp_path / other).exists() == (other != "absent")


@pytest.mark.spark
@pytest.mark.integration
def test_rebuild_refuses_table_that_went_back(
    spark: Any, cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rebuild = partial(run_in_process, rebuild_consume_queue.command, capsys)
    table, checkpoint = tmp_path / "table", tmp_path / "checkpoint"
    arguments = ["--peers", cluster.peers, "--groups", "m", "--table", str(table), "--checkpoint", str(checkpoint)]
    with Client(cluster.peers, "m") as client:
        for number in range(2):
            client.append(encode_messages(topic=["t"], queue_id=[0], body=[b"%d" % number]))
            assert rebuild(*arguments)[0] == 0
            if number == 0:
                shutil.copytree(checkpoint, tmp_path / "old checkpoint")
                version = spark.sql(f"DESCRIBE HISTORY delta.`{table}`").selectExpr("max(version)").first()[0]
    spark.sql(f"RESTORE TABLE delta.`{table}` TO VERSION AS OF {version}")
    code, summary, _ = rebuild(*arguments)
    assert (code, summary["error"]) == (3, "DLEDGER_TABLE")
    spark.sql(restore_in(summary["message"]))
    code, summary, _ = rebuild(*arguments)
    assert (code, summary["rows"]) == (0, 2)
    code, summary, _ = rebuild(*arguments[:-1], str(tmp_path / "old checkpoint"))
    assert (code, summary["error"]) == (3, "DLEDGER_TABLE")
    shutil.rmtree(table)
    code, summary, _ = rebuild(*arguments)
    assert (code, summary["error"]) == (3, "DLEDGER_TABLE")
    assert not table.exists()

    # the same from a file system that only Spark reads
    local = query_progress(spark, str(checkpoint))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_table_history, "local_path", lambda _: None)
        assert query_progress(spark, str(checkpoint)) == local is not None
        assert query_progress(spark, str(tmp_path / "absent")) is None
