"""Groups whose nodes are connected by slow links: a large append must not delay heartbeats into an election."""

from __future__ import annotations

import pytest

from dledger_core.record import Columns
from tests.support.server_group import eventually
from tests.support.slow_link import SlowGroup

APPEND_BYTES = 3 << 19
QUEUES = {"short queue": 64 << 10, "long queue": 4 << 20}


@pytest.mark.parametrize("queue_bytes", QUEUES.values(), ids=QUEUES)
async def test_large_append_over_slow_links_needs_no_election(tmp_path, queue_bytes):
    # The links need more than the longest election timeout for it: so would a heartbeat that waits for its end.
    link = {"bytes_per_s": 2 << 20, "latency_s": 0.02, "queue_bytes": queue_bytes}
    async with SlowGroup(tmp_path, link) as group:
        leader, before, acks = await group.leader(), group.term(), []
        group.hosted(leader).appends.append(Columns.from_bodies([b"x" * APPEND_BYTES]), acks.append)
        await eventually(lambda: acks)
        assert not isinstance(acks[0], Exception)
        assert (await group.leader(), group.term()) == (leader, before)
