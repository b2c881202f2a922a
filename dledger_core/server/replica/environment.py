"""The parts of a replica that differ between a node and a simulation: time, iterations, randomness, network, disk.

A node's replicas get ``event_loop_environment``. A test or simulation that runs a replica without threads and without a
clock passes an ``Environment`` of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from dledger_core.raft import Message, Ready
from dledger_core.server.replica.background import Background
from dledger_core.server.replica.group_commit import DiskWriter
from dledger_core.storage import CommitLog


class Disk(Protocol):
    """Persists Readys in order; its callbacks run in a later iteration, never within ``submit``."""

    @property
    def busy(self) -> bool:
        """Whether a submitted Ready has not been reported yet."""

    def submit(self, ready: Ready) -> None:
        """Queue a Ready."""

    def run(self, job: Callable[[], None]) -> None:
        """Queue other work on the store, in order with the Readys."""

    def close(self) -> None:
        """Finish the queue; block until then."""


def wall_ms() -> int:
    """Return the wall clock of this machine, ms since the epoch; it may jump, so only append times follow it."""
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """Return ms of a clock that never jumps; it counts suspend too, so that append times are right after it."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


OpenDisk = Callable[[CommitLog, Callable[[list[Ready]], None], Callable[[BaseException], None]], Disk]
"""Creates a disk from (log, on_persisted, on_failed): on_persisted gets the Readys that became durable, in order;
on_failed gets the first error, after which nothing is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The environment of one replica.

    Attributes:
        monotonic_ms: a clock that never jumps.
        running_ms: the node's running time, see ``RunningTime``.
        call_soon: runs a function after the current iteration, in order of the calls.
        send: sends a message of a group to a peer, or drops it.
        open_disk: creates the disk of a log.
        random: source of election timeouts.
        background: runs work that may take seconds.
    """

    monotonic_ms: Callable[[], int]
    running_ms: Callable[[], int]
    call_soon: Callable[[Callable[[], None]], object]
    send: Callable[[str, Message], None]
    open_disk: OpenDisk
    random: Random
    background: Background


def event_loop_environment(running_ms: Callable[[], int], send: Callable[[str, Message], None]) -> Environment:
    """Return the environment of a node's replica: the running event loop, its clocks, a thread that writes."""
    loop = asyncio.get_running_loop()
    return Environment(
        monotonic_ms=monotonic_ms,
        running_ms=running_ms,
        call_soon=loop.call_soon,
        send=send,
        open_disk=lambda log, on_persisted, on_failed: DiskWriter(log, loop, on_persisted, on_failed),
        random=Random(),
        background=lambda work: loop.run_in_executor(None, work),
    )
