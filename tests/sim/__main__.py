"""Run seeds of the simulation and print the counts of what happened in them.

python -m tests.sim --seeds 0..99                     complete replicas, their stores and clients
python -m tests.sim --seeds 0..99 --core              the Raft core alone, faster
python -m tests.sim --seeds 7..7 --faults 3,17        a part of a seed's schedule, as a shrunk failure names it
python -m tests.sim --soak 10000000                   run on until the record has this many events of the committed code

The first seed that fails is shrunk to a small schedule of faults.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from tests.sim.runs import KINDS, run_one, shrink
from tests.sim.simulator import Simulator, replay_command
from tests.support.soak_record import SoakRecord

RECORD = Path(__file__).with_name("SOAK.jsonl")
SEEDS_PER_LINE = 100


def run_seeds(
    seeds: Iterable[int], *, core: bool, jobs: int, numbers: list[int] | None = None, shrunk: bool = True
) -> Iterator[tuple[int, Counter[str]]]:
    """Yield (seed, counts); end the program at the first seed that fails."""
    run = partial(run_one, core, numbers)
    with multiprocessing.get_context("spawn").Pool(jobs) if jobs > 1 else nullcontext() as pool:
        for seed, counters, failure in pool.imap(run, seeds) if pool else map(run, seeds):
            if failure:
                sys.stderr.write(f"seed {seed} failed: {failure}\n")
                if shrunk:
                    show_shrunk(seed, core=core)
                sys.exit(1)
            yield seed, counters


def show_shrunk(seed: int, *, core: bool) -> None:
    kind = KINDS[core]
    faults = Simulator(seed, kind).faults
    numbers = shrink(seed, kind)
    sys.stderr.write(f"minimal schedule: {len(numbers)} of {len(faults)} faults\n")
    for number in numbers:
        sys.stderr.write(f"  at {faults[number].at:5} {faults[number].kind}\n")
    sys.stderr.write(f"replay: {replay_command(seed, kind)} --faults {','.join(map(str, numbers)) or 'none'}\n")


def show(runs: list[Counter[str]], seconds: float) -> None:
    totals = sum(runs, Counter(seeds=len(runs), seconds=round(seconds)))
    for name, count in sorted(totals.items()):
        sys.stdout.write(f"{name:>24} {count:>14,}\n")


def soak(events: int, jobs: int) -> None:
    """Run new seeds until the record has ``events`` events of the committed code."""
    record = SoakRecord(RECORD)
    if changed := record.uncommitted():
        sys.exit(f"commit first, because the record names a commit:\n{changed}")
    done = record.rows()
    total, first = sum(row["events"] for row in done), max((row["last_seed"] for row in done), default=-1) + 1
    while total < events:
        started, last = time.perf_counter(), first + SEEDS_PER_LINE - 1
        runs = [counters for _, counters in run_seeds(range(first, last + 1), core=False, jobs=jobs)]
        counts: Counter[str] = sum(runs, Counter())
        total += counts["events"]
        record.add(
            first_seed=first,
            last_seed=last,
            events=counts["events"],
            seconds=round(time.perf_counter() - started, 1),
            counts=dict(sorted(counts.items())),
        )
        sys.stderr.write(f"seeds {first}..{last}: {total:,} of {events:,} events, no violation\n")
        first = last + 1


def show_traces(seeds: Iterable[int], kind: type[Any]) -> None:
    logging.disable(logging.CRITICAL)
    for seed in seeds:
        sim = Simulator(seed, kind, traced=True)
        counters = sim.run()
        assert sim.trace is not None
        sys.stdout.write(f"{seed} {sim.trace.hexdigest()} {sorted(counters.items())}\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0..99", help="first and last seed, inclusive [default: 0..99]")
    parser.add_argument("--core", action="store_true", help="the Raft core alone, on a disk that is a list")
    parser.add_argument("--jobs", type=int, default=1, help="processes [default: 1]")
    parser.add_argument("--faults", metavar="NUMBERS", help="only these faults of the schedule, separated by commas")
    parser.add_argument("--trace", action="store_true", help="print a hash of all events of each seed")
    parser.add_argument("--no-shrink", action="store_true", help="do not shrink a seed that fails")
    parser.add_argument("--soak", type=int, metavar="EVENTS", help="record runs until the record has this many events")
    options = parser.parse_args()
    if options.soak:
        soak(options.soak, options.jobs)
        return
    first, _, last = options.seeds.partition("..")
    seeds = range(int(first), int(last or first) + 1)
    if options.trace:
        show_traces(seeds, KINDS[options.core])
        return
    started = time.perf_counter()
    chosen = options.faults and options.faults.replace("none", "").split(",")
    numbers = None if chosen is None else [int(number) for number in chosen if number]
    shrunk = not options.no_shrink and numbers is None
    runs = run_seeds(seeds, core=options.core, jobs=options.jobs, numbers=numbers, shrunk=shrunk)
    show([counters for _, counters in runs], time.perf_counter() - started)


if __name__ == "__main__":
    main()
