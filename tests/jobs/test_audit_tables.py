"""The passes and tables of an audit on Spark, step by step."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jobs._audit import pipeline
from jobs._audit.compare import compare_entries
from jobs._audit.digests import compare_digests
from jobs._audit.model import DIGESTS, FINDINGS, RESULTS, AuditFinding, Class
from jobs._audit.plan import ReadTask, sections
from jobs._audit.replicas import store_replicas
from tests.jobs.auditing import NOW, SPAN, digest_row, digest_table, digests, overwrite
from tests.spark_connector.store_writer import StoreWriter

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two stores, the second with a body that is damaged."""
    directory = tmp_path_factory.mktemp("stores")
    with StoreWriter(directory / "a") as writer:
        writer.append_numbers(3000, "a body of some length")
    shutil.copytree(writer.path, directory / "b")
    overwrite(sorted((directory / "b" / "data").iterdir())[0], 5000, b"\xff\xff")
    return {"a": writer.path, "b": directory / "b"}


def test_passes_on_spark_equal_their_steps_without_spark(spark: Any, stores: dict[str, Path]) -> None:
    replicas = store_replicas(stores)
    (part,) = sections(replicas)
    tasks = [ReadTask(replica, part.start, part.end, SPAN) for replica in replicas]
    order = [("replica", "ascending"), ("start", "ascending")]
    found = pipeline.digest_pass(spark, tasks, "run")
    assert found.drop_columns("read_at").sort_by(order) == digests(replicas).drop_columns("read_at").sort_by(order)
    drill = [row for row in compare_digests(found).to_pylist() if row["drill"]]
    entries = pipeline.entry_pass(spark, [(replicas, row["start"], row["end"]) for row in drill])
    expected = [compare_entries(replicas, row["start"], row["end"]) for row in drill]
    assert entries == pa.Table.from_pylist(expected, RESULTS)
    assert entries["findings"][0][0]["class"].as_py() == "CORRUPT"
    assert pipeline.index_pass(spark, replicas)["findings"].to_pylist() == [[], []]
    assert pipeline.digest_pass(spark, [], "run") == DIGESTS.empty_table()


def test_appended_rows_are_read_again_and_table_exists_without_rows(spark: Any, tmp_path: Path) -> None:
    directory = str(tmp_path / "a b%20ü")
    assert pipeline.earlier_digests(spark, directory) is None
    finding = AuditFinding.of(Class.CORRUPT, "g", "n0", 5, 6, {"stored": "00"}).to_row() | {
        "run_id": "run",
        "found_at": NOW,
    }
    for rows in ([], [finding], []):
        pipeline.append(spark, pa.Table.from_pylist(rows, FINDINGS), f"{directory}/audit_findings")
    (row,) = spark.read.format("delta").load(f"{directory}/audit_findings").collect()
    assert (row["class"], row["severity"], row["evidence"]) == ("CORRUPT", "critical", '{"stored": "00"}')
    assert row["found_at"].timestamp() == NOW.timestamp()
    digest_rows = digest_table(digest_row("ü", damaged=[1, 2]), digest_row("b", 1 << 62, log_uuid=None))
    for _ in range(2):
        pipeline.append(spark, digest_rows, f"{directory}/audit_ranges")
    earlier = pipeline.earlier_digests(spark, directory)
    assert earlier is not None
    found = earlier.where(earlier["read_at"] >= NOW).toArrow().select(DIGESTS.names).cast(DIGESTS)
    assert sorted(map(repr, found.to_pylist())) == sorted(map(repr, 2 * digest_rows.to_pylist()))
