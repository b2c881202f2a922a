"""Faults of nodes, drivers, executors, checkpoints and the table. One random source decides."""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil
from deltalake import DeltaTable

from dledger_core import Client, LocalCluster
from dledger_core.errors import DLedgerError
from tests.chaos.connector.drivers import Driver, wait

CALM_S: Final = (2.0, 12.0)
JUDGED_S: Final = 90.0
"""Time in which a driver that was started with an older checkpoint or table continues or refuses it."""
OUTAGE_S: Final = (60.0, 100.0)


class ConnectorNemesis:
    """Injects faults; belongs to one thread.

    Args:
        cluster: the nodes.
        drivers: of the table and of the log; the first one writes the table.
        table: the Delta table.
        chance: draws the faults.
        scratch: a directory for copies of checkpoints.
    """

    def __init__(
        self, cluster: LocalCluster, drivers: tuple[Driver, Driver], table: Path, chance: random.Random, scratch: Path
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._cluster, self._drivers, self._table, self._chance = cluster, drivers, table, chance
        self._scratch = scratch
        self.kinds: dict[str, Callable[[], str]] = {
            "driver killed": self.kill_driver,
            "executor killed": self.kill_worker,
            "node killed": self.kill_node,
            "leader killed": self.kill_leader,
            "node hung": self.hang_node,
            "leader moved": self.move_leader,
            "all nodes away": self.outage,
            "two drivers": self.second_driver,
            "checkpoint of an earlier time": self.older_checkpoint,
            "checkpoint truncated": self.truncated_checkpoint,
            "table of an earlier time": self.older_table,
        }

    def run(self, until: float) -> None:
        """Strike until a moment of the monotonic clock: first each kind once, then any."""
        first = list(self.kinds)
        self._chance.shuffle(first)
        while time.monotonic() < until:
            name = first.pop() if first else self._chance.choice(list(self.kinds))
            outcome = self.kinds[name]()
            self.counts[f"{name}: {outcome}" if outcome else name] += 1
            wait(self._chance.uniform(*CALM_S), self._drivers)

    def _hold(self, shortest: float, longest: float) -> None:
        wait(self._chance.uniform(shortest, longest), self._drivers)

    # --- processes ----------------------------------------------------------------------------------------------------

    def kill_driver(self) -> str:
        driver = self._chance.choice(self._drivers)
        driver.kill()
        driver.start()
        self._hold(10, 25)
        return ""

    def kill_worker(self) -> str:
        workers = [worker for driver in self._drivers for worker in driver.workers()]
        if workers:
            with suppress(psutil.NoSuchProcess):  # it may have ended meanwhile
                self._chance.choice(workers).kill()
        return "" if workers else "none ran"

    def second_driver(self) -> str:
        driver = self._chance.choice(self._drivers)
        driver.start_second()
        self._hold(25, 45)
        driver.kill_second()
        return ""

    def kill_node(self) -> str:
        return self._kill(self._chance.choice(self._cluster.node_ids))

    def kill_leader(self) -> str:
        leader = self._leader()
        return self._kill(leader) if leader else "no leader"

    def _kill(self, node: str) -> str:
        self._cluster.kill(node)
        self._hold(1, 10)
        self._cluster.restart(node)
        return ""

    def hang_node(self) -> str:
        node = self._chance.choice(self._cluster.node_ids)
        self._cluster.pause(node)
        self._hold(5, 20)
        self._cluster.resume(node)
        return ""

    def outage(self) -> str:
        for node in self._cluster.node_ids:
            self._cluster.kill(node)
        self._hold(*OUTAGE_S)
        for node in self._cluster.node_ids:
            self._cluster.restart(node)
        return ""

    def _leader(self) -> str | None:
        with suppress(DLedgerError), Client(self._cluster.peers, "in", timeout_ms=3000) as client:
            return client.metadata().leader_id
        return None

    def move_leader(self) -> str:
        moved = 0
        for group in ("in", "out"):
            with suppress(DLedgerError), Client(self._cluster.peers, group, timeout_ms=3000) as client:
                client.transfer_leadership(self._chance.choice(self._cluster.node_ids))
                moved += 1
        return "" if moved else "refused"

    # --- files --------------------------------------------------------------------------------------------------------

    def older_checkpoint(self) -> str:
        """Copy a checkpoint of a running query, and put the copy in its place some time later."""
        driver = self._chance.choice(self._drivers)
        copy, newest = self._scratch / "older", self._scratch / "newest"
        if driver.newest("commits") < 0 or not _copied(driver.checkpoint, copy):
            return "no checkpoint"
        self._hold(5, 15)
        driver.kill()
        driver.checkpoint.rename(newest)
        copy.rename(driver.checkpoint)
        return self._judged(driver, newest)

    def truncated_checkpoint(self) -> str:
        """Cut the newest file of one of a checkpoint's logs in half, or to nothing."""
        driver = self._chance.choice(self._drivers)
        number = min(driver.newest("offsets"), driver.newest("commits"))
        if number < 0:
            return "no checkpoint"
        driver.kill()
        newest = self._scratch / "newest"
        shutil.copytree(driver.checkpoint, newest)
        name = self._chance.choice(("offsets", "commits"))
        path = driver.checkpoint / name / str(driver.newest(name))
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2] if self._chance.random() < 0.5 else b"")
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
        return self._judged(driver, newest)

    def _judged(self, driver: Driver, newest: Path) -> str:
        """Let a driver continue with its checkpoint; if it refuses it, put the newest one back, as its error says."""
        before = driver.newest("commits")
        driver.start()
        end = time.monotonic() + JUDGED_S
        outcome = "undecided"
        while outcome == "undecided" and time.monotonic() < end:
            if driver.watch():
                outcome = "refused"
            elif driver.newest("commits") > before + 1:
                outcome = "continued"
            time.sleep(0.2)
        if outcome == "refused":
            driver.kill()
            shutil.rmtree(driver.checkpoint)
            newest.rename(driver.checkpoint)
            driver.start()
        shutil.rmtree(newest, ignore_errors=True)
        return outcome

    def older_table(self) -> str:
        """Restore the table to an earlier version; when the job refuses it, restore the newest one again."""
        driver = self._drivers[0]
        if driver.newest("commits") < 3:
            return "no table"
        driver.kill()
        table = DeltaTable(str(self._table))
        newest = table.version()
        table.restore(max(0, newest - self._chance.randrange(1, 20)))
        driver.start()
        end = time.monotonic() + JUDGED_S
        is_refused = False
        while not is_refused and time.monotonic() < end:
            is_refused = driver.watch()
            time.sleep(0.2)
        driver.kill()
        DeltaTable(str(self._table)).restore(newest)
        driver.start()
        return "refused" if is_refused else "not refused"


def _copied(source: Path, target: Path) -> bool:
    """Copy the files of a running query; those that go meanwhile are not needed."""
    shutil.rmtree(target, ignore_errors=True)
    with suppress(shutil.Error, FileNotFoundError):
        shutil.copytree(source, target)
    return (target / "metadata").exists()
