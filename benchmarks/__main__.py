"""Measure this log next to a skeleton without Raft, Kafka, NATS JetStream, etcd and Java DLedger, in one run.

Each round measures every line with every side; see benchmarks/README.md. Progress goes to standard error, and the
results are saved after each measurement, so a run may be interrupted. A side or line that fails is recorded with its
reason, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from benchmarks.comparison import PEERS, ROOT, Comparison, say
from benchmarks.lines import LINES
from benchmarks.peers.fetching import PROGRAMS, fetch


def main() -> None:
    """Measure, fetch or render."""
    names = [line.name for line in LINES]
    peers = ["skeletons", *PEERS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--lines", default=",".join(names), help="comma-separated [default: %(default)s]")
    parser.add_argument("--peers", default=",".join(peers), help="comma-separated, may be empty [default: %(default)s]")
    parser.add_argument("--repeat", type=int, default=5, help="number of rounds [default: 5]")
    parser.add_argument("--seconds", type=float, default=1.5, help="duration of a measurement [default: 1.5]")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results.json", help="file for the results")
    parser.add_argument("--programs", type=Path, default=PROGRAMS, help="programs of the peers [default: %(default)s]")
    parser.add_argument("--no-warm", action="store_true", help="do not touch free memory before each measurement")
    parser.add_argument(
        "--fetch", action="store_true", help="fetch the programs of the peers by Maven and Go, and stop"
    )
    parser.add_argument(
        "--render",
        action="store_true",
        help="only write RESULTS.md, results.svg and the figures in dledger_core/README.md, from --out",
    )
    options = parser.parse_args()
    for chosen, known in ((options.lines, names), (options.peers, peers)):
        for name in filter(None, chosen.split(",")):
            if name not in known:
                parser.error(f"{name!r} is not one of {', '.join(known)}")
    if options.fetch:
        sys.exit(fetch(options.programs))
    if options.render:
        from benchmarks.report import render

        render(json.loads(options.out.read_text()))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes of a side end with this one
    wanted = set(options.lines.split(","))
    wanted |= {line.of for line in LINES if line.name in wanted and line.of}
    Comparison(
        [line for line in LINES if line.name in wanted],
        list(filter(None, options.peers.split(","))),
        options.repeat,
        options.seconds,
        options.out,
        options.programs.absolute(),
        not options.no_warm,
    ).run()
    say(f"saved {options.out}; python -m benchmarks --render writes the page, the picture and the README's figures")


if __name__ == "__main__":
    main()
