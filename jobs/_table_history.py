"""Whether a Delta table still has the rows that the query of a Spark checkpoint wrote; before the first micro-batch.

Delta records each micro-batch of a query twice: as a transaction identifier (``txn``: the query's id and the number of
the micro-batch), by which it skips a repeated one, and in the table's history. ``RESTORE`` takes rows back and leaves
the identifier as it is. So both are compared with the micro-batches that the checkpoint has committed.

Rows that users delete, update or merge are their decision, and so is TRUNCATE. OPTIMIZE, VACUUM and changes of columns
and properties remove no row. A difference is a RESTORE to an earlier version, a table that was replaced or overwritten
as a whole, one that was deleted, created again or restored from a copy, and a checkpoint that is new or older.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Final

from spark_connector import local_path
from spark_connector.errors import TableMismatchError

from ._delta_log import newest_files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "Commit",
    "Contents",
    "QueryProgress",
    "Removal",
    "TableHistory",
    "batch_metadata",
    "batches_of",
    "contents_of",
    "query_progress",
]


@dataclass(frozen=True, slots=True)
class QueryProgress:
    """The progress of a query in its Spark checkpoint.

    Attributes:
        query_id: its id.
        planned: newest planned micro-batch.
        committed: newest committed micro-batch, -1 if there is none.
    """

    query_id: str
    planned: int
    committed: int


def query_progress(spark: SparkSession, checkpoint: str) -> QueryProgress | None:
    """Return the progress that a Spark checkpoint records, anywhere; None if no micro-batch is planned."""
    planned = _numbers(_names(spark, f"{checkpoint}/offsets"))
    if not planned:
        return None
    metadata = f"{checkpoint}/metadata"
    path = local_path(metadata)
    if path is not None:
        text = path.read_text(encoding="utf-8") if path.is_file() else "{}"
    else:
        text = spark.read.text(metadata, wholetext=True).collect()[0][0]
    query_id = json.loads(text).get("id")
    if query_id is None:
        return None
    # Spark plans a micro-batch only after the previous one is committed.
    done = max([*_numbers(_names(spark, f"{checkpoint}/commits")), max(planned) - 1])
    return QueryProgress(query_id, max(planned), done)


def _names(spark: SparkSession, directory: str) -> list[str]:
    """Return the names of the files in a directory of any file system, none if it is missing."""
    path = local_path(directory)
    if path is not None:
        return [entry.name for entry in path.iterdir()] if path.is_dir() else []
    from pyspark.errors import AnalysisException

    try:
        files = spark.read.format("binaryFile").load(directory).select("path").collect()
    except AnalysisException as error:
        if error.getCondition() != "PATH_NOT_FOUND":
            raise
        return []
    return [str(row["path"]).rpartition("/")[2] for row in files]


def _numbers(names: Iterable[str]) -> list[int]:
    return [int(name) for name in names if name.isascii() and name.isdigit()]


@dataclass(frozen=True, slots=True)
class Commit:
    """A version of a table, as Delta's history shows it."""

    version: int
    time: datetime
    operation: str
    parameters: Mapping[str, str | None]

    @property
    def replaces_table(self) -> bool:
        """Whether it removed all earlier rows and wrote others instead."""
        if re.match("(CREATE OR )?REPLACE TABLE|CLONE", self.operation):
            return True
        mode = self.parameters.get("mode") or self.parameters.get("outputMode")
        part = self.parameters.get("predicate") or self.parameters.get("isDynamicPartitionOverwrite")
        return mode in ("Overwrite", "Complete") and part in (None, "[]", "false")


@dataclass(frozen=True, slots=True)
class Removal:
    """Micro-batches that a version took out of the table.

    Attributes:
        version: the version.
        operation: its operation.
        first: first missing micro-batch.
        last: last one; None if unknown.
    """

    version: int
    operation: str
    first: int
    last: int | None

    def named(self, noun: str) -> str:
        """Return the missing ones, for an error."""
        if self.last is None:
            return f"{noun} {self.first} and later ones"
        return f"{noun} {self.first}" if self.last == self.first else f"{noun} {self.first} to {self.last}"


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between table and checkpoint, and the remedy of it alone."""

    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Contents:
    """The micro-batches of a query in a version of the table.

    Attributes:
        last: newest one; -1 if there is none, None if its version is older than the history.
        removal: the first removal whose micro-batches are still missing.
    """

    last: int | None = None
    removal: Removal | None = None

    def without(self, commit: Commit, kept: Contents) -> Contents:
        """Return ``kept``, the contents after a commit that dropped others, with its missing micro-batches."""
        if kept.last is None or (self.last is not None and self.last <= kept.last):
            return kept
        return replace(
            kept, removal=kept.removal or Removal(commit.version, commit.operation, kept.last + 1, self.last)
        )


def contents_of(commits: Sequence[Commit], batch_of: Callable[[Commit], int | None], *, dense: bool) -> Contents:
    """Return which micro-batches of a query the newest version of a table contains.

    Args:
        commits: the versions, oldest first.
        batch_of: returns the number of the query's micro-batch that a version added, None for other versions.
        dense: whether the query commits all its micro-batches, also empty ones.
    """
    if not commits:
        return Contents()
    current, at = Contents(-1 if commits[0].version == 0 else None), dict[int, Contents]()
    for commit in commits:
        batch = batch_of(commit)
        if commit.operation == "RESTORE":
            older = Contents(None if current.last is None else -1)  # the history no longer has that version
            current = current.without(commit, at.get(_restored(commit, commits), older))
        elif batch == 0:
            current = Contents(0)
        elif batch is not None:
            begins = dense and current.last is not None and current.last < batch - 1 and current.removal is None
            missing = Removal(commit.version, _CREATED, int(current.last or 0) + 1, batch - 1) if begins else None
            current = Contents(batch, current.removal or missing)
        elif commit.replaces_table:
            current = current.without(commit, Contents(-1))
        at[commit.version] = current
    return current


def _restored(commit: Commit, commits: Sequence[Commit]) -> int:
    """Return the version to which a RESTORE went back, -1 if the history does not have it."""
    version = commit.parameters.get("version")
    if version is not None:
        return int(version)
    time = commit.parameters.get("timestamp") or commit.parameters.get("datetime")  # delta-rs: milliseconds
    if time is None:
        return -1
    moment = datetime.fromtimestamp(int(time) / 1000) if time.isdigit() else datetime.fromisoformat(time)  # noqa: DTZ006
    return max((each.version for each in commits if each.time.replace(tzinfo=None) <= moment), default=-1)


def batches_of(query_id: str) -> Callable[[Commit], int | None]:
    """Return a function for ``contents_of`` that finds the micro-batches which a query adds to the table."""

    def batch_of(commit: Commit) -> int | None:
        if commit.parameters.get("queryId") != query_id:
            return None
        return int(commit.parameters["epochId"] or 0)

    return batch_of


def batch_metadata(query_id: str, number: int) -> str:
    """Return Delta's ``userMetadata`` of a micro-batch that ``foreachBatch`` writes.

    The history shows such a commit as a WRITE, which alone does not name the query and the micro-batch.
    """
    return json.dumps({"queryId": query_id, "epochId": str(number)})


def _parameters(of_operation: Mapping[str, str | None] | None, metadata: str | None) -> Mapping[str, str | None]:
    """Return the parameters of a commit, with those in a ``batch_metadata``."""
    try:
        added = json.loads(metadata or "{}")
    except ValueError:
        added = {}
    return {**(of_operation or {}), **(added if isinstance(added, dict) and "queryId" in added else {})}


_HISTORY_MIN: Final = 1000
_PARAMETERS: Final = ("operationParameters", "userMetadata")
_CREATED: Final = "CREATE"
_TXN: Final = "txn struct<appId: string, version: bigint>"


class TableHistory:
    """A Delta table that the query of a Spark checkpoint extends.

    Args:
        spark: the session.
        table: its directory.
        checkpoint: directory of the Spark checkpoint.
        option: the option that names the table.
    """

    def __init__(self, spark: SparkSession, table: str, checkpoint: str, option: str = "--table") -> None:
        self._spark = spark
        self._table = table
        self._checkpoint = checkpoint
        self._option = option

    def check(self, groups: Sequence[str], starts: Mapping[str, int]) -> None:
        """Check a table into which a query streams entries: the committed micro-batches are there, and no others.

        Args:
            groups: the groups of the query.
            starts: by group, the first index that the query reads of the groups which the checkpoint does not have.

        Raises:
            TableMismatchError: they do not belong together, or the table has rows that the query would add again.
        """
        progress = query_progress(self._spark, self._checkpoint)
        if progress is None or (progress.committed < 0 and not self._has_any(progress)):
            self._check_new(starts, is_new=progress is None)
            return
        batch_of = batches_of(progress.query_id)
        found = self._missing(progress)
        if found is None:
            commits = self.commits(lambda found: any(batch_of(each) == progress.committed for each in found))
            in_history = max((batch for batch in map(batch_of, commits) if batch is not None), default=-1)
            known = in_history if in_history >= progress.committed else self.recorded_batch(progress.query_id)
            removal = contents_of(commits, batch_of, dense=True)
            found = _older(progress, known) or self._newer(progress, known) or self._removed(removal, "micro-batch")
        if found is not None:
            raise self._mismatch(progress, found, f"--checkpoint NEW{_starting(self._next_indexes(groups))}")
        if local_path(self._checkpoint) is not None:  # of others the caller does not know the groups
            self._check_new(starts, is_new=False)

    def check_appends(self) -> None:
        """Check a table to which a query appends with ``txnAppId`` and leaves out micro-batches without rows.

        Raises:
            TableMismatchError: micro-batches are missing, or the table has later ones than the checkpoint.
        """
        progress = query_progress(self._spark, self._checkpoint)
        if progress is None or progress.committed < 0:
            return
        found = self._missing(progress)
        if found is None:
            removal = contents_of(self.commits(lambda found: any(map(_append, found))), _append, dense=False)
            found = self._newer(progress, self.recorded_batch(progress.query_id)) or self._removed(removal, "version")
        if found is not None:
            raise self._mismatch(progress, found, None)

    def check_start(self, starts: Mapping[str, int]) -> None:
        """Check a table that has rows of some entries only: a new checkpoint reads none of them again.

        Args:
            starts: by group, the first index that the query reads.

        Raises:
            TableMismatchError: the table has rows that the query would add again.
        """
        if query_progress(self._spark, self._checkpoint) is None:
            self._check_new(starts, is_new=True)

    def _check_new(self, starts: Mapping[str, int], *, is_new: bool) -> None:
        ends = self._next_indexes(starts) if starts else {}
        for group, start in sorted(starts.items()):
            if start < ends.get(group, 0):
                what = f"--checkpoint {self._checkpoint} starts group {group!r} at {start}, and the table has its"
                what += f" rows up to {ends[group] - 1}: they would be in it twice"
                ways = f"use the checkpoint that wrote them, add{_starting(ends)}, or name a new {self._option}"
                if not is_new:  # --starting-offsets has no effect
                    ways = "use the checkpoint that wrote them, or leave the group out"
                raise TableMismatchError(what, f"{self._option} {self._table}", ways)

    def _has_any(self, progress: QueryProgress) -> bool:
        return self._exists() and self.recorded_batch(progress.query_id) >= 0

    def _missing(self, progress: QueryProgress) -> Difference | None:
        """Return the difference if there is no table."""
        return None if self._exists() else Difference("there is no table", "put it back")

    def _newer(self, progress: QueryProgress, recorded: int) -> Difference | None:
        """Return the difference if the table has a micro-batch that the checkpoint has not planned."""
        if recorded <= progress.planned:
            return None
        what = f"the table has micro-batch {recorded}: rows of the micro-batches between would be left out"
        return Difference(what, "put the newer checkpoint back")

    def _removed(self, contents: Contents, noun: str) -> Difference | None:
        """Return the difference if a version of the table has taken rows of the query out."""
        removal = contents.removal
        if removal is None:
            return None
        what = f"version {removal.version} of the table ({removal.operation}) lacks {removal.named(noun)}"
        if removal.operation == _CREATED:
            return Difference(what, "put the earlier table back")
        before = removal.version - 1
        path = self._table.replace("`", "``")
        restore = f"RESTORE TABLE delta.`{path}` TO VERSION AS OF {before}"
        if contents.last is None or contents.last < removal.first:
            return Difference(what, restore)
        # The query has continued meanwhile: those rows are not in the earlier version.
        return Difference(what, f"{restore} with --checkpoint NEW{_starting(self._next_indexes(version=before))}")

    def _mismatch(self, progress: QueryProgress, found: Difference, keep: str | None) -> TableMismatchError:
        """Return the error with the ways out; ``keep`` continues with the table as it is, if that is possible."""
        what = f"--checkpoint {self._checkpoint} has committed micro-batch {progress.committed} of query"
        ways = [found.remedy, "or begin again with a new --table and a new --checkpoint"]
        if keep is not None and self._exists():
            ways.insert(1, f"or keep the table as it is with {keep}")
        return TableMismatchError(
            f"{what} {progress.query_id}, and {found.what}", f"--table {self._table}", ", ".join(ways)
        )

    def _next_indexes(self, groups: Iterable[str] | None = None, version: int | None = None) -> dict[str, int]:
        """Return the index after the last one in the table, for each of the groups (default: all) that has rows.

        Of a CommitLog it is a position in the last message: a read from there on starts with the next message.
        """
        from pyspark.sql import functions as f

        if not self._exists():
            return {}
        reader = self._spark.read.format("delta")
        reader = reader if version is None else reader.option("versionAsOf", version)
        last = f.coalesce(f.max("index"), f.max("position")).alias("last")
        found = reader.load(self._table).groupBy("group").agg(last).where("last is not null").collect()
        wanted = None if groups is None else set(groups)
        return {row["group"]: row["last"] + 1 for row in sorted(found) if wanted is None or row["group"] in wanted}

    def commits(self, is_enough: Callable[[Sequence[Commit]], bool]) -> list[Commit]:
        """Return the newest versions, oldest first: at least 1,000, and as many as needed or exist."""
        from delta.tables import DeltaTable

        table, limit = DeltaTable.forPath(self._spark, self._table), _HISTORY_MIN
        while True:
            rows = table.history(limit).select("version", "timestamp", "operation", *_PARAMETERS).collect()
            found = [Commit(row[0], row[1], row[2] or "", _parameters(row[3], row[4])) for row in rows]
            if len(found) < limit or is_enough(found):
                return sorted(found, key=lambda commit: commit.version)
            limit *= 10

    def seconds_since(self, operation: str, most: float) -> float:
        """Return the time since the newest commit of an operation, or since the oldest commit if there is none.

        Args:
            operation: as in the table's history.
            most: a longer time does not matter, so older commits are not read.
        """

        def age(commit: Commit) -> float:
            return time.time() - commit.time.timestamp()

        def is_enough(found: Sequence[Commit]) -> bool:
            return any(each.operation == operation or age(each) >= most for each in found)

        if not self._exists():
            return 0.0
        commits = self.commits(is_enough)
        return age(next((each for each in reversed(commits) if each.operation == operation), commits[0]))

    def rows_added(self, query_id: str, batches: Container[int]) -> int:
        """Return the number of rows that micro-batches of a query have added, as Delta counted them."""
        from delta.tables import DeltaTable

        if not self._exists():
            return 0
        added = (
            DeltaTable.forPath(self._spark, self._table)
            .history()
            .selectExpr(
                "operationParameters['queryId']", "operationParameters['epochId']", "operationMetrics['numOutputRows']"
            )
        )
        return sum(int(row[2] or 0) for row in added.collect() if row[0] == query_id and int(row[1]) in batches)

    def recorded_batch(self, query_id: str) -> int:
        """Return the newest micro-batch of a query that the table's log records, -1 if there is none."""
        log = f"{self._table}/_delta_log"
        parts, later = newest_files(_names(self._spark, log))
        chosen = {
            "parquet": [name for name in parts if name.endswith(".parquet")],
            "json": [*(name for name in parts if name.endswith(".json")), *later],
        }
        recorded = [-1]
        for kind, files in chosen.items():
            if files:
                paths = [_escaped(f"{log}/{name}") for name in files]
                rows = self._spark.read.format(kind).schema(_TXN).load(paths)
                recorded += [row[0] for row in rows.where(f"txn.appId = '{query_id}'").select("txn.version").collect()]
        return max(recorded)

    def _exists(self) -> bool:
        from delta.tables import DeltaTable

        return DeltaTable.isDeltaTable(self._spark, self._table)


def _older(progress: QueryProgress, recorded: int) -> Difference | None:
    """Return the difference if the table lacks the newest micro-batches that the checkpoint has committed."""
    if recorded >= progress.committed:
        return None
    has = f"has them up to {recorded}" if recorded >= 0 else "has none of that query"
    return Difference(f"the table {has}", "put the newer table back, or name the table of this checkpoint")


def _append(commit: Commit) -> int | None:
    """The ``batch_of`` of a table that only one program appends to: versions stand for micro-batches."""
    is_append = commit.operation == "WRITE" and commit.parameters.get("mode") == "Append"
    return commit.version if is_append else None


def _starting(indexes: Mapping[str, int]) -> str:
    return f" --starting-offsets '{json.dumps(indexes)}'" if indexes else ""


def _escaped(path: str) -> str:
    """Return a path in which Spark sees no pattern."""
    return re.sub(r"([\\{}\[\]*?])", r"\\\1", path)
