"""Appends of several producers in one request: each is as if it had come alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from dledger_core import AsyncClient, AsyncProducer
from dledger_core.config import format_peers
from dledger_core.errors import FencedError, SequenceConflictError
from tests.support.server_group import TIMEOUT_S, RawClient, ServerGroup, run

FAILED = (-1, -1)
ROUNDS = 3


def client_of(group: ServerGroup) -> AsyncClient:
    return AsyncClient(format_peers(group.peers), timeout_ms=int(TIMEOUT_S * 1000))


def test_each_append_of_many_producers_is_there_once_and_in_order(tmp_path: Path) -> None:
    async def work() -> None:
        async with ServerGroup(tmp_path) as group, client_of(group) as client:
            producers = [AsyncProducer(client, f"p{number}") for number in range(150)]

            async def append(producer: AsyncProducer, place: int) -> None:
                for number in range(ROUNDS):
                    result = await producer.append([f"{place} {number} {part}".encode() for part in range(2)])
                    assert result.last_index == result.first_index + 1

            await asyncio.gather(*(append(producer, place) for place, producer in enumerate(producers)))
            bodies = [body.decode().split() for body in (await client.read(0, 1 << 20)).column("body").to_pylist()]
            for place in range(len(producers)):
                found = [(int(number), int(part)) for owner, number, part in bodies if owner == str(place)]
                assert found == [(number, part) for number in range(ROUNDS) for part in range(2)]

    run(work())


@pytest.mark.parametrize(
    ("append", "outcome"),
    [
        (("new", 0, 0, [b"first"]), "appended"),
        (("known", 0, 1, [b"next"]), "appended"),
        (("known", 0, 0, [b"known"]), "repeated"),
        (("known", 0, 5, [b"gap"]), "failed"),
        (("known", 0, 0, [b"other bodies"]), "failed"),
        (("fenced", 0, 1, [b"old epoch"]), "failed"),
        (("unknown", 0, 7, [b"unknown"]), "failed"),
        (("x" * 600, 0, 0, [b"long id"]), "failed"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_append_that_fails_does_not_change_the_others(
    tmp_path: Path, append: tuple[str, int, int, list[bytes]], outcome: str
) -> None:
    async def work() -> None:
        async with ServerGroup(tmp_path, nodes=1) as group, client_of(group) as client:
            await group.leader()
            raw = RawClient(await group.channel("n0"))
            known, fenced = await raw.produce(("known", 0, 0, [b"known"]), ("fenced", 1, 0, [b"epoch 1"]))
            assert FAILED not in (known, fenced)
            before, found, after = await raw.produce(
                ("before", 0, 0, [b"a", b"b"]), append, ("after", 0, 0, [b"c", b"d", b"e"])
            )
            assert (before[1] - before[0], after[1] - after[0]) == (1, 2)
            bodies = Counter((await client.read(0, 1 << 20)).column("body").to_pylist())
            assert all(bodies[body] == 1 for body in (b"a", b"b", b"c", b"d", b"e", b"known"))
            assert (found == FAILED) is (outcome == "failed")
            assert (found == known) is (outcome == "repeated")
            if outcome != "repeated":
                assert bodies[append[3][0]] == (outcome == "appended")

    run(work())


def test_repeat_of_the_same_request_returns_the_same_ranges(tmp_path: Path) -> None:
    async def work() -> None:
        async with ServerGroup(tmp_path, nodes=1) as group, client_of(group) as client:
            appends = [(f"p{number}", 0, 0, [b"x"] * (number + 1)) for number in range(5)]
            await group.leader()
            raw = RawClient(await group.channel("n0"))
            first = await raw.produce(*appends)
            assert await raw.produce(*appends) == first
            assert (await client.read(0, 1 << 20)).num_rows == 15

    run(work())


def test_programs_with_one_id_and_epoch_conflict_and_equal_appends_count_once(tmp_path: Path) -> None:
    async def work() -> None:
        async with ServerGroup(tmp_path, nodes=1) as group, client_of(group) as client:
            first, second = AsyncProducer(client, "p"), AsyncProducer(client, "p")
            await first.append([b"a"])
            await second.append([b"b"])
            with pytest.raises(SequenceConflictError):
                await first.append([b"c"])
            await first.append([b"c"])
            await second.append([b"c"])  # the number of the other one's append: its repeat
            await AsyncProducer(client, "p", epoch=1).append([b"d"])
            with pytest.raises(FencedError):
                await first.append([b"e"])
            assert (await client.read(0, 100)).column("body").to_pylist() == [b"a", b"b", b"c", b"d"]

    run(work())
