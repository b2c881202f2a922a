"""The audit with the archive as one more replica: differences, coverage, the third copy, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake

from dledger_core import Client, LocalCluster
from dledger_core.archive import ArchiveTable
from dledger_core.checksum import crc32
from jobs._audit import pipeline
from jobs._audit.archived import plan_recorded, recorded_digests, rows_snapshot, trust_recorded
from jobs._audit.archives import take_archives
from jobs._audit.model import ARCHIVE, DIGESTS, AuditedReplica, Options
from jobs._audit.pipeline import Audit
from jobs._audit.replicas import take_snapshot
from jobs.audit_replicas import command
from tests.jobs.auditing import NOW, digest_row
from tests.rocketmq import golden
from tests.spark_connector.store_writer import StoreWriter
from tests.support.archived_store import archive
from tests.support.archiving import DirectJob
from tests.support.damage import overwrite, place_of
from tests.support.run_job import run_in_process
from tests.support.slow_elections import SLOW_ELECTIONS
from tests.support.soon import soon

run = partial(run_in_process, command)
CUTS = (0, 60, 100, 180)
VICTIM = 142


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A directory with two equal stores and the archive of their log, which has hidden entries and control entries."""
    with StoreWriter(tmp_path / "n0", segment_bytes=1 << 13) as writer:
        writer.append_numbers(50)
        writer.append_attempt(10, batch=1, run="lost")
        writer.commit(writer.append_attempt(20, batch=1), batch=1)
        writer.term = 2
        writer.append([], noop=True)
        writer.append_numbers(150)
        archive(writer, tmp_path / "table", CUTS)
    shutil.copytree(writer.path, tmp_path / "b")
    (tmp_path / "a").symlink_to(writer.path)
    return tmp_path


@pytest.fixture(autouse=True)
def in_one_process(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Run what the audit gives to Spark's tasks here, unless the test starts Spark."""
    if "spark" not in request.fixturenames:
        monkeypatch.setattr(
            pipeline,
            "spread",
            lambda _spark, _title, work, rows, schema: pa.Table.from_pylist(
                [row for item in work for row in rows(item)], schema
            ),
        )


def audit(made: Path, *names: str, **more: Any) -> dict[str, Any]:
    """Audit stores with their archive; returns the summary."""
    replicas = tuple(f"{name}={made / name}" for name in names or ("a", "b"))
    options = Options.parse({"replicas": replicas, "archive": "true", **more})
    snapshot = take_snapshot(options)
    spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=2))
    summary, page = Audit(snapshot, options, take_archives(options, snapshot)).execute(spark)
    return summary | {"page": page}


def brief(summary: dict[str, Any]) -> list[tuple[str, str, int, int]]:
    return [(one["class"], one["replica"], one["start"], one["end"]) for one in summary["findings"]]


def table_of(made: Path) -> pa.Table:
    rows: pa.Table = DeltaTable(made / "table").to_pyarrow_table()
    return rows.sort_by("index")


def rewrite(made: Path, rows: pa.Table) -> None:
    write_deltalake(made / "table", rows, mode="overwrite")


def change(column: str, value: Any) -> Callable[[Path], None]:
    """Change one value of the victim's row."""

    def changed(made: Path) -> None:
        rows = table_of(made)
        is_victim = pc.equal(rows["index"], VICTIM)
        at = rows.schema.get_field_index(column)
        values = pc.if_else(is_victim, pa.scalar(value, pa.int64()).cast(rows[column].type) if column != "body"
                            else pa.scalar(value, rows[column].type), rows[column])  # fmt: skip
        rewrite(made, rows.set_column(at, rows.schema.field(at), values))

    return changed


def twice(made: Path) -> None:
    rows = table_of(made)
    write_deltalake(made / "table", rows.filter(pc.equal(rows["index"], VICTIM)), mode="append")


def of_another_log(made: Path) -> None:
    rows = table_of(made)
    terms = pc.add(rows["term"], 7)
    rewrite(made, rows.set_column(rows.schema.get_field_index("term"), "term", terms))


def with_row_of_hidden_entry(made: Path) -> None:
    rows = table_of(made)
    hidden = rows.slice(0, 1).set_column(rows.schema.get_field_index("index"), "index", pa.array([55]))
    write_deltalake(made / "table", hidden, mode="append")


def test_archive_equal_to_its_log_is_covered_and_consistent(made: Path) -> None:
    summary = audit(made)
    assert (brief(summary), summary["verdict"], summary["incomplete"]) == ([], "CONSISTENT", [])
    part = summary["coverage"][ARCHIVE]
    assert (part["entries_compared"], part["entries_eligible"], part["percent"]) == (180, 180, 100.0)
    assert part["bytes_compared"] == pc.sum(pc.binary_length(table_of(made)["body"])).as_py()
    end = summary["compared"]["end"]
    assert {name: one["entries_compared"] for name, one in summary["coverage"].items()} == {
        "a": end, "b": end, ARCHIVE: 180,
    }  # fmt: skip
    [found] = [one for one in summary["replicas"] if one["kind"] == "archive"]
    assert (found["where"], found["first_index"], found["last_index"]) == (str(made / "table"), 0, 179)
    states = [(one["start"], one["end"], one["state"]) for one in summary["groups"][0]["ranges"] if
              one["replica"] == ARCHIVE]  # fmt: skip
    assert states == [(0, 180, "read now")]


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda made: DeltaTable(made / "table").delete(f'"index" = {VICTIM}'), [("MISSING", VICTIM, VICTIM + 1)]),
        (
            lambda made: DeltaTable(made / "table").delete('"index" >= 58 and "index" < 104'),
            [("MISSING", 62, 82), ("MISSING", 84, 104)],
        ),
        (twice, [("DOUBLED", VICTIM, VICTIM + 1)]),
        (change("body", b"other"), [("CHANGED", VICTIM, VICTIM + 1)]),
        (change("term", 9), [("CHANGED", VICTIM, VICTIM + 1)]),
        (change("position", 1), [("CHANGED", VICTIM, VICTIM + 1)]),
        (change("timestamp", 1), [("CHANGED", VICTIM, VICTIM + 1)]),
        (change("body", None), [("CHANGED", VICTIM, VICTIM + 1)]),
        (with_row_of_hidden_entry, [("FOREIGN", 55, 56)]),
        (of_another_log, [("CHANGED", 0, 50), ("CHANGED", 62, 82), ("CHANGED", 84, 180)]),
        (lambda made: DeltaTable(made / "table").restore(1), [("MISSING", 100, 180)]),
    ],
    ids=["row deleted", "rows around a seam", "row twice", "body", "term", "position", "time", "null", "hidden entry",
         "another log", "RESTORE"],
)  # fmt: skip
def test_difference_of_archive_is_a_finding_with_its_indexes(
    made: Path, damage: Callable[[Path], Any], expected: list[tuple[str, int, int]]
) -> None:
    damage(made)
    summary = audit(made, report=str(made / "page.html"))
    assert summary["verdict"] == "INCONSISTENT"
    assert brief(summary) == [(f"ARCHIVE_{kind}", ARCHIVE, start, end) for kind, start, end in expected]
    assert summary["coverage"][ARCHIVE]["percent"] == 100.0
    assert "dledger-archive" in summary["page"]
    assert str(made / "table") in summary["page"]


def test_difference_of_deleted_entries_is_a_lost_range(made: Path) -> None:
    with StoreWriter(made / "n0", term=2, segment_bytes=1 << 13) as writer:
        for _ in range(15):
            writer.append_numbers(10)
        first = writer.trim()
    assert first > 180
    DeltaTable(made / "table").delete(f'"index" = {VICTIM}')
    summary = audit(made, "a")
    assert brief(summary) == [("ARCHIVE_LOST", ARCHIVE, 100, 180)]
    assert (summary["coverage"][ARCHIVE]["percent"], summary["verdict"]) == (100.0, "INCONSISTENT")


def rewrite_entry(store: Path, index: int) -> None:
    """Change the body of an entry and its CRC, as no damaged disk does."""
    path, offset = place_of(store, index)
    data = path.read_bytes()
    length = int.from_bytes(data[offset + 44 : offset + 48])
    body = bytes([data[offset + 48] ^ 1]) + data[offset + 49 : offset + 48 + length]
    overwrite(path, offset + 40, crc32(body).to_bytes(4) + length.to_bytes(4) + body)


def test_archive_decides_which_of_two_replicas_is_damaged(made: Path) -> None:
    rewrite_entry(made / "b", VICTIM)
    without = audit(made, archive=None)
    assert brief(without) == [("CORRUPT", "a,b", VICTIM, VICTIM + 1)]
    summary = audit(made)
    assert brief(summary) == [("CORRUPT", "b", VICTIM, VICTIM + 1)]
    assert summary["findings"][0]["agree"] == ["a", ARCHIVE]


@pytest.mark.parametrize("mode", ["digest", "full"])
def test_single_replica_is_compared_with_archive(made: Path, mode: str) -> None:
    summary = audit(made, "b", mode=mode)
    assert (brief(summary), summary["verdict"]) == ([], "INCOMPLETE")  # nothing has its entries after the archive
    assert "[0, 180)" in summary["incomplete"][0]
    assert summary["coverage"]["b"]["entries_compared"] == 180
    rewrite_entry(made / "b", VICTIM)
    summary = audit(made, "b", mode=mode)
    assert brief(summary) == [("CORRUPT", "b", VICTIM, VICTIM + 1)]
    assert summary["verdict"] == "INCONSISTENT"


def test_table_that_cannot_be_read_leaves_audit_incomplete(made: Path) -> None:
    for path in (made / "table").glob("*.parquet"):
        path.unlink()
    summary = audit(made)
    assert (brief(summary), summary["verdict"], summary["coverage"][ARCHIVE]["percent"]) == ([], "INCOMPLETE", 0.0)
    assert "the table cannot be read" in summary["incomplete"][0]


def recorded(made: Path, *names: str) -> tuple[dict[str, Any], Any, Any]:
    options = Options.parse({"replicas": tuple(f"{name}={made / name}" for name in names), "archive": "true"})
    snapshot = take_snapshot(options)
    return dict(snapshot), snapshot, take_archives(options, snapshot)


def test_ranges_are_compared_with_one_replica_in_turn_and_all_in_full_mode(made: Path) -> None:
    _, snapshot, archives = recorded(made, "a", "b")
    trimmed = {group: (found[0], replace(found[1], first_index=70)) for group, found in snapshot.items()}
    plans = {mode: plan_recorded(trimmed, archives, mode=mode).to_pylist() for mode in ("digest", "full", "quick")}
    assert [(row["start"], row["end"], row["replicas"][1:]) for row in plans["digest"]] == [
        (0, 60, ["a"]), (60, 100, ["a"]), (100, 180, ["a"]),
    ]  # fmt: skip
    assert [row["replicas"][1:] for row in plans["full"]] == [["a"], ["a"], ["a", "b"]]
    assert [row["start"] for row in plans["quick"]] == [0, 60, 100]


def test_ranges_equal_within_their_age_are_trusted(made: Path) -> None:
    _, snapshot, archives = recorded(made, "a")
    [(group, archived)] = archives.items()
    replicas = [each for found in rows_snapshot(snapshot, archives).values() for each in found]
    ranges, expected = plan_recorded(snapshot, archives), recorded_digests(archives)

    def row(one: AuditedReplica, start: int, end: int, **more: Any) -> dict[str, Any]:
        known = {"group": group, "end": end, "content": expected[group, start, end], "log_uuid": one.log_uuid}
        return digest_row(one.name, start, **(known | {"source": one.source} | more))

    rows = [row(one, start, end) for one in replicas for start, end in ((0, 60), (60, 100), (100, 180))]
    old = NOW - timedelta(days=9)
    for changed, trusted in (
        ([], {0, 60, 100}),
        ([row(replicas[0], 0, 60, content=b"other", read_at=NOW + timedelta(1))], {60, 100}),
        ([row(replicas[1], 60, 100, problem="unread", read_at=NOW + timedelta(1))], {0, 100}),
    ):
        digests = pa.Table.from_pylist([*rows, *changed], DIGESTS)
        now = NOW + timedelta(days=2)
        found = trust_recorded(ranges, digests, replicas, archives, age=timedelta(7), now=now, percent=0)
        assert {one["start"] for one in found.to_pylist() if one["proven_at"]} == trusted
    aged = pa.Table.from_pylist([one | {"read_at": old} for one in rows], DIGESTS)
    found = trust_recorded(ranges, aged, replicas, archives, age=timedelta(7), now=NOW, percent=0)
    assert found["proven_at"].null_count == 3
    assert archived.recorded[0].end == 60


def test_logs_without_archive_are_refused(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    java = golden.extract(golden.REUSED, "n0/dledger-n0", tmp_path / "java")
    with StoreWriter(tmp_path / "other") as plain:
        plain.append_numbers(5)
    for arguments, name in (
        (("--replica", f"a={java}"), "Java"),
        (("--replica", f"a={plain.path}"), "no archive"),
        (("--replica", f"archive={made / 'a'}"), "'archive'"),
    ):
        code, summary, err = run(capsys, *arguments, "--archive", "true", "--table", str(tmp_path / "audit"))
        assert (code, summary["error"], name in err) == (3, "CONFIG", True), err
    for location, name in ((str(tmp_path / "nothing"), "cannot be read"), (str(made / "renamed"), "term")):
        if name == "term":
            rows = table_of(made)
            write_deltalake(
                made / "renamed", rows.rename_columns([*rows.column_names[:2], "epoch", *rows.column_names[3:]])
            )
        arguments = ("--replica", f"a={made / 'a'}", "--archive", location, "--table", str(tmp_path / "audit"))
        code, summary, err = run(capsys, *arguments)
        assert (code, summary["error"], name in err) == (3, "DLEDGER_ARCHIVE_TABLE", True), err
    assert not (tmp_path / "audit").exists()


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(3, data_segment_bytes=1 << 16, retain_bytes=1 << 16, **SLOW_ELECTIONS) as running:
        yield running


@pytest.mark.spark
@pytest.mark.integration
def test_archive_of_nodes_is_audited_below_their_first_index(
    spark: Any, cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, result = tmp_path / "table", tmp_path / "audit"
    with Client(cluster.peers) as client:
        client.append([b"%06d" % number + b"x" * 1000 for number in range(100)])
        job = DirectJob(client, table).start()
        assert job.prove(until=60).end == 60
        assert job.prove(until=90).end == 90
        for at in range(100, 400, 50):
            client.append([b"%06d" % number + b"x" * 1000 for number in range(at, at + 50)])
        first = soon(lambda: client.bounds().first_index, 120, every_s=0.5)
        last = client.bounds().end
        soon(lambda: [node.commit_index >= last - 1 for node in client.metadata().nodes] == [True] * 3)
    assert first > 0
    arguments = ["--peers", cluster.peers, "--table", str(result), "--archive"]
    code, done, err = run(capsys, *arguments, "true")
    assert (code, done["verdict"]) == (0, "CONSISTENT"), err
    assert (done["coverage"][ARCHIVE]["entries_compared"], done["coverage"][ARCHIVE]["percent"]) == (90, 100.0)
    copy = tmp_path / "copy"
    write_deltalake(copy, DeltaTable(table).to_pyarrow_table())
    code, done, err = run(capsys, *arguments, str(copy), "--skip-proven", "7d", "--reread-share", "0")
    assert (code, done["coverage"][ARCHIVE]["percent"]) == (0, 100.0), err  # a copy at another place is read itself
    assert done["cost"]["bytes_read"][ARCHIVE] > 60_000
    code, done, err = run(capsys, *arguments, str(copy), "--skip-proven", "7d", "--reread-share", "0")
    assert (code, done["cost"]["bytes_read"].get(ARCHIVE), done["coverage"][ARCHIVE]["percent"]) == (0, None, 100.0), (
        err
    )
    indexes = sorted(DeltaTable(copy).to_pyarrow_table()["index"].to_pylist())
    victim = indexes[5]
    DeltaTable(copy).delete(f'"index" = {victim}')
    code, done, err = run(capsys, *arguments, str(copy), "--report", str(tmp_path / "page.html"))
    found = [one for one in done["findings"] if one["replica"] == ARCHIVE]
    kinds = ("ARCHIVE_LOST", 0, 60) if first > 0 else ("ARCHIVE_MISSING", victim, victim + 1)
    assert (code, [(one["class"], one["start"], one["end"]) for one in found]) == (1, [kinds]), err
    rows = spark.read.format("delta").load(str(result / "audit_findings")).where("replica = 'archive'").collect()
    assert [(row["class"], row["start"], row["end"]) for row in rows] == [kinds]
    assert "ARCHIVE_LOST" in (tmp_path / "page.html").read_text()
    assert ArchiveTable(str(table)).count("default", 0, 90) == len(indexes)


def test_audit_reads_version_that_is_new_when_it_begins(made: Path) -> None:
    assert brief(audit(made)) == []
    DeltaTable(made / "table").delete(f'"index" = {VICTIM}')  # the files of the version before are still there
    assert brief(audit(made)) == [("ARCHIVE_MISSING", ARCHIVE, VICTIM, VICTIM + 1)]
