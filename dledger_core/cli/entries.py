"""Selection of the entries that ``dump``, ``get`` and ``tail`` print: seek targets, filters, decoded messages.

All work is done by Arrow, on complete batches. Columns that a filter needs are decoded first and alone; bodies are
decompressed only of entries that passed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import wraps
from typing import Any, Final, Literal

import click
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.cli.formats import MESSAGE_COLUMNS, EntryFormat
from dledger_core.cli.help import option
from dledger_core.client import LogRange, SyncLogClient
from dledger_core.config import parse_duration
from dledger_core.errors import ConfigError
from dledger_core.rocketmq import decode_chunks, decode_messages, select_entries
from dledger_core.rocketmq.message.decode import Selected

INDEX_MAX: Final = (1 << 63) - 1
SEEK_HELP: Final = (
    "an index, -N for the last N, 'first', 'end', @POSITION, a time like 2025-01-31T12:00 (UTC), or -1h for an hour ago"
)
_CHUNK_BYTES: Final = 64 << 20
"""Limit on the decompressed bodies of one chunk; a single body may be larger."""
_TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
_WINDOW_MIN: Final = 64
_WINDOW_MAX: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class SeekTarget:
    """A point in a log.

    Attributes:
        kind: how the point is given.
        number: the index, the number of entries before the end, or the position; otherwise 0.
        time: with a zone, for ``time``.
    """

    kind: Literal["index", "last", "first", "end", "position", "time"]
    number: int = 0
    time: datetime | None = None

    def __str__(self) -> str:
        sign = {"position": "@", "last": "-"}.get(self.kind, "")
        return self.time.isoformat() if self.time else f"{sign}{self.number}"


class SeekType(click.ParamType[Any]):
    """Parse a seek target."""

    name = "TARGET"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See ``click.ParamType``."""
        if isinstance(value, SeekTarget):
            return value
        found = self._parse(str(value))
        if found is None:
            expected = f"an index up to {INDEX_MAX}, -N, 'first', 'end', @POSITION, a time, or a duration like -1h"
            self.fail(f"{value!r} is not {expected}", param, ctx)
        return found

    def _parse(self, text: str) -> SeekTarget | None:
        if text in ("first", "end"):
            return SeekTarget("first" if text == "first" else "end")
        number = re.fullmatch(r"([-@]?)([0-9]{1,19})", text)
        if number is not None and int(number[2]) <= INDEX_MAX:
            if number[1] == "@":
                return SeekTarget("position", int(number[2]))
            return SeekTarget("last" if number[1] else "index", int(number[2]))
        if text.lstrip("-@").isdigit():
            return None  # do not read a long number as a time without separators
        if text.startswith("-"):
            try:
                return SeekTarget("time", 0, datetime.now(UTC) - timedelta(seconds=parse_duration(text[1:])))
            except ConfigError:
                return None
        try:
            time = datetime.fromisoformat(text)
        except ValueError:
            return None
        return SeekTarget("time", 0, time if time.tzinfo else time.replace(tzinfo=UTC))


class EntrySeekType(click.ParamType[Any]):
    """Parse the target of one entry: its index, or ``@POSITION``."""

    name = "INDEX"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See ``click.ParamType``."""
        if isinstance(value, SeekTarget):
            return value
        text = str(value)
        if text.startswith("@"):
            return SeekType().convert(value, param, ctx)
        if text in ("first", "last"):
            return SeekTarget("first") if text == "first" else SeekTarget("last", 1)
        number = re.fullmatch("(-?)([0-9]{1,19})", text)
        if number is None or int(number[2]) > INDEX_MAX or text in ("-0", "-"):
            self.fail(f"{value!r} is not an index up to {INDEX_MAX}, 'first', 'last', -N or @POSITION", param, ctx)
        return SeekTarget("last" if number[1] else "index", int(number[2]))


@dataclass(frozen=True, kw_only=True)
class Filters:
    """Conditions on entries; an empty one is met by every entry.

    Attributes:
        since: earliest time; the append time, or the message's store time if that is unknown.
        until: end of the time range (exclusive).
        topics: messages of one of these topics.
        queues: messages of one of these queues.
        tags: messages with one of these tags.
        keys: messages with one of these keys or unique keys.
        msg_ids: messages with one of these message ids.
        grep: entries whose body, decompressed if it is a message, matches this regular expression (RE2).
    """

    since: datetime | None = None
    until: datetime | None = None
    topics: tuple[str, ...] = ()
    queues: tuple[int, ...] = ()
    tags: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    msg_ids: tuple[str, ...] = ()
    grep: str | None = None

    @property
    def of_messages(self) -> bool:
        """Whether only messages can pass."""
        return bool(self.topics or self.queues or self.tags or self.keys or self.msg_ids)

    @property
    def any(self) -> bool:
        """Whether an entry may fail."""
        return self.of_messages or self.grep is not None or self.since is not None or self.until is not None

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the entries that pass."""
        return self.select(batch).entries

    def select(self, batch: pa.RecordBatch) -> Selected:
        """Return the entries that pass, and which of their messages do: an inner batch has several."""
        timed = self.since is not None or self.until is not None
        wanted = [name for name, used in self._columns(timed and batch.column("timestamp").null_count > 0) if used]
        if not self.any or not batch.num_rows:
            return Selected(batch)
        if not wanted:
            return Selected(batch.filter(self._passes(batch, None)))  # drops null too
        return select_entries(batch, wanted, self._passes, opened_bytes_max=_CHUNK_BYTES)

    @property
    def columns(self) -> list[str] | None:
        """The columns of a read that ``indexes`` needs; None if it needs bodies."""
        if self.grep is not None:
            return None
        timed = self.since is not None or self.until is not None
        of_messages = [name for name, used in self._columns(timed) if used]
        return ["index", *(["timestamp"] if timed else []), *of_messages]

    def indexes(self, rows: pa.RecordBatch) -> npt.NDArray[np.int64]:
        """Return the indexes of the entries that pass, ascending, from rows with ``columns``."""
        passing = rows.filter(self._passes(rows, rows)) if self.any else rows
        return np.unique(np.asarray(passing.column("index")))

    def _passes(self, batch: pa.RecordBatch, found: pa.RecordBatch | None) -> Any:
        masks = list(self._masks(batch, found))
        keep = masks[0]
        for mask in masks[1:]:
            keep = pc.and_kleene(keep, mask)
        return keep

    def _columns(self, unknown_times: bool) -> list[tuple[str, bool]]:
        return [
            ("store_timestamp", unknown_times),
            ("topic", bool(self.topics)),
            ("queue_id", bool(self.queues)),
            ("tags", bool(self.tags)),
            ("keys", bool(self.keys)),
            ("properties", bool(self.keys)),
            ("msg_id", bool(self.msg_ids)),
            ("body", self.grep is not None),
        ]

    def _masks(self, batch: pa.RecordBatch, found: pa.RecordBatch | None) -> Iterator[Any]:
        if self.since is not None or self.until is not None:
            times = _times(batch, found)
            if self.since is not None:
                yield pc.greater_equal(times, pa.scalar(self.since, _TIMESTAMP))
            if self.until is not None:
                yield pc.less(times, pa.scalar(self.until, _TIMESTAMP))
        if found is None:
            return
        if self.topics:
            yield pc.is_in(found.column("topic"), pa.array(self.topics, pa.string()))
        if self.queues:
            yield pc.is_in(found.column("queue_id"), pa.array(self.queues, pa.int32()))
        if self.tags:
            yield pc.is_in(found.column("tags"), pa.array(self.tags, pa.string()))
        if self.keys:
            any_key = "|".join(re.escape(key) for key in self.keys)
            among = pc.match_substring_regex(found.column("keys"), rf"(?:^|\s)(?:{any_key})(?:\s|$)")
            unique = pc.map_lookup(found.column("properties"), pa.scalar("UNIQ_KEY"), "first")
            yield pc.or_(pc.fill_null(among, False), pc.is_in(unique, pa.array(self.keys, pa.string())))
        if self.msg_ids:
            wanted = pa.array([each.upper() for each in self.msg_ids], pa.string())
            yield pc.is_in(pc.utf8_upper(found.column("msg_id")), wanted)
        if self.grep is not None:
            yield pc.match_substring_regex(pc.coalesce(found.column("body"), batch.column("body")), self.grep)


_EVERY_ENTRY: Final = Filters()


def _times(batch: pa.RecordBatch, found: pa.RecordBatch | None) -> Any:
    """Return the append times of entries; where one is unknown, the message's store time."""
    times = batch.column("timestamp")
    if found is None or "store_timestamp" not in found.schema.names:
        return times
    return pc.coalesce(times, found.column("store_timestamp"))


def _check_regex(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    try:
        pc.match_substring_regex(pa.array([""]), value or "")
    except pa.ArrowInvalid as error:
        raise click.BadParameter(str(error)) from None
    return value


_SEVERAL: Final[dict[str, Any]] = {"multiple": True}
_CONDITIONS: Final[tuple[tuple[str, str, str, dict[str, Any]], ...]] = (
    ("--grep", "REGEX", "Entries whose body matches this regular expression (RE2).", {"callback": _check_regex}),
    ("--msg-id", "ID", "The message with this message id; repeat the option for several.", _SEVERAL),
    ("--key", "KEY", "Messages with this key or unique key; repeat the option for several.", _SEVERAL),
    ("--tag", "TAG", "Messages with this tag; repeat the option or write 'a || b'; '*' for all.", _SEVERAL),
    (
        *("--queue", "NUMBER", "Messages of this queue; repeat the option for several."),
        _SEVERAL | {"type": click.IntRange(0, (1 << 31) - 1)},
    ),
    ("--topic", "TOPIC", "Messages of this topic; repeat the option for several.", _SEVERAL),
)
"""Options with conditions, last one first: name, metavar, help, and what else ``option`` gets."""


def filter_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add options that select entries, passed on as ``filters`` and ``count``."""
    counted = option(
        "--count",
        type=click.IntRange(1),
        metavar="NUMBER",
        section="Selection",
        help="Stop after this many entries.",
    )
    return condition_options(counted(command))


def condition_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add options with conditions on entries, passed on as ``filters``."""

    @wraps(command)
    def filtered(
        *,
        topic: tuple[str, ...],
        queue: tuple[int, ...],
        tag: tuple[str, ...],
        key: tuple[str, ...],
        msg_id: tuple[str, ...],
        grep: str | None,
        **others: Any,
    ) -> Any:
        # A tag may contain the separator itself, so the complete text counts too.
        tags = tuple(part.strip() for text in tag for part in (text, *text.split("||")))
        filters = Filters(
            topics=topic,
            queues=queue,
            tags=() if "*" in tags else tags,  # as in a subscription of RocketMQ
            keys=key,
            msg_ids=msg_id,
            grep=grep,
        )
        return command(filters=filters, **others)

    for name, metavar, described, kind in _CONDITIONS:
        filtered = option(name, metavar=metavar, section="Selection", help=described, **kind)(filtered)
    return filtered


class EntryView:
    """The entries to print of a stream of entries, with the columns of their messages.

    A table shows messages, and so does a format where only messages are printed. JSON has the columns of messages with
    every filter and without one; their bodies stay as they are stored, unless only messages are printed.

    Args:
        output: the format.
        decode: value of ``--decode``.
        filters: conditions on the entries.
        in_commitlog: a classic CommitLog is printed.
        limit: maximum number of entries; None = all.
        broker_end: entries from this index on are messages of a native log, which has no queue offsets; None = a broker
            wrote all of them.

    Attributes:
        printed: number of entries so far.
    """

    def __init__(
        self,
        output: EntryFormat,
        decode: str | None,
        filters: Filters,
        *,
        in_commitlog: bool = False,
        limit: int | None = None,
        broker_end: int | None = None,
    ) -> None:
        only_messages = filters.of_messages or in_commitlog
        by_default = output.name == "table" or (only_messages and output.name != "hex")
        decoded = by_default if decode is None else decode == "message"
        self._stored = output.name == "json" and decode is None and not decoded
        self._columns: tuple[str, ...] = ("topic",) if decoded else ()
        if output.name in ("table", "json") and (decoded or self._stored):
            self._columns = MESSAGE_COLUMNS
        self._filters = filters
        self._left = limit
        self._broker_end = broker_end
        self.printed = 0

    @property
    def full(self) -> bool:
        """Whether the limit is reached."""
        return self._left == 0

    def of(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield the entries of a batch to print, in chunks that fit into memory."""
        selected = self._filters.select(batch)
        shown = selected.entries
        if self._left is not None:
            shown = shown.slice(0, self._left)
            self._left -= shown.num_rows
        self.printed += shown.num_rows
        if not shown.num_rows:
            return
        if not self._columns:
            yield shown
        elif self._stored:
            yield self._joined(shown, decode_messages(shown.column("body"), self._columns))
        else:
            yield from selected.only(self._decoded(shown))

    def _decoded(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        names = list(dict.fromkeys([*self._columns, "body", "error"]))
        for chunk, found in decode_chunks(batch, names, opened_bytes_max=_CHUNK_BYTES):
            yield self._joined(chunk, found)

    def _joined(self, chunk: pa.RecordBatch, found: pa.RecordBatch) -> pa.RecordBatch:
        """Join the columns of entries and of their messages; an entry that is not a message keeps its body."""
        columns = {name: chunk.column(name) for name in chunk.schema.names}
        columns |= {name: found.column(name) for name in self._columns}
        if not self._stored:
            # A message whose body is null is damaged, or could not be decompressed.
            without = pc.match_substring_regex(found.column("error"), "^its body (cannot|does not)")
            columns["body"] = pc.if_else(
                pc.fill_null(without, False), None, pc.coalesce(found.column("body"), chunk["body"])
            )
            columns["error"] = found.column("error")
        if "queue_offset" in columns and self._broker_end is not None:
            given = pc.fill_null(pc.less(chunk.column("index"), self._broker_end), True)  # a CommitLog has no index
            columns["queue_offset"] = pc.if_else(given, columns["queue_offset"], None)
        return pa.RecordBatch.from_pydict(columns)


def near(indexes: npt.NDArray[np.int64], gap: int) -> list[tuple[int, int]]:
    """Return ranges [start, end) that contain ascending indexes; those at most ``gap`` apart share one."""
    if not len(indexes):
        return []
    breaks = np.flatnonzero(np.diff(indexes) > gap)
    firsts, lasts = indexes[np.append(0, breaks + 1)], indexes[np.append(breaks, len(indexes) - 1)]
    return list(zip(firsts.tolist(), (lasts + 1).tolist(), strict=True))


def first_visible(client: SyncLogClient, bounds: LogRange) -> int:
    """Return the index of the first visible entry; the first index of the log if there is none."""
    found = next(client.tail(bounds.first_index, bounds.end, columns=["index"]), None)
    return bounds.first_index if found is None else int(found.column("index")[0].as_py())


def index_of_last(client: SyncLogClient, indexes: tuple[int, int], count: int, filters: Filters = _EVERY_ENTRY) -> int:
    """Return the index in a range from which on ``count`` visible entries pass the filters; its start if fewer do.

    Control entries take indexes too, so the entries are read backwards, in windows, until enough of them passed.
    """
    first, start = indexes
    missing, window, columns = count, min(max(count, _WINDOW_MIN), _WINDOW_MAX), filters.columns
    while start > first:
        stop, start = start, max(first, start - window)
        if columns is None:
            parts = [np.asarray(filters.apply(part).column("index")) for part in client.tail(start, stop)]
        else:
            parts = [filters.indexes(part) for part in client.tail(start, stop, columns=columns)]
        found = [index for part in parts for index in part.tolist()]
        if len(found) >= missing:
            return int(found[-missing])
        missing, window = missing - len(found), min(2 * window, _WINDOW_MAX)
    return first
