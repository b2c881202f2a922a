"""Chaos against real processes on loopback.

python -m tests.chaos --minutes 5                 rounds of at most five minutes, each with a new seed
python -m tests.chaos --minutes 60 --record       the same, resumable, each round a line of SOAK.jsonl
python -m tests.chaos failover --kills 50         how long appends wait when the leader is killed
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from tests.chaos.failover import run_failover
from tests.chaos.soak import run_soak


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", choices=("run", "failover"), default="run")
    parser.add_argument("--minutes", type=float, default=1.0, help="total time of faults")
    parser.add_argument("--seed", type=int, help="the first round's seed; the next rounds count on from it")
    parser.add_argument("--out", type=Path, help="directory of a failed round [default: a new temporary one]")
    parser.add_argument("--record", action="store_true", help="append to SOAK.jsonl and continue its seeds")
    parser.add_argument("--kills", type=int, default=50, help="failover: how often the leader is killed")
    parser.add_argument("--limit-ms", type=float, default=1000.0, help="failover: more than this is a failure")
    options = parser.parse_args()
    # SIGTERM cleans up as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out = options.out or Path(tempfile.mkdtemp(prefix="dledger-chaos-"))
    try:
        if options.command == "failover":
            return run_failover(options.kills, options.limit_ms, out / "failover")
        return run_soak(options.minutes, options.seed, out, to_record=options.record)
    finally:
        if not any(out.iterdir()) and options.out is None:
            out.rmdir()


if __name__ == "__main__":
    sys.exit(main())
