"""The job ``dledger-archive`` on real nodes and with real Spark: from nothing to a proved archive, and its findings."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pytest
from deltalake import DeltaTable
from pyspark.errors import PySparkException

from dledger_core import Client, LocalCluster
from dledger_core.archive import ArchiveTable
from jobs.archive import command
from spark_connector import register
from tests.support.object_store import KEY, SECRET, bucket_on_loopback
from tests.support.run_job import run_in_process
from tests.support.slow_elections import SLOW_ELECTIONS
from tests.support.soon import soon
from tests.test_guides import blocks

run = partial(run_in_process, command)
GUIDE = Path(__file__).parents[2] / "spark_connector" / "HISTORY.md"
ROWS = 600


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(3, data_segment_bytes=1 << 16, retain_bytes=1 << 16, **SLOW_ELECTIONS) as running:
        yield running


@pytest.mark.spark
@pytest.mark.integration
def test_archive_is_written_proved_read_across_the_seam_and_verified(
    spark: Any, cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table"
    arguments = ["--peers", cluster.peers, "--table", str(table)]
    with Client(cluster.peers) as client:
        client.append([b"%06d" % number + b"x" * 1000 for number in range(100)])
        code, done, _ = run(capsys, *arguments, "--until", "60", "--write")
        assert (code, done["status"], done["archived_end"], done["findings"]) == (0, "ok", 60, [])
        spark.conf.set("spark.sql.session.timeZone", "Asia/Kathmandu")
        spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')")
        # Renamed columns, whose names in the files differ.
        spark.sql(f"ALTER TABLE delta.`{table}` SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')")
        spark.sql(f"ALTER TABLE delta.`{table}` ADD COLUMN note STRING")
        code, done, _ = run(capsys, *arguments, "--until", "90", "--write")
        assert (code, done["archived_end"], done["findings"]) == (0, 90, [])
        spark.conf.set("spark.sql.session.timeZone", "UTC")
        rows = spark.read.format("delta").load(str(table)).where("index >= 60")
        indexes = [row[0] for row in rows.select("index").orderBy("index").collect()]
        # A deletion vector hides a row that was proved: its number of rows in the statistics stays.
        spark.sql(f"DELETE FROM delta.`{table}` WHERE `index` = {indexes[3]}")
        assert ArchiveTable(str(table)).count("default", 60, 90) == len(indexes) - 1
        reported = ["--report", str(tmp_path / "page.html"), "--findings", str(tmp_path / "findings")]
        code, done, err = run(capsys, *arguments, "--until", "95", *reported)
        assert (code, done["status"]) == (1, "findings")
        assert [(one["kind"], one["start"]) for one in done["findings"]] == [("missing", indexes[3])]
        assert f"missing [{indexes[3]}," in err
        assert str(indexes[3]) in (tmp_path / "page.html").read_text()
        [kept] = DeltaTable(tmp_path / "findings").to_pyarrow_table().to_pylist()
        assert {name: kept[name] for name in done["findings"][0]} == done["findings"][0]
        assert (kept["group"], kept["table"]) == ("default", str(table))
        code, done, _ = run(capsys, *arguments, "--verify", "--write")
        assert (code, done["ranges"], done["findings"]) == (0, 2, [])
        spark.sql(f"ALTER TABLE delta.`{table}` RENAME COLUMN term TO epoch")
        code, done, _ = run(capsys, *arguments)
        assert (code, done["error"], "term" in done["message"]) == (3, "DLEDGER_ARCHIVE_TABLE", True)
        spark.sql(f"ALTER TABLE delta.`{table}` RENAME COLUMN epoch TO term")
        for at in range(100, ROWS, 50):
            client.append([b"%06d" % number + b"x" * 1000 for number in range(at, at + 50)])
        soon(lambda: client.bounds().first_index > 0, every_s=0.5)
        register(spark)
        guide: dict[str, Any] = {"spark": spark, "peers": cluster.peers}
        exec(blocks(GUIDE.read_text(), "Read archive and log as one")[0], guide)
        found = guide["history"].orderBy("index").collect()
        assert [bytes(row["body"][:6]) for row in found] == [b"%06d" % number for number in range(ROWS)]
        check_moved_table(spark, guide, table, [row["index"] for row in found], capsys)
        code, done, _ = run(capsys, *arguments, "--dry-run", "--until", str(client.bounds().end))
        assert (code, done["archived_end"]) == (0, 90)
        code, done, _ = run(capsys, *arguments, "--end")
        assert (code, client.metadata().archive) == (0, None)


def check_moved_table(
    spark: Any, guide: dict[str, Any], table: Path, indexes: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy of the table on object storage is read; its credentials are in nothing that Spark shows or stores."""
    capsys.readouterr()
    with bucket_on_loopback() as bucket:
        bucket.upload(table, "moved")
        storage = {f"archive.{name}": value for name, value in bucket.storage.items()}
        moved = guide["log"].option("archive", f"s3://{bucket.name}/moved").options(**storage)
        history = moved.option("startingOffsets", "earliest").load()
        assert [row[0] for row in history.select("index").orderBy("index").collect()] == indexes
        history.explain(extended=True)
        history.explain(mode="formatted")
        failing = moved.option("archive", "s3://none/moved").option("startingOffsets", "earliest").load()
        with pytest.raises(PySparkException, match="DLEDGER_ARCHIVE_TABLE") as failed:
            failing.collect()
    shown = capsys.readouterr()
    assert "dledger" in shown.out
    events = Path(unquote(urlparse(spark.conf.get("spark.eventLog.dir")).path))
    stored = soon(lambda: [one for path in events.rglob("events_*") if "s3://none/moved" in (one := path.read_text())])
    assert [text for text in (*shown, str(failed.value), *stored) for secret in (KEY, SECRET) if secret in text] == []
