"""What a replica takes from the world around it: time, the end of a turn, chance, a disk that works beside it.

A node's replicas get ``event_loop_environment``. Whoever drives a replica by hand, without threads and without a
clock, gives an ``Environment`` of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from dledger_core.raft import Ready
from dledger_core.server.replica.group_commit import DiskWriter
from dledger_core.storage import CommitLog

__all__ = ["Disk", "Environment", "OpenDisk", "event_loop_environment"]


class Disk(Protocol):
    """Persists Readys in order; its callbacks come in a later turn, never from within ``submit``."""

    @property
    def busy(self) -> bool:
        """Whether a submitted Ready has not been reported yet."""

    def submit(self, ready: Ready) -> None:
        """Queues a Ready."""

    def run(self, job: Callable[[], None]) -> None:
        """Queues other work on the store behind what is queued."""

    def close(self) -> None:
        """Does what is queued; blocks until then."""


OpenDisk = Callable[[CommitLog, Callable[[list[Ready]], None], Callable[[BaseException], None]], Disk]
"""Makes a disk of (log, on_persisted, on_failed): on_persisted gets the Readys that are durable now, in order;
on_failed gets the first error, after which nothing is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A replica's surroundings.

    Attributes:
        now_ms: the time, ms since the epoch.
        call_soon: runs a function after the current turn, in order of the calls.
        open_disk: makes the disk of a log.
        random: spreads election timeouts and makes the log's uuid.
    """

    now_ms: Callable[[], int]
    call_soon: Callable[[Callable[[], None]], object]
    open_disk: OpenDisk
    random: Random


def event_loop_environment() -> Environment:
    """Returns the surroundings of a node's replica: the running event loop, the clock, a thread that writes."""
    loop = asyncio.get_running_loop()
    return Environment(
        now_ms=lambda: time.time_ns() // 1_000_000,
        call_soon=loop.call_soon,
        open_disk=lambda log, on_persisted, on_failed: DiskWriter(log, loop, on_persisted, on_failed),
        random=Random(),
    )
