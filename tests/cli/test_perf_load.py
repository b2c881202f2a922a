"""The loads of ``dledger perf`` without a log."""

from __future__ import annotations

import asyncio
import statistics

from dledger_core.cli.perf.load import Load
from dledger_core.cli.perf.measures import Cost


def test_requests_at_a_rate_are_due_one_after_the_other() -> None:
    in_flight, others = 0, list[int]()

    async def request() -> tuple[int, int]:
        nonlocal in_flight
        others.append(in_flight)
        in_flight += 1
        await asyncio.sleep(0.002)
        in_flight -= 1
        return 100, 0

    load = Load([request] * 6, 1.0, 2000.0, Cost({}))  # a request each 50 ms
    asyncio.run(load.run())
    assert 5 < len(load.latencies_s) <= 21
    assert statistics.mean(others) < 1.5, "bursts of 6 would find 2.5 others"
