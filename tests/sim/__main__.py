"""Runs seeds of the simulation and prints what happened in them.

python -m tests.sim --seeds 0..99             a whole group: replicas, stores, clients
python -m tests.sim --seeds 0..99 --core      the Raft core alone, faster
python -m tests.sim --campaign 10000000       go on until this many events ran on the committed code, and record it
python -m tests.sim --mutations               remove guards one by one: is each noticed?
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from datetime import UTC, datetime

from tests.sim import campaign
from tests.sim.seeds import run_seeds

FAULTS = (
    *("crashes", "crashes in a write", "disk errors", "disk stalls", "partitions", "stalls", "clock jumps"),
    *("bits flipped", "sectors lost", "sectors misdirected", "rows flipped", "rows lost", "marks refused"),
    *("lost", "duplicated", "cut off", "requests twice", "runs replaced", "transfers"),
)
SEEDS_PER_LINE = 500


def summary(runs: list[Counter[str]], seconds: float) -> dict[str, float]:
    """Returns medians per seed and the speed."""
    return {
        "events (median)": statistics.median(run["events"] for run in runs),
        "elections (median)": statistics.median(run["elections"] for run in runs),
        "faults (median)": statistics.median(sum(run[fault] for fault in FAULTS) for run in runs),
        "seconds": round(seconds, 1),
    }


def show(runs: list[Counter[str]], seconds: float) -> None:
    totals: Counter[str] = sum(runs, Counter())
    totals["seeds"] = len(runs)
    for name, count in sorted(totals.items()):
        sys.stdout.write(f"{name:>24} {count:>14,}\n")
    for name, value in summary(runs, seconds).items():
        sys.stdout.write(f"{name:>24} {value:>14,.1f}\n")
    sys.stdout.write(f"{'events per second':>24} {totals['events'] / seconds:>14,.0f}\n")


def run_campaign(events: int, jobs: int) -> None:
    """Runs new seeds until the record holds ``events`` events for the committed code."""
    changed = campaign.uncommitted()
    if changed:
        sys.exit(f"commit first, or the record would not say what ran:\n{changed}")
    version = campaign.code_version()
    done = campaign.valid_lines(version)
    total, first = sum(line["events"] for line in done), max((line["last_seed"] for line in done), default=-1) + 1
    while total < events:
        started, last = time.perf_counter(), first + SEEDS_PER_LINE - 1
        runs = [counters for _, counters in run_seeds(range(first, last + 1), core=False, jobs=jobs)]
        seconds = time.perf_counter() - started
        counts: Counter[str] = sum(runs, Counter())
        total += counts["events"]
        campaign.append_line(
            {
                "commit": campaign.git("rev-parse", "HEAD"),
                "code": version,
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
                "first_seed": first,
                "last_seed": last,
                "events": counts["events"],
                "violations": 0,
                **summary(runs, seconds),
                "counts": dict(sorted(counts.items())),
            }
        )
        sys.stderr.write(f"seeds {first}..{last}: {total:,} of {events:,} events, no violation\n")
        first = last + 1


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0..99", help="first and last seed, both run: 0..99")
    parser.add_argument("--core", action="store_true", help="the Raft core alone, on a disk that is a list")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--campaign", type=int, metavar="EVENTS", help="record runs until there are so many events")
    parser.add_argument("--mutations", action="store_true", help="remove each guard in turn and say whether it shows")
    options = parser.parse_args()
    if options.mutations:
        from tests.sim import mutations

        sys.exit(mutations.main(options.jobs))
    if options.campaign:
        run_campaign(options.campaign, options.jobs)
        return
    first, _, last = options.seeds.partition("..")
    started = time.perf_counter()
    seeds = range(int(first), int(last or first) + 1)
    runs = [counters for _, counters in run_seeds(seeds, core=options.core, jobs=options.jobs)]
    show(runs, time.perf_counter() - started)


if __name__ == "__main__":
    main()
