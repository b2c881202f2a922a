"""Options of ``format("dledger")``: names, defaults and checks, all in one table.

Spark hands over a flat map of strings with lower-cased names. An unknown option is an error that names the
nearest known one: a limit with a typing error in its name must not silently do nothing.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from dledger_core.config import check_group_name, parse_peers
from dledger_core.errors import ConfigError
from spark_connector.errors import OptionError
from spark_connector.times import parse_duration, parse_time

__all__ = ["EARLIEST", "LATEST", "DLedgerOptions", "StartSpec", "TimeSpec"]

EARLIEST: Final = -2
LATEST: Final = -1

StartSpec = Literal["earliest", "latest"] | Mapping[str, int]
"""Where to start or end: everywhere alike, or per group an index, EARLIEST or LATEST."""

TimeSpec = int | Mapping[str, int]
"""Milliseconds since the epoch: for all groups alike, or per group."""

_SPARKS_OWN = frozenset({"path", "checkpointlocation", "queryname"})
_DOCUMENTATION = "see the table of options in the README"


class _Option(NamedTuple):
    """One option: its public name, the attribute it sets, its parser, and whether it is for reading or writing."""

    name: str
    attribute: str
    parse: Callable[[str], Any]
    use: str


def _text(value: str) -> str:
    if not value.strip():
        raise ValueError("it is empty")
    return value.strip()


def _peers(value: str) -> str:
    parse_peers(value)
    return value.strip()


def _group(value: str) -> str:
    return check_group_name(value.strip())


def _groups(value: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(_group(part) for part in value.split(",") if part.strip()))
    if not names:
        raise ValueError("it names no group")
    return names


def _flag(value: str) -> bool:
    text = value.strip().lower()
    if text not in ("true", "false"):
        raise ValueError("it must be true or false")
    return text == "true"


def _count(value: str) -> int:
    if not value.strip().isascii() or not value.strip().isdigit() or not 0 < int(value) < 1 << 63:
        raise ValueError("it must be a whole number above 0")
    return int(value)


def _choice(*known: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        text = value.strip().lower()
        if text not in known:
            raise ValueError(f"it must be one of {', '.join(known)}")
        return text

    return parse


def _read_from(value: str) -> str:
    text = value.strip()
    if text.lower() in ("any", "leader", "follower"):
        return text.lower()
    if text.startswith("node:") and len(text) > len("node:"):
        return text
    raise ValueError("it must be any, leader, follower or node:ID")


def _offsets(value: str) -> StartSpec:
    text = value.strip()
    if text.lower() == "earliest":
        return "earliest"
    if text.lower() == "latest":
        return "latest"
    if text.startswith("@"):
        text = _file(text[1:])
    try:
        parsed = json.loads(text)
    except ValueError:
        raise ValueError('it must be earliest, latest or JSON like {"default": 1200}, or @ and a file of it') from None
    if isinstance(parsed, dict) and isinstance(parsed.get("groups"), dict) and "v" in parsed:
        parsed = {group: entry.get("next") for group, entry in parsed["groups"].items() if isinstance(entry, dict)}
    if not isinstance(parsed, dict) or not parsed:
        raise ValueError('it must be JSON like {"default": 1200}')
    return {_group(group): _index(group, index) for group, index in sorted(parsed.items())}


def _file(path: str) -> str:
    """Returns a file's content; of a file of offsets in Spark's checkpoint its last line, which holds ours."""
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the file: {error}") from None
    return text.splitlines()[-1] if text.startswith("v1\n") else text


def _times(value: str) -> TimeSpec:
    if not value.strip().startswith("{"):
        return parse_time(value)
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict) or not parsed:
        raise ValueError('per group it must be JSON like {"default": "2026-03-01T12:00:00Z"}')
    return {_group(group): parse_time(str(moment)) for group, moment in sorted(parsed.items())}


def _index(group: str, value: object) -> int:
    names = {"earliest": EARLIEST, "latest": LATEST}
    if isinstance(value, str) and value.lower() in names:
        return names[value.lower()]
    if not isinstance(value, int) or isinstance(value, bool) or not EARLIEST <= value < 1 << 63:
        raise ValueError(f"group {group!r} must have an index, -2 (earliest) or -1 (latest)")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class DLedgerOptions:
    """Checked options; made by ``for_reading`` and ``for_writing``, then passed around and pickled.

    Attributes:
        peers: the servers, ``n0-host:port;n1-host:port``; empty when a store is read.
        path: a node's store directory, read without servers; empty when servers are read.
        groups: the logs to read.
        group: the log to write to; None = the column ``group``, else ``default``.
        starting_offsets: where a new query begins; None = earliest for a batch, latest for a stream.
        starting_timestamp: a new query begins at the first entry appended then or later; wins over
            ``starting_offsets``.
        starting_strategy: where there is no such entry: error, or latest.
        ending_offsets: where a batch read ends.
        ending_timestamp: a batch read ends before the first entry appended then or later; wins over
            ``ending_offsets``.
        max_offsets_per_trigger: at most this many indexes in a micro-batch, all groups together.
        max_bytes_per_trigger: at most this many bytes of the logs in a micro-batch, all groups together.
        min_offsets_per_trigger: hold a micro-batch back until there are so many indexes.
        max_trigger_delay: milliseconds after which it is not held back any longer.
        min_partitions: plan at least this many partitions where there are that many entries.
        fail_on_data_loss: fail the query on a loss, or log and count it.
        read_from: which replica: any, leader, follower or node:ID.
        decode: none, or message for RocketMQ's columns.
        isolation: read_committed leaves out losing and open transactions.
        fetch_max_bytes: bytes of one read, and so of one Arrow batch.
        fetch_timeout_ms: how long one request may take.
        fetch_retry_ms: how long a failing read or append is tried again, on this and other replicas.
        poll_ms: how long an idle stream waits at the server for new entries.
        append_max_bytes: bytes of bodies in one append of the sink.
        token: credential for the servers.
        protocol: dledger, or dledger-java for a Java group.
    """

    peers: str = ""
    path: str = ""
    groups: tuple[str, ...] = ("default",)
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
    fail_on_data_loss: bool = True
    read_from: str = "any"
    decode: str = "none"
    isolation: Literal["read_committed", "read_uncommitted"] = "read_committed"
    fetch_max_bytes: int = 4 << 20
    fetch_timeout_ms: int = 10_000
    fetch_retry_ms: int = 60_000
    poll_ms: int = 500
    append_max_bytes: int = 2 << 20
    token: str | None = None
    protocol: str = "dledger"
    groups_given: bool = False

    @classmethod
    def for_reading(cls, options: Mapping[str, str]) -> DLedgerOptions:
        """Parses the options of a read.

        Raises:
            OptionError: unknown option, wrong value, or not exactly one of ``peers`` and ``path``.
        """
        parsed = cls(**_parse(options, "r"), groups_given=any(name.lower() == "groups" for name in options))
        if bool(parsed.peers) == bool(parsed.path):
            raise OptionError(
                "give exactly one of the options peers and path",
                "peers, path",
                "peers names servers (n0-127.0.0.1:40911;n1-…), path (or load(path)) a node's store directory",
            )
        if parsed.path and len(parsed.groups) > 1:
            raise OptionError("a store holds one group", "groups", "name one group or leave the option out")
        for name in ("startingOffsets", "startingTimestamp", "endingOffsets", "endingTimestamp"):
            _check_groups(name, getattr(parsed, _ATTRIBUTES[name]), parsed)
        least, most = parsed.min_offsets_per_trigger, parsed.max_offsets_per_trigger
        if least is not None and most is not None and least > most:
            raise OptionError(f"{least} is more than maxOffsetsPerTrigger", "minOffsetsPerTrigger", "lower it")
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


_TABLE: Final = (
    _Option("peers", "peers", _peers, "rw"),
    _Option("path", "path", _text, "r"),
    _Option("groups", "groups", _groups, "r"),
    _Option("group", "group", _group, "w"),
    _Option("startingOffsets", "starting_offsets", _offsets, "r"),
    _Option("startingTimestamp", "starting_timestamp", _times, "r"),
    _Option("startingOffsetsByTimestampStrategy", "starting_strategy", _choice("error", "latest"), "r"),
    _Option("endingOffsets", "ending_offsets", _offsets, "r"),
    _Option("endingTimestamp", "ending_timestamp", _times, "r"),
    _Option("maxOffsetsPerTrigger", "max_offsets_per_trigger", _count, "r"),
    _Option("maxBytesPerTrigger", "max_bytes_per_trigger", _count, "r"),
    _Option("minOffsetsPerTrigger", "min_offsets_per_trigger", _count, "r"),
    _Option("maxTriggerDelay", "max_trigger_delay", parse_duration, "r"),
    _Option("minPartitions", "min_partitions", _count, "r"),
    _Option("failOnDataLoss", "fail_on_data_loss", _flag, "r"),
    _Option("readFrom", "read_from", _read_from, "r"),
    _Option("decode", "decode", _choice("none", "message"), "r"),
    _Option("isolation", "isolation", _choice("read_committed", "read_uncommitted"), "r"),
    _Option("fetchMaxBytes", "fetch_max_bytes", _count, "r"),
    _Option("fetchTimeoutMs", "fetch_timeout_ms", _count, "rw"),
    _Option("fetchRetryMs", "fetch_retry_ms", _count, "rw"),
    _Option("pollMs", "poll_ms", _count, "r"),
    _Option("appendMaxBytes", "append_max_bytes", _count, "w"),
    _Option("token", "token", _text, "rw"),
    _Option("protocol", "protocol", _choice("dledger", "dledger-java"), "rw"),
)

_ATTRIBUTES: Final = {option.name: option.attribute for option in _TABLE}


def _check_groups(name: str, spec: StartSpec | TimeSpec | None, options: DLedgerOptions) -> None:
    if not isinstance(spec, Mapping) or (options.path and not options.groups_given):
        return
    unknown = [group for group in spec if group not in options.groups]
    if unknown:
        raise OptionError(
            f"group {unknown[0]!r} is not among the groups {', '.join(options.groups)}", name, "correct either option"
        )


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
            raise OptionError(f"wrong value{shown}: {error}", option.name, _DOCUMENTATION) from None
    return parsed


def _unknown(name: str, use: str, other_use: bool) -> OptionError:
    by_lower = {option.name.lower(): option.name for option in _TABLE if use in option.use}
    nearest = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    known = ", ".join(sorted(by_lower.values()))
    hint = f"did you mean {by_lower[nearest[0]]!r}?" if nearest else f"known options: {known}"
    doing = "reading" if use == "r" else "writing"
    what = f"option {name!r} is not for {doing}" if other_use else f"unknown option {name!r}"
    return OptionError(what, name, hint)
