"""Rounds of chaos: start a cluster, inject faults, heal, check the history, report; and soak runs of many rounds."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dledger_core import open_store
from dledger_core.errors import DLedgerError
from tests.chaos.cluster import ChaosCluster, SmallDisk
from tests.chaos.linearizability import PROGRAM, linearizable
from tests.chaos.nemesis import Nemesis, NodeDownError
from tests.chaos.proxy import LoopThread, Network
from tests.chaos.recorder import Recorder
from tests.chaos.workload import Workload
from tests.support.checker import Verdict, check
from tests.support.history import Append, Operation, ReplicaLog, hash_of
from tests.support.logs import Row, rows_of
from tests.support.soak_record import SoakRecord

RECORD: Final = Path(__file__).with_name("SOAK.jsonl")
ROUND_MINUTES_MAX: Final = 5.0
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
    skipped: str = ""
    porcupine: str = "not built: run .ci/porcupine"
    longest_gap_s: float = 0.0
    slowest_recovery_s: float = 0.0
    elections: int = 0

    @property
    def ok(self) -> bool:
        return self.verdict.ok

    def row(self) -> dict[str, Any]:
        """Return the line of the record."""
        return {
            "seed": self.seed,
            "minutes": self.minutes,
            "operations": dict(sorted(self.verdict.counts.items())),
            "faults": dict(sorted(self.faults.items())),
            "elections": self.elections,
            "porcupine": self.porcupine,
            "longest_gap_s": round(self.longest_gap_s, 2),
            "slowest_recovery_s": round(self.slowest_recovery_s, 2),
            "violations": len(self.verdict.violations),
            "verdict": "ok" if self.ok else "violated",
        }

    def show(self) -> None:
        """Print the line; after a violation also what was violated, and where the files are kept."""
        sys.stdout.write(json.dumps(self.row()) + "\n")
        if self.skipped:
            sys.stdout.write(f"skipped: disk-full: {self.skipped}\n")
        if self.ok:
            return
        sys.stdout.writelines(f"VIOLATION {each.kind}: {each.detail}\n" for each in self.verdict.violations)
        sys.stdout.write(f"kept: {self.directory}\n")
        sys.stdout.write(f"replay: python -m tests.chaos --minutes {self.minutes:g} --seed {self.seed}\n")


def run_round(seed: int, minutes: float, directory: Path) -> Round:
    """Run one round in a new directory, which stays; no process and no mount is left."""
    directory.mkdir(parents=True)
    found = Round(seed, minutes, directory)
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
        recorder.flush()
        _judge_again(directory / "history.jsonl", found)
        acks = sorted(each.end for each in recorder.operations if isinstance(each, Append) and each.status == "ok")
        found.longest_gap_s = max((b - a for a, b in itertools.pairwise(acks)), default=0.0)
        found.slowest_recovery_s = max(nemesis.recoveries_s, default=0.0)
    except NodeDownError as error:
        for detail in [*nemesis.violations, str(error)]:
            found.verdict.add("behavior", detail)
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
    found.skipped = refusal
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


def _judge_again(history: Path, found: Round) -> None:
    """Let Porcupine check the history too."""
    if PROGRAM.exists():
        right, found.porcupine = linearizable(history)
        if not right:
            found.verdict.add("linearizability", f"porcupine says: {found.porcupine}")


def _internal_errors(log: Path) -> list[str]:
    words = ("Traceback", "safety property", "InvariantViolation", "internal error", "unexpected ")
    return [line for line in log.read_text(errors="replace").splitlines() if any(word in line for word in words)]


def load_replica(store: Path, upto: int | None) -> ReplicaLog:
    """Read a stopped node's store, up to an index."""
    rows: list[Row] = []
    records: list[int] = []
    with open_store(store) as reader:
        at = first = int(reader.first_index)
        end = 1 + (int(reader.last_index) if upto is None else min(upto, int(reader.last_index)))
        while at < end:
            chunk = reader.raw(at, end)
            rows += rows_of(chunk)
            data, ends = memoryview(chunk.data), (chunk.starts + chunk.sizes).tolist()
            records += [hash_of(data[a:b]) for a, b in zip(chunk.starts.tolist(), ends, strict=True)]
            at += chunk.count
        return ReplicaLog.of(first, rows, reader.shown(until="end"), records)


def run_soak(minutes: float, seed: int | None, out: Path, *, to_record: bool) -> int:
    """Run rounds until ``minutes`` are done; recorded ones count, unless a seed is given.

    Returns:
        The process's exit code.
    """
    rows = SoakRecord(RECORD)
    if to_record and (changed := rows.uncommitted()):
        sys.stderr.write(f"commit first, because the record names a commit:\n{changed}\n")
        return 3
    done = rows.rows() if to_record and seed is None else []
    left = minutes - sum(row["minutes"] for row in done if row["verdict"] == "ok")
    if done:
        sys.stderr.write(
            f"{len(done)} rounds of this code are recorded; {max(left, 0):g} of {minutes:g} minutes are left\n"
        )
    first = seed if seed is not None else 1 + max((row["seed"] for row in done), default=random.randrange(1 << 30))
    for number in itertools.count(first):
        if left <= 1e-9:
            break
        found = run_round(number, min(left, ROUND_MINUTES_MAX), out / f"seed-{number}")
        found.show()
        if to_record:
            rows.add(**found.row())
        if not found.ok:
            return 1
        shutil.rmtree(found.directory)
        left -= found.minutes
    return 0
