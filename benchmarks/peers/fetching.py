"""The programs of the peers: Maven fetches those in Java, Go builds those in Go."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.peers import SOURCES
from benchmarks.peers.java_dledger import JavaDLedger
from benchmarks.peers.kafka import Kafka
from benchmarks.spark_table.brokers import MissingError

PROGRAMS = Path.home() / ".cache" / "dledger-benchmarks"


def fetch(programs: Path) -> int:
    """Fetch the missing programs; print why one is not available, and return the exit code."""
    (programs / "bin").mkdir(parents=True, exist_ok=True)
    missing = []
    for peer in (Kafka, JavaDLedger):
        try:
            peer.fetch(programs)
        except MissingError as error:
            missing.append(str(error))
    go = shutil.which("go")
    if go is None:
        missing.append("no go on PATH to build NATS, etcd and their load with")
    else:
        built = subprocess.run(
            [go, "build", "-o", f"{programs / 'bin'}/", "tool", "."],
            cwd=SOURCES,
            capture_output=True,
            text=True,
            check=False,
        )
        if built.returncode:
            missing.append(f"go build failed: {built.stderr[-500:]}")
        else:
            (programs / "bin" / "server").replace(programs / "bin" / "etcd")
    for reason in missing:
        sys.stderr.write(f"{reason}\n")
    return 1 if missing else 0
