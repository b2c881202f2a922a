"""``dledger salvage``: the result is a store like any other, and an interrupted run continues."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from dledger_core import Client, LocalCluster, open_store
from dledger_core.cli import main
from dledger_core.errors import ConfigError
from dledger_core.rocketmq.convert import ConvertRequest, convert, store_directory
from tests.rocketmq.convert.stores import request
from tests.rocketmq.convert.test_resume import TARGET, bytes_of
from tests.spark_connector.store_writer import StoreWriter
from tests.support.damage import flip_entry
from tests.support.faulty_files import Crash, FaultyFiles


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A store of 300 entries in files of 4 KiB: one of them is missing, and entry 10 is damaged."""
    with StoreWriter(tmp_path, segment_bytes=1 << 12) as writer:
        for term in range(1, 7):
            writer.term = term
            writer.append_numbers(50)
    flip_entry(writer.path, 10)
    files = sorted((writer.path / "data").iterdir())
    files[len(files) // 2].unlink()
    return writer.path


def salvage(store: Path) -> ConvertRequest:
    return dataclasses.replace(request(store, TARGET, save_bytes=2_000), salvage=True)


def test_salvage_continues_after_crash_at_any_operation(damaged: Path) -> None:
    wanted, intact = salvage(damaged), FaultyFiles()
    report = convert(wanted, files=intact)
    assert [each.start for each in report.lost] == [10, report.lost[1].start]
    expected, operations = bytes_of(intact), intact.operations
    for at in range(1, operations, 4):
        files = FaultyFiles(seed=at)
        files.crash_at = at
        with pytest.raises(Crash):
            convert(wanted, files=files)
        files.crash(0.5)
        if TARGET / "meta/log.json" not in files.names:
            again = convert(wanted, files=files)
            assert (again.lost, again.digest, again.log_uuid) == (report.lost, report.digest, report.log_uuid)
        assert bytes_of(files) == expected


@pytest.mark.parametrize("damage", ["flipped", "lost file", "lost directory", "zeros"])
def test_entries_survive_damage_of_index(tmp_path: Path, damage: str) -> None:
    with StoreWriter(tmp_path) as writer:
        writer.append_numbers(300)
    index = writer.path / "index"
    first, *_ = sorted(index.iterdir())
    match damage:
        case "flipped":
            first.write_bytes(bytes(byte ^ 0x55 for byte in first.read_bytes()))
        case "lost file":
            first.unlink()
        case "lost directory":
            shutil.rmtree(index)
        case _:
            first.write_bytes(bytes(first.stat().st_size))
    result = CliRunner().invoke(main, ["salvage", str(writer.path), str(tmp_path / "saved"), "--format", "json"])
    assert (result.exit_code, json.loads(result.stdout)["lost"]) == (0, []), result.output
    with open_store(store_directory(tmp_path / "saved", "salvaged", "n0")) as saved:
        assert saved.read(0, 300)["body"].to_pylist() == [b"body-%d" % index for index in range(300)]


def test_commitlog_is_refused(tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    (tmp_path / "commitlog" / f"{0:020d}").write_bytes(bytes(1 << 12))
    with pytest.raises(ConfigError):
        convert(salvage(tmp_path / "commitlog"), files=FaultyFiles())


@pytest.mark.integration
def test_salvaged_store_is_served_as_a_log_of_its_own(tmp_path: Path) -> None:
    with LocalCluster(1, tmp_path / "old") as cluster, Client(cluster.peers) as client:
        client.append([b"body-%d" % number for number in range(1000)])
        old = client.metadata().log_uuid
    flip_entry(cluster.store_path("n0"), 500)
    nodes = LocalCluster(1, tmp_path / "new", groups=("salvaged",))
    report = convert(
        dataclasses.replace(
            request(cluster.store_path("n0"), nodes.store_path("n0", "salvaged"), group="salvaged"), salvage=True
        )
    )
    assert [(each.start, each.end) for each in report.lost] == [(500, 501)]
    with nodes, Client(nodes.peers, "salvaged") as client:
        client.append([b"later"])
        found = client.read(0, 1 << 20)
        assert client.metadata().log_uuid == report.log_uuid != old
    bodies = dict(zip(found["index"].to_pylist(), found["body"].to_pylist(), strict=True))
    assert 500 not in bodies
    assert list(bodies.values())[-1] == b"later"
    assert [body for body in bodies.values() if body != b"later"] == [
        b"body-%d" % number for number in range(1000) if number != 500 - min(bodies)
    ]
