"""Bugs made on purpose: each removes one guard from a copy of the code, and some seed or test must fail.

``found_by`` names how: ``core`` = seeds of the Raft core alone, ``whole`` = seeds of complete replicas, otherwise the
test that fails (``FILE::TEST``, of another room ``ROOM/FILE::TEST``), or a file with such tests. The tests serve where
a random run would have to be lucky. A guard is its text; it occurs once in its room, in whatever file. A room is a
package of ``dledger_core``, "." all of it; the connector is a room too.

python -m tests.sim.mutations NAME --seeds 0..4999    run the seeds without this guard, up to one that fails
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
CONNECTOR: Final = "spark_connector"


class Mutation(NamedTuple):
    """One guard of a room and the text without it."""

    name: str
    room: str
    guard: str
    without: str
    found_by: str

    def tests(self, root: Path = ROOT) -> tuple[Path, str]:
        """Return the file of the tests that fail, and the name of the one that does, "" = some of them."""
        path, _, test = self.found_by.partition("::")
        return root / "tests" / (path if "/" in path else f"{self.room}/{path}"), test

    def module(self, root: Path = ROOT) -> Path | None:
        """Return the file that contains the guard, or None unless it occurs exactly once."""
        room = root / self.room if self.room == CONNECTOR else root / "dledger_core" / self.room
        counts = {path: text.count(self.guard) for path, text in _texts(room).items()}
        found = [path for path, count in counts.items() if count]
        return found[0] if sum(counts.values()) == 1 else None


@lru_cache(maxsize=16)
def _texts(room: Path) -> dict[Path, str]:
    return {path: path.read_text() for path in room.rglob("*.py")}


def load() -> list[Mutation]:
    """Return the mutations of ``mutations.diff``. A guard without replacement is removed as a complete line."""
    found = []
    for part in Path(__file__).with_suffix(".diff").read_text().split("\n= ")[1:]:
        head, *lines = part.rstrip("\n").split("\n")
        name, room, found_by = head.split(" | ")
        guard = "\n".join(line[1:] for line in lines if line.startswith("-"))
        without = "\n".join(line[1:] for line in lines if line.startswith("+"))
        removed = not any(line.startswith("+") for line in lines)
        found.append(Mutation(name, room, guard + "\n" * removed, without, found_by))
    return found


MUTATIONS: Final = load()
NAMED: Final = {mutation.name: mutation for mutation in MUTATIONS}
LIKELY_SEEDS: Final = {
    "an acknowledgement names the end of the log": 1,
    "a read is answered by old echoes": 273,
    "majorities of two changes decide without a common member": 159,
    "a recovering voter votes at once": 35,
    "the page cache after a failed sync is trusted": 15,
    "a batch ends where a row is lost": 122,
    "a snapshot install keeps the old tables": 33,
    "recovered records are not synced": 13,
    "the shortest log is continued": 6,
    "in a run a range outlives the end of a continued log": 86,
}
"""The seed that failed when this was last tried, where it is not among the first ones. It is tried first."""


def mutate(directory: Path, mutation: Mutation) -> None:
    """Copy the code and its tests, and remove one guard from the copy."""
    for package in ("dledger_core", CONNECTOR, "tests"):
        shutil.copytree(ROOT / package, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
    path = mutation.module(directory)
    if path is None:
        raise AssertionError(f"room {mutation.room} does not contain this guard once: {mutation.name}")
    path.write_text(path.read_text().replace(mutation.guard, mutation.without))


def run_python(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python on a copy."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env={
            **os.environ,
            "PYTHONPATH": str(directory),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "DLEDGER_CHECKOUT": str(ROOT),  # a copy has no history
        },
        capture_output=True,
        text=True,
        check=False,
    )


def failing_seed(directory: Path, mutation: Mutation, options: Sequence[str] = ("--no-shrink",)) -> str:
    """Return the output of the simulation of a mutated copy if a seed fails, otherwise ""."""
    core = ["--core"] if mutation.found_by == "core" else []
    likely = LIKELY_SEEDS.get(mutation.name, 0)
    for seeds in (f"{likely}..{likely}", "0..299" if core else "0..149"):
        run = run_python(directory, "-m", "tests.sim", *core, *options, "--seeds", seeds)
        noticed = any(kind in run.stderr for kind in ("Violation", "Liveness", "AssertionError", "Corrupt"))
        if run.returncode != 0 and "replay: python -m tests.sim" in run.stderr and noticed:
            return run.stderr
    return ""


def failing_test(directory: Path, mutation: Mutation) -> str:
    """Return the summary of the tests of a mutated room if one fails, or ""."""
    file, test = mutation.tests(directory)
    options = ["-q", "-x", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir", str(directory)]
    for tests in [f"{file}::{test}"] if test else [str(file), str(file.parent)]:
        run = run_python(directory, "-m", "pytest", *options, tests)
        summary = run.stdout.splitlines()[-1] if run.stdout else ""
        if run.returncode == 1 and "error" not in summary:
            return summary
    return ""


def attempt(name: str) -> str:
    """Try one mutation on a copy of its own; return the failure that noticed it, or ""."""
    mutation = NAMED[name]
    with tempfile.TemporaryDirectory() as directory:
        mutate(Path(directory), mutation)
        if mutation.found_by in ("core", "whole"):
            return failing_seed(Path(directory), mutation)
        return failing_test(Path(directory), mutation)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutations", description="Run seeds without one guard.")
    parser.add_argument("name", choices=[name for name, found in NAMED.items() if found.found_by in ("core", "whole")])
    parser.add_argument("--seeds", default="0..4999", help="first and last seed, inclusive [default: 0..4999]")
    parser.add_argument("--jobs", type=int, default=1, help="processes [default: 1]")
    options = parser.parse_args()
    mutation = NAMED[options.name]
    core = ["--core"] if mutation.found_by == "core" else []
    with tempfile.TemporaryDirectory() as directory:
        mutate(Path(directory), mutation)
        seeds = ["--seeds", options.seeds, "--jobs", str(options.jobs)]
        run = run_python(Path(directory), "-m", "tests.sim", *core, "--no-shrink", *seeds)
    sys.stdout.write(run.stdout + run.stderr)
    sys.exit(0 if run.returncode else "no seed fails")


if __name__ == "__main__":
    main()
