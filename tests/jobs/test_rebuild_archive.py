"""Consume queues rebuilt from the first archived entry on, across the seam between archive and log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake

from dledger_core import Client, LocalCluster
from dledger_core.rocketmq import encode_messages
from jobs import rebuild_consume_queue
from jobs._rebuild.plan import START_PIN, plan_for
from tests.jobs.conftest import Rebuild
from tests.support.archiving import DirectJob
from tests.support.slow_elections import SLOW_ELECTIONS
from tests.support.soon import soon

pytestmark = [pytest.mark.spark, pytest.mark.integration]
QUEUES = 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Nodes that keep about 64 KiB of each log."""
    with LocalCluster(
        3, groups=("a", "plain", "read", "late"), data_segment_bytes=1 << 16, retain_bytes=1 << 16, **SLOW_ELECTIONS
    ) as nodes:
        yield nodes


def append(client: Client, first: int, count: int) -> None:
    """Append messages that alternate between the queues; the number of each is in its body."""
    for at in range(first, first + count, 50):
        bodies = [b"%06d" % number + b"x" * 1000 for number in range(at, at + 50)]
        ids = [number % QUEUES for number in range(at, at + 50)]
        client.append(encode_messages(["T"] * 50, ids, bodies).to_pylist())


def units(spark: Any, table: Path) -> list[tuple[int, int, int]]:
    """Queue, offset and index of each unit, in index order."""
    rows = spark.read.format("delta").load(str(table)).orderBy("index").collect()
    return [(row["queue_id"], row["queue_offset"], row["index"]) for row in rows]


def copied(table: Path, path: Path, term: int = 0) -> Path:
    """Copy a table, as that of another log if its terms differ."""
    rows = DeltaTable(table).to_pyarrow_table()
    terms = pc.add(rows["term"], pa.scalar(term, pa.int64()))
    write_deltalake(path, rows.set_column(rows.schema.get_field_index("term"), "term", terms))
    return path


def test_queues_continue_across_the_seam_and_damage_writes_no_row(
    spark: Any, cluster: LocalCluster, tmp_path: Path, run_rebuild: Rebuild
) -> None:
    peers: dict[str, Any] = {"peers": cluster.peers, "groups": "a"}
    archived, table = tmp_path / "archive", tmp_path / "table"
    checkpoint, kept = tmp_path / "checkpoint", tmp_path / "kept"
    with Client(cluster.peers, "a") as client:
        append(client, 0, 100)
        job = DirectJob(client, archived).start()
        assert job.prove(until=60).end == 60
        assert job.prove(until=95).end == 95
        code, summary = run_rebuild(**peers, table=kept, checkpoint=checkpoint, archive="true")
        assert (code, summary["rows"], summary["start"]) == (0, 100, 0)
        append(client, 100, 300)
        first = soon(lambda: client.bounds().first_index, 120, every_s=0.5)
        assert first > 0
        code, without = run_rebuild(**peers, table=tmp_path / "without")
        assert (code, without["start"], without["rows"] < 400) == (0, first, True)
        code, summary = run_rebuild(**peers, table=table, archive="true")
    assert (code, summary["start"], summary["rows"], summary["dense"]) == (0, 0, 400, True)
    found = units(spark, table)
    assert [(queue, offset) for queue, offset, _ in found] == [(n % QUEUES, n // QUEUES) for n in range(400)]
    seam = next(number for number, unit in enumerate(found) if unit[2] >= first)
    assert 0 < seam < 400  # both queues have messages on both sides
    code, summary = run_rebuild(**peers, table=kept, checkpoint=checkpoint, archive="true")
    assert (code, summary["rows"]) == (0, 400)
    assert units(spark, kept) == found
    damaged, other = copied(archived, tmp_path / "damaged"), copied(archived, tmp_path / "other", term=5)
    DeltaTable(damaged).delete(f'"index" = {found[seam // 2][2]}')  # below the log's first index
    for location in (damaged, other):
        code, summary = run_rebuild(**peers, table=tmp_path / "new", archive=location)
        assert (code, summary.get("error")) == (4, "DLEDGER_ARCHIVE_DAMAGED"), summary
        assert str(location) in summary["message"]
        assert not (tmp_path / "new").exists()
    code, summary = run_rebuild(**peers, table=table, archive=damaged)
    assert (code, units(spark, table) == found) == (4, True)
    assert run_rebuild(**peers, table=table, archive=copied(archived, tmp_path / "moved"))[0] == 0


def test_log_without_archive_and_wrong_table_are_refused_before_spark_starts(
    cluster: LocalCluster, tmp_path: Path, run_rebuild: Rebuild
) -> None:
    peers: dict[str, Any] = {"peers": cluster.peers, "groups": "plain", "table": tmp_path / "table"}
    with Client(cluster.peers, "plain") as client:
        append(client, 0, 50)
        code, summary = run_rebuild(**peers, archive="true")
        assert (code, summary["error"], "no archive" in summary["message"]) == (3, "CONFIG", True)
        DirectJob(client, tmp_path / "archive").start().prove(until=20)
    code, summary = run_rebuild(**peers, archive=tmp_path / "nothing")
    assert (code, summary["error"]) == (3, "DLEDGER_ARCHIVE_TABLE")
    code, summary = run_rebuild(**peers, archive="true", dry_run=True)
    assert (code, summary["start"], summary["dry_run"]) == (0, 0, True)
    assert not (tmp_path / "table").exists()
    assert json.dumps(summary)


def test_retention_continues_after_a_finished_rebuild(
    cluster: LocalCluster, tmp_path: Path, run_rebuild: Rebuild
) -> None:
    """Without an archive its reader pins what it has planned, for ten minutes."""
    with Client(cluster.peers, "read") as client:
        append(client, 0, 300)
        code, summary = run_rebuild(peers=cluster.peers, groups="read", table=tmp_path / "table")
        assert (code, summary["rows"] > 0) == (0, True)
        append(client, 300, 300)  # more than the nodes keep
        soon(lambda: client.bounds().first_index > 300, every_s=0.5)


def test_entries_deleted_between_plan_and_stream_are_a_loss(
    cluster: LocalCluster, tmp_path: Path, run_rebuild: Rebuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream from the first stored entry would leave them out, with exit code 0."""
    with Client(cluster.peers, "late") as client:
        append(client, 0, 100)

        def planned(options: Any) -> Any:
            plan = plan_for(options)
            client.pin(START_PIN, 0, 0.0)  # as if Spark took longer to start than it lasts
            start, end = plan.ranges["late"]
            append(client, 100, 50)  # a segment more than the nodes keep
            soon(lambda: client.bounds().first_index > start, every_s=0.5)
            assert client.bounds().first_index < end
            return plan

        monkeypatch.setattr(rebuild_consume_queue, "plan_for", planned)
        code, summary = run_rebuild(peers=cluster.peers, groups="late", table=tmp_path / "table")
        assert (code, summary["error"]) == (3, "DLEDGER_DATA_LOSS.RETENTION"), summary
        assert not (tmp_path / "table").exists()
