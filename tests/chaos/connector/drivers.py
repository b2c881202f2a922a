"""Drivers as an operator runs them: each is started again when it ends, with the same checkpoint."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from tests.support.spark_jvm import short_lived_environment

ROOT: Final = Path(__file__).resolve().parents[3]
END_S: Final = 600.0
_CODE: Final = re.compile(r"\[?(DLEDGER_[A-Z_.]+|[A-Z]+(?:_[A-Z]+){2,})\]?")
EXECUTOR: Final = "CoarseGrainedExecutorBackend"
PYTHON_WORKER: Final = "daemon"
"""``pyspark.daemon``, or ``pyspark/daemon.py``, and the workers that it forks."""


class Driver:
    """A driver of one query.

    Attributes:
        checkpoint: the directory of its checkpoint.
        refusals: how often it ended without being killed, by the code of its error.
    """

    def __init__(self, name: str, command: Sequence[object], last: Sequence[object], directory: Path) -> None:
        self.name = name
        self.checkpoint = directory / f"{name} checkpoint"
        self.refusals: Counter[str] = Counter()
        self._command, self._last = ([sys.executable, *map(str, given)] for given in (command, last))
        self._log = directory / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._second: subprocess.Popen[bytes] | None = None
        self._seen: set[psutil.Process] = set()

    def start(self) -> None:
        """Start it."""
        self._process = self._spawn(self._command)

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            environment = psutil.Process().environ() | short_lived_environment()
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)

    def watch(self) -> bool:
        """Start it again if it has ended; return whether it had."""
        assert self._process is not None
        if self._process.poll() is None:
            return False
        text = self._log.read_text(errors="replace")[-20_000:]
        found = _CODE.findall(text)
        self.refusals[found[-1] if found else f"exit code {self._process.returncode}"] += 1
        self.start()
        return True

    def processes(self) -> list[psutil.Process]:
        """Return the driver's processes: its Python, its JVM, executors and their Python."""
        assert self._process is not None
        with suppress(psutil.NoSuchProcess):
            own = psutil.Process(self._process.pid)
            found = [own, *own.children(recursive=True)]
            self._seen.update(found)
            return found
        return []

    def workers(self, *words: str) -> list[psutil.Process]:
        """Return its executors and Python workers: those with one of the words in their command."""
        found = []
        for process in self.processes():
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if any(word in " ".join(process.cmdline()) for word in words):
                    found.append(process)
        return found

    def kill(self) -> None:
        """Kill its Python and its JVM; executors find out as on other machines."""
        assert self._process is not None
        workers = set(self.workers(EXECUTOR, PYTHON_WORKER))
        for process in self.processes():
            if process not in workers:
                _kill(process)
        self._process.wait()
        for process in workers:  # the next driver is on the same machine: what hangs does not stay
            with suppress(psutil.TimeoutExpired):
                process.wait(5)
            _kill(process)

    def start_second(self, checkpoint: Path | None = None) -> None:
        """Start another driver with the same checkpoint, or with a copy of it."""
        own = str(self.checkpoint)
        self._second = self._spawn([str(checkpoint or own) if each == own else each for each in self._command])

    def second_has_ended(self) -> bool:
        """Return whether the other driver has ended."""
        return self._second is None or self._second.poll() is not None

    def kill_second(self) -> None:
        """Kill the other driver."""
        if self._second is not None:
            with suppress(psutil.NoSuchProcess):
                own = psutil.Process(self._second.pid)
                for process in [own, *own.children(recursive=True)]:
                    _kill(process)
            self._second.wait()
            self._second = None

    def newest(self, log: str) -> int:
        """Return the newest micro-batch in ``offsets`` or ``commits`` of its checkpoint; -1 if there is none."""
        return newest(self.checkpoint, log)

    def finish(self) -> int:
        """Kill it, and run it up to the newest entry, again if it fails; return the last exit code."""
        self.kill()
        code, end = -1, time.monotonic() + END_S
        while code != 0 and time.monotonic() < end:
            process = self._spawn(self._last)
            try:
                code = process.wait(max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        return code

    def close(self) -> None:
        """Kill whatever runs."""
        self.kill_second()
        if self._process is not None:
            self.kill()
        for process in self._seen:
            _kill(process)

    def last_words(self) -> str:
        """Return the end of its log."""
        return self._log.read_text(errors="replace")[-2000:]


def newest(checkpoint: Path, log: str) -> int:
    """Return the newest micro-batch in a log of a checkpoint; -1 if there is none."""
    numbers = [int(path.name) for path in (checkpoint / log).glob("[0-9]*") if path.name.isdigit()]
    return max(numbers, default=-1)


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):  # psutil kills no other process that has the same number now
        process.kill()


def wait(seconds: float, drivers: Sequence[Driver]) -> None:
    """Let time pass; drivers that end are started again."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for driver in drivers:
            driver.watch()
            driver.processes()
        time.sleep(0.2)
