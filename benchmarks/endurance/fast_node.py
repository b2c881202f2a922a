"""A node whose log time runs faster: ``python -m benchmarks.endurance.fast_node SPEED serve ...``.

Each ms that a leader leads counts as SPEED ms of log time. Nothing else is faster: ticks, elections, deadlines
and append times keep to the clocks.
"""

from __future__ import annotations

import sys

from dledger_core.cli import main
from dledger_core.server.replica.log_time import RunningTime


def run_faster(speed: int) -> None:
    """Multiply the running time of this process's node, of which only log time is made."""
    running_ms = RunningTime.now_ms

    def now_ms(self: RunningTime) -> int:
        return speed * running_ms(self)

    RunningTime.now_ms = now_ms  # type: ignore[method-assign]


if __name__ == "__main__":
    run_faster(int(sys.argv[1]))
    sys.argv = ["dledger", *sys.argv[2:]]
    main()
