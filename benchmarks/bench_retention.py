"""How long the deletion of expired data files holds up the thread that writes a log.

Method: one store (``TMPDIR`` names its disk) of four data files of 256 MiB, filled with entries of 1 MiB and synced, so
that their blocks exist. ``CommitLog.trim`` then deletes three of them, as retention does, in the thread that writes:
appends of the group wait for as long. Each number is the median of ``--rounds`` rounds. For comparison the same three
files are unlinked directly by ``os.unlink`` in another round.

Run: ``python -m benchmarks.bench_retention [--rounds 3]``. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from dledger_core.config import StorageConfig
from dledger_core.ids import Index, Term
from dledger_core.record import Columns, ProposedBatch
from dledger_core.storage import CommitLog

FILE_BYTES, FILES, BODY = 256 << 20, 4, bytes(1 << 20)


def filled(directory: Path) -> CommitLog:
    """Return a log of four full data files."""
    config = StorageConfig(data_segment_bytes=FILE_BYTES, index_segment_bytes=1 << 20, preallocate_bytes=0)
    log = CommitLog.open(directory, group="g", node_id="n0", config=config)
    while log.staged_end < (FILES - 1) * FILE_BYTES + (8 << 20):
        batch = log.place(ProposedBatch(Columns.from_bodies([BODY] * 4)), Index(log.last_index() + 1), Term(1))
        log.persist(None, None, [batch])
    return log


def trim_ms(directory: Path) -> float:
    """Return the time that a trim of three files takes."""
    log = filled(directory)
    try:
        last = log.last_index()
        tables = log.load_tables().take_changes()
        began = time.monotonic()
        log.trim(last, tables, last)
        return (time.monotonic() - began) * 1000
    finally:
        log.close()


def unlink_ms(directory: Path) -> float:
    """Return the time that three calls of unlink take."""
    filled(directory).close()
    paths = sorted((directory / "data").iterdir())[: FILES - 1]
    began = time.monotonic()
    for path in paths:
        os.unlink(path)
    return (time.monotonic() - began) * 1000


def main() -> None:
    """Runs the rounds and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    found: dict[str, list[float]] = {"trim_ms": [], "unlink_ms": []}
    for _ in range(parser.parse_args().rounds):
        for name, measure in (("trim_ms", trim_ms), ("unlink_ms", unlink_ms)):
            with tempfile.TemporaryDirectory() as directory:
                found[name].append(measure(Path(directory) / "dledger-n0"))
    medians = {name: round(statistics.median(times), 2) for name, times in found.items()}
    sys.stdout.write(json.dumps(medians) + "\n")


if __name__ == "__main__":
    main()
