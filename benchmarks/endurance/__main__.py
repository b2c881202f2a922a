"""Producers and queries that come and go while weeks of log time pass; see ``benchmarks.endurance.soak``.

python -m benchmarks.endurance --minutes 2                     a trial
python -m benchmarks.endurance --minutes 30 --record           a line of SOAK.jsonl, and its plot
python -m benchmarks.endurance plot                            the plot of the newest line again
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

from benchmarks.endurance.plot import PLOT, save_plot
from benchmarks.endurance.soak import RECORD, Plan, new_seed, run_soak

PER_MINUTE = 100_000 / 30, 10_000 / 30
"""Producers and queries."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.endurance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", choices=("run", "plot"), default="run")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--days", type=float, default=28.0, help="days of log time in the run")
    parser.add_argument("--producers", type=int, help="distinct producers [default: 100,000 in 30 minutes]")
    parser.add_argument("--queries", type=int, help="distinct queries [default: 10,000 in 30 minutes]")
    parser.add_argument("--timeout", type=float, help="seconds after which the leader aborts an inactive transaction")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--out", type=Path, help="directory of the run [default: a new temporary one]")
    parser.add_argument("--record", action="store_true", help="append to SOAK.jsonl and draw the plot next to it")
    options = parser.parse_args()
    # SIGTERM cleans up as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out = options.out or Path(tempfile.mkdtemp(prefix="dledger-endurance-"))
    if options.command == "plot":
        save_plot(json.loads(RECORD.read_text().splitlines()[-1]), PLOT)
        return 0
    out.mkdir(parents=True, exist_ok=True)
    producers, queries = (round(options.minutes * rate) for rate in PER_MINUTE)
    plan = Plan(
        minutes=options.minutes,
        days=options.days,
        producers=producers if options.producers is None else options.producers,
        queries=queries if options.queries is None else options.queries,
        timeout_s=options.timeout or min(10.0, 3.0 + options.minutes),
        seed=new_seed() if options.seed is None else options.seed,
    )
    code = run_soak(plan, out, to_record=options.record)
    save_plot(json.loads((out / "row.json").read_text()), PLOT if options.record else out / PLOT.name)
    sys.stdout.write(f"plot and figures: {out}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
