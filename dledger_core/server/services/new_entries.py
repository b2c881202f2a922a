"""How an idle reader of many groups waits at one node: one request, however many they are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dledger_core.errors import BadRequestError, NoLeaderError
from dledger_core.net.codec import int_field
from dledger_core.server.replica.replica import Replica
from dledger_core.server.services.reads import WAIT_MS_MAX, Isolation, isolation_of
from dledger_core.server.services.waiting import wait_any

__all__ = ["AwaitRequest", "grown_groups"]

GROUPS_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class AwaitRequest:
    """An AWAIT frame's fields.

    Attributes:
        seen: end (exclusive) of what the asker knows, by group.
        isolation: what counts, as for reads.
        wait_s: how long to wait for more in any of them.
    """

    seen: dict[str, int]
    isolation: Isolation
    wait_s: float

    @classmethod
    def parse(cls, header: Mapping[str, Any]) -> AwaitRequest:
        """Checks an AWAIT header; raises BadRequestError or ProtocolError."""
        seen = header.get("seen")
        if not isinstance(seen, dict) or not 0 < len(seen) <= GROUPS_MAX:
            raise BadRequestError(f"field 'seen' does not map 1 to {GROUPS_MAX} groups to ends", "", "ask for less")
        if not all(type(group) is str and type(end) is int for group, end in seen.items()):
            raise BadRequestError("field 'seen' does not map groups to ends", "", "use names and indexes")
        return cls(seen, isolation_of(header), min(int_field(header, "wait", 0), WAIT_MS_MAX) / 1000)


async def grown_groups(replicas: Mapping[str, Replica], wanted: AwaitRequest) -> list[str]:
    """Returns the groups that have more to read than was seen, none if the time is over first.

    Raises:
        NoLeaderError: a replica here knows of no leader, so it would not hear of what others commit.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wanted.wait_s
    while True:
        grown = [group for group, end in wanted.seen.items() if _end(replicas[group], wanted.isolation) > end]
        left = deadline - loop.time()
        if grown or left <= 0:
            return grown
        for group in wanted.seen:
            if replicas[group].soft_state.leader_id is None:
                raise NoLeaderError("no leader is known here", f"group {group}", "ask another node")
        await wait_any([replicas[group].progress for group in wanted.seen], left)


def _end(replica: Replica, isolation: Isolation) -> int:
    return replica.visible_end if isolation == "committed" else replica.readable_end
