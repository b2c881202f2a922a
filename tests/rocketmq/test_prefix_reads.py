"""Reads by position, over the wire: any byte of a log, and a real broker's CommitLog before it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dledger_core.config import StorageConfig
from dledger_core.connect import AsyncClient
from dledger_core.errors import BehindError, CorruptRecordError, IndexOutOfRangeError
from dledger_core.ids import Index
from dledger_core.net.protocol import Type
from dledger_core.rocketmq.convert import read_commitlog, start_store_after
from dledger_core.rocketmq.store.location import COMMITLOG_DIRECTORY
from dledger_core.server.config import ServerConfig
from dledger_core.server.services.reads import Positions
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import Layout, load_log_meta, save_log_meta
from dledger_core.storage.tables.tables import TableChanges
from tests.rocketmq.golden import MIXED, messages
from tests.rocketmq.node_group import PARTS, rocketmq_group
from tests.support.damage import flip
from tests.support.server_group import ServerGroup, eventually

FILE_BYTES = 131_072
END = 2 * FILE_BYTES
STORAGE = StorageConfig(data_segment_bytes=FILE_BYTES, index_segment_bytes=1 << 12, preallocate_bytes=0)
PREFIX = {at: data for at, data in sorted(messages(MIXED).items()) if at < END}
BODIES = [bytes([number]) * (number * 977 % 40_000) for number in range(30)]


@contextlib.asynccontextmanager
async def one_node(directory: Path) -> AsyncIterator[tuple[ServerGroup, AsyncClient]]:
    async with rocketmq_group(directory, 1, storage=STORAGE) as group, AsyncClient(group.peers) as client:
        yield group, client


def create_prefix(classic: Path, directory: Path, node_id: str = "n0") -> Path:
    """Create a store after the CommitLog; return the directory of the prefix."""
    store = directory / "default" / f"dledger-{node_id}"
    start_store_after(read_commitlog(classic), store, group="default", node_id=node_id, config=STORAGE)
    return store.parent / COMMITLOG_DIRECTORY


class Apart(ServerGroup):
    """Nodes with a directory each."""

    def config(self, node_id: str, **options: Any) -> ServerConfig:
        return super().config(node_id, directory=self.directory / node_id, **options)


async def test_every_position_leads_to_its_entry_or_the_next(tmp_path: Path) -> None:
    async with rocketmq_group(tmp_path, 1, storage=STORAGE) as group:
        client = await group.client()
        _, last, _ = await client.append(BODIES)
        log = group.hosted("n0").replica.log
        starts = [(index, int(log.position_of(index))) for index in range(last + 2)]

        async def at(position: int) -> int:
            return (await client.ask(Type.AT, position=position, max=1)).header["index"]

        blanks = 0
        for (index, begin), (_, following) in pairwise(starts):
            end = begin + int(log.read_raw(index, index + 1, 1).sizes[0])
            for position in (begin, begin + 47, (begin + end) // 2, end - 1):
                assert await at(position) == index, position
            if end < following:
                blanks += 1
                assert [await at(end), await at(following - 1)] == [index + 1] * 2
        assert blanks >= 3, "the log must have several files"
        assert [await at(starts[-1][1]), await at((1 << 63) - 1)] == [last + 1] * 2


async def read_on(client: AsyncClient, position: int, max_bytes: int) -> tuple[list[int], pa.Table]:
    """Read to the end of the log; return the number of rows of each read, and all rows."""
    batches = []
    while True:
        found = await client.fetch_at(position, max_bytes=max_bytes)
        batches.append(found.batch)
        assert (found.next_position is None) != (found.next_index is None)
        if found.next_position is None:
            break
        position = found.next_position
    index = found.next_index
    assert index is not None
    while (read := await client.fetch(index, 1 << 40, max_bytes=max_bytes)).next_index > index:
        batches.append(read.batch)
        index = read.next_index
    return [batch.num_rows for batch in batches], pa.Table.from_batches(batches)


@pytest.mark.parametrize("max_bytes", [1, 5000, 8 << 20])
async def test_positions_lead_through_prefix_into_log(tmp_path: Path, classic: Path, max_bytes: int) -> None:
    create_prefix(classic, tmp_path)
    async with one_node(tmp_path) as (_group, client):
        await client.append(BODIES)
        counts, table = await read_on(client, 0, max_bytes)
        rows = table.to_pylist()
        prefix, new = rows[: len(PREFIX)], rows[len(PREFIX) :]
        assert {row["position"]: row["body"] for row in prefix} == PREFIX
        assert {(row["index"], row["term"], row["timestamp"]) for row in prefix} == {(None, None, None)}
        assert [row["body"] for row in new] == BODIES
        assert new[0]["position"] >= END
        assert (max(counts[:50]) == 1) == (max_bytes == 1)
        near = max(PREFIX)
        assert (await client.read_at(near)).column("position").to_pylist() == [near]
        inside = await client.read_at(new[3]["position"] + 48, max_bytes=1)
        assert inside.column("body").to_pylist() == [BODIES[3]]
        with pytest.raises(IndexOutOfRangeError):
            await client.read_at(1)
        end = new[-1]["position"] + 48 + len(BODIES[-1])
        assert [(await client.read_at(at)).num_rows for at in (end, 1 << 60)] == [0, 0]


async def test_position_before_log_is_out_of_range_without_prefix(tmp_path: Path, classic: Path) -> None:
    shutil.rmtree(create_prefix(classic, tmp_path))
    async with one_node(tmp_path) as (_group, client):
        await client.append([b"first"])
        with pytest.raises(IndexOutOfRangeError) as found:
            await client.read_at(max(PREFIX))
        assert found.value.values["first_position"] == END
        assert (await client.read_at(END)).column("body").to_pylist() == [b"first"]


async def test_directory_next_to_log_without_prefix_is_not_read(tmp_path: Path, classic: Path) -> None:
    async with one_node(tmp_path) as (group, client):
        shutil.copytree(classic, tmp_path / "default" / COMMITLOG_DIRECTORY)
        await client.append(BODIES)
        replica = group.hosted("n0").replica
        segments = replica.log.segment_summaries()
        replica.store.trim(Index(segments[1].first_index))
        await eventually(lambda: replica.log.first_index() > 0)
        with pytest.raises(IndexOutOfRangeError):
            await client.read_at(0)


@pytest.mark.parametrize("moment", ["first_index", "position_of"])
async def test_read_by_position_survives_concurrent_trim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The head of the log is trimmed after the read got the first index, or before it finds the entry."""
    async with one_node(tmp_path) as (group, client):
        await client.append(BODIES)
        replica = group.hosted("n0").replica
        log, segments = replica.log, replica.log.segment_summaries()
        original, left = getattr(log, moment), [1]

        def interrupted(*arguments: int) -> int:
            found = original(*arguments)
            if left and left.pop():
                log.trim(segments[1].first_index, TableChanges.complete(replica.tables), replica.commit_index)
            return int(found)

        monkeypatch.setattr(log, moment, interrupted)
        kept = segments[1].first_index + 1
        position = int(log.position_of(kept))
        left[:] = [1]
        positions = Positions(replica, ThreadPoolExecutor(1))
        if moment == "first_index":
            assert await positions.at(position, 1) == kept
        else:
            with pytest.raises(IndexOutOfRangeError):
                await positions.at(0, 1)
        assert not left


async def test_read_during_snapshot_install_is_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rocketmq_group(tmp_path, 1, storage=STORAGE) as group:
        client = await group.client()
        await client.append(BODIES)
        replica = group.hosted("n0").replica
        log, positions = replica.log, Positions(replica, ThreadPoolExecutor(1))
        monkeypatch.setattr(log, "first_index", lambda: 58)  # as in the middle of a snapshot install
        monkeypatch.setattr(log, "last_index", lambda: 57)
        with pytest.raises(BehindError):
            await positions.at(0, 1)


async def test_damaged_or_shorter_prefix_fails_over(tmp_path: Path, classic: Path) -> None:
    """Two nodes have a damaged message; the fingerprint of the third starts later and ends at the same position."""
    second = [at for at in sorted(PREFIX) if at >= FILE_BYTES]
    damaged = second[7]
    for node_id in ("n0", "n1"):
        flip(create_prefix(classic, tmp_path / node_id, node_id) / f"{FILE_BYTES:020}", damaged - FILE_BYTES + 100)
    later = shutil.copytree(classic, tmp_path / "later")
    (later / f"{0:020}").unlink()
    create_prefix(later, tmp_path / "n2", "n2")
    whole, shorter = (Layout(tmp_path / n / "default" / f"dledger-{n}").log_meta for n in ("n0", "n2"))
    prefix = load_log_meta(OsFiles(), whole).commitlog_prefix
    save_log_meta(OsFiles(), shorter, replace(load_log_meta(OsFiles(), shorter), commitlog_prefix=prefix))
    async with Apart(tmp_path, 3, storage=STORAGE, **PARTS) as group, AsyncClient(group.peers) as client:
        last = (await client.append([b"first"])).last_index
        results = await asyncio.gather(*(client.read_at(damaged, max_bytes=1) for _ in range(6)))
        assert {tuple(batch.column("body").to_pylist()) for batch in results} == {(PREFIX[damaged],)}
        for node in ("n0", "n1"):
            with pytest.raises(CorruptRecordError):
                await client.read_at(damaged, node=node)
            before = await client.fetch_at(FILE_BYTES, node=node)
            assert (before.batch.num_rows, before.next_position) == (7, damaged)
        await eventually(lambda: group.hosted("n2").replica.log.last_index() >= last)
        with pytest.raises(IndexOutOfRangeError):
            await client.read_at(0, node="n2")
        assert (await client.read_at(0, max_bytes=1)).column("body").to_pylist() == [PREFIX[0]]
