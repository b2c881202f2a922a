"""Rounds of chaos: start a cluster, inject faults, heal, check the history, report; and soak runs of many rounds."""

from __future__ import annotations

import itertools
import random
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from dledger_core import open_store
from dledger_core.errors import DLedgerError
from dledger_core.record import MAGIC_DATA
from tests.chaos.checker import ReplicaLog, Verdict, check
from tests.chaos.cluster import ChaosCluster, SmallDisk
from tests.chaos.history import Append, Operation, Recorder, hash_of
from tests.chaos.nemesis import Nemesis
from tests.chaos.proxy import LoopThread, Network
from tests.chaos.workload import Workload
from tests.support.soak_record import SoakRecord

RECORD: Final = Path(__file__).with_name("SOAK.jsonl")
ROUND_MINUTES_MAX: Final = 5.0
SHOWN_MAX: Final = 4
"""Violations of a kind that are printed; the file has more."""
OPTIONS: Final = {
    "data_segment_bytes": 1 << 20,
    "index_segment_bytes": 128 << 10,
    "preallocate_bytes": 256 << 10,
    "transaction_timeout_ms": 5000,
}
"""Small segments, so that a run of a minute has many of them."""


@dataclass
class Round:
    """The result of a round."""

    seed: int
    minutes: float
    directory: Path
    verdict: Verdict = field(default_factory=Verdict)
    faults: Counter[str] = field(default_factory=Counter)
    skipped: list[str] = field(default_factory=list)
    longest_gap_s: float = 0.0
    slowest_recovery_s: float = 0.0
    elections: int = 0
    replay: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict.ok


def run_round(seed: int, minutes: float, directory: Path) -> Round:
    """Run one round in a new directory, which stays; no process and no mount is left."""
    directory.mkdir(parents=True)
    found = Round(seed, minutes, directory, replay=f"python -m tests.chaos --minutes {minutes:g} --seed {seed}")
    chance = random.Random(seed)
    network, clients = Network(), LoopThread("clients")
    recorder = Recorder(directory / "history.jsonl")
    cluster = ChaosCluster(directory, network, **OPTIONS)
    disk = _small_disk(cluster, chance, found)
    try:
        cluster.start(timeout_s=120.0)
        workload = Workload(cluster.client_peers, cluster.node_ids, recorder, seed)
        scratch = directory / "copies"
        nemesis = Nemesis(cluster, recorder, chance, scratch, disk)
        clients.call(workload.start())
        nemesis.run(time.monotonic() + minutes * 60)
        found.faults = nemesis.counts
        settled = _settle(cluster, clients, workload, found.verdict)
        for detail in [*nemesis.violations, *workload.failures]:
            found.verdict.add("behavior", detail)
        cluster.resume_all()
        _judge(cluster, recorder.operations, settled, found)
        acks = sorted(each.end for each in recorder.operations if isinstance(each, Append) and each.status == "ok")
        found.longest_gap_s = max((b - a for a, b in itertools.pairwise(acks)), default=0.0)
        found.slowest_recovery_s = max(nemesis.recoveries_s, default=0.0)
    finally:
        cluster.close()
        network.close()
        clients.close()
        recorder.close()
        if disk is not None:
            _keep_store(disk[1], found)
            disk[1].unmount()
    return found


def _small_disk(cluster: ChaosCluster, chance: random.Random, found: Round) -> tuple[str, SmallDisk] | None:
    node = chance.choice(cluster.node_ids)
    refusal = SmallDisk.refusal()
    if refusal is None:
        disk = SmallDisk(cluster.node_directory(node))
        refusal = disk.mount()
        if refusal is None:
            return node, disk
    found.skipped.append(f"disk-full: {refusal}")
    return None


def _keep_store(disk: SmallDisk, found: Round) -> None:
    """Copy the files of a disk that is about to be unmounted, if the round failed."""
    if disk.mounted and not found.ok:
        shutil.copytree(disk.path, found.directory / f"{disk.path.name}-kept", dirs_exist_ok=True)


def _settle(cluster: ChaosCluster, clients: LoopThread, workload: Workload, verdict: Verdict) -> int | None:
    """Heal everything, let the clients finish, and return an index that every node has committed, if it can."""
    cluster.network.heal()
    cluster.resume_all()
    clients.call(workload.stop(), timeout_s=300)
    settled = cluster.wait_settled()
    if settled is None:
        verdict.add("liveness", "a minute after everything was healed the nodes differ")
        return None
    clients.call(workload.read_all(settled), timeout_s=300)
    again = cluster.wait_settled()
    return settled if again is None else again


def _judge(cluster: ChaosCluster, history: list[Operation], settled: int | None, found: Round) -> None:
    codes = cluster.stop_all()
    for node_id, code in codes.items():
        if code != 0:
            found.verdict.add("behavior", f"{node_id} was stopped and exited with code {code}")
    for node_id in cluster.node_ids:
        for line in _internal_errors(cluster.log_path(node_id)):
            found.verdict.add("behavior", f"{node_id} printed: {line}")
    replicas = {}
    for node_id in cluster.node_ids:
        try:
            replicas[node_id] = load_replica(cluster.store_path(node_id), settled)
        except DLedgerError as error:
            found.verdict.add("store", f"{node_id}: {error}")
    if replicas:
        judged = check(history, replicas)
        found.verdict.violations += judged.violations
        found.verdict.counts += judged.counts
        found.elections = max(0, int(max(log.terms[-1] for log in replicas.values())))


def _internal_errors(log: Path) -> list[str]:
    words = ("Traceback", "safety property", "InvariantViolation", "internal error", "unexpected ")
    return [line for line in log.read_text(errors="replace").splitlines() if any(word in line for word in words)]


def load_replica(store: Path, upto: int | None) -> ReplicaLog:
    """Read a stopped node's store, up to an index."""
    terms, data, hashes, records = [], [], [], []
    with open_store(store) as reader:
        at = first = int(reader.first_index)
        end = 1 + (int(reader.last_index) if upto is None else min(upto, int(reader.last_index)))
        while at < end:
            chunk = reader.records(at, end)
            terms.append(chunk.headers["term"].astype(np.int64))
            data.append(chunk.headers["magic"] == MAGIC_DATA)
            raw, bodies = memoryview(chunk.data), chunk.bodies
            starts, sizes = chunk.starts.tolist(), chunk.sizes.tolist()
            body_at = 0
            for start, size in zip(starts, sizes, strict=True):
                records.append(hash_of(bytes(raw[start : start + size])))
                hashes.append(hash_of(bytes(bodies[body_at : body_at + size - 48])))
                body_at += size - 48
            at += chunk.count
    return ReplicaLog(
        first,
        np.concatenate(terms) if terms else np.empty(0, np.int64),
        np.concatenate(data) if data else np.empty(0, np.bool_),
        np.array(hashes, np.uint64),
        np.array(records, np.uint64),
    )


def show(found: Round, console: Console) -> None:
    """Print the table of a round."""
    table = Table("event", "count", title=f"seed {found.seed}, {found.minutes:g} min")
    table.columns[1].justify = "right"
    for name, count in sorted(found.verdict.counts.items()):
        table.add_row(name, f"{count:,}")
    table.add_section()
    for name, count in sorted(found.faults.items()):
        table.add_row(f"fault {name}", f"{count:,}")
    table.add_section()
    table.add_row("elections (final term)", f"{found.elections:,}")
    table.add_row("longest time without an ack", f"{found.longest_gap_s:.2f} s")
    table.add_row("longest time from healing to an ack", f"{found.slowest_recovery_s:.2f} s")
    table.add_row("verdict", "ok" if found.ok else f"{len(found.verdict.violations)} violations")
    console.print(table)
    for reason in found.skipped:
        console.print(f"skipped: {reason}", markup=False)
    lines = Counter[str]()
    for violation in found.verdict.violations:
        lines[violation.kind] += 1
        if lines[violation.kind] <= SHOWN_MAX:
            console.print(f"VIOLATION {violation.kind}: {violation.detail}", style="red", markup=False, soft_wrap=True)
    if not found.ok:
        every = "\n".join(f"{violation.kind}: {violation.detail}" for violation in found.verdict.violations)
        (found.directory / "violations.txt").write_text(every + "\n")
        console.print(f"kept: {found.directory}", markup=False, soft_wrap=True)
        console.print(f"replay: {found.replay}", markup=False, soft_wrap=True)


# --- soak runs --------------------------------------------------------------------------------------------------------


def record(found: Round, record: SoakRecord) -> None:
    """Append a round's line."""
    record.add(
        seed=found.seed,
        minutes=found.minutes,
        operations=dict(sorted(found.verdict.counts.items())),
        faults=dict(sorted(found.faults.items())),
        elections=found.elections,
        longest_gap_s=round(found.longest_gap_s, 2),
        slowest_recovery_s=round(found.slowest_recovery_s, 2),
        violations=len(found.verdict.violations),
        verdict="ok" if found.ok else "violated",
    )


def run_soak(minutes: float, seed: int | None, out: Path, *, to_record: bool) -> int:
    """Run rounds until ``minutes`` are done; recorded ones count, unless a seed is given.

    Returns:
        The process's exit code.
    """
    console = Console(width=110, highlight=False)
    rows = SoakRecord(RECORD)
    if to_record and (changed := rows.uncommitted()):
        sys.stderr.write(f"commit first, because the record names a commit:\n{changed}\n")
        return 3
    done = rows.rows() if to_record and seed is None else []
    left = minutes - sum(row["minutes"] for row in done if row["verdict"] == "ok")
    if done:
        console.print(f"{len(done)} rounds of this code are recorded; {max(left, 0):g} of {minutes:g} minutes are left")
    first = seed if seed is not None else 1 + max((row["seed"] for row in done), default=random.randrange(1 << 30))
    for number in itertools.count(first):
        if left <= 1e-9:
            break
        found = run_round(number, min(left, ROUND_MINUTES_MAX), out / f"seed-{number}")
        show(found, console)
        if to_record:
            record(found, rows)
        if not found.ok:
            return 1
        shutil.rmtree(found.directory)
        left -= found.minutes
    return 0
