"""Runs the way out of DLedger mode in processes that the kernel kills (SIGKILL) at a given operation of the files.

A process of its own, because only one without threads may be forked: it imports everything once. For each line of its
input, a request in JSON, it forks a run and writes how that process ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from dledger_core.rocketmq.leaving import LeaveRequest, leave
from tests.rocketmq.leaving.dying_files import DyingFiles

PATHS = ("source", "destination", "broker_conf", "id_map")


def kill_itself() -> NoReturn:
    """End this process as ``kill -9`` does: no handler, no ``finally``, no buffer that is flushed."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("the process lives on")


def run_until(at: int, *, after: bool, **given: Any) -> None:
    paths = {name: Path(given.pop(name)) for name in PATHS}
    leave(LeaveRequest(**paths, **given), files=DyingFiles(at, after=after, die=kill_itself))


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if not child:
            code = 1
            try:
                run_until(**json.loads(line))
                code = 0
            except Exception:  # noqa: BLE001 - this process has no caller that could handle it
                traceback.print_exc()
            os._exit(code)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
