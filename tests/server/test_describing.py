"""DESCRIBE and GROUPS: tables about the logs of a node."""

from __future__ import annotations

import asyncio

from dledger_core.config import Limits, StorageConfig, format_peers
from dledger_core.connect import AsyncClient
from dledger_core.net.protocol import Type
from dledger_core.storage import open_store
from tests.support.server_group import RawClient, ServerGroup, eventually, run

SMALL = StorageConfig(data_segment_bytes=1 << 16, index_segment_bytes=1 << 12, preallocate_bytes=0)


def test_describe_returns_terms_segments_and_producers(tmp_path):
    async def main():
        async with ServerGroup(tmp_path, 1, storage=SMALL) as group:
            raw = await group.client()
            async with AsyncClient(format_peers(group.peers)) as client:
                for number in range(5):
                    await raw.append([bytes(15_000)] * 2, p="orders", pe=3, ps=number)
                key = {"q": "query", "b": 7, "r": "run"}
                part = await raw.attempt([b"row"], key)
                assert (await client.describe("producers")).num_rows == 1, "an open transaction is none of a query's"
                await raw.ask(Type.TRANSACTION, op="commit", x=key, parts=[list(part)])
                end = (await client.metadata()).nodes[0].last_index + 1
                found = {table: (await client.describe(table)).to_pylist() for table in ("terms", "segments")}
                producers = (await client.describe("producers", "n0")).to_pylist()
        assert found["terms"] == [{"first_index": 0, "end": end, "term": 1}]
        bounds = [(row["first_index"], row["end"]) for row in found["segments"]]
        assert len(bounds) == 3
        assert [stop for _, stop in bounds] == [*(first for first, _ in bounds[1:]), end]
        assert [row["position"] for row in found["segments"]] == [0, 1 << 16, 2 << 16]
        assert all(row["bytes"] == 1 << 16 for row in found["segments"][:-1])
        assert all(row["last_timestamp"].year >= 2024 for row in found["segments"])
        assert [row.pop("last_timestamp") is not None for row in producers] == [True, False]
        last = {"first_index": 14, "last_index": 15}
        assert producers[0] == {
            "producer_id": "orders", "kind": "producer", "epoch": 3, "run_id": None, "next_sequence": 5, **last
        }  # fmt: skip
        assert producers[1] == {
            "producer_id": "query", "kind": "query", "epoch": None, "run_id": "run", "next_sequence": 8,
            "first_index": part.first, "last_index": part.last,
        }  # fmt: skip
        with open_store(tmp_path / "default" / "dledger-n0") as store:
            for table, rows in found.items():
                assert store.describe(table).to_pylist() == rows
            at_rest = store.describe("producers").to_pylist()
            assert [row["producer_id"] for row in at_rest] == ["orders", "query"]
            assert {k: v for k, v in at_rest[0].items() if k != "last_timestamp"} == producers[0]

    run(main())


def test_describe_terms_leaves_out_uncommitted_entries(tmp_path):
    async def main():
        async with ServerGroup(tmp_path) as group, AsyncClient(format_peers(group.peers)) as client:
            await client.append([b"a"])
            await group.stop(await group.leader())
            index = (await client.append([b"b"])).first_index
            rows = (await client.describe("terms", await group.leader())).to_pylist()
            assert [(row["first_index"], row["end"]) for row in rows] == [(0, index - 1), (index - 1, index + 1)]
            assert rows[0]["term"] < rows[1]["term"]
            leader = await group.leader()
            await group.stop((await group.followers())[0])
            log = group.hosted(leader).replica.log
            asked = asyncio.create_task(RawClient(await group.channel(leader)).append([b"never"]))
            await eventually(lambda: log.last_index() > index)
            for table in ("terms", "segments"):
                assert (await client.describe(table, leader)).to_pylist()[-1]["end"] == index + 1
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    run(main())


def test_describe_returns_long_tables_in_pages(tmp_path):
    async def main():
        async with ServerGroup(tmp_path, 1, storage=SMALL, limits=Limits(describe_rows=3)) as group:
            raw = await group.client()
            async with AsyncClient(format_peers(group.peers)) as client:
                names = [f"p{number}" for number in range(7)]
                for name in reversed(names):
                    await raw.append([bytes(30_000)], p=name, pe=0, ps=0)
                assert (await client.describe("producers")).column("producer_id").to_pylist() == names
                segments = (await client.describe("segments")).to_pylist()
                assert [row["position"] for row in segments] == [number << 16 for number in range(4)]

    run(main())


def test_groups_are_listed_to_client_of_unknown_group(tmp_path):
    async def main():
        async with ServerGroup(tmp_path, 1, groups=("a", "b")) as group:
            await group.leader("a")
            await group.leader("b")
            async with AsyncClient(format_peers(group.peers), "unknown") as client:
                uuids = {name: group.hosted("n0", name).replica.log_uuid for name in "ab"}
                assert await client.groups() == uuids
                assert len(set(uuids.values())) == 2

    run(main())
