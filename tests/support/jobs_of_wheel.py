"""The jobs of an installed wheel, run as its commands on a cluster of the wheel.

``.ci/pythons`` runs it where only the wheel is: ``python -m tests.support.jobs_of_wheel PROGRAMS DIRECTORY``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from dledger_core import Client, LocalCluster
from dledger_core.rocketmq import encode_messages
from tests.support.spark_jvm import short_lived_environment


def run(command: Path, *arguments: str) -> dict[str, Any]:
    """Return the summary of a job, its last line."""
    environment = os.environ | short_lived_environment()
    done = subprocess.run([command, *arguments], stdout=subprocess.PIPE, text=True, check=True, env=environment)
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


def main(programs: Path, directory: Path) -> None:
    """Ingest and rebuild what was appended, audit the replicas, and check what the jobs found."""
    with LocalCluster(3) as cluster, Client(cluster.peers) as client:
        client.append(encode_messages("orders", [number % 4 for number in range(100)], [b"body"] * 100))

        def job(name: str, *arguments: str) -> dict[str, Any]:
            table = str(directory / name)
            return run(programs / f"dledger-{name}", "--peers", cluster.peers, "--table", table, *arguments)

        found = [
            job("ingest", "--checkpoint", str(directory / "checkpoint"))["rows"],
            job("audit")["verdict"],
            job("rebuild")["rows"],
        ]
    if found != [100, "CONSISTENT", 100]:
        raise SystemExit(f"the jobs found {found}")
    sys.stdout.write("jobs as commands passed\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]).resolve())
