"""Figures of a run, sample by sample, and the comparison of its end with its beginning."""

from __future__ import annotations

import math
import os
import statistics
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

QUARTERS: Final = 4


class Measures:
    """Samples of a run. Times of appends are also kept per quarter, for percentiles of all of them.

    Args:
        seconds: length of the run.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._took_ms: list[dict[str, array[float]]] = [defaultdict(lambda: array("f")) for _ in range(QUARTERS)]
        self.columns: dict[str, list[float | None]] = defaultdict(list)
        self.starts: list[dict[str, Any]] = []

    def quarter(self, at_s: float) -> int:
        """Return the quarter of the run, from 0, in which this time is."""
        return min(QUARTERS - 1, int(QUARTERS * at_s / self._seconds))

    def add_start(self, at_s: float, day: float, took_s: float, *, killed: bool) -> None:
        """Record that a node started again."""
        self.starts.append({"at_s": round(at_s, 1), "day": round(day, 2), "took_s": round(took_s, 3), "killed": killed})

    def add(self, at_s: float, took_ms: Mapping[str, array[float]], values: Mapping[str, float | None]) -> None:
        """Record a sample: values now, and how long each append and read took since the last sample."""
        found: dict[str, float | None] = {"at_s": at_s, **values}
        for kind, took in took_ms.items():
            self._took_ms[self.quarter(at_s)][kind].extend(took)
            for name, part in (("p50", 0.5), ("p99", 0.99)):
                found[f"{kind} {name} ms"] = percentile(took, part)
        found["load"] = os.getloadavg()[0]
        for name, value in found.items():
            self.columns[name].append(None if value is None else round(value, 3))

    def quarters(self) -> list[dict[str, float]]:
        """Return the figures of each quarter: medians of the samples and starts, percentiles of all appends."""
        rows = []
        for number in range(QUARTERS):
            row = {}
            at = [n for n, at_s in enumerate(self.columns["at_s"]) if at_s and self.quarter(at_s - 1e-3) == number]
            for name, values in self.columns.items():
                known = [values[n] for n in at if n < len(values) and values[n] is not None]
                if known and not name.endswith(" ms") and name not in ("at_s", "day"):
                    row[name] = round(statistics.median(known), 3)
            for kind, took in self._took_ms[number].items():
                for name, part in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999)):
                    row[f"{kind} {name} ms"] = round(percentile(took, part), 2)
            starts = [start["took_s"] for start in self.starts if self.quarter(start["at_s"]) == number]
            if starts:
                row["start s"] = round(statistics.median(starts), 3)
            rows.append(row)
        return rows


def ratios(quarters: Sequence[dict[str, float]], base: int) -> dict[str, float]:
    """Return the last quarter's figures divided by those of the quarter ``base``."""
    first, last = quarters[base], quarters[-1]
    return {name: round(last[name] / value, 2) for name, value in first.items() if name in last and value}


def percentile(values: Sequence[float], part: float) -> float:
    """Return the value that this part of the values does not exceed; 0 of none."""
    return sorted(values)[math.ceil(part * len(values)) - 1] if values else 0.0
