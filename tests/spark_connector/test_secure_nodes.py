"""Reading and writing nodes with security: TLS files and tokens as options, permissions of the principal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException

from dledger_core import LocalCluster
from dledger_core.certificates import principal_entry
from tests.support.soon import soon

pytestmark = [pytest.mark.spark, pytest.mark.integration]


@pytest.fixture(scope="module")
def secure() -> Iterator[LocalCluster]:
    with LocalCluster(1, tls=True) as cluster:
        yield cluster


def options(cluster: LocalCluster, token: Path | None = None) -> dict[str, str]:
    assert cluster.tls is not None
    return {"peers": cluster.peers, "tls.ca": str(cluster.tls.ca), "token.file": str(token or cluster.token)}


def test_rows_are_written_and_read_with_tls(dledger: Any, secure: LocalCluster) -> None:
    rows = dledger.createDataFrame([(f"row {number}",) for number in range(50)], ["body"])
    rows.write.format("dledger").options(**options(secure)).mode("append").save()
    found = dledger.read.format("dledger").options(**options(secure)).load()
    assert found.count() == 50


def test_file_of_client_config_names_nodes_and_token(dledger: Any, secure: LocalCluster, tmp_path: Path) -> None:
    given = options(secure)
    config = tmp_path / "client.toml"
    names = {"peers": "peers", "tls-ca": "tls.ca", "token-file": "token.file"}
    config.write_text("".join(f"{key} = '{given[name]}'\n" for key, name in names.items()))
    rows = dledger.createDataFrame([(f"by file {number}",) for number in range(5)], ["body"])
    rows.write.format("dledger").option("client.config", str(config)).mode("append").save()
    found = dledger.read.format("dledger").option("client.config", str(config)).load()
    assert found.where("cast(body as string) like 'by file%'").count() == 5


def test_reader_without_append_is_forbidden_to_write(dledger: Any, secure: LocalCluster, tmp_path: Path) -> None:
    assert secure.tls is not None
    token = tmp_path / "token"
    token.write_text("a-reader")
    principals = Path(secure.tls.ca).with_name("principals.toml")
    principals.write_text(principals.read_text() + principal_entry("reader", "a-reader"))
    with secure.client() as client:
        client.append([b"x"])

    def reads() -> bool:  # once the node has read the file again
        with contextlib.suppress(PySparkException):
            return int(dledger.read.format("dledger").options(**options(secure, token)).load().count()) > 0
        return False

    soon(reads, timeout_s=60)
    rows = dledger.createDataFrame([("y",)], ["body"])
    with pytest.raises(PySparkException, match="FORBIDDEN"):
        rows.write.format("dledger").options(**options(secure, token)).mode("append").save()


def test_token_is_in_nothing_that_spark_shows_or_stores(
    dledger: Any, secure: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert secure.token is not None
    token = secure.token.read_text().strip()
    with secure.client() as client:
        client.append([b"x"])
    rows = dledger.readStream.format("dledger").options(**options(secure), startingOffsets="earliest").load()
    writer = rows.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "done"))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    query.explain(extended=True)
    dledger.read.format("dledger").options(**options(secure)).load().explain(mode="formatted")
    shown = capsys.readouterr()
    assert "dledger" in shown.out
    settings = dledger.sparkContext.getConf().getAll()  # the page Environment of Spark's UI
    progress = [each.json for each in query.recentProgress]
    assert progress
    assert [text for text in (shown.out, shown.err, *map(str, settings), *progress) if token in text] == []
    stored = [path for path in (tmp_path / "done").rglob("*") if path.is_file()]
    assert any(path.parent.name == "offsets" for path in stored)
    assert [path for path in stored if token.encode() in path.read_bytes()] == []


def test_missing_token_file_is_reported_before_any_task(dledger: Any, secure: LocalCluster, tmp_path: Path) -> None:
    with pytest.raises(PySparkException, match="CONFIG"):
        dledger.read.format("dledger").options(**options(secure, tmp_path / "none")).load().count()
