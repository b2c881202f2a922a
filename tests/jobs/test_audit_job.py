"""The audit job as a whole: bad arguments, and real clusters and stores through Spark."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dledger_core import Client, LocalCluster
from jobs._audit import pipeline
from jobs._audit.compare import compare_entries
from jobs._audit.digests import compare_digests
from jobs._audit.model import DIGESTS, FINDINGS, RESULTS, AuditFinding, Class
from jobs._audit.plan import ReadTask, sections
from jobs._audit.replicas import store_replicas
from jobs.audit_replicas import command
from tests.jobs.auditing import NOW, SPAN, digest_row, digest_table, digests
from tests.spark_connector.store_writer import StoreWriter
from tests.support.damage import flip_entry, overwrite
from tests.support.run_job import run_in_process
from tests.support.slow_elections import SLOW_ELECTIONS
from tests.support.soon import soon

run = partial(run_in_process, command)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three nodes; each test uses a group of its own."""
    directory = tmp_path_factory.mktemp("audit")
    with LocalCluster(
        3, directory, groups=("equal", "flipped", "down"), data_segment_bytes=1 << 17, **SLOW_ELECTIONS
    ) as running:
        yield running


def fill(cluster: LocalCluster, group: str, count: int = 5000) -> None:
    """Append entries and waits until all nodes know that they are committed: an audit compares no others."""
    with Client(cluster.peers, group) as client:
        for start in range(0, count, 1000):
            bodies = [b"entry %06d " % i + b"." * (i % 50) for i in range(start, start + 1000)]
            last = client.append(bodies).last_index
        soon(lambda: [node.commit_index >= last for node in client.metadata().nodes] == [True] * 3)


@pytest.mark.spark
@pytest.mark.integration
def test_equal_replicas_are_consistent(
    spark: Any, cluster: LocalCluster, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fill(cluster, "equal")
    table = tmp_path / "audit"
    code, summary, err = run(capsys, "--peers", cluster.peers, "--groups", "equal", "--table", str(table))
    assert (code, summary["verdict"], summary["findings"], summary["incomplete"]) == (0, "CONSISTENT", [], []), err
    assert summary["compared"]["start"] == 0
    assert summary["compared"]["end"] > 5000  # control entries count
    assert set(summary["coverage"]) == {"n0", "n1", "n2"}
    assert {part["percent"] for part in summary["coverage"].values()} == {100.0}
    assert {part["entries_compared"] for part in summary["coverage"].values()} == {summary["compared"]["end"]}
    assert {node["commit_index"] for node in summary["replicas"]} == {summary["compared"]["end"] - 1}

    runs = spark.read.format("delta").load(str(table / "audit_runs")).collect()
    assert [(row.run_id, row.verdict) for row in runs] == [(summary["run_id"], "CONSISTENT")]
    ranges = spark.read.format("delta").load(str(table / "audit_ranges"))
    assert ranges.count() == 3 * ranges.select("start").distinct().count()
    assert spark.read.format("delta").load(str(table / "audit_findings")).count() == 0


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.integration
def test_flipped_byte_is_named_on_live_nodes_and_stores(
    spark: Any, cluster: LocalCluster, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    del spark
    fill(cluster, "flipped")
    victim = next(node for node in cluster.node_ids if node != cluster.leader("flipped"))
    flip_entry(cluster.store_path(victim, "flipped"), 2345)  # under a running node, as a disk would do it
    stores = {node: tmp_path / node for node in cluster.node_ids}
    code, summary, err = run(
        capsys, "--peers", cluster.peers, "--groups", "flipped", "--table", str(tmp_path / "audit")
    )
    check_flipped(code, summary, err, victim)

    for node, path in stores.items():
        shutil.copytree(cluster.store_path(node, "flipped"), path)
    replicas = [argument for node, path in stores.items() for argument in ("--replica", f"{node}={path}")]
    for mode in ("digest", "full"):
        code, summary, err = run(capsys, *replicas, "--mode", mode, "--dry-run")
        check_flipped(code, summary, err, victim)


@pytest.mark.spark
@pytest.mark.soak
def test_proven_ranges_are_read_again_in_turn(spark: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from delta.tables import DeltaTable

    with StoreWriter(tmp_path / "made") as writer:
        writer.append_numbers(2048)
    shutil.copytree(writer.path, tmp_path / "copy")
    table, page = tmp_path / "audit", tmp_path / "report.html"
    stores = ["--replica", f"a={writer.path}", "--replica", f"b={tmp_path / 'copy'}", "--table", str(table)]
    code, first, err = run(capsys, *stores, "--max-bytes-per-second", "100000000")
    assert (code, {part["kind"] for part in first["groups"][0]["provenance"]}) == (0, {"read now"}), err
    assert first["cost"]["bytes_read"] == {"a": 2048 * 48 + first["coverage"]["a"]["bytes_compared"]} | {
        "b": first["cost"]["bytes_read"]["a"]
    }

    # As if the first run had been killed: half of a's digests are there.
    DeltaTable.forPath(spark, str(table / "audit_ranges")).delete("replica = 'b' OR start > 0")
    flip_entry(writer.path, 5)  # not seen: this range of a is not read again
    code, second, err = run(capsys, *stores, "--resume", first["run_id"])
    assert (code, second["coverage_percent"], second["resumed"]) == (0, 100.0, first["run_id"]), err
    kinds = [(p["replica"], p["kind"], p["entries"]) for p in second["groups"][0]["provenance"]]
    assert sorted(kinds) == [
        ("a", f"read by run {first['run_id']}", 1024),
        ("a", "read now", 1024),
        ("b", "read now", 2048),
    ]

    code, third, err = run(capsys, *stores, "--skip-proven", "7d", "--reread-share", "50", "--report", str(page))
    assert (code, third["verdict"]) == (1, "INCONSISTENT"), err  # the oldest range of a is the one that was flipped
    (found,) = third["findings"]
    assert (found["class"], found["replica"], found["start"]) == ("CORRUPT", "a", 5)
    kinds = [(p["kind"][:9], p["entries"]) for p in third["groups"][0]["provenance"]]
    assert sorted(kinds) == [("proven on", 1024), ("proven on", 1024), ("read now", 1024), ("read now", 1024)]
    assert "INCONSISTENT" in page.read_text()


def check_flipped(code: int, summary: dict[str, Any], err: str, victim: str) -> None:
    assert (code, summary["verdict"]) == (1, "INCONSISTENT"), err
    (found,) = [finding for finding in summary["findings"] if finding["severity"] != "info"]
    assert (found["class"], found["replica"], found["start"], found["end"]) == ("CORRUPT", victim, 2345, 2346)
    assert (found["severity"], found["count"], found["disagree"]) == ("critical", 1, [victim])
    assert set(found["agree"]) == {"n0", "n1", "n2"} - {victim}


@pytest.mark.spark
@pytest.mark.integration
def test_unreachable_node_makes_audit_incomplete(
    spark: Any, cluster: LocalCluster, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    del spark
    fill(cluster, "down", 2000)
    away = next(node for node in cluster.node_ids if node != cluster.leader("down"))
    cluster.stop(away)
    try:
        code, summary, err = run(
            capsys, "--peers", cluster.peers, "--groups", "down", "--table", str(tmp_path / "a"), "--mode", "quick"
        )
    finally:
        cluster.restart(away)
    assert (code, summary["verdict"], summary["findings"]) == (2, "INCOMPLETE", []), err
    assert any(away in reason for reason in summary["incomplete"])
    assert summary["coverage"][away]["entries_eligible"] is None
    assert sorted(part["percent"] for part in summary["coverage"].values()) == [0.0, 100.0, 100.0]


@pytest.mark.spark
def test_appended_rows_are_read_again_and_table_exists_without_rows(spark: Any, tmp_path: Path) -> None:
    directory = str(tmp_path / "a b%20ü")
    assert pipeline.earlier_digests(spark, directory) is None
    finding = AuditFinding.of(Class.CORRUPT, "g", "n0", 5, 6, {"stored": "00"}).to_row()
    for rows in ([], [finding | {"run_id": "run", "found_at": NOW}], []):
        pipeline.append(spark, pa.Table.from_pylist(rows, FINDINGS), f"{directory}/audit_findings")
    (row,) = spark.read.format("delta").load(f"{directory}/audit_findings").collect()
    assert (row["class"], row["severity"], row["evidence"]) == ("CORRUPT", "critical", '{"stored": "00"}')
    assert row["found_at"].timestamp() == NOW.timestamp()
    ranges = digest_table(digest_row("ü", damaged=[1, 2]), digest_row("b", 1 << 62, log_uuid=None))
    for _ in range(2):
        pipeline.append(spark, ranges, f"{directory}/audit_ranges")
    earlier = pipeline.earlier_digests(spark, directory)
    assert earlier is not None
    found = earlier.where(earlier["read_at"] >= NOW).toArrow().select(DIGESTS.names).cast(DIGESTS)
    assert sorted(map(repr, found.to_pylist())) == sorted(map(repr, 2 * ranges.to_pylist()))


@pytest.mark.spark
def test_passes_on_spark_equal_their_steps_without_spark(spark: Any, tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "a") as writer:
        writer.append_numbers(3000, "a body of some length")
    shutil.copytree(writer.path, tmp_path / "b")
    overwrite(min((tmp_path / "b" / "data").iterdir()), 5000, b"\xff\xff")
    replicas = store_replicas({"a": writer.path, "b": tmp_path / "b"})
    (part,) = sections(replicas)
    found = pipeline.digest_pass(spark, [ReadTask(each, part.start, part.end, SPAN) for each in replicas], "run")
    order = [("replica", "ascending"), ("start", "ascending")]
    assert found.drop_columns("read_at").sort_by(order) == digests(replicas).drop_columns("read_at").sort_by(order)
    drill = [(replicas, row["start"], row["end"]) for row in compare_digests(found).to_pylist() if row["drill"]]
    entries = pipeline.entry_pass(spark, drill)
    assert entries == pa.Table.from_pylist([compare_entries(*each) for each in drill], RESULTS)
    assert entries["findings"][0][0]["class"].as_py() == "CORRUPT"
    assert pipeline.index_pass(spark, replicas)["findings"].to_pylist() == [[], []]
    assert pipeline.digest_pass(spark, [], "run") == DIGESTS.empty_table()
