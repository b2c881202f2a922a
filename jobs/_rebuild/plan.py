"""What a rebuild reads and writes, fixed before Spark starts, so that every pass over the log sees the same entries."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dledger_core import parse_groups
from dledger_core.errors import ConfigError
from dledger_core.rocketmq import broker_end_of, consume_queue_columns, end_of
from dledger_core.rocketmq.commit_log import CommitLogFile, commit_log_files
from dledger_core.rocketmq.layout import DELAY_LEVELS_MS
from jobs._directories import check_apart, check_checkpoint
from jobs._rebuild.batch_queues import batch_topics
from jobs._rebuild.classic import group_of, preceding, until_now
from jobs._rebuild.compare import LogEnd, check_compared
from jobs._rebuild.files import FOLDER, check_target, whole_units
from jobs._rebuild.incremental import check_trigger
from jobs._rebuild.table import checked_table
from jobs._rebuild.units import ALL_ENTRIES, EntryRules
from jobs._session import check_versions
from jobs._streams import check_resume

if TYPE_CHECKING:
    from dledger_core import LogBounds, StoreReader, Until
    from spark_connector.options import DLedgerOptions

__all__ = ["RebuildPlan", "delay_levels_of", "plan_for"]

_HEADER_BYTES: Final = 48
_DELAY: Final = re.compile(r"([0-9]{1,9})([smhd])")
_UNIT_MS: Final = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


@dataclass(frozen=True, kw_only=True)
class RebuildPlan:
    """What to read and where to write it.

    Attributes:
        source: options of the data source; empty for a classic CommitLog alone.
        ranges: per group the indexes [start, end), fixed before Spark reads.
        table: directory of the Delta table.
        rules: how entries are read.
        classic: files of a classic CommitLog, read before the entries.
        on_duplicate: whose slot it is in files where a broker gave it out twice, ``first`` or ``last``.
        files: directory to write RocketMQ's consumequeue files to.
        file_bytes: size of such a file.
        compared: consumequeue folder to compare with.
        root: directory of the broker's store, where its consumers' offsets are; None if unknown.
        checkpoint: directory of the stream's checkpoint; None for a full rebuild.
        trigger: ``available-now`` or an interval, with a checkpoint.
        cut: what the log recorded of itself and no longer holds.
        batch_topics: topics whose queues are batch consume queues; they are in the table only.
        log_end: where the log ends, for a comparison; None if there is none, and for servers.
    """

    source: dict[str, str]
    ranges: dict[str, tuple[int, int]]
    table: str
    rules: EntryRules = field(default_factory=EntryRules)
    classic: tuple[CommitLogFile, ...] = ()
    on_duplicate: str = "first"
    files: str | None = None
    file_bytes: int = 6_000_000
    compared: str | None = None
    root: str | None = None
    checkpoint: str | None = None
    trigger: str = "available-now"
    cut: tuple[tuple[str, int], ...] = ()
    batch_topics: tuple[str, ...] = ()
    log_end: LogEnd | None = None

    @property
    def foreign(self) -> bool:
        """Whether a broker wrote all of the log, so that every entry ought to be a message."""
        return self.rules.broker_end == ALL_ENTRIES

    def extent(self) -> dict[str, Any]:
        """What is read, for the summary."""
        groups = {group: {"start": start, "end": end} for group, (start, end) in self.ranges.items()}
        only = next(iter(groups.values())) if len(groups) == 1 else {}
        classic = {}
        if self.classic:
            places = {"files": len(self.classic), "start": self.classic[0].position, "end": self.classic[-1].end}
            classic = {"commitlog": places}
        return {**only, "groups": groups, **classic}


def plan_for(options: dict[str, Any]) -> RebuildPlan:
    """Checks the options and opens what they name.

    Raises:
        DLedgerError: they make no sense, or what they name cannot be read or written.
    """
    _check_combination(options)
    check_versions()
    written = {
        "table": checked_table(options["table"]),
        "on_duplicate": options["on_duplicate"],
        "files": check_target(options["files"]) if options["files"] else None,
        "file_bytes": whole_units(options["consume_queue_file_size"]),
        "compared": check_compared(options["compared"]) if options["compared"] else None,
        "checkpoint": options["checkpoint"],
        "trigger": options["trigger"] or "available-now",
    }
    levels = options["delay_levels"]
    rules = EntryRules(
        multi_dispatch=options["multi_dispatch"],
        delay_levels_ms=DELAY_LEVELS_MS if levels is None else delay_levels_of(levels),
    )
    if options["store"]:
        plan = _store_plan(options["store"], options["commitlog"], options["until"], rules, written)
    elif options["peers"]:
        plan = _live_plan(options["peers"], options["groups"] or "default", options["broker_end_index"], rules, written)
    else:
        plan = _classic_plan(options["commitlog"], rules, written)
    beside = options["compared"] and str(Path(str(plan.compared)).parent)
    above = options["store"] or options["commitlog"]
    root = beside or (above and str(Path(above).resolve().parent))
    return replace(plan, root=root, batch_topics=batch_topics(root or None))


def delay_levels_of(text: str) -> tuple[int, ...]:
    """Parses RocketMQ's ``messageDelayLevel``, as ``1s 5s 10s 2h``; returns ms, level 1 first.

    Raises:
        ConfigError: malformed, or no level at all.
    """
    found = [_DELAY.fullmatch(level) for level in text.split()]
    levels = tuple(int(level[1]) * _UNIT_MS[level[2]] for level in found if level)
    if not found or len(levels) < len(found):
        remedy = "give the broker's messageDelayLevel: numbers with s, m, h or d, separated by spaces"
        raise ConfigError(f"wrong delay levels {text!r}", "--delay-levels", remedy)
    return levels


def _check_combination(options: dict[str, Any]) -> None:
    """Refuses options that make no sense together, before anything is opened."""
    peers, store, commitlog = (options[name] for name in ("peers", "store", "commitlog"))
    if bool(peers) == bool(store or commitlog):
        raise ConfigError("give exactly one of --peers and --store", "", "see --help; --commitlog goes with --store")
    if not peers and options["groups"]:
        raise ConfigError("a store holds one group", "--groups", "leave it out")
    if not peers and options["broker_end_index"] is not None:
        raise ConfigError("a store records it itself", "--broker-end-index", "leave it out")
    if options["trigger"] and not options["checkpoint"]:
        raise ConfigError("--trigger needs --checkpoint", "--trigger", "name a checkpoint directory, or leave it out")
    if options["until"] == "committed" and commitlog and not store:
        raise ConfigError("a classic CommitLog records no commit index", "--until", "leave it out")
    _check_groups(options)
    if options["checkpoint"]:
        _check_incremental(options)
    files = f"{options['files']}/{FOLDER}" if options["files"] else None
    written = {"--table": options["table"], "--checkpoint": options["checkpoint"], "--files": files}
    check_apart(written, {"--store": store, "--commitlog": commitlog, "--compare": options["compared"]})


def _check_groups(options: dict[str, Any]) -> None:
    if not options["peers"] or len(parse_groups(options["groups"] or "default", "--groups")) == 1:
        return
    for name, flag in (("files", "--files"), ("compared", "--compare")):
        if options[name]:
            raise ConfigError("consume queue files are of one group", f"--groups, {flag}", "name one group")
    if options["broker_end_index"] is not None:
        raise ConfigError("it is of one group", "--groups, --broker-end-index", "name one group")


def _check_incremental(options: dict[str, Any]) -> None:
    if not options["peers"]:
        raise ConfigError("--checkpoint works with --peers only", "--checkpoint", "a store is rebuilt as a whole")
    check_trigger(options["trigger"] or "available-now")
    check_checkpoint(options["checkpoint"])
    if (options["files"] or options["compared"]) and (options["trigger"] or "available-now") != "available-now":
        raise ConfigError("a stream without end writes no files", "--files, --compare", "use --trigger available-now")


def _live_plan(
    peers: str, groups: str, broker_end: int | None, rules: EntryRules, written: dict[str, Any]
) -> RebuildPlan:
    """The plan for servers: they give what is committed."""
    from spark_connector.options import DLedgerOptions
    from spark_connector.reading.tracking import Tracker

    source = {"peers": peers, "groups": ",".join(parse_groups(groups, "--groups"))}
    options = DLedgerOptions.for_reading(source)
    tracker = Tracker(options)
    bounds = tracker.bounds()
    if written["checkpoint"]:
        check_resume(written["checkpoint"], tracker)
    if broker_end is None:
        for group, view in bounds.items():
            _check_own(options, group, view)
    ranges = {group: (view.first_index, view.end) for group, view in sorted(bounds.items())}
    return RebuildPlan(source=source, ranges=ranges, rules=replace(rules, broker_end=broker_end or 0), **written)


def _check_own(options: DLedgerOptions, group: str, view: LogBounds) -> None:
    """Refuses to assign offsets where a log begins with messages that a broker stored: those have theirs.

    Servers do not tell where a converted log's own part begins. A stored message holds its place in the log.
    """
    from spark_connector.reading.logs import open_log
    from spark_connector.reading.planning import Range

    if view.end <= view.first_index:
        return
    part = Range(group, view.first_index, view.end)
    found = open_log(options, group).chunk(part, part.start).batch.slice(0, 1)
    facts = consume_queue_columns(found.column("body"), ["physical_offset"]).column(0).to_pylist()
    if facts and facts[0] == found.column("position")[0].as_py() + _HEADER_BYTES:
        remedy = "give it: broker_end_index in meta/log.json of any node's store; 0 if no broker gave queue offsets"
        raise ConfigError(f"group {group!r} begins with messages that a broker stored", "--broker-end-index", remedy)


def _classic_plan(commitlog: str, rules: EntryRules, written: dict[str, Any]) -> RebuildPlan:
    """The plan for a classic CommitLog alone."""

    def files_now() -> tuple[CommitLogFile, ...]:
        return until_now(commit_log_files(commitlog))

    files = files_now()
    return RebuildPlan(
        source={},
        ranges={group_of(commitlog): (0, 0)},
        rules=replace(rules, committed_end=-1),
        classic=files,
        log_end=LogEnd(files[-1].end, lambda: files_now()[-1].end),
        **written,
    )


def _store_plan(
    store: str, commitlog: str | None, until: Until, rules: EntryRules, written: dict[str, Any]
) -> RebuildPlan:
    """The plan for a store directory, which a classic CommitLog may precede."""
    from spark_connector.connections import store_for
    from spark_connector.options import DLedgerOptions
    from spark_connector.reading.logs import open_log

    group = open_log(DLedgerOptions.for_reading({"path": store})).group  # names the stores below a wrong directory
    reader = store_for(store)
    if commitlog and reader.meta is not None and reader.meta.first_position == 0:
        raise ConfigError("the store did not begin behind a CommitLog", "--commitlog", "leave it out")
    committed = -1 if reader.commit_index is None else int(reader.commit_index)
    if until == "committed" and reader.commit_index is None:
        remedy = "leave it out: the column committed is null where nothing is known"
        raise ConfigError("the store records no commit index", "--until", remedy)
    first, last, meta = int(reader.first_index), int(reader.last_index), reader.meta
    vouched = reader.vouched_index
    visible = reader.visibility(until)
    end, hidden = int(visible.end), tuple(visible.orphaned(first, visible.end))
    given = broker_end_of(reader, meta)
    broker_end = ALL_ENTRIES if given is None else given
    rules = replace(rules, broker_end=broker_end, committed_end=committed + 1, hidden=hidden)
    classic = preceding(commitlog, store) if commitlog else ()
    recorded = _recorded_end(store) if meta is None else vouched
    damaged = end_of(reader).damaged
    known = max(-1 if recorded is None else int(recorded), last if damaged is None else max(damaged[1] - 1, last + 1))
    cut = ((group, known),) if known > last else ()
    ranges = {group: (max(0, first), max(0, first, end))}
    plan = RebuildPlan(source={"path": store}, ranges=ranges, rules=rules, classic=classic, cut=cut, **written)
    return replace(plan, log_end=_log_end(reader, store, ranges[group][1])) if plan.compared else plan


def _log_end(reader: StoreReader, store: str, end: int) -> LogEnd:
    """Where the entries before index ``end`` end, in a store that may be written to."""
    from spark_connector.connections import store_for

    behind = reader.position_end
    if end <= reader.last_index:
        behind = reader.read(end, end + 1, max_bytes=1).column("position")[0].as_py()
    return LogEnd(behind, lambda: store_for(store).position_end)


def _recorded_end(store: str) -> int | None:
    """The last index that a broker's store recorded, in the file beside its data; None if it recorded none."""
    for name in ("checkpoint", "checkpoint.bak"):
        path = Path(store) / name
        lines = path.read_text(encoding="ascii", errors="replace").splitlines() if path.is_file() else []
        ends = [line.partition("=")[2].strip() for line in lines if line.startswith("endIndex=")]
        if ends and ends[0].lstrip("-").isdigit():
            return int(ends[0])
    return None
