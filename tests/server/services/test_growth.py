"""Requests that wait for entries: each is woken by its entry, and by none before."""

from __future__ import annotations

import asyncio

import pytest

from dledger_core.server.services.growth import GrowthWatch, wait_grown
from tests.support.replica_group import Asker, HandDriven


async def woken(waiters: list[asyncio.Future[None]]) -> list[bool]:
    for _ in range(3):
        await asyncio.sleep(0)
    return [waiter.done() for waiter in waiters]


def waiters(watch: GrowthWatch, ends: list[int], isolation="committed") -> list[asyncio.Future[None]]:
    found = [asyncio.get_running_loop().create_future() for _ in ends]
    for waiter, end in zip(found, ends, strict=True):
        watch.add(waiter, end, isolation)
    return found


@pytest.mark.parametrize("isolation", ["committed", "uncommitted", "records"])
async def test_commit_wakes_only_requests_whose_entry_it_made_readable(tmp_path, isolation) -> None:
    with HandDriven(tmp_path / "s") as n0:
        n0.lead()
        watch, asker = GrowthWatch(n0.replica), Asker(n0)
        end = watch.end(isolation)
        waiting = waiters(watch, [end, end + 2, end + 1, 1 << 40], isolation)
        asker.plain(b"a", b"b")
        n0.run()
        assert await woken(waiting) == [True, False, True, False]
        asker.plain(b"c")
        n0.run()
        assert await woken(waiting) == [True, True, True, False]
        assert len(watch) == 1


async def test_change_of_role_wakes_all(tmp_path) -> None:
    with HandDriven(tmp_path / "s", voters=("n0", "n1", "n2")) as n0:
        n0.lead()
        watch = GrowthWatch(n0.replica)
        waiting = waiters(watch, [1 << 40])
        assert await woken(waiting) == [False]
        n0.depose()
        assert await woken(waiting) == [True]
        assert len(watch) == 0


async def test_timeout_leaves_nothing_and_others_wait_on(tmp_path) -> None:
    with HandDriven(tmp_path / "s") as n0:
        n0.lead()
        watch, asker = GrowthWatch(n0.replica), Asker(n0)
        [waiting] = waiters(watch, [watch.end("committed")])
        await asyncio.gather(*(wait_grown({watch: 1 << 40}, "committed", 0.001) for _ in range(500)))
        assert len(watch) == 1
        asker.plain(b"a")
        n0.run()
        assert await woken([waiting]) == [True]
        assert len(watch) == 0
