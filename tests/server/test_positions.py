"""Reads by position, over the wire: any byte of a log, and a real broker's CommitLog before it."""

from __future__ import annotations

import asyncio
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dledger_core.config import StorageConfig, format_peers
from dledger_core.connect import AsyncClient
from dledger_core.errors import BehindError, CorruptRecordError, IndexOutOfRangeError
from dledger_core.ids import Index
from dledger_core.net.protocol import Type
from dledger_core.rocketmq.convert import read_commitlog, start_store_after
from dledger_core.rocketmq.store.directory import COMMITLOG_DIRECTORY
from dledger_core.server.config import ServerConfig
from dledger_core.server.services.positions import Positions
from dledger_core.storage.tables.tables import TablesSnapshot
from tests.rocketmq.golden import MIXED, extract, messages
from tests.support.server_group import ServerGroup, eventually, run

FILE_BYTES = 131_072
END = 2 * FILE_BYTES
STORAGE = StorageConfig(data_segment_bytes=FILE_BYTES, index_segment_bytes=1 << 12, preallocate_bytes=0)
OLD = {at: data for at, data in sorted(messages(MIXED).items()) if at < END}
BODIES = [bytes([number]) * (number * 977 % 40_000) for number in range(30)]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CommitLog that a real broker closed when it was upgraded."""
    return extract(MIXED, "n0/commitlog", tmp_path_factory.mktemp("golden"))


def lay_out(golden: Path, directory: Path, node_id: str = "n0") -> Path:
    """Makes a store behind the old files; returns where these lie."""
    store = directory / "default" / f"dledger-{node_id}"
    start_store_after(read_commitlog(golden), store, group="default", node_id=node_id, config=STORAGE)
    return store.parent / COMMITLOG_DIRECTORY


class Apart(ServerGroup):
    """Nodes that have a directory each."""

    def config(self, node_id: str, **options: Any) -> ServerConfig:
        return super().config(node_id, directory=self.directory / node_id, **options)


def test_every_byte_of_a_log_belongs_to_an_entry_or_leads_to_the_next(tmp_path: Path) -> None:
    async def main() -> None:
        async with ServerGroup(tmp_path, 1, storage=STORAGE) as group:
            client = await group.client()
            _, last, _ = await client.append(BODIES)
            log = group.hosted("n0").replica.log
            places = [(index, int(log.position_of(index))) for index in range(last + 2)]

            async def at(position: int) -> int:
                return (await client.ask(Type.AT, position=position, max=1)).header["index"]

            blanks = 0
            for (index, begin), (_, following) in pairwise(places):
                end = begin + int(log.read_raw(index, index + 1, 1).sizes[0])
                for position in (begin, begin + 47, (begin + end) // 2, end - 1):
                    assert await at(position) == index, position
                if end < following:
                    blanks += 1
                    assert [await at(end), await at(following - 1)] == [index + 1] * 2
            assert blanks >= 3, "the log is to lie in several files"
            assert [await at(places[-1][1]), await at((1 << 63) - 1)] == [last + 1] * 2

    run(main())


async def read_on(client: AsyncClient, position: int, max_bytes: int) -> tuple[list[int], pa.Table]:
    """Reads to the end of the log; returns how many rows each read gave, and all of them."""
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
def test_positions_lead_through_the_old_messages_into_the_log(tmp_path: Path, golden: Path, max_bytes: int) -> None:
    lay_out(golden, tmp_path)

    async def main() -> None:
        async with ServerGroup(tmp_path, 1, storage=STORAGE) as group, AsyncClient(format_peers(group.peers)) as client:
            await client.append(BODIES)
            counts, table = await read_on(client, 0, max_bytes)
            rows = table.to_pylist()
            old, new = rows[: len(OLD)], rows[len(OLD) :]
            assert {row["position"]: row["body"] for row in old} == OLD
            assert {(row["index"], row["term"], row["timestamp"]) for row in old} == {(None, None, None)}
            assert [row["body"] for row in new] == BODIES
            assert new[0]["position"] >= END
            assert (max(counts[:50]) == 1) == (max_bytes == 1)
            near = max(OLD)
            assert (await client.read_at(near)).column("position").to_pylist() == [near]
            inside = await client.read_at(new[3]["position"] + 48, max_bytes=1)
            assert inside.column("body").to_pylist() == [BODIES[3]]
            with pytest.raises(IndexOutOfRangeError, match="no message begins at position 1 "):
                await client.read_at(1)
            end = new[-1]["position"] + 48 + len(BODIES[-1])
            assert [(await client.read_at(at)).num_rows for at in (end, 1 << 60)] == [0, 0]

    run(main())


def test_without_the_old_files_what_was_before_the_log_is_out_of_range(tmp_path: Path, golden: Path) -> None:
    shutil.rmtree(lay_out(golden, tmp_path))

    async def main() -> None:
        async with ServerGroup(tmp_path, 1, storage=STORAGE) as group, AsyncClient(format_peers(group.peers)) as client:
            await client.append([b"first"])
            with pytest.raises(IndexOutOfRangeError, match="before the log") as found:
                await client.read_at(max(OLD))
            assert found.value.values["first_position"] == END
            assert (await client.read_at(END)).column("body").to_pylist() == [b"first"]

    run(main())


def test_a_folder_beside_a_log_that_began_behind_none_is_not_read(tmp_path: Path, golden: Path) -> None:
    async def main() -> None:
        async with ServerGroup(tmp_path, 1, storage=STORAGE) as group, AsyncClient(format_peers(group.peers)) as client:
            shutil.copytree(golden, tmp_path / "default" / COMMITLOG_DIRECTORY)
            await client.append(BODIES)
            replica = group.hosted("n0").replica
            segments = replica.log.segment_summaries()
            replica.trim(Index(segments[1].first_index))
            await eventually(lambda: replica.log.first_index() > 0)
            with pytest.raises(IndexOutOfRangeError, match="before the log"):
                await client.read_at(0)

    run(main())


@pytest.mark.parametrize("moment", ["first_index", "position_of"])
def test_retention_in_the_middle_of_a_read_by_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The log's beginning goes just when the read has looked where that is, or begins to look for the entry."""

    async def main() -> None:
        async with ServerGroup(tmp_path, 1, storage=STORAGE) as group, AsyncClient(format_peers(group.peers)) as client:
            await client.append(BODIES)
            replica = group.hosted("n0").replica
            log, segments = replica.log, replica.log.segment_summaries()
            whole, left = getattr(log, moment), [1]

            def interrupted(*arguments: int) -> int:
                found = whole(*arguments)
                if left and left.pop():
                    log.trim(segments[1].first_index, TablesSnapshot.of(replica.tables), replica.commit_index)
                return int(found)

            monkeypatch.setattr(log, moment, interrupted)
            place = int(log.position_of(segments[1].first_index + 1)) if moment == "first_index" else None
            left[:] = [1]
            positions = Positions(replica, group.nodes["n0"]._executor)
            if place is not None:
                assert await positions.at(place, 1) == segments[1].first_index + 1
            else:
                with pytest.raises(IndexOutOfRangeError, match="before the log"):
                    await positions.at(0, 1)
            assert not left

    run(main())


def test_a_log_that_begins_anew_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with ServerGroup(tmp_path, 1, storage=STORAGE) as group:
            client = await group.client()
            await client.append(BODIES)
            replica = group.hosted("n0").replica
            log, positions = replica.log, Positions(replica, group.nodes["n0"]._executor)
            last = log._last_index
            log._first_index, log._last_index = 58, 57  # as in the middle of CommitLog._reset
            with pytest.raises(BehindError):
                await positions.at(0, 1)
            log._first_index, log._last_index = 0, last

    run(main())


def test_a_damaged_old_message_is_an_error_of_that_node_alone(tmp_path: Path, golden: Path) -> None:
    damaged = sorted(OLD)[7]
    for node_id in ("n0", "n1", "n2"):
        path = lay_out(golden, tmp_path / node_id, node_id) / f"{0:020}"
        if node_id != "n2":
            data = bytearray(path.read_bytes())
            data[damaged + 100] ^= 1
            path.unlink()  # it is a link to the golden file
            path.write_bytes(data)

    async def main() -> None:
        async with Apart(tmp_path, 3, storage=STORAGE) as group, AsyncClient(format_peers(group.peers)) as client:
            await client.append([b"first"])
            results = await asyncio.gather(*(client.read_at(damaged, max_bytes=1) for _ in range(6)))
            assert {tuple(batch.column("body").to_pylist()) for batch in results} == {(OLD[damaged],)}
            for node in ("n0", "n1"):
                with pytest.raises(CorruptRecordError):
                    await client.read_at(damaged, node=node)
                before = await client.fetch_at(0, node=node)
                assert (before.batch.num_rows, before.next_position) == (7, damaged)

    run(main())


def test_a_node_whose_copy_lacks_older_files_joins_all_the_same(tmp_path: Path, golden: Path) -> None:
    """It lost its store and has fewer old files; its fingerprint starts later and ends at the same position."""
    for node_id in ("n0", "n1"):
        lay_out(golden, tmp_path / node_id, node_id)
    later = shutil.copytree(golden, tmp_path / "later")
    (later / f"{0:020}").unlink()
    lay_out(later, tmp_path / "n2", "n2")

    async def main() -> None:
        async with Apart(tmp_path, 3, storage=STORAGE) as group, AsyncClient(format_peers(group.peers)) as client:
            last = (await client.append([b"first"])).last_index
            await eventually(lambda: group.hosted("n2").replica.log.last_index() >= last)
            assert (await client.read_at(max(OLD), node="n2")).column("body").to_pylist() == [OLD[max(OLD)]]
            with pytest.raises(IndexOutOfRangeError):
                await client.read_at(0, node="n2")
            assert (await client.read_at(0, max_bytes=1)).column("body").to_pylist() == [OLD[0]]

    run(main())
