"""Bytes per second of an audit: ``python -m tests.benchmarks.bench_audit --gib 2``.

Three equal native stores with 1 KB entries are written, synced and read once, so they are in the page cache. Then
the complete job in ``digest`` mode, from its snapshot to its tables, runs ``--rounds`` times in one session, whose
start is not counted, nor a first round, which is shown; after each, a second time with ``--skip-proven``. For
comparison, the limit of the two cores: BLAKE3 of as many bytes and their CRC, in two processes, from memory.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from blake3 import blake3

from dledger_core import checksum
from dledger_core.config import StorageConfig
from dledger_core.ids import GroupName, Index, NodeId, Term
from dledger_core.raft import HardState
from dledger_core.record import Columns, ProposedBatch
from dledger_core.storage import CommitLog

BODY_BYTES = 1000
BATCH = 4096
REPLICAS = ("n0", "n1", "n2")
MIB = 1 << 20


def write_store(path: Path, node: str, nbytes: int) -> None:
    """Writes entries of random bytes until the store holds ``nbytes``; everything is committed."""
    config = StorageConfig(durability="page-cache")
    log = CommitLog.open(path, group=GroupName("bench"), node_id=NodeId(node), config=config)
    log.adopt_uuid("bench-audit")
    chance = random.Random(1)  # the same entries in each store
    columns = Columns.from_bodies([chance.randbytes(BODY_BYTES) for _ in range(BATCH)])
    for first in range(0, nbytes // (BODY_BYTES + 48), BATCH):
        batch = log.place(ProposedBatch(columns), Index(first), Term(1), 1_700_000_000_000 + first)
        log.persist(HardState(Term(1), None), None, [batch])
    log.close(log.last_index())


def hash_blocks(blocks: int) -> None:
    """BLAKE3 and CRC-32 of ``blocks`` blocks of 1 MiB."""
    block = os.urandom(MIB)
    for _ in range(blocks):
        blake3(block).digest()
        checksum.crc32(block)


def bound() -> float:
    """Bytes per second that two processes hash at once."""
    blocks = 1024
    with ProcessPoolExecutor(2) as pool:
        list(pool.map(hash_blocks, [1, 1]))
        began = time.perf_counter()
        list(pool.map(hash_blocks, [blocks, blocks]))
        return 2 * blocks * MIB / (time.perf_counter() - began)


def processor_s() -> float:
    """Processor time of this process and all below it: the JVM and its workers."""
    me = psutil.Process()
    used = 0.0
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):  # a worker that exited meanwhile
            times = process.cpu_times()
            used += times.user + times.system
    return used


def run(arguments: list[str]) -> tuple[float, float, dict[str, Any]]:
    """Seconds of one audit, its processor time, and its summary."""
    from jobs.audit_replicas import command

    began, used = time.perf_counter(), processor_s()
    outcome = command.main(args=arguments, standalone_mode=False)
    return time.perf_counter() - began, processor_s() - used, outcome.summary


def measure(place: Path, nbytes: int, rounds: int) -> None:
    """Writes the stores, audits them, prints the figures."""
    from jobs._session import spark_session

    stores = [place / name / "bench" / f"dledger-{name}" for name in REPLICAS]
    for name, path in zip(REPLICAS, stores, strict=True):
        write_store(path, name, nbytes)
    os.sync()
    for path in stores:
        for file in sorted(path.rglob("0*")):
            file.read_bytes()
    best = bound()
    arguments = [f"--replica={name}={path}" for name, path in zip(REPLICAS, stores, strict=True)]
    first: list[float] = []
    again: list[float] = []
    with spark_session("bench-audit", settings={"spark.master": "local[2]"}):
        for number in range(1 + rounds):
            table = f"--table={place / f'audit{number}'}"
            took, cpu, summary = run([*arguments, table])
            total = sum(summary["cost"]["bytes_read"].values())
            took_again, cpu_again, summary_again = run([*arguments, table, "--skip-proven", "1d"])
            total_again = sum(summary_again["cost"]["bytes_read"].values())
            assert summary["verdict"] == summary_again["verdict"] == "CONSISTENT"
            sys.stdout.write(
                f"{total / 1e9:.2f} GB in {took:.1f} s ({cpu:.1f} s processor time): {total / took / 1e9:.2f} GB/s; "
                f"--skip-proven {total_again / total:.1%} of the bytes in {took_again:.2f} s ({cpu_again:.1f} s)\n"
            )
            first, again = [*first, total / took], [*again, took_again / took]
        del first[0], again[0]
    rate = statistics.median(first)
    sys.stdout.write(
        f"audit {rate / 1e9:.2f} GB/s  hashing alone {best / 1e9:.2f} GB/s  share {rate / best:.2f}  "
        f"time of a second audit {statistics.median(again):.1%}\n"
    )


def main() -> None:
    """Runs the rounds."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--gib", type=float, default=2.0, help="size of each store")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--directory", type=Path, help="where to write; default: a temporary folder, removed")
    given = options.parse_args()
    place = Path(tempfile.mkdtemp(prefix="bench-audit-", dir=given.directory))
    try:
        measure(place, int(given.gib * (1 << 30)), given.rounds)
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
