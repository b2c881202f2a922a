"""One run of the comparison: rounds in which each side is measured with each line, saved after each measurement."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import skeletons
from benchmarks.lines import Line, Load
from benchmarks.peers import NotRunError, Peer, Side
from benchmarks.peers.etcd import Etcd
from benchmarks.peers.java_dledger import JavaDLedger
from benchmarks.peers.kafka import Kafka
from benchmarks.peers.nats import Nats

ROOT = Path(__file__).resolve().parents[1]
OURS = Side(
    "ours",
    "this log",
    "three nodes as `dledger perf append` starts them, all default: fdatasync before the acknowledgement. Client: "
    "`AsyncClient`; separate singles by `--separate`, joined ones by `--singles`, which calls `append` for each.",
)
SKELETONS = (
    Side("growing", "skeleton, growing", "benchmarks/skeletons.py: no Raft; sparse files that grow."),
    Side("zeroed", "skeleton, zeroed", "benchmarks/skeletons.py: no Raft; files of 1 GiB, zeroed before, overwritten."),
)
PEERS: dict[str, type[Peer]] = {"kafka": Kafka, "nats": Nats, "etcd": Etcd, "java_dledger": JavaDLedger}
SIDES = (OURS, *SKELETONS, *(side for peer in PEERS.values() for side in peer.SIDES))
JOINING = {"ours", "kafka_fsync", "kafka_page"}
"""Sides whose client joins singles. For the others, a line with joined singles is the one with separate ones."""
WARM_UP_S = 1.0
TAIL_TIMES = 3
"""A line of percentiles at a fixed rate takes this many times longer, because few of its requests are the slowest."""
START_S = {"ours": 3.0, "skeletons": 1.5, "kafka": 22.0, "nats": 9.0, "etcd": 9.0, "java_dledger": 14.0}
"""For the estimate: seconds to start this log and a skeleton for each line, and a peer for each round."""
SETTLE_S = 0.3
LIMIT_S = 180.0
FREE_BYTES = 600 << 20
SPARSE_BYTES = 64 << 30


class Memory:
    """Touches free memory, so that no side is the first that uses a page.

    A virtual machine gives free memory back to its host, and the first use of such a page costs a fault there. A log
    that grows uses fresh pages all the time: it would pay what the side before it did. So a sparse file is read into
    the page cache, which gives its pages up to other files, until little memory is free.

    Args:
        directory: for the sparse file.
    """

    def __init__(self, directory: Path) -> None:
        self._path, self._offset = directory / "memory", 0

    @staticmethod
    def free_bytes() -> int:
        """Return the bytes of free memory; 0 where the system does not say."""
        with contextlib.suppress(OSError):
            for line in Path("/proc/meminfo").read_text().splitlines():
                if line.startswith("MemFree:"):
                    return int(line.split()[1]) << 10
        return 0

    def warm(self) -> None:
        """Touch as many bytes as are free now, but for a small rest."""
        buffer = bytearray(16 << 20)
        with self._path.open("ab+", buffering=0) as file:
            file.truncate(SPARSE_BYTES)
            for _ in range((self.free_bytes() - FREE_BYTES) // len(buffer)):
                os.preadv(file.fileno(), [buffer], self._offset % SPARSE_BYTES)
                self._offset += len(buffer)


def measure_ours(load: Load, directory: Path) -> dict[str, Any]:
    """Return the figures of ``dledger perf append``, which warms up for a second before."""
    command = [sys.executable, "-m", "dledger_core.cli", "perf", "append", "--format", "json"]
    options: dict[str, object] = {
        "--dir": directory,
        "--size": load.size,
        "--in-flight": load.in_flight,
        "--seconds": load.seconds,
    }
    if load.entries > 1:
        options["--request-bytes"] = load.entries * load.size
    else:
        command.append("--separate" if load.separate else "--singles")
    if load.groups > 1:
        options["--groups"] = load.groups
    if load.rate is not None:
        options["--rate"] = load.rate
    command += [str(word) for option in options.items() for word in option]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def machine() -> dict[str, object]:
    """Return the facts about the machine that the figures depend on."""
    model = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "python": platform.python_version(),
        "commit": commit,
    }


@dataclass
class Comparison:
    """A run.

    Attributes:
        lines: to measure.
        peers: names of PEERS, and ``skeletons``.
        repeat: rounds.
        seconds: of a measurement.
        out: file for the results.
        programs: directory of the programs of the peers.
        warm: whether memory is warmed before each measurement.
    """

    lines: Sequence[Line]
    peers: Sequence[str]
    repeat: int
    seconds: float
    out: Path
    programs: Path
    warm: bool = True
    runs: list[dict[str, Any]] = field(default_factory=list)
    _begun: float = field(default_factory=time.monotonic)

    def sides_of(self, part: str) -> tuple[Side, ...]:
        """Return the sides of ``ours``, ``skeletons`` or a peer."""
        return {"ours": (OURS,), "skeletons": SKELETONS}.get(part) or PEERS[part].SIDES

    def estimate_s(self) -> float:
        """Return about how long a round takes."""
        total = 0.0
        for part in ("ours", *self.peers):
            for line in self.lines:
                joins = part in {"ours", "kafka"} or line.separate or line.in_flight > 64
                seconds = (self._seconds(line) + WARM_UP_S + SETTLE_S) * len(self.sides_of(part)) if joins else 0.0
                total += seconds + (START_S[part] * len(self.sides_of(part)) if part in {"ours", "skeletons"} else 0)
            total += 0 if part in {"ours", "skeletons"} else START_S[part]
        return total

    def run(self) -> None:
        """Measure, one round after the other; in each, ours next to the skeletons line by line, then each peer."""
        say(f"about {self.repeat * self.estimate_s() / 60:.0f} minutes for {self.repeat} rounds")
        with tempfile.TemporaryDirectory(prefix="dledger-bench-", ignore_cleanup_errors=True) as name:
            self._directory, memory = Path(name), Memory(Path(name))
            self._prepare = memory.warm if self.warm else lambda: None
            for number in range(1, self.repeat + 1):
                self._round(number)
                left = (time.monotonic() - self._begun) / number * (self.repeat - number)
                say(f"round {number} of {self.repeat} is done, about {left / 60:.0f} minutes left")

    def _round(self, number: int) -> None:
        for line in self.lines:
            self._measure(number, line, OURS, self._ours)
            for side in SKELETONS if "skeletons" in self.peers else ():
                self._measure(number, line, side, partial(self._skeleton, side.name))
        for part in self.peers:
            if part != "skeletons":
                self._peer(number, part)

    @contextlib.contextmanager
    def _store(self) -> Iterator[Path]:
        """Yield a directory that is removed afterwards; memory is warm."""
        self._prepare()
        store = self._directory / "store"
        store.mkdir()
        try:
            yield store
        finally:
            shutil.rmtree(store, ignore_errors=True)

    def _ours(self, load: Load) -> dict[str, Any]:
        with self._store() as store:
            return measure_ours(load, store)

    def _skeleton(self, variant: str, load: Load) -> dict[str, Any]:
        if load.groups > 1:
            raise NotRunError("it has one group")
        if variant == "growing":
            with self._store() as store:
                return skeletons.measure(variant, store, load)
        self._prepare()
        return skeletons.measure(variant, self._directory, load)  # the zeroed files stay for the next time

    def _peer(self, number: int, part: str) -> None:
        with self._store() as store, contextlib.ExitStack() as stack:
            try:
                peer = stack.enter_context(PEERS[part](self.programs, store))
            except Exception as error:  # noqa: BLE001  (whatever it is: the others are measured all the same)
                reason = str(error) or repr(error)
                say(f"{part}: not run: {reason}")
                for side in self.sides_of(part):
                    for line in self.lines:
                        self._record(number, line, side, {"not_run": reason})
                return
            for line in self.lines:
                for side in self.sides_of(part):
                    self._measure(number, line, side, partial(peer.measure, side.name))

    def _seconds(self, line: Line) -> float:
        return self.seconds * (TAIL_TIMES if line.share else 1)

    def _measure(self, number: int, line: Line, side: Side, measure: Callable[[Load], dict[str, Any]]) -> None:
        try:
            same = self._same(number, line, side)
            found = measure(self._load(line, side)) if same is None else same
            if not found["entries_per_s"]:
                found = {"failed": "no request was acknowledged in time"}
        except NotRunError as error:
            found = {"not_run": str(error)}
        except Exception as error:  # noqa: BLE001  (a line of a side that fails leaves the others as they are)
            found = {"failed": str(error) or repr(error)}
        self._record(number, line, side, found)
        what = (
            found.get("not_run") or found.get("failed") or f"{found['entries_per_s']:,}/s, p50 {found.get('p50_ms')} ms"
        )
        say(f"{time.monotonic() - self._begun:5.0f} s  round {number}  {line.name:<12} {side.name:<13} {what}")
        time.sleep(SETTLE_S)

    def _load(self, line: Line, side: Side) -> Load:
        rate = None
        if line.share:
            rates = [run["entries_per_s"] for run in self.runs_of(line.of, side.name)]
            if not any(rates):
                raise NotRunError(f"its rate with {line.of} is not known")
            rate = round(line.share * statistics.median(rates))
        return line.load(self._seconds(line), WARM_UP_S, rate)

    def _same(self, number: int, line: Line, side: Side) -> dict[str, Any] | None:
        """Return the figures of the same load with separate singles, where the client joins none."""
        if line.separate or line.request_bytes or side.name in JOINING:
            return None
        for other in self.lines:
            if other.separate and replace(other, name="", title="", separate=False) == replace(line, name="", title=""):
                for run in self.runs_of(other.name, side.name):
                    if run["round"] == number:
                        return {**run, "same_as": other.name}
        return None

    def runs_of(self, line: str, side: str) -> list[dict[str, Any]]:
        """Return the measurements of a line of a side."""
        return [run for run in self.runs if run["line"] == line and run["side"] == side and "entries_per_s" in run]

    def _record(self, number: int, line: Line, side: Side, found: dict[str, Any]) -> None:
        self.runs.append({**found, "line": line.name, "side": side.name, "round": number})
        result = {
            "at": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            "machine": machine(),
            "seconds": self.seconds,
            "warm_up_s": WARM_UP_S,
            "rounds": self.repeat,
            "warmed": self.warm,
            "runs": self.runs,
        }
        partial = self.out.with_name(self.out.name + ".partial")
        partial.write_text(json.dumps(result, indent=1) + "\n")
        partial.replace(self.out)


def say(line: str) -> None:
    """Print progress."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
