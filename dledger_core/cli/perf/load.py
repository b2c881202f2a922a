"""Loads: a number of requests in flight, each of them repeated until the measurement ends."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import click
import numpy as np
import pyarrow as pa

from dledger_core.cli.help import option
from dledger_core.cli.options import DurationType
from dledger_core.cli.perf.measures import Cost, percentiles
from dledger_core.config import BATCH_BYTES_MAX
from dledger_core.errors import ConfigError
from dledger_core.record import HEADER_BYTES

_WARM_UP_S: Final = 1.0
Request = Callable[[], Awaitable[tuple[int, int]]]
"""Sends one request and returns its entries and the bytes of their bodies."""


@dataclass
class Load:
    """A load and what was measured.

    Attributes:
        requests: each of them is in flight all the time.
        seconds: duration, after a short warm-up that is not counted.
        rate: entries per second that are due, however long the earlier ones take; None = as many as fit.
        cost: of the client and of the nodes that are known.
    """

    requests: Sequence[Request]
    seconds: float
    rate: float | None
    cost: Cost
    entries: int = 0
    body_bytes: int = 0
    took_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    _due_s: float = field(default=0.0, init=False)
    _newest: int = field(default=1, init=False)
    """Entries of the request that ended last."""

    async def run(self) -> None:
        """Keep all requests in flight until the measurement ends."""
        await self._phase(min(_WARM_UP_S, self.seconds))
        self.latencies_s.clear()
        self.entries = self.body_bytes = 0
        await asyncio.to_thread(self.cost.start)
        begun = time.perf_counter()
        await self._phase(self.seconds)
        self.took_s = time.perf_counter() - begun
        await asyncio.to_thread(self.cost.stop)

    async def _phase(self, seconds: float) -> None:
        begun = self._due_s = time.perf_counter()
        await asyncio.gather(*(self._sender(request, begun + seconds) for request in self.requests))
        if self.rate is not None:  # the last entry may have been due before the end
            await asyncio.sleep(max(0.0, begun + seconds - time.perf_counter()))

    async def _sender(self, request: Request, end: float) -> None:
        while (begun := time.perf_counter()) < end and self._due_s < end:
            if self.rate is not None:
                # The senders take the due times in turn, one interval apart: a burst of all of them would measure how
                # long they wait for each other (test_requests_at_a_rate_are_due_one_after_the_other).
                due, self._due_s = self._due_s, self._due_s + self._newest / self.rate
                await asyncio.sleep(max(0.0, due - begun))
                # From the moment at which it was due: a load that waits for a slow log would hide how slow it is.
                begun = due
            self._newest, body_bytes = await request()
            self.latencies_s.append(time.perf_counter() - begun)
            self.entries += self._newest
            self.body_bytes += body_bytes

    def results(self, *, writes: bool) -> dict[str, Any]:
        """Return the results of a load that ``writes``, or only reads."""
        if not self.latencies_s:
            raise ConfigError("no request ended in time", "", "use a longer --seconds, or a higher --rate")
        return {
            "entries": self.entries,
            "seconds": round(self.took_s, 2),
            "entries_per_s": round(self.entries / self.took_s),
            "mb_per_s": round(self.body_bytes / self.took_s / 1e6, 1),
            **percentiles(self.latencies_s),
            **self.cost.per_entry(self.entries, self.body_bytes if writes else 0),
            "requests": len(self.latencies_s),
        }


def random_bodies(size: int, request_bytes: int) -> pa.Array:
    """Return incompressible bodies of one request, made once, so that making them is not measured."""
    count = max(1, request_bytes // size)
    if count * (size + HEADER_BYTES) > BATCH_BYTES_MAX:
        raise ConfigError(
            f"{count} entries of {size} bytes exceed a batch of {BATCH_BYTES_MAX} bytes",
            "",
            "use a smaller --request-bytes",
        )
    offsets = np.arange(0, (count + 1) * size, size, dtype=np.int32)
    return pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(os.urandom(count * size))]
    )


size_option = option(
    "--size",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    metavar="BYTES",
    help="Size of an entry's body in bytes.",
)


def in_flight_option(default: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return ``--in-flight``."""
    return option(
        "--in-flight",
        type=click.IntRange(1),
        default=default,
        show_default=True,
        metavar="NUMBER",
        help="Number of requests in flight.",
    )


def rate_option(verb: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return ``--rate``."""
    return option(
        "--rate",
        type=click.FloatRange(0, min_open=True),
        metavar="NUMBER",
        help=f"Entries per second to {verb}, however long they take [default: as many as fit].",
    )


seconds_option = option(
    "--seconds",
    type=DurationType(0.1),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Duration of the measurement.",
)
producers_option = option(
    "--producers",
    type=click.IntRange(1),
    metavar="NUMBER",
    help="Append through that many idempotent producers, each with one request in flight.",
)
