"""Options of ``format("dledger")``: names, defaults and checks, all in one table.

Spark hands over a flat map of strings with lower-cased names. An unknown option is an error that names the
nearest known one: a limit with a typing error in its name must not silently do nothing.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from dledger_core.config import parse_peers
from dledger_core.errors import ConfigError
from spark_connector import option_values as values
from spark_connector.errors import OptionError
from spark_connector.option_values import EARLIEST, LATEST, StartSpec, TimeSpec
from spark_connector.times import parse_duration

__all__ = ["EARLIEST", "LATEST", "DLedgerOptions", "StartSpec", "TimeSpec"]

_SPARKS_OWN = frozenset({"path", "checkpointlocation", "queryname"})
_FETCH_BYTES_MAX: Final = 16 << 20
_OF_TABLES: Final = frozenset(
    {"table", "peers", "path", "groups", "groupspattern", "fetchtimeoutms", "fetchretryms", "token", "protocol"}
)
"""Options that have a meaning for metadata tables."""


class _Option(NamedTuple):
    """One option.

    Attributes:
        name: its public name.
        attribute: what it sets.
        parse: its parser.
        use: ``r`` for reading, ``w`` for writing, ``rw`` for both.
        example: a right value, for error texts.
    """

    name: str
    attribute: str
    parse: Callable[[str], Any]
    use: str
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DLedgerOptions:
    """Checked options; made by ``for_reading`` and ``for_writing``, then passed around and pickled.

    Attributes:
        peers: the servers, ``n0-host:port;n1-host:port``; empty when a store is read.
        path: a node's store directory, read without servers; empty when servers are read.
        groups: the logs to read.
        groups_pattern: instead: every log whose whole name this regular expression matches, new ones too.
        discovery_ms: how often a stream looks for new ones.
        table: read what is known of the logs, not their entries: groups, nodes, terms, segments or producers.
        group: the log to write to; None = the column ``group``, else ``default``.
        starting_offsets: where a new query begins; None = earliest for a batch, latest for a stream.
        starting_timestamp: a new query begins at the first entry appended then or later; wins over
            ``starting_offsets``.
        starting_strategy: where there is no such entry: error, or latest.
        ending_offsets: where a batch read ends, and what a stream never passes.
        ending_timestamp: the same, before the first entry appended then or later; wins over ``ending_offsets``.
        max_offsets_per_trigger: at most this many indexes in a micro-batch, all groups together.
        max_bytes_per_trigger: at most this many bytes of the logs in a micro-batch, all groups together.
        min_offsets_per_trigger: hold a micro-batch back until there are so many indexes.
        max_trigger_delay: milliseconds after which it is not held back any longer.
        min_partitions: plan at least this many partitions where there are that many entries.
        max_records_per_partition: plan no partition of more entries.
        fail_on_data_loss: fail the query on a loss, or log and count it.
        pin_ms: how long what is planned is kept out of retention; None = 10 minutes for a stream, 0 for a batch.
        read_from: which replica: any, leader, follower or node:ID.
        decode: none, or message for RocketMQ's columns.
        topics: with ``decode``: only messages of these topics; empty = all.
        tags: with ``decode``: only messages with one of these tags; empty = all.
        on_decode_error: a body that is no message is a row with the column ``error`` set, or fails the query.
        isolation: read_committed leaves out losing and open transactions.
        fetch_max_bytes: bytes of one read, and so of one Arrow batch; None = 4 MiB from servers, 8 MiB from files.
        fetch_timeout_ms: how long one request may take.
        fetch_retry_ms: how long a failing read or append is tried again, on this and other replicas.
        poll_ms: how long an idle stream waits at the server for new entries.
        append_max_bytes: bytes of bodies in one append of the sink.
        token: credential for the servers.
        protocol: dledger, or dledger-java for a Java group.
        safety_lag_ms: of a Java group: read up to the end that was seen so long ago.
        commit_probe: of a Java group: append probe entries and read below them instead.
        groups_given: whether groups were named.
        columns: those that a user-given schema names; None = all.
    """

    peers: str = ""
    path: str = ""
    groups: tuple[str, ...] = ("default",)
    groups_pattern: str | None = None
    discovery_ms: int = 10_000
    table: str | None = None
    group: str | None = None
    starting_offsets: StartSpec | None = None
    starting_timestamp: TimeSpec | None = None
    starting_strategy: str = "error"
    ending_offsets: StartSpec | None = None
    ending_timestamp: TimeSpec | None = None
    max_offsets_per_trigger: int | None = None
    max_bytes_per_trigger: int | None = None
    min_offsets_per_trigger: int | None = None
    max_trigger_delay: int = 15 * 60_000
    min_partitions: int | None = None
    max_records_per_partition: int | None = None
    fail_on_data_loss: bool = True
    pin_ms: int | None = None
    read_from: str = "any"
    decode: str = "none"
    topics: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    on_decode_error: str = "column"
    isolation: Literal["read_committed", "read_uncommitted"] = "read_committed"
    fetch_max_bytes: int | None = None
    fetch_timeout_ms: int = 10_000
    fetch_retry_ms: int = 60_000
    poll_ms: int = 500
    append_max_bytes: int = 2 << 20
    token: str | None = None
    protocol: str = "dledger"
    safety_lag_ms: int = 10_000
    commit_probe: bool = False
    groups_given: bool = False
    columns: tuple[str, ...] | None = None

    def read_bytes(self, *, files: bool = False) -> int:
        """Returns the bytes of one read, from servers or from files: these give large reads at less cost."""
        return self.fetch_max_bytes or (8 << 20 if files else 4 << 20)

    def selects(self, group: str) -> bool:
        """Whether a group of this name belongs to the query."""
        if self.groups_pattern is not None:
            return re.fullmatch(self.groups_pattern, group) is not None
        return group in self.groups or (bool(self.path) and not self.groups_given)

    @classmethod
    def for_reading(cls, options: Mapping[str, str]) -> DLedgerOptions:
        """Parses the options of a read.

        Raises:
            OptionError: unknown option, wrong value, or options that do not go together.
        """
        given = {name.lower() for name in options}
        parsed = cls(**_parse(options, "r"), groups_given="groups" in given)
        _check_source(parsed)
        _check_messages(parsed, given)
        _check_java(parsed, given)
        for name in ("startingOffsets", "startingTimestamp", "endingOffsets", "endingTimestamp"):
            _check_groups(name, getattr(parsed, _ATTRIBUTES[name]), parsed)
        least, most = parsed.min_offsets_per_trigger, parsed.max_offsets_per_trigger
        if least is not None and most is not None and least > most:
            raise OptionError(f"{least} is more than maxOffsetsPerTrigger", "minOffsetsPerTrigger", "lower it")
        if parsed.table is not None:
            _check_table(options, parsed.table)
        return parsed

    @classmethod
    def for_writing(cls, options: Mapping[str, str]) -> DLedgerOptions:
        """Parses the options of a write.

        Raises:
            OptionError: unknown option, wrong value, or no ``peers``.
        """
        parsed = cls(**_parse(options, "w"))
        if not parsed.peers:
            raise OptionError(
                "the option peers is missing", "peers", "name the servers: n0-127.0.0.1:40911;n1-127.0.0.1:40912"
            )
        if parsed.append_max_bytes > 7 << 20:
            raise OptionError(f"{parsed.append_max_bytes} is too large", "appendMaxBytes", "use at most 7 MiB")
        return parsed


_PEERS: Final = "n0-127.0.0.1:40911;n1-127.0.0.1:40912;n2-127.0.0.1:40913"
_OFFSETS: Final = 'earliest, latest, {"default": 1200} or @offsets.json'
_TIME: Final = "2026-03-01T12:00:00Z"

_TABLE: Final = (
    _Option("peers", "peers", values.peers_string, "rw", _PEERS),
    _Option("path", "path", values.text, "r", "dledger-data/default/dledger-n0"),
    _Option("groups", "groups", values.group_names, "r", "orders,payments"),
    _Option("groupsPattern", "groups_pattern", values.pattern, "r", "orders.*"),
    _Option("discoveryInterval", "discovery_ms", parse_duration, "r", "10s"),
    _Option("group", "group", values.group_name, "w", "orders"),
    _Option("table", "table", values.choice("groups", "nodes", "terms", "segments", "producers"), "r", "groups"),
    _Option("startingOffsets", "starting_offsets", values.offsets, "r", _OFFSETS),
    _Option("startingTimestamp", "starting_timestamp", values.times, "r", _TIME),
    _Option("startingOffsetsByTimestampStrategy", "starting_strategy", values.choice("error", "latest"), "r", "latest"),
    _Option("endingOffsets", "ending_offsets", values.offsets, "r", _OFFSETS),
    _Option("endingTimestamp", "ending_timestamp", values.times, "r", _TIME),
    _Option("maxOffsetsPerTrigger", "max_offsets_per_trigger", values.count(), "r", "1000000"),
    _Option("maxBytesPerTrigger", "max_bytes_per_trigger", values.count(), "r", "268435456"),
    _Option("minOffsetsPerTrigger", "min_offsets_per_trigger", values.count(), "r", "10000"),
    _Option("maxTriggerDelay", "max_trigger_delay", parse_duration, "r", "15m"),
    _Option("minPartitions", "min_partitions", values.count(100_000), "r", "8"),
    _Option("maxRecordsPerPartition", "max_records_per_partition", values.count(), "r", "1000000"),
    _Option("failOnDataLoss", "fail_on_data_loss", values.flag, "r", "true"),
    _Option("pinFor", "pin_ms", values.lag, "r", "10m"),
    _Option("readFrom", "read_from", values.replica_choice, "r", "follower"),
    _Option("decode", "decode", values.choice("none", "message"), "r", "message"),
    _Option("topics", "topics", values.message_topics, "r", "orders,payments"),
    _Option("tags", "tags", values.message_tags, "r", "created || paid"),
    _Option("onDecodeError", "on_decode_error", values.choice("column", "fail"), "r", "fail"),
    _Option("isolation", "isolation", values.choice("read_committed", "read_uncommitted"), "r", "read_committed"),
    _Option("fetchMaxBytes", "fetch_max_bytes", values.count(_FETCH_BYTES_MAX), "r", "4194304"),
    _Option("fetchTimeoutMs", "fetch_timeout_ms", values.count(), "rw", "10000"),
    _Option("fetchRetryMs", "fetch_retry_ms", values.count(), "rw", "60000"),
    _Option("pollMs", "poll_ms", values.count(), "r", "500"),
    _Option("appendMaxBytes", "append_max_bytes", values.count(), "w", "2097152"),
    _Option("token", "token", values.text, "rw", "the token"),
    _Option("protocol", "protocol", values.choice("dledger", "dledger-java"), "rw", "dledger"),
    _Option("safetyLag", "safety_lag_ms", values.lag, "r", "10s"),
    _Option("commitProbe", "commit_probe", values.flag, "r", "true"),
)

_KAFKAS_NAMES: Final = {
    "kafka.bootstrap.servers": "peers",
    "assign": "groups",
    "subscribe": "groups",
    "subscribepattern": "groupsPattern",
    "startingoffsetsbytimestamp": "startingTimestamp",
    "endingoffsetsbytimestamp": "endingTimestamp",
    "topic": "group",
}
"""Names that users of Kafka's connector know, and what serves here; ``topics`` is close to ``topic`` and no target."""

_OF_JAVA: Final = ("safetyLag", "commitProbe")
_NOT_OF_JAVA: Final = (
    *("path", "groupsPattern", "discoveryInterval", "table", "pinFor"),
    *("startingTimestamp", "startingOffsetsByTimestampStrategy", "endingTimestamp"),
)
"""A Java group has no such thing: no append times, no list of groups, no descriptions."""

_ATTRIBUTES: Final = {option.name: option.attribute for option in _TABLE}


def _check_source(options: DLedgerOptions) -> None:
    """Checks that servers or a store are named, and which of their logs."""
    if bool(options.peers) == bool(options.path):
        raise OptionError(
            "give exactly one of the options peers and path",
            "peers, path",
            "peers names servers (n0-127.0.0.1:40911;n1-…), path (or load(path)) a node's store directory",
        )
    if options.groups_pattern is not None and options.groups_given:
        raise OptionError("give only one of the options groups and groupsPattern", "groups, groupsPattern", "drop one")
    if options.path and (len(options.groups) > 1 or options.groups_pattern is not None):
        name = "groups" if options.groups_given else "groupsPattern"
        raise OptionError("a store holds one group", name, "name one group or leave the option out")
    if options.peers and options.read_from.startswith("node:"):
        nodes = [str(peer.node_id) for peer in parse_peers(options.peers)]
        if options.read_from.removeprefix("node:") not in nodes:
            remedy = f"use one of {', '.join(f'node:{node}' for node in nodes)}"
            raise OptionError(f"wrong value {options.read_from!r}: peers names no such node", "readFrom", remedy)


def _check_messages(options: DLedgerOptions, given: set[str]) -> None:
    for name in ("topics", "tags", "onDecodeError"):
        if name.lower() in given and options.decode != "message":
            raise OptionError("without decode=message it does nothing", name, "set decode=message, or leave it out")


def _check_java(options: DLedgerOptions, given: set[str]) -> None:
    is_java = options.protocol == "dledger-java"
    for name in _OF_JAVA if not is_java else _NOT_OF_JAVA:
        if name.lower() in given:
            remedy = "leave it out" if is_java else "set protocol=dledger-java, or leave it out"
            raise OptionError(f"with protocol={options.protocol} it does nothing", name, remedy)
    if is_java and options.read_from not in ("any", "leader"):
        raise OptionError("a Java group is read at its leader", "readFrom", "leave it out")


def _check_table(options: Mapping[str, str], table: str) -> None:
    useless = [name for name in options if name.lower() not in _OF_TABLES | _SPARKS_OWN]
    if useless:
        raise OptionError(f"with table={table} it does nothing", useless[0], "leave it out")


def _check_groups(name: str, spec: StartSpec | TimeSpec | None, options: DLedgerOptions) -> None:
    unknown = [group for group in spec if not options.selects(group)] if isinstance(spec, Mapping) else []
    if unknown and options.groups_pattern is not None:
        reason = f"does not match groupsPattern {options.groups_pattern!r}"
    else:
        reason = f"is not among the groups {', '.join(options.groups)}"
    if unknown:
        raise OptionError(f"group {unknown[0]!r} {reason}", name, "correct either option")


def _parse(options: Mapping[str, str], use: str) -> dict[str, Any]:
    table = {option.name.lower(): option for option in _TABLE}
    parsed: dict[str, Any] = {}
    for name, value in options.items():
        option = table.get(name.lower())
        if option is None or use not in option.use:
            if name.lower() not in _SPARKS_OWN:
                raise _unknown(name, use, option is not None)
            continue
        try:
            parsed[option.attribute] = option.parse(value)
        except ConfigError as error:
            raise OptionError(error.what, option.name, error.remedy) from None
        except ValueError as error:
            shown = "" if option.name == "token" else f" {value!r}"
            raise OptionError(f"wrong value{shown}: {error}", option.name, f"for example {option.example}") from None
    return parsed


def _unknown(name: str, use: str, other_use: bool) -> OptionError:
    by_lower = {option.name.lower(): option.name for option in _TABLE if use in option.use}
    known = _KAFKAS_NAMES.get(name.lower(), "")
    nearest = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    if known.lower() in by_lower:
        hint = f"what Kafka calls so is {known!r} here"
    elif nearest:
        hint = f"did you mean {by_lower[nearest[0]]!r}?"
    else:
        hint = f"known options: {', '.join(sorted(by_lower.values()))}"
    doing = "reading" if use == "r" else "writing"
    what = f"option {name!r} is not for {doing}" if other_use else f"unknown option {name!r}"
    return OptionError(what, name, hint)
