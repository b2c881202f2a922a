"""How fast a commit log takes and gives entries, on the machine at hand.

Method: one thread, one store in a temporary folder (``TMPDIR`` names another disk), random bodies of one size,
batches of about 1 MiB of records. Each figure is the best of ``--rounds`` rounds, because on a shared machine the
best round is the one least disturbed; every round appends ``--megabytes`` of records to a new store and reads them
back warm.

* stage: encoding into records, as the leader's event loop does
* persist: writing data and index without a sync per batch (durability page-cache), then once with fdatasync per batch
* read: reads of 1 MiB with all checks; raw: without body CRCs; batches: as a leader reads for a follower
* verify: the whole store; recover: opening it without a checkpoint; reindex: the same without an index

Run: ``python -m benchmarks.bench_storage [--body-bytes 100]``. Prints one JSON object per body size.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from benchmarks.timing import seconds
from dledger_core.config import StorageConfig
from dledger_core.ids import Index, Term
from dledger_core.raft.ready import HardState
from dledger_core.record import Columns, ProposedBatch
from dledger_core.storage import CommitLog, open_store
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.meta_files import Checkpoint, save_checkpoint

NOTHING_COVERED = Checkpoint(-1, -1, 0)

MIB = 1 << 20


def _open(path: Path, durability: str = "fsync") -> CommitLog:
    config = StorageConfig(durability=durability)
    return CommitLog.open(path, group="bench", node_id="n0", config=config)


def _read(read: Callable[[int, int, int], object], end: int) -> None:
    at = 0
    while at < end:
        at += read(at, end, MIB).count


def _read_batches(log: CommitLog, end: int) -> None:
    at = 0
    while at < end:
        at = log.read_batches(Index(at), MIB)[-1].last_index + 1


def _write(path: Path, columns: Columns, batches: int, durability: str, took: dict[str, float]) -> CommitLog:
    """Appends ``batches`` times ``columns`` to a new store."""
    log = _open(path, durability)
    log.persist(HardState(Term(1), None), None, [])
    for number in range(batches):
        start = time.perf_counter()
        batch = log.place(ProposedBatch(columns), Index(number * columns.count), Term(1), 1)
        staged = time.perf_counter()
        log.persist(None, None, [batch])
        took["stage"] += (staged - start) / 2  # staging is the same for both durabilities
        took[f"persist {durability}"] += time.perf_counter() - staged
    return log


def one_round(directory: Path, body_bytes: int, megabytes: int) -> dict[str, float]:
    """Returns seconds per phase for one store, and the number of entries under ``entries``."""
    count = max(MIB // (body_bytes + 48), 1)
    columns = Columns.from_bodies([os.urandom(body_bytes) for _ in range(count)])
    took: dict[str, float] = defaultdict(float)
    _write(directory / "synced", columns, megabytes, "fsync", took).close()
    path = directory / "cached"
    log = _write(path, columns, megabytes, "page-cache", took)
    end = log.last_index() + 1
    took["read"] = seconds(lambda: _read(log.read, end))
    took["raw"] = seconds(lambda: _read(log.read_raw, end))
    took["batches"] = seconds(lambda: _read_batches(log, end))
    log.close(end - 1)
    took["verify"] = seconds(lambda: open_store(path).verify())
    save_checkpoint(OsFiles(), path / "meta" / "checkpoint", NOTHING_COVERED)
    took["recover"] = seconds(lambda: _open(path).close())
    save_checkpoint(OsFiles(), path / "meta" / "checkpoint", NOTHING_COVERED)
    shutil.rmtree(path / "index")
    took["reindex"] = seconds(lambda: _open(path).close())
    took["entries"] = end
    return took


def main() -> None:
    """Runs the rounds and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--body-bytes", type=int, nargs="*", default=[100, 1000, 10_000])
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for body_bytes in options.body_bytes:
        best: dict[str, float] = {}
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as directory:
                for phase, value in one_round(Path(directory), body_bytes, options.megabytes).items():
                    best[phase] = min(value, best.get(phase, value))
        entries = best.pop("entries")
        rates = {
            phase: {
                "entries_per_s": round(entries / took),
                "mb_per_s": round(entries * (body_bytes + 48) / took / 1e6),
            }
            for phase, took in best.items()
        }
        sys.stdout.write(json.dumps({"body_bytes": body_bytes, "entries": int(entries), **rates}) + "\n")


if __name__ == "__main__":
    main()
