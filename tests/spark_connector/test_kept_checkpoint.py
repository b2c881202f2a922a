"""Checkpoints of earlier versions: this version resumes from each, without gap or duplicate."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from dledger_core import Client, LocalCluster
from spark_connector.offsets import StreamOffset
from tests.spark_connector.kept_checkpoint import GROUPS, ROWS, STORE, TESTDATA, go_on, rows
from tests.support.archives import unpack

ARCHIVES = sorted(TESTDATA.glob("checkpoint-*.tar.xz"))


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with tarfile.open(request.param) as tar:
        unpack(tar, tmp_path)
    return tmp_path


def test_there_is_one() -> None:
    assert ARCHIVES


def test_its_offsets_can_be_read(kept: Path) -> None:
    entries = [path for path in (kept / "checkpoint" / "offsets").iterdir() if path.name.isdigit()]
    offsets = [StreamOffset.from_json(json.loads(path.read_text().splitlines()[-1])) for path in entries]
    assert len(offsets) >= 4
    for offset in offsets:
        assert list(offset.groups) == ["source"]
        assert offset.groups["source"].log is not None


@pytest.mark.spark
@pytest.mark.integration
def test_query_resumes_from_kept_checkpoint(dledger: Any, kept: Path) -> None:
    checkpoint = kept / "checkpoint"
    replayed = max(int(path.name) for path in (checkpoint / "offsets").iterdir() if path.name.isdigit())
    assert not (checkpoint / "commits" / str(replayed)).exists()
    with LocalCluster(1, kept / "cluster", GROUPS, **STORE) as cluster, Client(cluster.peers, "target") as target:
        before = shown(target)
        assert before == rows(0, 60)
        query = go_on(dledger, cluster.peers, checkpoint)
        assert query.recentProgress[0]["batchId"] == replayed
        assert query.recentProgress[0]["numInputRows"] > 0
        assert shown(target) == rows(0, ROWS)


def shown(client: Client) -> list[bytes]:
    return list(client.read(0, 1 << 40, consistency="linearizable")["body"].to_pylist())
