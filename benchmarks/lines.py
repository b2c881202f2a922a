"""The lines of the comparison: what each side appends, and the figures of one measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Line:
    """A kind of load that every side is measured with.

    Attributes:
        name: its name for ``--lines`` and in the results.
        title: its name in tables.
        size: bytes of a body.
        in_flight: requests in flight, in all groups.
        request_bytes: bytes of all bodies of a request; None = requests of one entry.
        separate: a request of one entry stays one, where a client can also join several.
        groups: number of groups, topics or streams that the entries go to.
        share: send at this share of the rate that the same side reached with ``of``; 0 = as fast as possible.
        of: name of that line.
    """

    name: str
    title: str
    size: int
    in_flight: int
    request_bytes: int | None = None
    separate: bool = False
    groups: int = 1
    share: float = 0.0
    of: str = ""

    def load(self, seconds: float, warm_up_s: float, rate: float | None = None) -> Load:
        """Return the load of one measurement; ``rate`` in entries per second."""
        entries = 1 if self.request_bytes is None else self.request_bytes // self.size
        return Load(self.size, entries, self.in_flight, self.separate, self.groups, rate, seconds, warm_up_s)


@dataclass(frozen=True)
class Load:
    """The load of one measurement: the fields of its line, and its duration.

    Attributes:
        entries: of one request.
        rate: entries per second; None = as many as fit.
        seconds: duration.
        warm_up_s: time before it that does not count.
    """

    size: int
    entries: int
    in_flight: int
    separate: bool
    groups: int
    rate: float | None
    seconds: float
    warm_up_s: float


MIB = 1 << 20
LINES = (
    Line("separate_64", "100 B, separate requests, 64 in flight", 100, 64, separate=True),
    Line("separate_1", "100 B, 1 in flight", 100, 1, separate=True),
    Line("append_64", "100 B, 64 in flight", 100, 64),
    Line("append_256", "100 B, 256 in flight", 100, 256),
    Line("groups_16", "100 B, 64 in flight, 16 groups", 100, 64, groups=16),
    Line("large_100", "100 B in requests of 1 MiB", 100, 6, MIB),
    Line("large_1k", "1 KB in requests of 1 MiB", 1000, 6, MIB),
    Line("large_10k", "10 KB in requests of 1 MiB", 10_000, 6, MIB),
    Line("rate_60", "1 KB in requests of 1 MiB, at 60 % of the maximum rate", 1000, 6, MIB, share=0.6, of="large_1k"),
)


def figures(latencies_s: Sequence[float], entries: int, seconds: float) -> dict[str, float]:
    """Return rate and percentiles of requests of ``entries`` each."""
    millis = np.array(latencies_s) * 1000
    p50, p99, p999 = (round(float(q), 3) for q in np.quantile(millis, (0.5, 0.99, 0.999)))
    return {
        "entries_per_s": round(len(latencies_s) * entries / seconds),
        "p50_ms": p50,
        "p99_ms": p99,
        "p99_9_ms": p999,
    }
