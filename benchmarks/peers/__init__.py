"""Other replicated logs, for ``python -m benchmarks``: three nodes of each on loopback, driven by its own best client.

Their programs are not part of this project: ``python -m benchmarks --fetch`` gets them by Maven and Go into
``PROGRAMS``. One that is not there is not measured, and the results say why.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from benchmarks.lines import Load

SOURCES = Path(__file__).parent / "load"
WARM_UP = (Load(100, 1, 64, True, 1, None, 3.0, 0.0), Load(1000, 1048, 6, False, 1, None, 2.0, 0.0))
"""Loads of each peer before it is measured: compilers and caches of a new process need it."""
ANSWER_S = 40.0


class NotRunError(Exception):
    """A side, or a line of it, cannot be measured here; the reason is its text."""


@dataclass(frozen=True)
class Side:
    """A column of the results.

    Attributes:
        name: in the results and for ``--peers``.
        title: in tables.
        settings: its version, its options that have not their default, and how the lines are translated for it.
    """

    name: str
    title: str
    settings: str


class Peer(Protocol):
    """Three nodes of a system; a context manager that starts, warms up and stops them.

    Raises:
        NotRunError: on entering, if it cannot be started here.
    """

    SIDES: tuple[Side, ...]
    """The ways in which it is measured."""

    def __init__(self, programs: Path, directory: Path) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def measure(self, side: str, load: Load) -> dict[str, Any]:
        """Return the figures of one measurement.

        Raises:
            NotRunError: there is no equivalent of the load.
        """
        ...


def program(programs: Path, name: str) -> Path:
    """Return a program: of the environment variable of its name (``NATS_SERVER``), of ``programs``, or on PATH.

    Raises:
        NotRunError: it is nowhere.
    """
    named = os.environ.get(name.upper().replace("-", "_"))
    for found in (named, str(programs / "bin" / name), name):
        if found and (path := shutil.which(found)):
            return Path(path)
    raise NotRunError(f"{name} is not here: python -m benchmarks --fetch")


class Process:
    """A program whose output goes to a file, until ``stop``; with ``asked``, one that answers lines."""

    def __init__(self, command: list[Any], log: Path, *, asked: bool = False) -> None:
        self._command, self._log, self._asked = list(map(str, command)), log, asked
        self._process = self._started()

    def _started(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE if self._asked else None
        with self._log.open("ab") as output:
            return subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe or output, stderr=output, cwd=self._log.parent, text=True
            )

    def stop(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
        for pipe in filter(None, (self._process.stdin, self._process.stdout)):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def send(self, load: Load) -> None:
        """Start a measurement."""
        assert self._process.stdin is not None
        fields = (load.size, load.entries, load.in_flight, int(load.separate), load.groups, load.rate or 0)
        self._process.stdin.write(" ".join(map(str, (*fields, load.warm_up_s, load.seconds))) + "\n")
        self._process.stdin.flush()

    def answer(self, load: Load) -> dict[str, Any]:
        """Return the figures of the measurement.

        Raises:
            RuntimeError: the program ended or does not answer.
        """
        assert self._process.stdout is not None
        timer = threading.Timer(load.warm_up_s + load.seconds + ANSWER_S, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise RuntimeError(f"{Path(self._command[0]).name} ended or did not answer")
        found: dict[str, Any] = json.loads(line)
        if found.get("failed") and not found["entries_per_s"]:
            raise RuntimeError(f"every append failed: {found['reason']}")
        return found

    def measure(self, load: Load) -> dict[str, Any]:
        """Return the figures of a measurement; start the program again if an earlier one ended it."""
        if self._process.poll() is not None:
            self.stop()
            self._process = self._started()
        self.send(load)
        return self.answer(load)
