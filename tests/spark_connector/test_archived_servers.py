"""Archive and log on real nodes: entries are proved, trimmed, and read from the first index on. No JVM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, write_deltalake

from dledger_core import Client, LocalCluster
from spark_connector.errors import ArchiveDamagedError, RetentionError
from spark_connector.options import DLedgerOptions
from spark_connector.reading.readers import DLedgerBatchReader, DLedgerStreamReader
from tests.cli.command import run
from tests.spark_connector.engine import Engine
from tests.support.archiving import DirectJob
from tests.support.slow_elections import SLOW_ELECTIONS
from tests.support.soon import soon

BODY = b"x" * 1000


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Nodes that keep about 64 KiB of each log."""
    with LocalCluster(
        3, groups=("a", "b"), data_segment_bytes=1 << 16, retain_bytes=1 << 16, **SLOW_ELECTIONS
    ) as nodes:
        yield nodes


def append(client: Client, first: int, count: int) -> None:
    for at in range(first, first + count, 50):
        client.append([b"%06d" % number + BODY for number in range(at, at + 50)])


def options(cluster: LocalCluster, group: str, **more: str) -> DLedgerOptions:
    given = {"peers": cluster.peers, "groups": group, "archive": "true", "pollMs": "1", "startingOffsets": "earliest"}
    return DLedgerOptions.for_reading(given | more)


def bodies(reader: Any, planned: Any) -> list[bytes]:
    return [body.as_py() for one in planned for batch in reader.read(one) for body in batch.column("body")]


def numbers(count: int) -> list[bytes]:
    return [b"%06d" % number + BODY for number in range(count)]


@pytest.mark.integration
def test_log_is_read_from_its_first_index_after_retention(cluster: LocalCluster, tmp_path: Path) -> None:
    path = tmp_path / "table"
    with Client(cluster.peers, "a") as client:
        append(client, 0, 200)
        job = DirectJob(client, path).start()
        done = job.prove(until=150)
        assert (done.findings, done.end) == ([], 150)
        append(client, 200, 200)
        soon(lambda: client.bounds().first_index > 0, 120, every_s=0.5)
        state = client.metadata().archive
        assert state is not None
        assert (state.start, state.end, state.table) == (0, 150, str(path))
        assert all(node.first_index <= 150 for node in client.metadata().nodes)
        planned = DLedgerBatchReader(options(cluster, "a", minPartitions="3"))
        assert bodies(planned, planned.partitions()) == numbers(400)
        check_commands(cluster, client, path)
        end = client.bounds().end
        assert job.prove(until=end).end == end
        stream, engine = DLedgerStreamReader(options(cluster, "a", maxOffsetsPerTrigger="60")), Engine()
        engine.limit = stream.getDefaultReadLimit()
        engine.run(stream, 30)
        assert len(engine.read) == 400
        assert engine.read == sorted(engine.read)
        parts = planned.partitions()
        append(client, 400, 200)
        soon(lambda: client.bounds().first_index > 150, 120, every_s=0.5)
        assert bodies(planned, parts) == numbers(400)
        DeltaTable(path).delete('"index" = 20')
        with pytest.raises(ArchiveDamagedError):
            bodies(planned, planned.partitions())
        found = job.prove(until=client.bounds().end)
        assert [(one.kind, one.start <= 20 < one.end) for one in found.findings] == [("lost", True)]
        client.end_archive()
        with pytest.raises(RetentionError):
            bodies(planned, parts)


def check_commands(cluster: LocalCluster, client: Client, path: Path) -> None:
    """``tail`` and ``get`` read archive and log as one log; each refuses a table that has other rows."""
    first, end = client.bounds().first_index, client.bounds().end
    asked = ["--peers", cluster.peers, "--group", "a", "--format", "json", "--archive", "true"]
    lines = run("tail", *asked, "--no-follow", "--from", "first", "--until", end).stdout.splitlines()
    shown = [json.loads(line) for line in lines]
    assert [one["body"] for one in shown] == [body.decode() for body in numbers(400)]
    beyond = next(number for number, one in enumerate(shown) if one["index"] >= first)
    assert beyond > 0
    chosen = shown[beyond - 1]
    for target in (chosen["index"], f"@{chosen['position'] + 50}", -(400 - beyond + 1)):
        assert json.loads(run("get", *asked, target).stdout) == chosen
    since = run("tail", *asked, "--no-follow", "--from", chosen["timestamp"], "--count", 1).stdout
    assert json.loads(since)["timestamp"] == chosen["timestamp"]
    run("get", *asked[:-2], 20, code=3)  # the nodes do not have it
    other = path.with_name("other")
    write_deltalake(other, DeltaTable(path).to_pyarrow_table())
    DeltaTable(other).delete('"index" = 20')
    assert run("tail", *asked[:-1], other, "--no-follow", "--from", 20, "--count", 1, code=4).stdout == ""


@pytest.mark.integration
def test_two_jobs_and_a_leader_change_record_each_range_once(cluster: LocalCluster, tmp_path: Path) -> None:
    path = tmp_path / "table"
    with Client(cluster.peers, "b") as client:
        append(client, 0, 100)
        jobs = DirectJob(client, path)
        first, second = jobs.start(), jobs.start()
        assert first.prove(until=40).end == 40
        assert second.prove(until=60).end == 60
        leader = client.metadata().leader_id
        client.transfer_leadership(next(node for node in cluster.node_ids if node != leader))
        assert first.prove(until=80).end == 80
        recorded = client.archived_ranges().ranges
        assert [(one.start, one.end) for one in recorded] == [(0, 40), (40, 60), (60, 80)]
        assert second.verify().ranges == 3
