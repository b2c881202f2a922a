"""Faults of nodes, drivers, executors, checkpoints, the table and the load. One random source decides."""

from __future__ import annotations

import random
import shutil
import threading
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
from tests.chaos.connector.drivers import EXECUTOR, PYTHON_WORKER, Driver, newest, wait

CALM_S: Final = (2.0, 12.0)
FIRST_S: Final = 600.0
"""Time in which both drivers commit the first micro-batches: a fault before them would find no checkpoint."""
JUDGED_S: Final = 600.0
"""Longest time in which a driver that was started with an older checkpoint or table continues or refuses it."""
OUTAGE_S: Final = (60.0, 150.0)
QUIET_S: Final = (20.0, 30.0)
"""Longer than dynamic allocation keeps idle executors (``query.py``)."""
MOVES: Final = 5
WORKER_S: Final = 60.0
MICRO_BATCH_S: Final = 20.0


class ConnectorNemesis:
    """Injects faults; belongs to one thread.

    Args:
        cluster: the nodes.
        drivers: of the table and of the log; the first one writes the table.
        table: the Delta table.
        chance: draws the faults.
        scratch: a directory for copies of checkpoints.
        quiet: while it is set, nothing is appended.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        drivers: tuple[Driver, Driver],
        table: Path,
        chance: random.Random,
        scratch: Path,
        quiet: threading.Event,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._cluster, self._drivers, self._table, self._chance = cluster, drivers, table, chance
        self._scratch, self._quiet = scratch, quiet
        self.kinds: dict[str, Callable[[], str]] = {
            "driver killed": self.kill_driver,
            "executor killed": self.kill_executor,
            "executor hung": self.hang_executor,
            "Python worker killed": self.kill_worker,
            "executors leave a quiet log": self.quiet,
            "node killed": self.kill_node,
            "leader killed": self.kill_leader,
            "node hung": self.hang_node,
            "leader moved": self.move_leader,
            "leader moved in micro-batches": self.move_leader_in_micro_batches,
            "all nodes away": self.outage,
            "two drivers": self.second_driver,
            "checkpoint of an earlier time": self.older_checkpoint,
            "checkpoint copied, both run": self.copied_checkpoint,
            "checkpoint truncated": self.truncated_checkpoint,
            "table of an earlier time": self.older_table,
        }

    def run(self, seconds: float) -> None:
        """Wait for the first micro-batches, then strike for some time: first each kind once, then any."""
        end = time.monotonic() + FIRST_S
        while min(driver.newest("commits") for driver in self._drivers) < 3:
            if time.monotonic() > end:
                raise TimeoutError("the drivers have no micro-batch")
            wait(1, self._drivers)
        until = time.monotonic() + seconds
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

    def kill_executor(self) -> str:
        executor = self._some(EXECUTOR)
        if executor is not None:
            with suppress(psutil.NoSuchProcess):  # it may have ended meanwhile
                executor.kill()
        return "" if executor else "none ran"

    def kill_worker(self) -> str:
        worker = self._some(PYTHON_WORKER)
        if worker is not None:
            with suppress(psutil.NoSuchProcess):
                worker.kill()
        return "" if worker else "none ran"

    def hang_executor(self) -> str:
        """Stop an executor until speculation runs its tasks again; then it continues them."""
        executor = self._some(EXECUTOR)
        if executor is None:
            return "none ran"
        with suppress(psutil.NoSuchProcess):  # it may end meanwhile, and a driver that ends takes it along
            executor.suspend()
        self._hold(3, 10)
        with suppress(psutil.NoSuchProcess):
            executor.resume()
        return ""

    def _some(self, word: str) -> psutil.Process | None:
        """Return a running process of an executor; None if a minute brings none."""
        end = time.monotonic() + WORKER_S
        while True:
            found = [each for driver in self._drivers for each in driver.workers(word)]
            if found:
                return self._chance.choice(found)
            if time.monotonic() > end:
                return None
            wait(0.2, self._drivers)

    def quiet(self) -> str:
        self._quiet.set()
        self._hold(*QUIET_S)
        left = len(self._drivers[1].workers(EXECUTOR))
        self._quiet.clear()
        return f"{left} stayed" if left else ""

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

    def move_leader_in_micro_batches(self) -> str:
        """Move the leader of the written log while its driver appends or commits, several times."""
        driver, moved = self._drivers[1], 0
        for _ in range(MOVES):
            end = time.monotonic() + MICRO_BATCH_S
            while driver.newest("offsets") == driver.newest("commits") and time.monotonic() < end:
                time.sleep(0.02)
            self._hold(0, 1)
            with suppress(DLedgerError), Client(self._cluster.peers, "out", timeout_ms=3000) as client:
                others = sorted(set(self._cluster.node_ids) - {client.metadata().leader_id})
                client.transfer_leadership(self._chance.choice(others))
                moved += 1
        return f"{moved} times"

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
        return f"{driver.name}: {self._judged(driver, newest)}"

    def copied_checkpoint(self) -> str:
        """Start another driver with a copy of a running query's checkpoint, while the query runs."""
        driver = self._chance.choice(self._drivers)
        copy = self._scratch / "copied"
        if not _copied(driver.checkpoint, copy):
            return "no checkpoint"
        planned, end = driver.newest("offsets"), time.monotonic() + JUDGED_S
        while driver.newest("commits") <= planned and time.monotonic() < end:
            wait(0.2, self._drivers)  # the copy is older than the query then
        if driver.newest("commits") <= planned:
            return "no micro-batch"
        driver.start_second(copy)
        before, outcome = newest(copy, "commits"), "undecided"
        end = time.monotonic() + JUDGED_S
        while outcome == "undecided" and time.monotonic() < end:
            wait(0.2, self._drivers)
            if driver.second_has_ended():
                outcome = "copy refused"
            elif newest(copy, "commits") > before + 1:
                outcome = "copy continued"
        driver.kill_second()
        return f"{driver.name}: {outcome}"

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
        return f"{driver.name}: {self._judged(driver, newest)}"

    def _judged(self, driver: Driver, newest: Path) -> str:
        """Let a driver continue with its checkpoint; if it refuses it, put the newest one back, as its error says."""
        outcome = self._outcome(driver)
        if outcome == "refused":
            driver.kill()
            shutil.rmtree(driver.checkpoint)
            newest.rename(driver.checkpoint)
            driver.start()
        shutil.rmtree(newest, ignore_errors=True)
        return outcome

    def _outcome(self, driver: Driver) -> str:
        """Start a driver, and wait until it ends or commits micro-batches."""
        before = driver.newest("commits")
        driver.start()
        end = time.monotonic() + JUDGED_S
        while time.monotonic() < end:
            if driver.watch():
                return "refused"
            if driver.newest("commits") > before + 1:
                return "continued"
            time.sleep(0.2)
        return "undecided"

    def older_table(self) -> str:
        """Restore the table to an earlier version; when the job refuses it, restore the newest one again."""
        driver = self._drivers[0]
        driver.kill()
        table = DeltaTable(str(self._table))
        newest = table.version()
        table.restore(max(0, newest - self._chance.randrange(1, 20)))
        outcome = self._outcome(driver)
        driver.kill()
        DeltaTable(str(self._table)).restore(newest)
        driver.start()
        return outcome


def _copied(source: Path, target: Path) -> bool:
    """Copy the files of a running query; those that go meanwhile are not needed."""
    shutil.rmtree(target, ignore_errors=True)
    with suppress(shutil.Error, FileNotFoundError):
        shutil.copytree(source, target)
    return (target / "metadata").exists()
