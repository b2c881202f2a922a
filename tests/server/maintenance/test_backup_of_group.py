"""Backups of running groups: pins against retention, trimmed logs, recovering nodes, backups at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dledger_core.client.backup import NodeLog
from dledger_core.config import StorageConfig, format_peers
from dledger_core.connect import AsyncClient
from dledger_core.errors import BadRequestError, EndLostError, IndexOutOfRangeError
from dledger_core.net.credentials import PLAINTEXT
from dledger_core.server.maintenance.backup import BackupReport, back_up_group
from dledger_core.server.maintenance.restore import restore
from dledger_core.server.maintenance.retention import RetentionPolicy
from dledger_core.storage import open_store
from dledger_core.storage.files.backup_files import locked
from dledger_core.storage.files.file_system import OsFiles
from tests.support.server_group import ServerGroup, eventually

SEGMENT = 1 << 16
STORAGE = StorageConfig(data_segment_bytes=SEGMENT, index_segment_bytes=3200, preallocate_bytes=0)
RETENTION = RetentionPolicy(retain_bytes=2 * SEGMENT)
pytestmark = pytest.mark.integration


def group_of(tmp_path: Path) -> ServerGroup:
    return ServerGroup(tmp_path / "nodes", storage=STORAGE, retention=RETENTION)


async def fill(group: ServerGroup, batches: int = 30) -> None:
    client = await group.client()
    for _ in range(batches):
        await client.append([bytes(1000)] * 10)


async def retain(group: ServerGroup, node: str) -> int:
    """Run retention once; return the first index of the node's log."""
    await group.nodes[node].disk_rounds.retain()
    return int(group.hosted(node).replica.log.first_index())


async def backed_up(group: ServerGroup, destination: Path) -> BackupReport:
    """Back the group up in a thread, as a command does."""
    async with AsyncClient(format_peers(group.peers)) as client:
        metadata = await client.metadata()

    def work() -> BackupReport:
        with locked(OsFiles(), destination):
            return back_up_group("default", metadata, destination, 30.0, PLAINTEXT)

    return await asyncio.to_thread(work)


async def test_started_backup_holds_back_retention_until_it_ends(tmp_path: Path) -> None:
    async with group_of(tmp_path) as group:
        await fill(group)
        node = await group.leader()
        backup = NodeLog(group.peers, node, "default", 30.0)
        fields, _ = await backup.start(-1)
        first = fields["meta"]["first_index"]
        await fill(group)
        await retain(group, node)
        await fill(group, 1)  # its disk executes one request after another
        assert group.hosted(node).replica.log.first_index() == first
        assert (await backup.read(first, first + 1)).first.index == first
        await backup.pin(first)
        await backup.end()
        await eventually(lambda: not group.hosted(node).replica.pins.starts(0))
        await eventually_trimmed(group, node, first)


async def eventually_trimmed(group: ServerGroup, node: str, first: int) -> None:
    """Run retention, and wait until it has deleted an entry."""
    await retain(group, node)
    await eventually(lambda: group.hosted(node).replica.log.first_index() > first)


async def test_group_with_trimmed_log_is_backed_up_with_its_tables(tmp_path: Path) -> None:
    async with group_of(tmp_path) as group:
        client = await group.client()
        await client.append([b"first"], p="producer", pe=0, ps=0)
        await fill(group)
        end = group.hosted(await group.leader()).replica.readable_end
        await eventually(lambda: all(group.hosted(node).replica.readable_end >= end for node in group.nodes))
        for node in group.nodes:
            await eventually_trimmed(group, node, 0)
        first = await backed_up(group, tmp_path / "backup")
        assert first.first_index > 0
        await fill(group, 5)
        second = await backed_up(group, tmp_path / "backup")
        assert second.end_index >= first.end_index + 50
        assert second.kept_files >= first.copied_files - 2, "another node may have other first segments"
    (found,) = restore(tmp_path / "backup", tmp_path / "new", node_id="n1")
    with open_store(found.store) as store:
        assert list(store.verify().findings) == []
        assert (store.first_index, store.last_index + 1) == (second.first_index, second.end_index)
        assert store.describe("producers")["producer_id"].to_pylist() == ["producer"]
        with pytest.raises(IndexOutOfRangeError):
            store.fetch(0, 1)


async def test_group_with_recovering_node_is_refused(tmp_path: Path) -> None:
    async with group_of(tmp_path) as group:
        await fill(group, 2)
        (node, *_) = await group.followers()
        await group.stop(node)  # so that no majority is left that ends the floor of the other one
        other = (await group.followers())[0]
        assert group.hosted(other).replica.peers.raise_floor(None)
        backup = NodeLog(group.peers, other, "default", 30.0)
        with pytest.raises(EndLostError):
            await backup.start(-1)
        await backup.end()
        with pytest.raises(EndLostError):
            await backed_up(group, tmp_path / "backup")


async def test_later_backup_of_node_ends_an_earlier_one(tmp_path: Path) -> None:
    async with group_of(tmp_path) as group:
        await fill(group, 2)
        node = await group.leader()
        first, second = (NodeLog(group.peers, node, "default", 30.0) for _ in range(2))
        await first.start(-1)
        await second.start(-1)
        backups = group.hosted(node).backups
        with pytest.raises(BadRequestError):
            backups.chunk("another", 0)
        await second.end()
        await first.end()
        assert not group.hosted(node).replica.pins.starts(0)
