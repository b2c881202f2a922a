"""A sample of a log in memory: entries as a table, with search, SQL and time ranges.

The source is closed once the sample is read, so a notebook that stays open keeps no connection, file or process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.cli import preview
from dledger_core.record import MAGIC_DATA
from dledger_core.rocketmq import Damaged, Deleted, decode_messages, expanded_messages, rows_of_messages, sample_ranges

from .facts import Facts, size_text
from .note import Note
from .session import spark_of
from .sources import Source, open_source
from .table import Table, readable

__all__ = ["Log", "open_log"]

LIMIT: Final = 20_000
LIMIT_BYTES: Final = 64 << 20
_BODY_WIDTH: Final = 80
_NO_TOPIC: Final = "(no RocketMQ message)"
_MESSAGE: Final = ("topic", "queue_id", "queue_offset", "tags", "keys", "msg_id", "born_timestamp", "store_timestamp")
_TIME: Final = pa.timestamp("us", tz="UTC")
_SHOWN: Final = ("index", "position", "time", "topic", "queue_id", "tags", "keys", "body", "error")


@dataclass(frozen=True)
class Log:
    """A sample of a log.

    Attributes:
        name: the directory, or the group.
        kind: in words.
        first_index: of the log, or of the range that was asked for.
        end: end (exclusive).
        nbytes: size of the log's files.
        entries: number of indexes, or None for a CommitLog of which only a part was read.
        table: the entries that were read, in order: index, term, position, time (of the append, or of the message's
            storing), body, and the fields of RocketMQ messages. Control entries are left out.
        complete: whether every entry was read.
        damage: a sentence for each problem.
        nodes: of a group, a row per node.
        narrowed: how the sample was narrowed, in words.
    """

    name: str
    kind: str
    first_index: int
    end: int
    nbytes: int
    entries: int | None
    table: pa.Table
    complete: bool
    damage: tuple[str, ...] = ()
    nodes: pd.DataFrame = field(default_factory=pd.DataFrame)
    narrowed: str = ""

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @property
    def time_column(self) -> str:
        """The time of plots and ranges: ``born_timestamp`` if there are messages, else ``time``."""
        born = self.table["born_timestamp"]
        return "born_timestamp" if born.null_count < len(born) else "time"

    def facts(self) -> Facts:
        """Return the log and the sample in words; a notebook shows them for the log too."""
        facts = {"log": self.name, "kind": self.kind, "size": size_text(self.nbytes)}
        if self.end > self.first_index:
            facts["indexes"] = f"{self.first_index:,} to {self.end - 1:,}"
        facts["read"] = self._read_text()
        for name, column in (("time", "time"), ("born", "born_timestamp")):
            times = pc.min_max(self.table[column])
            if times["min"].is_valid:
                since, until = (pd.Timestamp(times[edge].as_py()) for edge in ("min", "max"))
                facts[name] = f"{since:%Y-%m-%d %H:%M:%S} to {until:%Y-%m-%d %H:%M:%S} UTC"
        if self.narrowed:
            facts["only"] = self.narrowed
        return Facts(facts, self.damage)

    def _read_text(self) -> str:
        count = f"{len(self):,} {'entry' if len(self) == 1 else 'entries'}"
        if not len(self) and not self.narrowed and self.complete:
            return "the log is empty"
        return f"all, {count}" if self.complete else f"a sample of {count}"

    def __repr__(self) -> str:
        return repr(self.facts())

    def _repr_html_(self) -> str:
        return self.facts()._repr_html_()

    def nothing(self) -> Note:
        """Return the reason why there is no entry to show."""
        if self.narrowed:
            return Note(f"No entry of the sample is {self.narrowed}.")
        return Note("The log is empty." if self.complete and not self.damage else "No entry could be read.")

    def nodes_table(self) -> Table | Note:
        """Return a column per node of the group, as the node describes itself."""
        if not len(self.nodes):
            return Note("The log was read from a directory, so there are no nodes to list.")
        return Table(readable(self.nodes).set_index("node_id").T.rename_axis(columns=None))

    def contents(self) -> Table | Note:
        """Return a row per topic, plain bodies last: entries, bytes of bodies, queues, first and last time."""
        if not len(self):
            return self.nothing()
        columns = {name: self.table[name] for name in ("topic", "queue_id", "time")}
        table = pa.table(columns | {"bytes": pc.binary_length(self.table["body"])})
        grouped = table.group_by("topic").aggregate(
            [("bytes", "count"), ("bytes", "sum"), ("queue_id", "count_distinct"), ("time", "min"), ("time", "max")]
        )
        names = {"topic": grouped["topic"], "entries": grouped["bytes_count"], "bytes": grouped["bytes_sum"]}
        names |= {"queues": grouped["queue_id_count_distinct"]}
        names |= {"first": grouped["time_min"], "last": grouped["time_max"]}
        found = (
            pa.table(names).to_pandas().sort_values(["topic"]).sort_values("entries", ascending=False, kind="stable")
        )
        plain = found["topic"].isna()
        found = pd.concat([found[~plain], found[plain]])
        found["topic"] = found["topic"].fillna(_NO_TOPIC)
        return readable(found.reset_index(drop=True))

    def head(self, count: int = 20, *, skip: int = 0) -> Table | Note:
        """Return the first entries of the sample, after ``skip`` others, with bodies shortened."""
        return _readable(self.table.slice(skip, count)) if len(self) else self.nothing()

    def tail(self, count: int = 20) -> Table | Note:
        """Return the last entries of the sample, with bodies shortened."""
        return self.head(count, skip=max(0, len(self) - count))

    def at(self, index: int, count: int = 20) -> Table | Note:
        """Return entries of the sample from an index (of a CommitLog: a position) on, with bodies shortened."""
        by = "index" if self.table["index"].null_count < len(self) else "position"
        found = self.table.filter(pc.fill_null(pc.greater_equal(self.table[by], index), fill_value=False))
        if not found.num_rows:
            return (
                self.nothing()
                if not len(self)
                else Note(f"The last entry of the sample has {by} {pc.max(self.table[by])}.")
            )
        return _readable(found.slice(0, count))

    def search(
        self,
        text: str = "",
        *,
        topic: str | None = None,
        tag: str | None = None,
        key: str | None = None,
        count: int = 20,
    ) -> Table | Note:
        """Return the first entries of the sample that match all conditions.

        Args:
            text: part of the body, of the keys, of the tags or of the topic, in any case of letters.
            topic: the topic.
            tag: the tag.
            key: one of the keys, which spaces separate.
            count: number of rows.
        """
        keep = pa.array([True] * len(self), pa.bool_())
        for name, value in (("topic", topic), ("tags", tag)):
            if value is not None:
                keep = pc.and_(keep, pc.fill_null(pc.equal(self.table[name], value), fill_value=False))
        if key is not None:
            spaced = pc.binary_join_element_wise("", self.table["keys"], "", " ")
            keep = pc.and_(keep, pc.fill_null(pc.match_substring(spaced, f" {key} "), fill_value=False))
        if text:
            keep = pc.and_(keep, self._contains(text))
        found = self.table.filter(keep)
        if not found.num_rows:
            return Note("No entry of the sample matches.") if len(self) else self.nothing()
        return _readable(found.slice(0, count))

    def _contains(self, text: str) -> Any:
        found = pc.match_substring(self.table["body"], text.encode(), ignore_case=True)
        for name in ("keys", "tags", "topic"):
            found = pc.or_(
                found, pc.fill_null(pc.match_substring(self.table[name], text, ignore_case=True), fill_value=False)
            )
        return found

    def between(self, since: Any, until: Any) -> Log:
        """Return the entries of the sample with a ``time_column`` in [since, until]; UTC unless a zone is given."""
        low, high = (_utc(moment) for moment in (since, until))
        times = self.table[self.time_column]
        keep = pc.and_(
            pc.greater_equal(times, pa.scalar(low.to_pydatetime(), _TIME)),
            pc.less_equal(times, pa.scalar(high.to_pydatetime(), _TIME)),
        )
        text = f"from {low:%Y-%m-%d %H:%M:%S} to {high:%Y-%m-%d %H:%M:%S} UTC"
        return replace(self, table=self.table.filter(keep), complete=False, narrowed=text)

    def sql(self, query: str) -> Table:
        """Run a Spark SQL query over the sample, which is the view ``log``, and return its rows.

        Bodies that are text are in the column ``text``.
        """
        spark = spark_of("notebook")
        spark.createDataFrame(self._for_sql()).createOrReplaceTempView("log")
        return Table(spark.sql(query).toArrow().to_pandas())

    def _for_sql(self) -> pa.Table:
        text = pa.array(map(_text, self.table["body"].to_pylist()), pa.string())
        return self.table.append_column("text", text).combine_chunks()


def open_log(
    source: str | Path | None = None,
    group: str | None = None,
    *,
    limit: int = LIMIT,
    limit_bytes: int = LIMIT_BYTES,
    start: int | None = None,
    end: int | None = None,
) -> Log:
    """Read a log, or a sample of a large one, and close it again; print its size before.

    Args:
        source: a directory with a log, or the peers of a group. None = ``DLEDGER_SOURCE`` or ``DLEDGER_PEERS``; without
            them three nodes with flights.
        group: the group of peers. None = ``DLEDGER_GROUP``, or ``default``.
        limit: number of entries of the sample. It is read in up to 32 ranges that are spread over the log.
        limit_bytes: about the bytes of the sample.
        start: the first index to read, of a classic CommitLog alone the position; None = of the log.
        end: end (exclusive); None = of the log.

    Raises:
        DLedgerError: there is no log, or it cannot be read.
    """
    with open_source(source, group) as opened:
        asked = start is not None or end is not None
        positions = [] if asked else opened.positions
        if asked and opened.by_position:
            positions, start, end = opened.positions_between(start, end), None, None
        first = max(opened.first_index, opened.first_index if start is None else start)
        stop = max(first, min(opened.end, opened.end if end is None else end))
        ranges = sample_ranges(first, stop, limit // 2 if positions and stop > first else limit)
        print(_announcement(opened, first, stop, ranges))
        reading = _Reading(limit_bytes)
        classic = reading.read([opened.read_positions(*each) for each in positions])
        table = reading.read([opened.read(*each) for each in ranges])
        if classic.num_rows > limit:
            reading.complete = False
            classic = pa.concat_tables([classic.slice(a, b - a) for a, b in sample_ranges(0, classic.num_rows, limit)])
        everything = _is_everything(opened, first, stop, ranges, positions)
        return Log(
            opened.name,
            opened.kind,
            first,
            stop,
            opened.nbytes,
            None if positions else stop - first,
            pa.concat_tables([classic, table]),
            everything and reading.complete and not (asked and opened.by_position),
            tuple(dict.fromkeys([*reading.damage, *opened.problems()])),
            opened.nodes,
        )


def _is_everything(
    opened: Source, first: int, stop: int, ranges: list[tuple[int, int]], positions: list[tuple[int, int]]
) -> bool:
    asked = (first, stop) == (opened.first_index, max(opened.first_index, opened.end))
    return asked and len(ranges) <= 1 and sum(b - a for a, b in ranges) == stop - first and len(positions) <= 1


def _announcement(opened: Source, first: int, stop: int, ranges: list[tuple[int, int]]) -> str:
    line = f"{opened.name}: {size_text(opened.nbytes)}"
    if opened.end > opened.first_index:
        line += f", {opened.end - opened.first_index:,} indexes"
    count = sum(b - a for a, b in ranges)
    if count < stop - first:
        line += f"; reading {count:,} of {stop - first:,}, in {len(ranges)} ranges"
    return line


@dataclass
class _Reading:
    """Entries of several ranges, up to a number of bytes, and the damage between them."""

    limit_bytes: int
    damage: list[str] = field(default_factory=list)
    complete: bool = True

    def read(self, ranges: list[Iterator[pa.RecordBatch | Damaged | Deleted]]) -> pa.Table:
        tables = [_SCHEMA.empty_table()]
        for found in ranges:
            left = self.limit_bytes // len(ranges)
            for each in found:
                if isinstance(each, Damaged | Deleted):
                    self.damage.append(str(each))
                    continue
                if left <= 0:
                    self.complete = False
                    break
                tables.append(_entries(each))
                left -= each.nbytes
        return pa.concat_tables(tables)


def _schema() -> pa.Schema:
    found = decode_messages(pa.array([], pa.binary()), _MESSAGE).schema
    first = [("index", pa.int64()), ("term", pa.int64()), ("position", pa.int64()), ("time", _TIME)]
    return pa.schema([*first, *found, ("body", pa.binary()), ("error", pa.string())])


_SCHEMA: Final = _schema()


def _entries(batch: pa.RecordBatch) -> pa.Table:
    """Return the data entries of a batch; a body that is not a message is kept, and is no error."""
    if "magic" in batch.schema.names:
        batch = batch.filter(pc.fill_null(pc.equal(batch.column("magic"), MAGIC_DATA), fill_value=True))
    found, origin = expanded_messages(batch.column("body"), [*_MESSAGE, "body", "error"])
    batch = rows_of_messages(batch, origin)
    is_message = pc.is_valid(found.column("topic"))
    columns = {name: batch.column(name) for name in ("index", "term", "position")}
    columns |= {name: found.column(name) for name in _MESSAGE}
    columns |= {name: _set_times(found.column(name)) for name in ("born_timestamp", "store_timestamp")}
    columns["time"] = pc.coalesce(batch.column("timestamp").cast(_TIME), columns["store_timestamp"])
    columns["body"] = pc.if_else(is_message, found.column("body"), batch.column("body"))
    columns["error"] = pc.if_else(is_message, found.column("error"), pa.scalar(None, pa.string()))
    return pa.table([columns[name].cast(_SCHEMA.field(name).type) for name in _SCHEMA.names], schema=_SCHEMA)


def _set_times(times: pa.Array) -> pa.Array:
    """Return times without those that a writer did not set: some of RocketMQ's own are born in 1970."""
    return pc.if_else(pc.less_equal(times.cast(pa.int64()), 0), pa.scalar(None, times.type), times)


def _readable(table: pa.Table) -> Table:
    found = table.select(_SHOWN).to_pandas(integer_object_nulls=True).convert_dtypes()
    found["body"] = ["" if body is None else preview(body, _BODY_WIDTH) for body in table["body"].to_pylist()]
    return readable(found)


def _text(body: bytes | None) -> str | None:
    try:
        return None if body is None else body.decode()
    except UnicodeDecodeError:
        return None


def _utc(moment: Any) -> pd.Timestamp:
    found = pd.Timestamp(moment)
    return found.tz_localize("UTC") if found.tzinfo is None else found.tz_convert("UTC")
