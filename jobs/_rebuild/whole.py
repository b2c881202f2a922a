"""The whole table in one transaction: read, place, write.

Where tasks can write the table's files themselves, a broker's store is read only once: they write each message under
the offset that it carries, as if offsets only went up, and say what runs there are. If these tell that a queue is
tangled or packed, the files are thrown away and Spark places the units; else they are committed. In our own logs
offsets are assigned, so runs come first, and then tasks write. What came over the network is kept and placed by Spark.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from dledger_core.errors import StoreMismatchError
from jobs._cli import progress
from jobs._rebuild.classic import DAMAGED, read_classic
from jobs._rebuild.data_files import Bases, files_at
from jobs._rebuild.replacement import Replacement, rows_in
from jobs._rebuild.slots import QueueFacts, facts_row, first_offsets, place, queues_of, runs_of
from jobs._rebuild.table import read_table
from jobs._rebuild.tasks import RUNS, UNITS, Product, read_store
from jobs._rebuild.units import ALL_ENTRIES, IMPOSSIBLE, PENDING, STRANGE, UNIT_SCHEMA, unit_batches

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from jobs._rebuild.plan import RebuildPlan

__all__ = ["Whole"]

_REASONS: Final = (STRANGE, IMPOSSIBLE, PENDING, DAMAGED)
_BASES_MAX: Final = 100_000
"""Offsets that are sent to each task; a log with more parts and queues is placed by Spark."""


class Whole:
    """Reads a log and writes its table; a context manager, for what is kept in between.

    Attributes:
        runs: of all units, once ``write`` has returned.
        skipped: then, too: how many entries are no units, for each reason.
    """

    def __init__(self, spark: SparkSession, plan: RebuildPlan) -> None:
        self._spark = spark
        self._plan = plan
        self._resources = ExitStack()
        self.skipped: dict[str, int] = {}

    def __enter__(self) -> Whole:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def write(self) -> QueueFacts:
        """Replaces all rows of the table.

        Raises:
            StoreMismatchError: the log changed in the meantime.
        """
        live = "peers" in self._plan.source
        replacement = None if live else Replacement.begin(self._spark, self._plan.table)
        if replacement is None:
            return self._by_spark(live)
        self._resources.callback(replacement.discard)
        if self._plan.foreign:
            return self._in_one_pass(replacement)
        return self._in_two_passes(replacement)

    def _in_one_pass(self, replacement: Replacement) -> QueueFacts:
        """A broker gave all queue offsets."""
        progress("reading and writing the table in one pass")
        written = self._keep(self._read(files_at(replacement.stem)))
        self.runs = written.where("file is null")
        queues = queues_of(self.runs)
        facts, files = self._look(written, queues)
        if not facts.straight:
            replacement.discard()
            self._place(self._read(UNITS), queues, facts)
        else:
            self._commit(replacement, files, facts)
        return facts

    def _in_two_passes(self, replacement: Replacement) -> QueueFacts:
        self.runs = self._keep(self._read(RUNS))
        queues = queues_of(self.runs)
        facts, _ = self._look(self.runs, queues)
        bases = _bases(first_offsets(self.runs, queues)) if facts.straight else None
        if bases is None:
            self._place(self._read(UNITS), queues, facts)
        else:
            progress(f"{facts.units} units in {facts.queues} queues; writing the table")
            written = self._read(files_at(replacement.stem, bases))
            self._commit(replacement, [row["file"] for row in written.select("file").collect()], facts)
        return facts

    def _by_spark(self, live: bool) -> QueueFacts:
        """What came over the network is kept; a store is read a second time."""
        units = self._keep(self._read(UNITS)) if live else self._read(UNITS)
        self.runs = self._keep(runs_of(units) if live else self._read(RUNS))
        queues = queues_of(self.runs)
        facts, _ = self._look(self.runs, queues)
        self._place(units, queues, facts)
        return facts

    def _look(self, rows: DataFrame, queues: DataFrame) -> tuple[QueueFacts, list[str]]:
        """Looks at what tasks returned, in one query: facts of all queues, what was skipped, and files written."""
        row = facts_row(queues, self._plan.batch_topics).crossJoin(_ended(rows)).first()
        assert row is not None
        found = row.asDict()
        files: list[str] = found.pop("files")
        self.skipped = {reason: found.pop(reason) or 0 for reason in _REASONS}
        return QueueFacts(**found), files

    def _commit(self, replacement: Replacement, files: list[str], facts: QueueFacts) -> None:
        progress(f"{facts.units} units in {facts.queues} queues; committing {len(files)} files")
        _check(facts, rows_in(files), self._plan)
        replacement.commit(files)

    def _place(self, units: DataFrame, queues: DataFrame, facts: QueueFacts) -> None:
        progress(f"{facts.units} units in {facts.queues} queues; Spark writes the table")
        rows = place(units, self.runs, queues, facts)
        # A plain overwrite would forget the table's clustering; replacing every row does not.
        rows.write.format("delta").mode("overwrite").option("replaceWhere", "true").save(self._plan.table)
        _check(facts, read_table(self._spark, self._plan.table).count(), self._plan)

    def _keep(self, rows: DataFrame) -> DataFrame:
        from pyspark import StorageLevel

        self._resources.callback(rows.unpersist)
        return rows.persist(StorageLevel.MEMORY_AND_DISK)

    def _read(self, product: Product) -> DataFrame:
        plan, spark = self._plan, self._spark
        if "peers" in plan.source:
            return self._read_servers()
        [(group, bounds)] = plan.ranges.items()
        rules = replace(plan.rules, header_bytes=0, broker_end=ALL_ENTRIES, hidden=())
        parts = []
        if plan.classic:
            parts.append(read_classic(spark, plan.classic, group, rules, product, closed=bool(plan.source)))
        if plan.source:
            parts.append(read_store(spark, plan.source, group, bounds, plan.rules, product))
        return parts[0] if len(parts) == 1 else parts[0].unionByName(parts[1])

    def _read_servers(self) -> DataFrame:
        from spark_connector import register

        register(self._spark)
        starts, ends = ({group: bounds[i] for group, bounds in self._plan.ranges.items()} for i in (0, 1))
        options = {**self._plan.source, "startingOffsets": json.dumps(starts), "endingOffsets": json.dumps(ends)}
        entries = self._spark.read.format("dledger").options(**options).load()
        entries = entries.select("group", "index", "position", "body")
        return entries.mapInArrow(partial(unit_batches, rules=self._plan.rules), UNIT_SCHEMA)


def _ended(rows: DataFrame) -> DataFrame:
    """Returns a single row: how many entries are no units, for each reason, and ``files`` that were written."""
    from pyspark.sql import functions as f

    files = f.collect_list("file") if "file" in rows.columns else f.array()
    counts = {reason: f.sum(f.when(f.col("skipped") == reason, f.col("units"))) for reason in _REASONS}
    return rows.agg(files.alias("files"), *(count.alias(reason) for reason, count in counts.items()))


def _bases(offsets: DataFrame) -> Bases | None:
    """Returns them as tasks look them up; None if they are too many to be sent along."""
    found = offsets.limit(_BASES_MAX + 1).toArrow()
    if found.num_rows > _BASES_MAX:
        return None
    bases: dict[int, dict[tuple[str, int], int]] = {}
    columns = (found.column(name).to_pylist() for name in ("part", "topic", "queue_id", "base"))
    for part, topic, queue_id, base in zip(*columns, strict=True):
        bases.setdefault(part, {})[topic, queue_id] = base
    return bases


def _check(facts: QueueFacts, written: int, plan: RebuildPlan) -> None:
    """Raises StoreMismatchError where the table does not hold what was counted: the log changed under the job."""
    if written != facts.units:
        counts = {"found": facts.units, "written": written}
        raise StoreMismatchError("the log changed while it was read", str(plan.source), "run it again", counts)
