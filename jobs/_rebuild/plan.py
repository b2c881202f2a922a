"""The plan of a rebuild: its input and output, checked and fixed before Spark starts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, TypeVar

import pyarrow as pa
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from dledger_core import Client, ConfigError, LogRange, Until, open_store
from dledger_core.archive import FROM_LOG
from dledger_core.config import parse_groups
from dledger_core.rocketmq import (
    DELAY_LEVELS_MS,
    PHYSICAL_OFFSET_DELTA,
    CommitLogFile,
    FileStop,
    KeyFileSize,
    broker_end_of,
    check_continues,
    commit_log_files,
    consume_queue_columns,
    end_of,
    key_file_size,
    queues_in_rocksdb,
)
from spark_connector import local_path

from .._archive.recorded import named_table, of_log, recorded_archive
from .._cli import ArchiveAccess
from .._directories import check_apart, check_checkpoint, check_file, check_table
from .._session import AVAILABLE_NOW, check_resume, parse_trigger
from .broker import Consumers, batch_topics, configured_topics, read_consumers
from .compare import LogEnd, check_compared
from .files import DIRECTORY, INDEX_DIRECTORY, check_target, round_up
from .units import ALL_ENTRIES, EntryRules

if TYPE_CHECKING:
    from dledger_core import StoreReader
    from spark_connector.options import DLedgerOptions

__all__ = ["START_PIN", "RebuildOptions", "RebuildPlan", "check_assignable", "delay_levels_of", "plan_for"]

START_PIN: Final = "dledger-rebuild"
"""Keeps planned entries until Spark has started. One name for all runs: while it lasts, the log's start stays."""
_START_PIN_S: Final = 60.0

_T = TypeVar("_T")
_DELAY: Final = re.compile(r"([0-9]{1,9})([smhd])")
_IN_ROCKSDB: Final = (
    "the broker's consume queues are in RocksDB (storeType=defaultRocksDB), which only --compare reads: the table is "
    "complete without them, and a broker takes the files of --files once it starts with storeType=default"
)
_UNIT_MS: Final = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def delay_levels_of(text: str) -> tuple[int, ...]:
    """Parse RocketMQ's ``messageDelayLevel``, as ``1s 5s 10s 2h``; returns ms, level 1 first.

    Raises:
        ConfigError: malformed, or empty.
    """
    found = [_DELAY.fullmatch(level) for level in text.split()]
    levels = tuple(int(level[1]) * _UNIT_MS[level[2]] for level in found if level)
    if not found or len(levels) < len(found):
        remedy = "use the broker's messageDelayLevel: numbers with s, m, h or d, separated by spaces"
        raise ConfigError(f"wrong --delay-levels {text!r}", "", remedy)
    return levels


def _trigger(text: str) -> str:
    parse_trigger(text)
    return text


class RebuildOptions(ArchiveAccess):
    """The command's options."""

    peers: str | None = None
    groups: Annotated[tuple[str, ...], BeforeValidator(lambda text: parse_groups(text, "--groups"))] | None = None
    store: str | None = None
    commitlog: str | None = None
    table: str
    checkpoint: str | None = None
    trigger: Annotated[str, AfterValidator(_trigger)] | None = None
    files: str | None = None
    consume_queue_file_size: Annotated[int, AfterValidator(round_up)] = Field(6_000_000, ge=20, le=1 << 30)
    compared: str | None = None
    indexes: str | None = None
    broker_conf: str | None = None
    report: str | None = None
    on_duplicate: Literal["first", "last"] = "first"
    until: Until = "end"
    multi_dispatch: bool = True
    delay_levels: Annotated[tuple[int, ...], BeforeValidator(delay_levels_of)] | None = None
    broker_end_index: int | None = Field(None, ge=0)
    verbose: bool = False
    dry_run: bool = False

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if bool(self.peers) == bool(self.store or self.commitlog):
            remedy = "see --help; --commitlog goes with --store"
            raise ConfigError("give exactly one of --peers and --store", "", remedy)
        if not self.peers and self.groups:
            raise ConfigError("--groups has no effect with --store: a store contains one group", "", "leave it out")
        if not self.peers and self.broker_end_index is not None:
            raise ConfigError("--broker-end-index has no effect with --store, which records it", "", "leave it out")
        if not self.peers and self.archive is not None:
            what = "--archive has no effect without --peers: a store or CommitLog is read without its archive"
            raise ConfigError(what, "", "leave it out, or name the nodes with --peers")
        if self.indexes and self.peers:
            remedy = "use --store or --commitlog of a node, or leave it out"
            raise ConfigError("--indexes has no effect with --peers: index files are written from a store", "", remedy)
        if self.broker_conf and not self.indexes:
            raise ConfigError("--broker-conf needs --indexes, whose files have the sizes in it", "", "leave it out")
        if len(self.groups or ()) > 1:
            for value, flag in (
                (self.files, "--files"),
                (self.compared, "--compare"),
                (self.broker_end_index, "--broker-end-index"),
            ):
                if value is not None:
                    raise ConfigError(f"{flag} needs a single group in --groups", "", "name one group")
        return self

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        endless = (self.trigger or AVAILABLE_NOW) != AVAILABLE_NOW
        if self.trigger and not self.checkpoint:
            what, remedy = "--trigger needs --checkpoint", "name a checkpoint directory, or leave it out"
            raise ConfigError(what, "", remedy)
        if self.checkpoint and self.commitlog:
            raise ConfigError(
                "--checkpoint excludes --commitlog: a CommitLog needs a full rebuild", "", "leave one out"
            )
        if endless and not self.peers:
            raise ConfigError("--trigger with an interval needs --peers", "", f"use {AVAILABLE_NOW}")
        if endless and (self.files or self.compared or self.indexes):
            remedy = f"use --trigger {AVAILABLE_NOW}"
            raise ConfigError("--files, --indexes and --compare need a run that ends", "", remedy)
        files = f"{self.files}/{DIRECTORY}" if self.files else None
        indexes = f"{self.indexes}/{INDEX_DIRECTORY}" if self.indexes else None
        written = {"--table": self.table, "--checkpoint": self.checkpoint, "--files": files, "--indexes": indexes}
        read = {"--store": self.store, "--commitlog": self.commitlog, "--compare": self.compared}
        check_apart(written, read | {"--archive": self.archive if self.archive != FROM_LOG else None})
        check_table(self.table)
        if self.checkpoint:
            check_checkpoint(self.checkpoint)
        if self.report is not None:
            if self.compared is None:
                raise ConfigError("--report needs --compare", "", "name the broker's directory, or leave it out")
            check_apart({"--report": self.report}, {"--store": self.store, "--compare": self.compared})
            check_file(self.report, "--report")
        return self


@dataclass(frozen=True, kw_only=True)
class RebuildPlan:
    """The input and output of a rebuild.

    Attributes:
        source: options of the data source; empty for a classic CommitLog alone.
        ranges: per group the indexes [start, end), fixed before Spark reads.
        table: directory of the Delta table.
        rules: for reading entries.
        classic: files of a classic CommitLog, read before the entries.
        on_duplicate: the message in files of a slot that a broker assigned twice, ``first`` or ``last``.
        files: directory to write RocketMQ's consumequeue files to.
        file_bytes: size of such a file.
        compared: consumequeue directory to compare with.
        indexes: directory to write RocketMQ's index files to.
        index_size: size of these files.
        until: end of a read from a store.
        report: path of the HTML page of the comparison; None writes none.
        root: the broker's store directory, with its consumers' offsets; None if unknown.
        checkpoint: directory of the stream's checkpoint; None: the table is replaced.
        trigger: ``available-now`` or an interval, with a checkpoint.
        lost: entries [start, end) that are recorded and missing.
        batch_topics: topics whose queues are batch consume queues; they are in the table only.
        topics: topics that the broker's configuration has; None if it has no readable one.
        consumers: the consumers' offsets in the broker's directory.
        notes: files of the broker that could not be read.
        log_end: end of the log, for a comparison; None otherwise, and for servers.
    """

    source: dict[str, str] = field(repr=False)  # may have credentials of an archive
    ranges: dict[str, tuple[int, int]]
    table: str
    rules: EntryRules = field(default_factory=EntryRules)
    classic: tuple[CommitLogFile, ...] = ()
    on_duplicate: str = "first"
    files: str | None = None
    file_bytes: int = 6_000_000
    compared: str | None = None
    indexes: str | None = None
    index_size: KeyFileSize | None = None
    until: Until = "end"
    report: str | None = None
    root: str | None = None
    checkpoint: str | None = None
    trigger: str = AVAILABLE_NOW
    lost: tuple[int, int] | None = None
    batch_topics: tuple[str, ...] = ()
    log_end: LogEnd | None = None
    topics: frozenset[str] | None = None
    consumers: Consumers = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def foreign(self) -> bool:
        """Whether a broker wrote the complete log, so that every entry should be a message."""
        return self.rules.broker_end == ALL_ENTRIES

    def extent(self) -> dict[str, Any]:
        """Return the input ranges, for the summary."""
        groups = {group: {"start": start, "end": end} for group, (start, end) in self.ranges.items()}
        only = next(iter(groups.values())) if len(groups) == 1 else {}
        classic = {}
        if self.classic:
            extent = {"files": len(self.classic), "start": self.classic[0].position, "end": self.classic[-1].end}
            classic = {"commitlog": extent}
        return {**only, "groups": groups, **classic}


def plan_for(options: RebuildOptions) -> RebuildPlan:
    """Open the logs of the options.

    Raises:
        DLedgerError: a log cannot be read, or a target cannot be written.
    """
    compared = check_compared(options.compared) if options.compared else None
    above = options.store or options.commitlog
    root = str(Path(compared or Path(above or ".").resolve()).parent) if compared or above else None
    notes: list[str] = []
    topics = _read_or_note(lambda: batch_topics(root), tuple[str, ...](), None if options.files else notes)
    if root is not None and compared is None and queues_in_rocksdb(Path(root) / DIRECTORY):
        notes.append(_IN_ROCKSDB)
    plan = RebuildPlan(
        source={},
        ranges={},
        table=str(local_path(options.table) or options.table),
        rules=EntryRules(
            multi_dispatch=options.multi_dispatch, delay_levels_ms=options.delay_levels or DELAY_LEVELS_MS
        ),
        on_duplicate=options.on_duplicate,
        files=check_target(options.files) if options.files else None,
        file_bytes=options.consume_queue_file_size,
        compared=compared,
        indexes=check_target(options.indexes, "--indexes", INDEX_DIRECTORY) if options.indexes else None,
        index_size=_index_size(options, root) if options.indexes else None,
        until=options.until,
        report=options.report,
        root=root,
        checkpoint=options.checkpoint,
        trigger=options.trigger or AVAILABLE_NOW,
        batch_topics=topics,
        topics=_read_or_note(lambda: configured_topics(root), None, []),
        consumers=_read_or_note(lambda: read_consumers(root), {}, notes),
        notes=tuple(notes),
    )
    if options.store:
        return _of_store(plan, options.store, options.commitlog, options.until)
    if options.peers:
        return _of_servers(plan, options, options.peers)
    return _of_commitlog(plan, str(options.commitlog))


def _index_size(options: RebuildOptions, root: str | None) -> KeyFileSize:
    conf = Path(options.broker_conf) if options.broker_conf is not None else None
    return key_file_size(conf, Path(root) if root is not None else None)


def _read_or_note(read: Callable[[], _T], otherwise: _T, notes: list[str] | None) -> _T:
    """Read a file of the broker's configuration; if that fails, note why, or raise without a list of notes."""
    try:
        return read()
    except ConfigError as error:
        if notes is None:  # files of batch queues in the wrong place keep a broker from starting
            raise
        notes.append(str(error))
        return otherwise


def _of_servers(plan: RebuildPlan, options: RebuildOptions, peers: str) -> RebuildPlan:
    """Plan to read the committed entries of servers, and with ``--archive`` those that they have deleted."""
    from spark_connector.options import DLedgerOptions
    from spark_connector.reading.tracking import Tracker

    groups, broker_end = options.groups or ("default",), options.broker_end_index
    source = {"peers": peers, "groups": ",".join(groups), **options.access.of_source, **options.archive_of_source}
    parsed = DLedgerOptions.for_reading(source)
    ranges, notes = {}, list(plan.notes)
    for group in sorted(groups):
        with Client(peers, group, **options.access.of_client) as client:
            bounds, read = client.bounds(), client.read
            if options.archive is not None:
                archive = of_log(recorded_archive(client), group, peers)
                named_table(archive, options.archive, options.archive_storage)
                if archive.ranges[0].start > 0:
                    first = f"the archive of group {group!r} begins at index {archive.ranges[0].start}"
                    notes.append(f"{first}: the queues lack the messages before it")
                bounds, read = _with_archive(parsed, group)
            elif not options.dry_run:
                # Before the bounds are read again: what they name is kept until the stream has its own pin.
                client.pin(START_PIN, bounds.first_index, _START_PIN_S)
                bounds = client.bounds()
            if broker_end is None and bounds.first_index < bounds.end:
                check_assignable(read(bounds.first_index, bounds.end, max_bytes=1).slice(0, 1), group)
        ranges[group] = bounds.first_index, max(bounds.first_index, bounds.end)
    if plan.checkpoint:
        check_resume(plan.checkpoint, Tracker(parsed))
    rules = replace(plan.rules, broker_end=broker_end or 0)
    return replace(plan, source=source, ranges=ranges, rules=rules, notes=tuple(notes))


def _with_archive(options: DLedgerOptions, group: str) -> tuple[LogRange, Callable[..., pa.RecordBatch]]:
    """Return the bounds of a log and its archive, and the function that reads them as one log."""
    from spark_connector.planning import Range
    from spark_connector.reading.opening import open_log

    log = open_log(options, group)

    def read(start: int, end: int, *, max_bytes: int) -> pa.RecordBatch:
        return log.read(Range(group, start, end), start, max_bytes=max_bytes).batch

    return log.bounds(), read


def check_assignable(entry: pa.RecordBatch, group: str) -> None:
    """Reject a log that starts with messages of a broker, which have queue offsets already.

    Servers do not report the start of the native part of a converted log, but a stored message contains its position.

    Args:
        entry: the first entry of the log; empty if there is none.
        group: the log.
    """
    found = consume_queue_columns(entry.column("body"), ["physical_offset"]).column(0).to_pylist()
    if found and found[0] == entry.column("position")[0].as_py() + PHYSICAL_OFFSET_DELTA:
        remedy = "use broker_end_index in meta/log.json of any node's store; 0 if no broker assigned queue offsets"
        raise ConfigError(f"missing --broker-end-index: group {group!r} starts with messages of a broker", "", remedy)


def _of_commitlog(plan: RebuildPlan, commitlog: str) -> RebuildPlan:
    """Plan to read a classic CommitLog alone; its group is the name of the broker's store directory."""

    def files_now() -> tuple[CommitLogFile, ...]:
        """Return the files, the last one up to the present end of its messages: a broker may append to it."""
        *before, last = commit_log_files(commitlog)
        *_, stop = last.scan()
        if isinstance(stop, FileStop) and stop.kind == "end":
            last = replace(last, size=stop.position - last.position)
        return (*before, last)

    files = files_now()
    return replace(
        plan,
        ranges={Path(commitlog).resolve().parent.name: (0, 0)},
        rules=replace(plan.rules, committed_end=-1),
        classic=files,
        log_end=LogEnd(files[-1].end, lambda: files_now()[-1].end),
    )


def _of_store(plan: RebuildPlan, store: str, commitlog: str | None, until: Until) -> RebuildPlan:
    """Plan to read a store directory, which a classic CommitLog may precede."""
    from spark_connector.connections import store_for
    from spark_connector.options import DLedgerOptions
    from spark_connector.reading.opening import open_log

    group = open_log(DLedgerOptions.for_reading({"path": store})).group  # names the stores below a wrong directory
    reader = store_for(store)
    if commitlog and reader.meta is not None and reader.meta.first_position == 0:
        raise ConfigError("the store does not start after a --commitlog", store, "leave the option out")
    first, visible = max(0, int(reader.first_index)), reader.shown(until=until)
    lost = end_of(reader).lost
    end = max(first, min(int(visible.end), lost[0] if lost is not None else int(visible.end)))
    broker_end = broker_end_of(reader, reader.meta)
    if plan.checkpoint and broker_end is None:
        raise ConfigError("--checkpoint: a broker's store needs a full rebuild", "", "leave it out")
    rules = replace(
        plan.rules,
        broker_end=ALL_ENTRIES if broker_end is None else broker_end,
        committed_end=0 if reader.commit_index is None else int(reader.commit_index) + 1,
        hidden=tuple(visible.orphaned(first, end)),
    )
    # The rules name the hidden entries, so the source need not find them again.
    source = {"path": store, "isolation": "read_uncommitted"}
    return replace(
        plan,
        source=source,
        ranges={group: (first, end)},
        rules=rules,
        classic=_preceding(commitlog, reader) if commitlog else (),
        lost=lost,
        log_end=_log_end(reader, store, end) if plan.compared else None,
    )


def _preceding(commitlog: str, store: StoreReader) -> tuple[CommitLogFile, ...]:
    """Return the classic files that a store continues.

    Raises:
        StoreMismatchError: the store does not start at the end of the files.
    """
    files = commit_log_files(commitlog)
    check_continues(files, store)
    return files


def _log_end(reader: StoreReader, store: str, end: int) -> LogEnd:
    """Return the end position of the entries below index ``end``, in a store that may be appended to."""

    def position_end() -> int:
        with open_store(store) as now:
            return int(now.position_end)

    read = int(reader.position_end)
    if end <= reader.last_index:
        read = reader.read(end, end + 1, max_bytes=1).column("position")[0].as_py()
    return LogEnd(read, position_end)
