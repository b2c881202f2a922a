"""Bytes per second of an audit: ``python -m benchmarks.bench_audit --gib 2``.

Three equal native stores with 1 KB entries are written, synced and read once, so they are in the page cache. Then
the complete job in ``digest`` mode, from its snapshot to its tables, runs in one session, whose start is not counted:
once to warm up and ``--rounds`` times; after each, a second time with ``--skip-proven``.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.timing import read_all, seconds
from dledger_core.config import StorageConfig
from dledger_core.ids import Index, Term
from dledger_core.raft import HardState
from dledger_core.record import HEADER_BYTES, Columns, ProposedBatch
from dledger_core.storage import CommitLog

BODY_BYTES = 1000
BATCH = 4096
REPLICAS = ("n0", "n1", "n2")


def write_store(path: Path, node: str, nbytes: int) -> None:
    """Write entries of random bytes until the store contains ``nbytes``; everything is committed."""
    log = CommitLog.open(path, group="bench", node_id=node, config=StorageConfig(durability="page-cache"))
    log.adopt_uuid("bench-audit")
    chance = random.Random(1)  # the same entries in each store
    columns = Columns.from_bodies([chance.randbytes(BODY_BYTES) for _ in range(BATCH)])
    for first in range(0, nbytes // (BODY_BYTES + HEADER_BYTES), BATCH):
        batch = log.place(ProposedBatch(columns), Index(first), Term(1), 1_700_000_000_000 + first)
        log.persist(HardState(Term(1), None), None, [batch])
    log.close(log.last_index())


def processor_s() -> float:
    """Return the processor time of this process and all below it: the JVM and its workers."""
    me = psutil.Process()
    used = 0.0
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):  # a worker that exited meanwhile
            times = process.cpu_times()
            used += times.user + times.system
    return used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of each store")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    from jobs._session import spark_session
    from jobs.audit_replicas import command

    def audit(name: str, arguments: list[str]) -> None:
        found: list[dict[str, Any]] = []
        used = processor_s()
        took = seconds(lambda: found.append(command.main(args=arguments, standalone_mode=False).summary))
        total = sum(found[0]["cost"]["bytes_read"].values())
        assert found[0]["verdict"] == "CONSISTENT"
        sys.stdout.write(
            f"{name}: {total / 1e9:.2f} GB in {took:.1f} s ({processor_s() - used:.1f} s processor time), "
            f"{total / took / 1e9:.2f} GB/s\n"
        )

    with tempfile.TemporaryDirectory(prefix="bench-audit-") as place:
        arguments = []
        for name in REPLICAS:
            store = Path(place) / name / "bench" / f"dledger-{name}"
            write_store(store, name, int(options.gib * (1 << 30)))
            arguments.append(f"--replica={name}={store}")
        os.sync()
        read_all(Path(place))
        with spark_session("bench-audit", settings={"spark.master": "local[2]"}):
            for number in range(1 + options.rounds):
                table = f"--table={place}/audit{number}"
                audit(f"round {number}" if number else "to warm up", [*arguments, table])
                audit("again, --skip-proven", [*arguments, table, "--skip-proven", "1d"])


if __name__ == "__main__":
    main()
