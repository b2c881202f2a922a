"""Nodes whose log time runs faster; memory, files and start of each, measured from outside."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

import psutil

from dledger_core.cluster import LocalCluster
from tests.support.soon import soon

START_S: Final = 120.0


class FastCluster(LocalCluster):
    """Three nodes; a ms of leadership counts as ``speed`` ms of log time.

    Args:
        directory: of the stores and logs.
        speed: see above.
        options: of ``dledger serve``.
    """

    def __init__(self, directory: Path, speed: int, **options: Any) -> None:
        super().__init__(3, directory, **options)
        self._speed = speed

    def serve_command(self, node_id: str) -> list[str]:
        """Return the command of a node that runs with the other speed."""
        python, _, _, *arguments = super().serve_command(node_id)
        return [python, "-m", "benchmarks.endurance.fast_node", str(self._speed), *arguments]

    def start_again(self, node_id: str, *, kill: bool) -> float:
        """Stop or kill a node and start it; return the seconds from the new process to its served store."""
        if kill:
            self.kill(node_id)
        else:
            self.stop(node_id)
        log = self.log_path(node_id)
        offset, began = log.stat().st_size, time.monotonic()
        self.restart(node_id)
        soon(lambda: b" node started: " in log.read_bytes()[offset:], START_S, every_s=0.005)
        return time.monotonic() - began

    def rss_bytes(self, node_id: str) -> int:
        """Return the resident memory of a running node."""
        return int(psutil.Process(self.pid(node_id)).memory_info().rss)

    def tables_bytes(self, node_id: str) -> int:
        """Return the size of the file with the tables of producers and transactions; 0 before the first checkpoint."""
        path = self.store_path(node_id) / "meta" / "tables"
        return path.stat().st_size if path.exists() else 0

    def segments(self, node_id: str) -> int:
        """Return the number of data files."""
        return sum(1 for _ in (self.store_path(node_id) / "data").iterdir())

    def disk_bytes(self, node_id: str) -> int:
        """Return the bytes that the node's store occupies on the disk."""
        total = 0
        for path in self.store_path(node_id).rglob("*"):
            try:
                total += path.stat().st_blocks * 512
            except FileNotFoundError:
                continue  # retention deleted it
        return total
