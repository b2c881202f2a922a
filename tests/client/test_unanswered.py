"""Requests without a response, on each event loop that programs use."""

import asyncio

import pytest
import uvloop

from dledger_core.client.routing.channel import Unanswered
from dledger_core.errors import RequestTimedOutError


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_requests_expire_whatever_event_loop_counts(new_loop):
    unanswered = Unanswered("127.0.0.1:1")
    sent = []

    async def run():
        waiting = [
            asyncio.create_task(unanswered.response(number, lambda: sent.append(1), timeout_s))
            for number, timeout_s in enumerate((0.0, 0.0, 0.02, 0.01))
        ]
        return await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 60)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        outcomes = runner.run(run())
    assert [type(outcome) for outcome in outcomes] == [RequestTimedOutError] * 4
    assert len(sent) == 4
    assert len(unanswered) == 0
