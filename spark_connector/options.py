"""Options of ``format("dledger")``: names, defaults and checks, as one model.

Spark hands over a flat map of strings with lower-cased names. An unknown option is an error that names the nearest
known one: a limit with a typing error in its name must not silently do nothing.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from dledger_core import ConfigError, parse_peers
from spark_connector import option_values as values
from spark_connector.errors import OptionError
from spark_connector.option_values import EARLIEST, LATEST, StartSpec, TimeSpec

__all__ = ["EARLIEST", "LATEST", "DLedgerOptions", "StartSpec", "TimeSpec"]

_SPARKS_OWN: Final = frozenset({"path", "checkpointlocation", "queryname"})
_WRITTEN: Final = frozenset({"peers", "group", "fetch_timeout_ms", "fetch_retry_ms", "append_max_bytes", "protocol"})
"""Options of a write; those of a read are all but two of the fields."""
_WRITTEN_ONLY: Final = frozenset({"group", "append_max_bytes"})
_OF_TABLES: Final = frozenset(
    {"table", "peers", "path", "groups", "groups_pattern", "fetch_timeout_ms", "fetch_retry_ms", "protocol"}
)
"""Options that have a meaning for metadata tables."""
_OF_MESSAGES: Final = ("topics", "tags", "on_decode_error")
_OF_JAVA: Final = ("safety_lag_ms", "commit_probe")
_NOT_OF_JAVA: Final = (
    *("path", "groups_pattern", "discovery_ms", "table", "pin_ms"),
    *("starting_timestamp", "starting_strategy", "ending_timestamp"),
)
"""A Java group has no such thing: no append times, no list of groups, no descriptions."""
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
_OFFSETS: Final = ['earliest, latest, {"default": 1200} or @offsets.json']
_TIME: Final = ["2026-03-01T12:00:00Z"]


class DLedgerOptions(BaseModel):
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
        protocol: dledger, or dledger-java for a Java group.
        safety_lag_ms: of a Java group: read up to the end that was seen so long ago.
        commit_probe: of a Java group: append probe entries and read below them instead.
        columns: those that a user-given schema names; None = all.
    """

    model_config = ConfigDict(
        frozen=True, alias_generator=to_camel, validate_by_name=True, hide_input_in_errors=True, extra="forbid"
    )

    peers: values.Peers = Field("", examples=["n0-127.0.0.1:40911;n1-127.0.0.1:40912;n2-127.0.0.1:40913"])
    path: values.Text = Field("", examples=["dledger-data/default/dledger-n0"])
    groups: values.Groups = Field(("default",), examples=["orders,payments"])
    groups_pattern: values.Pattern | None = Field(None, examples=["orders.*"])
    discovery_ms: values.Duration = Field(10_000, validation_alias="discoveryInterval", examples=["10s"])
    table: Annotated[Literal["groups", "nodes", "terms", "segments", "producers"], values.Lowered] | None = Field(
        None, examples=["groups"]
    )
    group: values.Group | None = Field(None, examples=["orders"])
    starting_offsets: values.OffsetsOption | None = Field(None, examples=_OFFSETS)
    starting_timestamp: values.TimeOption | None = Field(None, examples=_TIME)
    starting_strategy: Annotated[Literal["error", "latest"], values.Lowered] = Field(
        "error", validation_alias="startingOffsetsByTimestampStrategy", examples=["latest"]
    )
    ending_offsets: values.OffsetsOption | None = Field(None, examples=_OFFSETS)
    ending_timestamp: values.TimeOption | None = Field(None, examples=_TIME)
    max_offsets_per_trigger: values.Count | None = Field(None, examples=["1000000"])
    max_bytes_per_trigger: values.Count | None = Field(None, examples=["268435456"])
    min_offsets_per_trigger: values.Count | None = Field(None, examples=["10000"])
    max_trigger_delay: values.Duration = Field(15 * 60_000, examples=["15m"])
    min_partitions: values.Count | None = Field(None, le=100_000, examples=["8"])
    max_records_per_partition: values.Count | None = Field(None, examples=["1000000"])
    fail_on_data_loss: bool = Field(True, examples=["true"])
    pin_ms: values.Delay | None = Field(None, validation_alias="pinFor", examples=["10m"])
    read_from: values.Replica = Field("any", examples=["follower"])
    decode: Annotated[Literal["none", "message"], values.Lowered] = Field("none", examples=["message"])
    topics: values.Topics = Field((), examples=["orders,payments"])
    tags: values.Tags = Field((), examples=["created || paid"])
    on_decode_error: Annotated[Literal["column", "fail"], values.Lowered] = Field("column", examples=["fail"])
    isolation: Annotated[Literal["read_committed", "read_uncommitted"], values.Lowered] = Field(
        "read_committed", examples=["read_committed"]
    )
    fetch_max_bytes: values.Count | None = Field(None, le=16 << 20, examples=["4194304"])
    fetch_timeout_ms: values.Count = Field(10_000, examples=["10000"])
    fetch_retry_ms: values.Count = Field(60_000, examples=["60000"])
    poll_ms: values.Count = Field(500, examples=["500"])
    append_max_bytes: values.Count = Field(2 << 20, le=7 << 20, examples=["2097152"])
    protocol: Annotated[Literal["dledger", "dledger-java"], values.Lowered] = Field("dledger", examples=["dledger"])
    safety_lag_ms: values.Delay = Field(10_000, validation_alias="safetyLag", examples=["10s"])
    commit_probe: bool = Field(False, examples=["true"])
    columns: tuple[str, ...] | None = None

    def read_bytes(self, *, files: bool = False) -> int:
        """Returns the bytes of one read, from servers or from files: these give large reads at less cost."""
        return self.fetch_max_bytes or (8 << 20 if files else 4 << 20)

    @property
    def groups_given(self) -> bool:
        """Whether the option groups was given."""
        return "groups" in self.model_fields_set

    def selects(self, group: str) -> bool:
        """Whether a group of this name belongs to the query."""
        if self.groups_pattern is not None:
            return re.fullmatch(self.groups_pattern, group) is not None
        return group in self.groups or (bool(self.path) and not self.groups_given)

    @classmethod
    def for_reading(cls, options: Mapping[str, str]) -> DLedgerOptions:
        """Checks the options of a read.

        Raises:
            OptionError: unknown option, wrong value, or options that do not go together.
        """
        parsed = cls._parsed(options, frozenset(cls.model_fields) - _WRITTEN_ONLY - {"columns"}, "reading")
        _check_source(parsed)
        _check_messages(parsed)
        _check_java(parsed)
        for name in ("starting_offsets", "starting_timestamp", "ending_offsets", "ending_timestamp"):
            _check_groups(name, getattr(parsed, name), parsed)
        least, most = parsed.min_offsets_per_trigger, parsed.max_offsets_per_trigger
        if least is not None and most is not None and least > most:
            raise OptionError(f"{least} is more than maxOffsetsPerTrigger", "minOffsetsPerTrigger", "lower it")
        _refuse(parsed, parsed.model_fields_set - _OF_TABLES if parsed.table else (), f"with table={parsed.table}")
        return parsed

    @classmethod
    def for_writing(cls, options: Mapping[str, str]) -> DLedgerOptions:
        """Checks the options of a write.

        Raises:
            OptionError: unknown option, wrong value, no ``peers``, or a Java group.
        """
        parsed = cls._parsed(options, _WRITTEN, "writing")
        if not parsed.peers:
            remedy = "name the servers: n0-127.0.0.1:40911;n1-127.0.0.1:40912"
            raise OptionError("the option peers is missing", "peers", remedy)
        if parsed.protocol == "dledger-java":
            raise OptionError(
                "Spark does not write to Java groups, which have no transactions",
                "protocol",
                "append with Client(peers, group, protocol='dledger-java').append, for example in foreachPartition",
            )
        return parsed

    @classmethod
    def _parsed(cls, options: Mapping[str, str], allowed: frozenset[str], doing: str) -> DLedgerOptions:
        names = {_name_of(field).lower(): field for field in cls.model_fields if field != "columns"}
        given = {}
        for name, value in options.items():
            field = names.get(name.lower())
            if field in allowed:
                given[_name_of(field)] = value
            elif name.lower() not in _SPARKS_OWN:
                raise _unknown(name, allowed, doing, known=field is not None)
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise _wrong_value(error, given) from None


def _name_of(field: str) -> str:
    """Returns the option's name of a field."""
    return str(DLedgerOptions.model_fields[field].validation_alias)


def _wrong_value(error: ValidationError, given: Mapping[str, str]) -> OptionError:
    first = error.errors()[0]
    name, cause = str(first["loc"][0]), first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return OptionError(cause.what, name, cause.remedy)
    reason = str(cause or first["msg"]).replace("Input should", "it should", 1)
    [field] = (field for field in DLedgerOptions.model_fields if _name_of(field) == name)
    example = (DLedgerOptions.model_fields[field].examples or [""])[0]
    return OptionError(f"wrong value {given[name]!r}: {reason}", name, f"for example {example}")


def _unknown(name: str, allowed: frozenset[str], doing: str, *, known: bool) -> OptionError:
    by_lower = {_name_of(field).lower(): _name_of(field) for field in allowed}
    kafkas = _KAFKAS_NAMES.get(name.lower(), "")
    nearest = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    if kafkas.lower() in by_lower:
        hint = f"what Kafka calls so is {kafkas!r} here"
    elif nearest:
        hint = f"did you mean {by_lower[nearest[0]]!r}?"
    else:
        hint = f"known options: {', '.join(sorted(by_lower.values()))}"
    return OptionError(f"option {name!r} is not for {doing}" if known else f"unknown option {name!r}", name, hint)


def _refuse(options: DLedgerOptions, fields: Iterable[str], why: str, remedy: str = "leave it out") -> None:
    """Refuses those of the fields that were given."""
    for field in fields:
        if field in options.model_fields_set:
            raise OptionError(f"{why} it does nothing", _name_of(field), remedy)


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


def _check_messages(options: DLedgerOptions) -> None:
    if options.decode != "message":
        _refuse(options, _OF_MESSAGES, "without decode=message", "set decode=message, or leave it out")


def _check_java(options: DLedgerOptions) -> None:
    is_java = options.protocol == "dledger-java"
    remedy = "leave it out" if is_java else "set protocol=dledger-java, or leave it out"
    _refuse(options, _NOT_OF_JAVA if is_java else _OF_JAVA, f"with protocol={options.protocol}", remedy)
    if is_java and options.read_from not in ("any", "leader"):
        raise OptionError("a Java group is read at its leader", "readFrom", "leave it out")


def _check_groups(field: str, spec: StartSpec | TimeSpec | None, options: DLedgerOptions) -> None:
    unknown = [group for group in spec if not options.selects(group)] if isinstance(spec, Mapping) else []
    if unknown and options.groups_pattern is not None:
        reason = f"does not match groupsPattern {options.groups_pattern!r}"
    else:
        reason = f"is not among the groups {', '.join(options.groups)}"
    if unknown:
        raise OptionError(f"group {unknown[0]!r} {reason}", _name_of(field), "correct either option")
