"""The lines of how long rows take to a Delta table, at 1,000 rows of 100 B a second.

One run of half an hour for each system, as long as a table and a JVM need to get into their stride; the rows of the
first third are left out. *append → Delta* is the time from the producer's clock in the row to the modification time of
the Delta commit that adds the row's file. The query has no trigger interval.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.spark_table.report import MEMORY, Line
from benchmarks.spark_table.systems import System
from benchmarks.spark_table.trickle import followed

RATE = 1000.0
PERCENTILES = (50, 90, 99, 99.9, 100)


def latency_lines(systems: list[System], seconds: float) -> list[Line]:
    """Return a line for each percentile."""
    runs: dict[str, list[float]] = {}
    for system in systems:
        if system.name != MEMORY:  # it has no producer
            with tempfile.TemporaryDirectory(prefix="dledger-bench-", ignore_cleanup_errors=True) as folder:
                _, waited = followed(system, RATE, seconds, Path(folder), seconds / 3)
            runs[system.name] = list(np.percentile(waited, PERCENTILES))
    name = f"append → Delta at 1,000 rows/s, after {seconds / 180:.0f} of {seconds / 60:.0f} minutes"
    return [
        Line(f"{name}, p{percentile:g}", "s", {of: [values[at]] for of, values in runs.items()})
        for at, percentile in enumerate(PERCENTILES)
    ]
