"""Spark checkpoints of earlier versions: this version resumes from each, without gap or duplicate."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest

from dledger_core import Client, LocalCluster
from tests.spark_connector.engine import read_all
from tests.spark_connector.kept_checkpoint import GROUPS, QUERIES, READ, ROWS, STORE, rows, to_table
from tests.support.archives import unpack

ARCHIVES = sorted((Path(__file__).parents[1] / "compatibility").glob("*/checkpoint.tar.xz"))


@pytest.mark.spark
@pytest.mark.integration
@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.parent.name)
def test_query_resumes_from_kept_checkpoint(dledger: Any, archive: Path, tmp_path: Path) -> None:
    with tarfile.open(archive) as tar:
        unpack(tar, tmp_path)

    def table() -> list[bytes]:
        found = dledger.read.format("delta").load(str(tmp_path / "table")).select("body").collect()
        return sorted(bytes(row["body"]) for row in found)

    with LocalCluster(1, tmp_path / "cluster", GROUPS, **STORE) as cluster, Client(cluster.peers, "target") as target:
        assert read_all(target) == rows(0, READ) == table()
        for name, resume in QUERIES.items():
            checkpoint = tmp_path / name
            replayed = max(int(path.name) for path in (checkpoint / "offsets").iterdir() if path.name.isdigit())
            assert not (checkpoint / "commits" / str(replayed)).exists()
            query = resume(dledger, cluster.peers, tmp_path)
            assert query.recentProgress[0]["batchId"] == replayed
            # Delta skips a micro-batch that it has committed without reading it.
            assert query.recentProgress[0]["numInputRows"] > 0 or resume is to_table
        assert read_all(target) == rows(0, ROWS) == table()
