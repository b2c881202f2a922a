"""Chaos for the connector on loopback: ``python -m tests.chaos.connector --minutes 30 --record``.

Two drivers run as an operator runs them: the job ``ingest`` from the log ``in`` into a Delta table, and a query from
``in`` into the log ``out`` on two executors. A writer appends to ``in``. At the end both are run to the newest entry;
then each body of ``in`` has to be in the table, and in ``out``, exactly once, and each acknowledged one in ``in``.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from deltalake import DeltaTable

from dledger_core import Client, LocalCluster
from dledger_core.errors import DLedgerError
from tests.chaos.connector.drivers import Driver
from tests.chaos.connector.faults import ConnectorNemesis
from tests.support.soak_record import SoakRecord

RECORD: Final = Path(__file__).with_name("SOAK.jsonl")
JUDGED: Final = ("dledger_core/client", "dledger_core/storage", "dledger_core/server", "spark_connector", "jobs")
BODIES: Final = 25
PAUSE_S: Final = 0.2


class Writer(threading.Thread):
    """Appends numbered bodies, unless it is ``quiet``; ``acknowledged`` are those whose append succeeded."""

    def __init__(self, peers: str) -> None:
        super().__init__()
        self.acknowledged: set[bytes] = set()
        self.quiet = threading.Event()
        self._peers, self._ended = peers, threading.Event()

    def run(self) -> None:
        number = 0
        with Client(self._peers, "in", timeout_ms=5000) as client:
            while not self._ended.wait(PAUSE_S):
                if self.quiet.is_set():
                    continue
                bodies = [f"{number + at:09}".encode() + b"x" * 91 for at in range(BODIES)]
                number += BODIES
                try:
                    client.append(bodies)
                except DLedgerError:
                    continue  # it may be in the log: then it has to be in the table too
                self.acknowledged.update(bodies)

    def end(self) -> None:
        self._ended.set()
        self.join()


def bodies_of(peers: str, group: str) -> list[bytes]:
    """Read all visible entries of a log."""
    found: list[bytes] = []
    with Client(peers, group, timeout_ms=60_000) as client:
        for batch in client.tail(0, client.bounds().end):
            found += batch.column("body").to_pylist()
    return found


def differences(name: str, found: list[bytes], wanted: list[bytes]) -> list[str]:
    """Return the bodies that are missing, there twice, or foreign, as sentences."""
    had, due = Counter(found), Counter(wanted)
    lost, more = due - had, had - due
    problems = []
    if lost:
        problems.append(f"{name} lacks {lost.total()} bodies, such as {min(lost)[:9]!r}")
    if more:
        problems.append(f"{name} has {more.total()} bodies too many, such as {min(more)[:9]!r}")
    return problems


def run(seed: int, minutes: float, directory: Path) -> dict[str, Any]:
    """Run one round; return its line of the record."""
    chance, table = random.Random(seed), directory / "table"
    violations: list[str] = []
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(3, directory / "nodes", ("in", "out"), data_segment_bytes=8 << 20))
        peers = cluster.peers
        job = ["jobs/ingest.py", "--peers", peers, "--groups", "in", "--table", table]
        query = ["-m", "tests.chaos.connector.query", peers, directory / "log checkpoint"]
        job += ["--checkpoint", directory / "table checkpoint", "--format", "json"]
        ingest = Driver("table", [*job, "--trigger", "1 second"], job, directory)
        copying = Driver("log", query, [*query, "--to-the-end"], directory)
        drivers = (ingest, copying)
        for driver in drivers:
            stack.callback(driver.close)
            driver.start()
        writer = Writer(peers)
        stack.callback(writer.end)
        writer.start()
        scratch = directory / "copies"
        scratch.mkdir()
        nemesis = ConnectorNemesis(cluster, drivers, table, chance, scratch, writer.quiet)
        nemesis.run(minutes * 60)
        writer.end()
        for driver in drivers:
            code = driver.finish()
            if code != 0:
                violations.append(f"the driver of {driver.name} ended with {code}: {driver.last_words()}")
        wanted, copied = bodies_of(peers, "in"), bodies_of(peers, "out")
        rows = DeltaTable(str(table)).to_pyarrow_table(columns=["index", "body"])
        violations += differences("the table", rows.column("body").to_pylist(), wanted)
        violations += differences("the log", copied, wanted)
        missing = writer.acknowledged - set(wanted)
        if missing:
            violations.append(f"{len(missing)} acknowledged bodies are missing in the log that was read")
        return {
            "seed": seed,
            "minutes": minutes,
            "bodies": len(wanted),
            "acknowledged": len(writer.acknowledged),
            "faults": dict(sorted(nemesis.counts.items())),
            "micro_batches": {driver.name: driver.newest("commits") + 1 for driver in drivers},
            "ended_by_themselves": {driver.name: dict(driver.refusals) for driver in drivers},
            "violations": violations,
            "verdict": "violated" if violations else "ok",
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.connector",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="time of faults")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30), help="draws the faults")
    parser.add_argument("--record", action="store_true", help="append the result to SOAK.jsonl")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="dledger-connector-"))
    found = run(options.seed, options.minutes, directory)
    sys.stdout.write(json.dumps(found) + "\n")
    if options.record:
        SoakRecord(RECORD, judged=JUDGED).add(**found)
    if found["violations"]:
        sys.stdout.write(f"kept: {directory}\nreplay: python -m tests.chaos.connector --seed {options.seed}\n")
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
