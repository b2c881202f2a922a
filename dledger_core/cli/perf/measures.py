"""Cost and latency of a measurement: processor time, context switches, disk, percentiles."""

from __future__ import annotations

import os
import ssl
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

_SYNCS: Final = "dledger_fsync_duration_seconds_count"
PERCENTILES: Final = {"p50_ms": 0.5, "p99_ms": 0.99, "p99_9_ms": 0.999, "p99_99_ms": 0.9999, "max_ms": 1.0}


class _Count(NamedTuple):
    """Resources that a process has used since its start."""

    cpu_s: float
    switches: int
    written_bytes: int

    def since(self, before: _Count) -> _Count:
        """Return the resources that were used after an earlier count."""
        return _Count(
            self.cpu_s - before.cpu_s, self.switches - before.switches, self.written_bytes - before.written_bytes
        )


class Cost:
    """Resources that the client and the nodes use between ``start`` and ``stop``.

    Linux counts it per process; elsewhere nothing is reported.

    Args:
        nodes: processes of the nodes that are known, by name.
        syncs: returns the syncs of all nodes since their starts; None = not known.
    """

    def __init__(self, nodes: Mapping[str, int], syncs: Callable[[], int] | None = None) -> None:
        known = {"client": os.getpid(), **nodes}
        self._pids = {name: pid for name, pid in known.items() if Path(f"/proc/{pid}/io").exists()}
        self._syncs = syncs
        self._before: tuple[Mapping[str, _Count], int] = ({}, 0)
        self._after: tuple[Mapping[str, _Count], int] = ({}, 0)

    def start(self) -> None:
        """Count from now on."""
        self._before = self._now()

    def stop(self) -> None:
        """Count up to now."""
        self._after = self._now()

    def per_entry(self, entries: int, body_bytes: int) -> dict[str, Any]:
        """Return the results.

        Args:
            entries: entries that were appended or read.
            body_bytes: bytes of their bodies that were written; 0 = the run only reads.
        """
        (before, syncs_before), (after, syncs_after) = self._before, self._after
        used = {name: after[name].since(before[name]) for name in after}
        found: dict[str, Any] = {
            f"cpu_us_per_entry_{name}": round(count.cpu_s * 1e6 / entries, 3) for name, count in used.items()
        }
        switches = sum(count.switches for count in used.values()) / entries
        found["context_switches_per_entry"] = round(switches, 3) if used else None
        if body_bytes:
            nodes = [count.written_bytes for name, count in used.items() if name != "client"]
            written = sum(nodes) / len(nodes) / body_bytes if nodes else None
            found["bytes_written_per_byte"] = None if written is None else round(written, 2)
            found["syncs"] = None if self._syncs is None else syncs_after - syncs_before
        return found

    def _now(self) -> tuple[Mapping[str, _Count], int]:
        syncs = 0 if self._syncs is None else self._syncs()
        return {name: _count(pid) for name, pid in self._pids.items()}, syncs


def _count(pid: int) -> _Count:
    """Return the resources that a process has used: man 5 proc, stat, status and io."""
    process = Path("/proc", str(pid))
    user, system = process.joinpath("stat").read_text().rpartition(")")[2].split()[11:13]
    lines = [line for task in process.glob("task/*/status") for line in task.read_text().splitlines()]
    switches = sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    io = dict(line.split(": ") for line in process.joinpath("io").read_text().splitlines())
    cpu_s = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return _Count(cpu_s, switches, int(io["write_bytes"]))


def syncs_of(pages: Sequence[str], ca: str | Path | None) -> int:
    """Return the syncs of nodes with these status pages since their starts.

    Args:
        pages: addresses of the pages.
        ca: the authority of their certificates; None = without TLS.
    """
    context = None if ca is None else ssl.create_default_context(cafile=str(ca))
    count = 0
    for page in pages:
        with urllib.request.urlopen(f"{page}metrics", timeout=10, context=context) as response:  # noqa: S310
            lines = response.read().decode().splitlines()
        count += sum(int(float(line.split()[-1])) for line in lines if line.startswith(_SYNCS))
    return count


def percentiles(latencies_s: Sequence[float]) -> dict[str, float]:
    """Return percentiles of latencies in ms, with two digits."""
    found = np.quantile(np.array(latencies_s) * 1000, list(PERCENTILES.values()))
    return dict(zip(PERCENTILES, (round(float(each), 2) for each in found), strict=True))
