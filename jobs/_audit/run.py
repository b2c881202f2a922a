"""One run of the audit on Spark: plan, first pass in steps that survive a kill, second pass, tables, summary."""

from __future__ import annotations

import threading
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from dledger_core.errors import ConfigError
from jobs._audit import plan, tables
from jobs._audit.compared import Compared, RangeKey, bytes_read, compared_by_replica, of_ranges, suspect_ranges
from jobs._audit.history import Held, Proof, chain_of, due_count, held, histories, to_reread, trusted
from jobs._audit.judged import Judged, judge_suspects, report_of
from jobs._audit.model import Replica
from jobs._audit.options import Options
from jobs._audit.page import page
from jobs._audit.passes import digest_pass, digests_here, drill_pass, index_pass, watched
from jobs._audit.picture import Stretch
from jobs._audit.report import GroupReport, merge_findings, summarize
from jobs._cli import StoppedError, progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Audit"]

_CHOSEN_SCHEMA: Final = pa.schema([("group", pa.string()), ("start", pa.int64()), ("end", pa.int64())])
TASKS_PER_CORE: Final = 1  # of each replica, and there are two at least
TASK_BYTES_MIN: Final = 1 << 26
TASK_BYTES_MAX: Final = 1 << 29
"""A task costs as much as reading some tens of megabytes; a large one says for long nothing of how far it is."""
STEP_BYTES: Final = 16 << 30
HERE_BYTES: Final = 1 << 29
"""So much is read in half a second, at least where hashing is the bound; a Spark job takes some tenths by itself."""
HERE_THREADS: Final = 4
TASK_S: Final = 5
STEP_S: Final = 30
"""With a byte rate: about how long a task or a step reads."""


@dataclass
class Audit:
    """One run; ``run`` may be called once."""

    snapshot: dict[str, tuple[Replica, ...]]
    options: Options
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    began: float = field(default_factory=time.monotonic)
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    reports: list[GroupReport] = field(default_factory=list)
    chosen: dict[RangeKey, plan.Section] = field(default_factory=dict)
    spans: dict[str, int] = field(default_factory=dict)
    proven: dict[RangeKey, Proof] = field(default_factory=dict)
    drilled_bytes: int = 0
    stopping: threading.Event = field(default_factory=threading.Event)
    """Ends a run from outside: what it has not recorded by then it does not record."""

    def run(self, spark: SparkSession) -> dict[str, Any]:
        """Does everything and returns the JSON summary.

        Raises:
            StoppedError: ``stopping`` was set.
        """
        progress(f"run {self.run_id}")
        parts = {group: plan.sections(replicas) for group, replicas in self.snapshot.items()}
        for group, sections in parts.items():
            for part in sections:
                names = ", ".join(replica.name for replica in part.replicas)
                progress(f"group {group}: [{part.start}, {part.end}) on {names}")
        self._choose(parts)
        earlier = self._earlier(spark)
        self._skip_proven(earlier)
        digests = self._digests(spark, earlier)
        judged = judge_suspects(suspect_ranges(digests))
        self._second_pass(spark, judged)
        if self.stopping.is_set():
            raise StoppedError("stopped by a signal")
        compared = compared_by_replica(digests)
        self.reports = [
            report_of(group, self.snapshot[group], parts[group], judged, self._done(group, compared), self.run_id)
            for group in self.snapshot
        ]
        if self.options.table is not None:
            self._write(spark)
        return self._summary(bytes_read(digests, self.run_id))

    def _choose(self, parts: dict[str, list[plan.Section]]) -> None:
        """Fixes the ranges to compare."""
        seed = self.options.resume or self.run_id
        for group, sections in parts.items():
            heaviest = max((replica.entry_bytes for replica in self.snapshot[group]), default=0)
            entries = sum(part.end - part.start for part in sections)
            self.spans[group] = span = plan.choose_span(entries, heaviest, self.options.rate)
            picked = plan.sample(sections, span, seed) if self.options.mode == "quick" else sections
            for part in picked:
                for start, end in plan.aligned(part.start, part.end, span):
                    self.chosen[group, start, end] = plan.Section(start, end, part.replicas)

    def _earlier(self, spark: SparkSession) -> tables.Ranges | None:
        """Returns the digests of earlier runs, if this one needs them."""
        options = self.options
        if options.table is None or not (options.resume or options.skip_proven):
            return None
        earlier = tables.read_ranges(spark, options.table)
        if earlier is None and options.resume:
            raise ConfigError(f"{options.table} records no run to go on with", "--resume", "leave it out")
        return earlier

    def _skip_proven(self, earlier: tables.Ranges | None) -> None:
        """Takes out of the plan what was proven equal not long ago, but for the share whose turn it is."""
        if earlier is None or self.options.skip_proven is None:
            return
        replicas = [replica for found in self.snapshot.values() for replica in found]
        age, percent = self.options.skip_proven, self.options.reread_percent
        oldest = self.started_at - age
        known = trusted(self.chosen, histories(earlier.since(oldest), replicas, self.started_at), oldest)
        due = due_count(known, age, self.started_at) if percent is None else -(-len(known) * percent // 100)
        again = to_reread(known, due)
        self.proven = {key: proof for key, proof in known.items() if key not in again}
        self.chosen = {key: part for key, part in self.chosen.items() if key not in self.proven}
        progress(f"{len(self.proven)} ranges were proven before, {len(self.chosen)} are read")

    def _digests(self, spark: SparkSession, earlier: tables.Ranges | None) -> pa.Table:
        """Reads what is not there yet and returns the digests of all ranges."""
        there: set[Held] = set()
        rows = None
        if earlier is not None and self.options.resume:
            replicas = [replica for found in self.snapshot.values() for replica in found]
            rows, there = held(earlier.of_runs(chain_of(earlier.resumed(), self.options.resume)), replicas)
            there = {one for one in there if (one[0], one[2], one[3]) in self.chosen}
        tasks, rate = self._tasks(spark, there), self.options.rate
        if self.options.table is None:
            return self._read(spark, tasks)
        nodes = len({task.replica.name for task in tasks})
        work = list(plan.steps(tasks, rate * STEP_S * nodes if rate else STEP_BYTES))
        mine: list[pa.Table] = []
        for number, step in enumerate(work or [[]]):
            if len(work) > 1:
                progress(f"step {number + 1} of {len(work)}")
            mine.append(self._read(spark, step))
            tables.write_ranges(spark, mine[-1], self.options.table)
        if rows is None:
            return pa.concat_tables(mine)
        groups, starts, ends = zip(*self.chosen, strict=True) if self.chosen else ((), (), ())
        wanted = pa.table({"group": groups, "start": starts, "end": ends}, _CHOSEN_SCHEMA)
        held_ranges = of_ranges(rows, wanted).select(mine[0].column_names)
        return pa.concat_tables([*mine, held_ranges.cast(mine[0].schema)])

    def _read(self, spark: SparkSession, work: list[plan.DigestTask]) -> pa.Table:
        """Reads digests: a little of stores here, else on Spark."""
        resumes, rate = self.options.resume or "", self.options.rate
        nbytes = sum((task.end - task.start) * task.replica.entry_bytes for task in work)
        if nbytes <= HERE_BYTES and not rate and not any(task.replica.live for task in work):
            cores = spark.sparkContext.defaultParallelism
            threads = min(cores, HERE_THREADS)
            return digests_here(work, self.run_id, self.stopping, resumes=resumes, threads=threads)
        with watched(spark, "digests"):
            return digest_pass(spark, work, self.run_id, resumes=resumes, rate=rate).toArrow()

    def _tasks(self, spark: SparkSession, there: set[Held]) -> list[plan.DigestTask]:
        cores = spark.sparkContext.defaultParallelism
        tasks: list[plan.DigestTask] = []
        for group, span in self.spans.items():
            parts = [part for key, part in self.chosen.items() if key[0] == group]
            here = {one[1:] for one in there if one[0] == group}
            heaviest = max((replica.entry_bytes for replica in self.snapshot[group]), default=0)
            size = heaviest * sum(part.end - part.start for part in parts)
            most = self.options.rate * TASK_S if self.options.rate else TASK_BYTES_MAX
            wanted = max(min(TASKS_PER_CORE * cores, int(size / TASK_BYTES_MIN)), int(size / most), 1)
            tasks += plan.reading_tasks(parts, span, wanted, here)
        if there:
            progress(f"{len(there)} digests were read by run {self.options.resume}")
        return tasks

    def _second_pass(self, spark: SparkSession, judged: Judged) -> None:
        full = self.options.mode == "full"
        doubtful = list(self.chosen) if full else judged.doubtful
        if doubtful:
            progress(f"{len(doubtful)} of {len(self.chosen)} ranges are read entry by entry")
            sections = [self.chosen[key] for key in doubtful]
            for key, drilled in zip(doubtful, drill_pass(spark, sections, self.options.rate), strict=True):
                judged.add_drilled(key[0], drilled)
                self.drilled_bytes += drilled.read_bytes
        if full and not self.options.rate:
            stores = [
                r for found in self.snapshot.values() for r in found if r.reachable and not r.live and not r.block_bytes
            ]
            for finding in index_pass(spark, stores):
                judged.findings[finding.group].append(finding)

    def _done(self, group: str, compared: list[Compared]) -> list[Compared]:
        """Returns what was compared now, by a killed run, or proven before, by replica."""
        done = [one for one in compared if one.group == group]
        by_day: dict[tuple[str, str], list[Proof]] = defaultdict(list)
        for key, proof in self.proven.items():
            if key[0] == group:
                for holder in proof.holders:
                    by_day[holder.partition("|")[0], proof.read_at.date().isoformat()].append(proof)
        for (name, _day), proofs in sorted(by_day.items()):
            dates = [proof.read_at for proof in proofs]
            entries, nbytes = sum(p.end - p.start for p in proofs), sum(p.nbytes for p in proofs)
            done.append(Compared(group, name, entries, nbytes, "", min(dates), max(dates)))
        return done

    def page(self, summary: dict[str, Any]) -> str:
        """Returns the report for people, after the run."""
        stretches: dict[str, list[Stretch]] = defaultdict(list)
        for (group, start, end), part in self.chosen.items():
            names = frozenset(replica.name for replica in part.replicas)
            stretches[group].append(Stretch(start, end, names, "read now"))
        for (group, start, end), proof in self.proven.items():
            names = frozenset(holder.partition("|")[0] for holder in proof.holders)
            stretches[group].append(Stretch(start, end, names, "proven before"))
        versions = {name: version(name) for name in ("dledger", "pyspark", "delta-spark")}
        frame = self.options.to_json() | {"versions": ", ".join(f"{k} {v}" for k, v in versions.items())}
        logs = {r.log_uuid for found in self.snapshot.values() for r in found if r.log_uuid}
        return page(summary, self.reports, stretches, frame | {"log": ", ".join(sorted(logs)) or "not recorded"})

    def _write(self, spark: SparkSession) -> None:
        assert self.options.table is not None
        progress(f"writing {self.options.table}")
        facts = tables.RunFacts(self.run_id, self.options.mode, self.started_at, time.monotonic() - self.began)
        found = merge_findings(finding for report in self.reports for finding in report.findings)
        tables.write_findings(spark, self.options.table, facts, found)
        tables.write_runs(spark, self.options.table, facts, self.reports)

    def _summary(self, read: dict[str, int]) -> dict[str, Any]:
        duration = time.monotonic() - self.began
        total = sum(read.values())
        return summarize(self.reports) | {
            "run_id": self.run_id,
            "mode": self.options.mode,
            "started_at": self.started_at.isoformat(),
            "duration_s": round(duration, 3),
            "table": self.options.table,
            "resumed": self.options.resume,
            "cost": {
                "bytes_read": read,
                "bytes_read_second_pass": self.drilled_bytes,
                "bytes_per_second": round(total / duration) if duration else None,
                "max_bytes_per_second": self.options.rate,
                "bytes_written_to_replicas": 0,
            },
        }
