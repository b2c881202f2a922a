"""``python -m tests.sim --seeds A..B``: runs seeds and prints what happened in them."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.support.cluster_sim import replay_command, run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", default="0..99", help="first and last seed, both run: 0..99")
    first, _, last = parser.parse_args().seeds.partition("..")
    totals: Counter[str] = Counter()
    started = time.perf_counter()
    for seed in range(int(first), int(last or first) + 1):
        try:
            totals += run_seed(seed)
        except Exception:
            sys.stderr.write(f"seed {seed} failed; replay: {replay_command(seed)}\n")
            raise
        totals["seeds"] += 1
    for name, count in sorted(totals.items()):
        sys.stdout.write(f"{name:>20} {count:>12,}\n")
    sys.stdout.write(f"{'seconds':>20} {time.perf_counter() - started:>12.1f}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
