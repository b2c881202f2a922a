"""Checkpoints of earlier versions: this version resumes from each, without gap or duplicate."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest

from dledger_core import Client, LocalCluster
from tests.spark_connector.engine import read_all
from tests.spark_connector.kept_checkpoint import GROUPS, ROWS, STORE, TESTDATA, go_on, rows
from tests.support.archives import unpack


@pytest.mark.spark
@pytest.mark.integration
@pytest.mark.parametrize("archive", sorted(TESTDATA.glob("checkpoint-*.tar.xz")), ids=lambda path: path.name)
def test_query_resumes_from_kept_checkpoint(dledger: Any, archive: Path, tmp_path: Path) -> None:
    with tarfile.open(archive) as tar:
        unpack(tar, tmp_path)
    checkpoint = tmp_path / "checkpoint"
    replayed = max(int(path.name) for path in (checkpoint / "offsets").iterdir() if path.name.isdigit())
    assert not (checkpoint / "commits" / str(replayed)).exists()
    with LocalCluster(1, tmp_path / "cluster", GROUPS, **STORE) as cluster, Client(cluster.peers, "target") as target:
        assert read_all(target) == rows(0, 60)
        query = go_on(dledger, cluster.peers, checkpoint)
        assert query.recentProgress[0]["batchId"] == replayed
        assert query.recentProgress[0]["numInputRows"] > 0
        assert read_all(target) == rows(0, ROWS)
