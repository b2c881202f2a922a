"""A soak of the guarantees that end by time: producers and queries come and go while weeks of log time pass.

Three real nodes on loopback. Log time runs so fast that the run has four weeks of it, a week per quarter: in the first
one the tables fill, then as many ids expire as come. Nothing else runs fast (``fast_node``). Meanwhile n2 starts again
four times per quarter, killed or stopped in turn, and leadership moves once per quarter between n0 and n1, which run
through. A log has entries of two days.

During the run each answer that depends on expiry is judged by log time, and each visible row is counted. At the end
the nodes are stopped, and their stores are compared with the auditor's model.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvloop

from benchmarks.endurance.auditor import DAY_MS, Auditor
from benchmarks.endurance.fast_cluster import FastCluster
from benchmarks.endurance.ledger import Ledger
from benchmarks.endurance.measures import QUARTERS, Measures, ratios
from benchmarks.endurance.writers import Load, Writers
from dledger_core import AsyncClient, Metadata, open_store
from dledger_core.errors import DLedgerError
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.tables.orphaned import ORPHANED
from dledger_core.storage.tables.queries import QUERY
from tests.support.soak_record import SoakRecord

RECORD: Final = Path(__file__).with_name("SOAK.jsonl")
SAMPLES: Final = 30
RETAINED_HOURS: Final = 48
SETTLE_S: Final = 120.0
MIB: Final = 1 << 20
RESTARTED: Final = "n2"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The size of a run.

    Attributes:
        minutes: how long producers and queries come.
        days: log time in it.
        producers: distinct producers.
        queries: distinct queries.
        timeout_s: seconds after which the leader aborts an inactive transaction.
        starts_per_quarter: how often n2 starts again.
        seed: of every choice.
    """

    minutes: float
    days: float
    producers: int
    queries: int
    timeout_s: float
    starts_per_quarter: int = 4
    seed: int

    @property
    def seconds(self) -> float:
        return self.minutes * 60

    @property
    def load(self) -> Load:
        speed = max(1, round(self.days * 86_400 / self.seconds))
        return Load(self.seconds, self.producers, self.queries, speed, int(self.timeout_s * 1000 * speed), self.seed)


class Soak:
    """One run in a new directory.

    Args:
        plan: its size.
        directory: gets stores and logs.
    """

    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan = plan
        self.load = plan.load
        self.ledger = Ledger()
        self.measures = Measures(plan.seconds)
        self._unsettled: list[str] = []
        self.directory = directory
        self.cluster = FastCluster(
            directory,
            self.load.speed,
            data_segment_bytes=4 << 20,
            index_segment_bytes=1 << 20,
            preallocate_bytes=1 << 20,
            transaction_timeout_ms=self.load.timeout_ms,
            file_reserved_hours=RETAINED_HOURS,
            delete_when="any",
            preferred_leaders="none",
        )

    def run(self) -> None:
        """Run, stop the nodes, and judge."""
        self.directory.mkdir(parents=True, exist_ok=True)
        try:
            self.cluster.start()
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                auditor = runner.run(self._run())
        finally:
            self.cluster.close()
        self._judge_stores(auditor)
        self.ledger.judge()

    def row(self) -> dict[str, Any]:
        """Return the line of the record."""
        quarters = self.measures.quarters()
        return {
            "minutes": self.plan.minutes,
            "days": round(self.load.days, 2),
            "producers": self.plan.producers,
            "queries": self.plan.queries,
            "seed": self.plan.seed,
            "counts": dict(sorted(self.ledger.counts.items())),
            "quarters": quarters,
            "last_to_first": ratios(quarters, 0),
            "last_to_second": ratios(quarters, 1),
            "starts": self.measures.starts,
            "samples": dict(self.measures.columns),
            "violations": len(self.ledger.violations),
            "verdict": "violated" if self.ledger.violations else "ok",
        }

    # --- the run ---------------------------------------------------------------------------------------------

    async def _run(self) -> Auditor:
        peers = self.cluster.peers
        async with AsyncClient(peers) as client, AsyncClient(peers) as measured, AsyncClient(peers) as reader:
            auditor = Auditor(reader, self.ledger)
            writers = Writers(client, measured, auditor, self.ledger, self.load)
            await self._lead(reader, "n0")
            readers = [asyncio.create_task(auditor.follow_all()), asyncio.create_task(auditor.follow_visible())]
            others = [
                asyncio.create_task(self._guarded(self._sample(writers, reader, auditor))),
                asyncio.create_task(self._guarded(self._start_again(writers, reader))),
            ]
            await writers.run()
            await asyncio.gather(*others)
            with suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_S):
                    await self._settle(reader, auditor)
            for task in readers:
                task.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
            return auditor

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - reported as a violation
            self.ledger.violated(f"the run failed: {error!r}")

    async def _sample(self, writers: Writers, client: AsyncClient, auditor: Auditor) -> None:
        every_s = self.plan.seconds / SAMPLES
        for number in range(SAMPLES):
            await _until(writers, (number + 1) / SAMPLES)
            took, writers.took_ms = writers.took_ms, writers.new_times()
            values = await asyncio.to_thread(self._look)
            with suppress(DLedgerError):
                metadata = await client.metadata()
                values |= _rows(metadata)
                writers.first_index = max(node.first_index for node in metadata.nodes)
            day = auditor.log_time_ms / DAY_MS
            self.measures.add((number + 1) * every_s, took, {"day": day, **values})
            sys.stderr.write(f"day {day:.1f} of {self.load.days:.0f}: {values}\n")

    def _look(self) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        for node in self.cluster.node_ids:
            try:
                found[f"rss {node} MiB"] = self.cluster.rss_bytes(node) / MIB
            except DLedgerError:
                found[f"rss {node} MiB"] = None  # it is starting again
        found["tables MiB"] = self.cluster.tables_bytes("n0") / MIB
        found["segments"] = self.cluster.segments("n0")
        found["disk MiB"] = self.cluster.disk_bytes("n0") / MIB
        return found

    async def _start_again(self, writers: Writers, client: AsyncClient) -> None:
        per_quarter = self.plan.starts_per_quarter
        total = QUARTERS * per_quarter
        for number in range(total):
            await _until(writers, (number + 0.3) / total)
            leader = (await client.metadata()).leader_id
            if leader == RESTARTED or number % per_quarter == per_quarter // 2:
                await self._lead(client, "n1" if leader == "n0" else "n0")
            killed = number % 2 == 1
            at_s = writers.elapsed * self.plan.seconds
            took_s = await asyncio.to_thread(lambda kill=killed: self.cluster.start_again(RESTARTED, kill=kill))
            self.measures.add_start(at_s, at_s / self.plan.seconds * self.load.days, took_s, killed=killed)

    async def _lead(self, client: AsyncClient, node_id: str) -> None:
        """Move leadership to a node."""
        until = asyncio.get_running_loop().time() + SETTLE_S
        while (await client.metadata()).leader_id != node_id:
            try:
                await client.transfer_leadership(node_id)
            except DLedgerError:
                if asyncio.get_running_loop().time() > until:
                    raise
                await asyncio.sleep(0.2)

    # --- judging ---------------------------------------------------------------------------------------------

    async def _settle(self, client: AsyncClient, auditor: Auditor) -> None:
        """Wait until abandoned transactions are aborted, all is read, and the tables have the rows of the model.

        Metadata has the rows of the node with the most of them, and a follower may expire its rows late.
        """
        while True:
            await auditor.catch_up()
            most = auditor.counts()
            try:
                rows = {usage.table: usage.rows for usage in (await client.metadata()).tables}
            except DLedgerError:
                rows = {}
            await auditor.catch_up()
            least = auditor.counts()
            # No writer is left: ids can only expire.
            self._unsettled = [
                f"{table}: {rows.get(table)} rows, the model has {least.get(table, 0)} to {most.get(table, 0)}"
                for table in ("open transactions", *least)
                if not least.get(table, 0) <= rows.get(table, -1) <= most.get(table, 0)
            ]
            if not self._unsettled:
                break
            await asyncio.sleep(0.2)
        for table in least:
            self.ledger.counts[f"{table} at the end"] = rows[table]
        await auditor.reach_visible()
        self.ledger.counts["settled"] = 1

    def _judge_stores(self, auditor: Auditor) -> None:
        """Compare the stopped nodes' stores with the model: the ids, their newest appends, and no old orphans."""
        if not self.ledger.counts["settled"]:
            self.ledger.violated(f"the run did not settle, or entries were not read: {self._unsettled}")
            return
        lasting, once = dict(auditor.producers.known), dict(auditor.producers_once.known)
        queries = {**auditor.queries.known, **auditor.dormant}
        queries_once = dict(auditor.queries_once.known)
        all_queries = queries | queries_once
        for node in self.cluster.node_ids:
            path = self.cluster.store_path(node)
            with open_store(path) as store:
                if findings := store.verify().findings:
                    self.ledger.violated(f"{node}: {findings[:3]}")
                rows = store.describe("producers").to_pylist()
                first_index = int(store.first_index)
            known = {"producer": lasting | once, "query": dict(all_queries)}
            for row in rows:
                model = known[row["kind"]].pop(row["producer_id"], None)
                if model is None:
                    self.ledger.violated(f"{node}: {row['producer_id']} should have expired")
                    continue
                last_index = row["last_index"] if row["kind"] == "producer" else model.last_index
                if (row["next_sequence"], last_index) != (model.number + 1, model.last_index):
                    self.ledger.violated(f"{node}: {row} differs from {model}")
            stored = OsFiles().read_tables(path / "meta" / "tables") or []
            for name in [key[1:].decode() for key, _ in stored if key[:1] == QUERY]:
                if name not in all_queries:
                    self.ledger.violated(f"{node}: {name} should have expired")
                known["query"].pop(name, None)  # the description leaves out a query that has committed nothing
            self._judge_missing(node, auditor, known)
            orphans = [row for row in stored if row[0][:1] == ORPHANED]
            old = [key for key, end in orphans if int.from_bytes(end, "big") <= first_index]
            if old:
                self.ledger.violated(f"{node}: {len(old)} orphaned ranges of deleted entries")
            self.ledger.counts[f"{node}: orphaned ranges at the end"] = len(orphans)

    def _judge_missing(self, node: str, auditor: Auditor, missing: dict[str, dict[str, Any]]) -> None:
        """Check that what a store lacks has expired since the auditor's last entry, in the seconds of the stop."""
        stop_ms = int(SETTLE_S * 1000) * self.load.speed
        for name, known in (missing["producer"] | missing["query"]).items():
            is_once = name in auditor.producers_once.known or name in auditor.queries_once.known
            limit_ms = auditor.producers_once.limit_ms if is_once else auditor.producers.limit_ms
            if name in auditor.dormant or auditor.log_time_ms + stop_ms - known.at_ms <= limit_ms:
                self.ledger.violated(f"{node}: {name} is missing")


async def _until(writers: Writers, part: float) -> None:
    """Wait until this part of the run is over."""
    await asyncio.sleep(max(0.0, part - writers.elapsed) * writers.seconds)


def _rows(metadata: Metadata) -> dict[str, float | None]:
    return {f"{usage.table} rows": usage.rows for usage in metadata.tables}


def run_soak(plan: Plan, out: Path, *, to_record: bool) -> int:
    """Run once; show the figures, and add them to the record if asked.

    Returns:
        The process's exit code.
    """
    record = SoakRecord(RECORD)
    if to_record and (changed := record.uncommitted()):
        sys.stderr.write(f"commit first, because the record names a commit:\n{changed}\n")
        return 3
    soak = Soak(plan, out / f"seed-{plan.seed}")
    soak.run()
    row = soak.row()
    shown = {name: value for name, value in row.items() if name not in ("samples", "starts")}
    sys.stdout.write(json.dumps(shown, indent=2) + "\n")
    (out / "row.json").write_text(json.dumps(row))
    if to_record:
        record.add(**row)
    sys.stdout.writelines(f"VIOLATION {each}\n" for each in soak.ledger.violations)
    if soak.ledger.violations:
        sys.stdout.write(f"kept: {soak.directory}\n")
        return 1
    shutil.rmtree(soak.directory)
    return 0


def new_seed() -> int:
    return random.randrange(1 << 30)
