"""The ingest job: what it adds to its table, what it reports, and how it continues."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dledger_core import Client, LocalCluster
from dledger_core.rocketmq import encode_messages
from jobs.ingest import command
from spark_connector import ddl_of
from spark_connector.columns import schema_for
from tests.cli.command import ErrorLine
from tests.jobs.test_ingest_options import field, write_log
from tests.jobs.test_table_history import starting_offsets_in
from tests.rocketmq.golden import MIXED, extract, messages
from tests.support.damage import overwrite
from tests.support.run_job import run_in_process, start_job, wait_for
from tests.support.slow_elections import SLOW_ELECTIONS

run = partial(run_in_process, command)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with LocalCluster(
        3, groups=("a", "b", "c", "d", "e", "computed"), data_segment_bytes=1 << 20, **SLOW_ELECTIONS
    ) as running:
        yield running


def append(cluster: Any, group: str, *bodies: bytes) -> None:
    with Client(cluster.peers, group) as client:
        client.append(bodies)


def in_table(spark: Any, table: Path) -> list[tuple[str, bytes]]:
    rows = spark.read.format("delta").load(str(table)).orderBy("group", "index").collect()
    return [(row["group"], bytes(row["body"])) for row in rows]


@pytest.mark.spark
@pytest.mark.integration
def test_second_ingest_adds_only_new_entries(
    spark: Any, cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table"
    arguments = ["--peers", cluster.peers, "--groups", "a,b", "--table", str(table)]
    arguments += ["--checkpoint", str(tmp_path / "checkpoint"), "--max-bytes-per-trigger", "3500"]
    append(cluster, "a", *(b"a-%03d" % number for number in range(90)))
    append(cluster, "b", *(b"b-%03d" % number for number in range(30)))
    code, plan, _ = run(capsys, *arguments, "--dry-run")
    assert (code, plan["dry_run"], plan["available"]["b"]["start"]) == (0, True, 0)
    assert not table.exists()
    lag = {name: tmp_path / name for name in ("lag.jsonl", "lag.prom")}
    outputs = zip(("--lag-json", "--lag-prometheus"), map(str, lag.values()), strict=True)
    code, first, _ = run(capsys, *arguments, *(part for output in outputs for part in output))
    assert (code, first["status"], first["rows"], first["exit_reason"]) == (0, "ok", 120, "available data read")
    assert first["batches"] >= 3
    assert first["offsets"]["a"]["from"] == 0
    assert first["offsets"]["b"]["lag"] == {"records": 0, "bytes": 0, "seconds": 0.0}
    assert (first["losses"], first["lost_records"]) == (0, 0)
    told = [json.loads(line) for line in lag["lag.jsonl"].read_text().splitlines()]
    assert len(told) == 2 * first["batches"]
    assert told[0]["lag_records"] == 90
    assert "dledger_query_active" in lag["lag.prom"].read_text()
    append(cluster, "a", b"a-090")
    spark.sql(f"ALTER TABLE delta.`{table}` ADD COLUMN more STRING")
    code, second, _ = run(capsys, *arguments, "--optimize-every", "1s")
    assert (code, second["rows"]) == (0, 1)
    assert second["offsets"]["a"]["from"] == first["offsets"]["a"]["to"]
    assert second["optimize"]["files_removed"] > second["optimize"]["files_added"] > 0
    assert spark.read.format("delta").load(str(table)).where("more is not null").count() == 0
    expected = [("a", b"a-%03d" % number) for number in range(91)] + [("b", b"b-%03d" % number) for number in range(30)]
    assert in_table(spark, table) == expected
    code, failed, err = run(capsys, *arguments[:3], "b", *arguments[4:])
    assert (code, failed["status"], failed["error"]) == (3, "error", "DLEDGER_DATA_LOSS.GROUP_GONE")
    assert ErrorLine(err).code == "DLEDGER_DATA_LOSS.GROUP_GONE"
    assert in_table(spark, table) == expected


@pytest.mark.soak
@pytest.mark.spark
@pytest.mark.integration
def test_stream_without_nodes_fails_and_is_continued_by_next_run(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, nodes, work = tmp_path / "table", ("n0", "n1", "n2"), tmp_path / "work"
    work.mkdir()
    with LocalCluster(3, groups=("a",), data_segment_bytes=1 << 20, **SLOW_ELECTIONS) as cluster:
        append(cluster, "a", *(b"%05d" % number for number in range(4000)))
        arguments = ["--peers", cluster.peers, "--groups", "a", "--table", str(table)]
        arguments += ["--checkpoint", str(tmp_path / "checkpoint")]
        limits = ["--trigger", "0.5 seconds", "--max-offsets-per-trigger", "50", "--retry-for", "2"]
        job = start_job("ingest", arguments + limits, work)
        try:
            wait_for(job, lambda: len(list((table / "_delta_log").glob("*.json"))) >= 3)
            for node in nodes:
                cluster.kill(node)
            out, err = job.communicate(timeout=400)
        finally:
            job.kill()
            job.wait()
        summary = json.loads(out.strip().splitlines()[-1])
        assert "\tat " not in err
        assert "Traceback" not in err
        assert not list(work.iterdir())
        assert (job.returncode, summary["status"], summary["error"]) == (2, "error", "UNREACHABLE")
        [line] = [line for line in err.splitlines() if line.startswith("error: ")]
        assert ErrorLine(line).code == "UNREACHABLE"
        assert cluster.peers in line
        for node in nodes:
            cluster.restart(node)
        code, summary, _ = run(capsys, *arguments)
        assert (code, summary["exit_reason"]) == (0, "available data read")
        assert in_table(spark, table) == [("a", b"%05d" % number) for number in range(4000)]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("start", "end", "code"),
    [(5, 3, "DLEDGER_OPTION"), (10_000, 20_000, "DLEDGER_DATA_LOSS.OFFSET_BEYOND_END")],
    ids=["end before start", "start beyond end"],
)
def test_start_of_new_checkpoint_that_does_not_fit_is_rejected_without_jvm(
    start: int, end: int, code: str, cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    append(cluster, "e", *[b"x"] * 10)
    given = ["--peers", cluster.peers, "--groups", "e", "--table", tmp_path / "t", "--checkpoint", tmp_path / "c"]
    bounds = ["--starting-offsets", f'{{"e": {start}}}', "--ending-offsets", f'{{"e": {end}}}']
    status, failed, _ = run(capsys, *map(str, given), *bounds, "--dry-run")
    assert (status, failed["error"]) == (3, code)


@pytest.mark.integration
def test_table_with_other_columns_is_rejected_unchanged(
    cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table"
    write_log(table, [field("id")])
    arguments = ["--peers", cluster.peers, "--groups", "a", "--table", str(table)]
    code, summary, err = run(capsys, *arguments, "--checkpoint", str(tmp_path / "checkpoint"))
    assert (code, summary["error"]) == (3, "CONFIG")
    [line] = err.splitlines()
    assert f"--table {table}" in line
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.spark
@pytest.mark.integration
def test_bodies_that_cannot_be_decoded_are_in_dead_letters_once(
    spark: Any, cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, dead, checkpoint = tmp_path / "table", tmp_path / "dead", tmp_path / "checkpoint"
    arguments = ["--peers", cluster.peers, "--groups-pattern", "d", "--table", str(table), "--decode", "message"]
    arguments += ["--checkpoint", str(checkpoint), "--dead-letters", str(dead)]
    good = encode_messages("T", 0, [b"one", b"two"]).to_pylist()
    append(cluster, "d", good[0], b"not a message", good[1])
    code, summary, _ = run(capsys, *arguments)
    assert (code, summary["rows"], summary["dead_letters"]) == (0, 3, 1)
    append(cluster, "d", b"another", good[0])
    code, summary, _ = run(capsys, *arguments)
    assert (code, summary["rows"], summary["dead_letters"]) == (0, 2, 1)
    newest = max(int(path.name) for path in (checkpoint / "commits").iterdir() if path.name.isdigit())
    for name in (str(newest), f".{newest}.crc"):  # as after a crash before the checkpoint's commit
        (checkpoint / "commits" / name).unlink()
    code, _, _ = run(capsys, *arguments)
    assert code == 0
    assert in_table(spark, table) == [("d", b"one"), ("d", b"two"), ("d", b"one")]
    rows = spark.read.format("delta").load(str(dead)).orderBy("index").collect()
    assert [(row["group"], bytes(row["body"])) for row in rows] == [("d", b"not a message"), ("d", b"another")]
    assert all(row["reason"] and row["term"] is not None and row["index"] > 0 for row in rows)
    spark.sql(f"RESTORE TABLE delta.`{table}` TO VERSION AS OF 1")
    code, summary, _ = run(capsys, *arguments)
    assert (code, summary["error"]) == (3, "DLEDGER_TABLE")


@pytest.mark.spark
@pytest.mark.integration
@pytest.mark.soak
def test_table_of_an_earlier_release_keeps_its_columns(
    spark: Any, cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, body = tmp_path / "table", encode_messages("Old", 0, [b"body"]).to_pylist()
    arguments = ["--peers", cluster.peers, "--groups", "c", "--table", str(table), "--decode", "message"]
    old = [name for name in schema_for("message").names if name != "batch_index"]
    spark.createDataFrame([], ddl_of(schema_for("message"))).select(*old).write.format("delta").save(str(table))
    append(cluster, "c", *body)
    for checkpoint, names in (("first", old), ("second", [*old, "batch_index"])):
        code, summary, err = run(capsys, *arguments, "--checkpoint", str(tmp_path / checkpoint))
        assert (code, summary["rows"]) == (0, 1)
        assert spark.read.format("delta").load(str(table)).columns == names
        if checkpoint == "first":
            spark.sql(next(line for line in err.splitlines() if "ALTER TABLE" in line).partition("Spark SQL: ")[2])
            spark.sql(f"DELETE FROM delta.`{table}`")


@pytest.mark.spark
@pytest.mark.integration
def test_rows_are_counted_where_delta_computes_columns(
    spark: Any, cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table"
    columns = f"{ddl_of(schema_for('none')).upper()}, day DATE GENERATED ALWAYS AS (CAST(`TIMESTAMP` AS DATE))"
    spark.sql(f"CREATE TABLE delta.`{table}` ({columns}) USING delta PARTITIONED BY (day)")
    arguments = ["--peers", cluster.peers, "--groups", "computed", "--table", str(table)]
    for count in (7, 5):
        append(cluster, "computed", *(b"x" for _ in range(count)))
        code, summary, _ = run(capsys, *arguments, "--checkpoint", str(tmp_path / "checkpoint"))
        assert (code, summary["rows"]) == (0, count)
    assert spark.read.format("delta").load(str(table)).where("day is not null").count() == 12


@pytest.mark.spark
def test_commitlog_is_in_table_once_and_deleted_files_are_loss(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, dead, commitlog = tmp_path / "table", tmp_path / "dead", tmp_path / "broker-a" / "commitlog"
    first, second = sorted(extract(MIXED, "n0/commitlog", tmp_path).iterdir())
    written, file_bytes = first.read_bytes(), first.stat().st_size
    starts = [at for at in messages(MIXED) if at < 2 * file_bytes]
    commitlog.mkdir(parents=True)
    given = ["--path", str(commitlog.parent), "--decode", "message", "--table", str(table), "--dead-letters", str(dead)]

    def grown(count: int) -> None:
        """Let the file have these messages, and the zeros after them that its broker has not written yet."""
        (commitlog / first.name).write_bytes(written[: starts[count]].ljust(file_bytes, b"\0"))

    def positions(path: Path) -> list[int]:
        return [row["position"] for row in spark.read.format("delta").load(str(path)).orderBy("position").collect()]

    grown(50)
    code, summary, _ = run(capsys, *given, "--checkpoint", str(tmp_path / "former"))
    assert (code, summary["rows"], summary["dead_letters"]) == (0, 50, 0)
    assert summary["offsets"]["broker-a"]["to"] == starts[50]
    assert summary["offsets"]["broker-a"]["lag"] == {"records": None, "bytes": 0, "seconds": 0.0}
    grown(80)
    arguments = [*given, "--checkpoint", str(tmp_path / "checkpoint")]
    code, summary, err = run(capsys, *arguments)
    assert (code, summary["error"], positions(table)) == (3, "DLEDGER_TABLE", starts[:50])
    code, summary, _ = run(capsys, *arguments, *starting_offsets_in(err))
    assert (code, summary["rows"], positions(table)) == (0, 30, starts[:80])

    # The broker fills the file, begins the next one, and its cleaner deletes the first one.
    (commitlog / first.name).unlink()
    (commitlog / second.name).write_bytes(second.read_bytes())
    damaged = [at for at in starts if at >= file_bytes][3]
    overwrite(commitlog / second.name, damaged - file_bytes + 90, b"?")
    code, summary, err = run(capsys, *arguments)
    assert (code, summary["error"]) == (3, "DLEDGER_DATA_LOSS.RETENTION")
    assert f"[{starts[80]}, {file_bytes})" in err
    code, summary, _ = run(capsys, *arguments, "--no-fail-on-data-loss")
    assert (code, summary["dead_letters"], summary["losses"]) == (0, 1, 1)
    assert summary["lost_records"] == file_bytes - starts[80]
    later = [at for at in starts if at >= file_bytes]
    assert positions(table) == [*starts[:80], *(at for at in later if at != damaged)]
    (row,) = spark.read.format("delta").load(str(dead)).collect()
    assert (row["group"], row["index"], row["position"]) == ("broker-a", None, damaged)
    assert row["reason"]
