"""What the values of options mean: one function for each kind of value, text in, checked value out.

A wrong value is a ValueError that says what it must be; ``options`` adds the option's name and an example.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal

from dledger_core.config import check_group_name, parse_peers
from spark_connector.errors import CheckpointError
from spark_connector.offsets import StreamOffset
from spark_connector.spark_checkpoint import read_offsets
from spark_connector.times import parse_duration, parse_time

__all__ = [
    "EARLIEST",
    "LATEST",
    "StartSpec",
    "TimeSpec",
    "choice",
    "count",
    "flag",
    "group_name",
    "group_names",
    "lag",
    "message_tags",
    "message_topics",
    "offsets",
    "pattern",
    "peers_string",
    "replica_choice",
    "text",
    "times",
]

EARLIEST: Final = -2
LATEST: Final = -1
_INT64_END: Final = 1 << 63

StartSpec = Literal["earliest", "latest"] | Mapping[str, int]
"""Where to start or end: everywhere alike, or per group an index, EARLIEST or LATEST."""

TimeSpec = int | Mapping[str, int]
"""Milliseconds since the epoch: for all groups alike, or per group."""


def text(value: str) -> str:
    """Any text that is not empty."""
    if not value.strip():
        raise ValueError("it is empty")
    return value.strip()


def peers_string(value: str) -> str:
    """DLedger's peers string; raises ConfigError."""
    parse_peers(value)
    return value.strip()


def group_name(value: str) -> str:
    """A group; raises ConfigError."""
    return check_group_name(value.strip())


def group_names(value: str) -> tuple[str, ...]:
    """Groups, separated by commas, each once; raises ConfigError for what cannot be one."""
    names = tuple(dict.fromkeys(group_name(part) for part in value.split(",") if part.strip()))
    if not names:
        raise ValueError("it names no group")
    return names


def pattern(value: str) -> str:
    """A regular expression."""
    try:
        re.compile(text(value))
    except re.error as error:
        raise ValueError(f"it must be a regular expression, and {error}") from None
    return value.strip()


def flag(value: str) -> bool:
    """``true`` or ``false``."""
    known = {"true": True, "false": False}
    if value.strip().lower() not in known:
        raise ValueError("it must be true or false")
    return known[value.strip().lower()]


def count(most: int = _INT64_END - 1) -> Callable[[str], int]:
    """Returns the parser of a whole number from 1 to ``most``."""

    def parse(value: str) -> int:
        digits = value.strip()
        if not (digits.isascii() and digits.isdigit()) or not 0 < int(digits) < _INT64_END:
            raise ValueError("it must be a whole number above 0")
        if int(digits) > most:
            raise ValueError(f"it must be at most {most}")
        return int(digits)

    return parse


def lag(value: str) -> int:
    """A duration, or 0."""
    return 0 if value.strip() in ("0", "0s", "0ms") else parse_duration(value)


def choice(*known: str) -> Callable[[str], str]:
    """Returns the parser of one of the words ``known``."""

    def parse(value: str) -> str:
        word = value.strip().lower()
        if word not in known:
            raise ValueError(f"it must be one of {', '.join(known)}")
        return word

    return parse


def replica_choice(value: str) -> str:
    """Which replica to read."""
    word = value.strip()
    if word.lower() in ("any", "leader", "follower"):
        return word.lower()
    if word.startswith("node:") and len(word) > len("node:"):
        return word
    raise ValueError("it must be any, leader, follower or node:ID")


def message_topics(value: str) -> tuple[str, ...]:
    """Topics, separated by commas or as a JSON list."""
    return _listed(value, ",", "topic")


def message_tags(value: str) -> tuple[str, ...]:
    """Tags, separated by RocketMQ's ``||`` or by commas, or as a JSON list; ``*`` is no filter, as in RocketMQ."""
    found = _listed(value, r"\|\||,", "tag")
    return () if found == ("*",) else found


def _listed(value: str, separator: str, what: str) -> tuple[str, ...]:
    if value.strip().startswith("["):
        try:
            parts = json.loads(value)
        except ValueError:
            parts = None
        if not isinstance(parts, list) or not all(isinstance(part, str) and part for part in parts):
            raise ValueError(f"it must be {what}s, or a JSON list of them")
    else:
        parts = [part.strip() for part in re.split(separator, value) if part.strip()]
    if not parts:
        raise ValueError(f"it names no {what}")
    return tuple(dict.fromkeys(parts))


def offsets(value: str) -> StartSpec:
    """``earliest``, ``latest``, JSON per group, an offset of a checkpoint, or ``@`` and a file of one of these."""
    word = value.strip()
    if word.startswith("@"):
        word = _file(word[1:])
    if word.lower() == "earliest":
        return "earliest"
    if word.lower() == "latest":
        return "latest"
    try:
        parsed = json.loads(word)
    except ValueError:
        raise ValueError('it must be earliest, latest or JSON like {"default": 1200}, or @ and a file of it') from None
    try:
        stored = StreamOffset.from_text(parsed)
    except CheckpointError as error:
        raise ValueError(error.what) from None
    parsed = parsed if stored is None else stored.next_indexes
    if not isinstance(parsed, dict) or not parsed:
        raise ValueError('it must be JSON like {"default": 1200}')
    return {group_name(group): _index(group, index) for group, index in sorted(parsed.items())}


def _file(path: str) -> str:
    """Returns a file's content; of a micro-batch's file in Spark's checkpoint the offset of this source."""
    try:
        content = Path(path).read_text(encoding="utf-8").strip()
        ours = [ends for ends in read_offsets(Path(path)) if ends is not None] if content.startswith("v1\n") else []
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"cannot read the file: {error}") from None
    except CheckpointError as error:
        raise ValueError(error.what) from None
    if len(ours) > 1:
        raise ValueError("the file holds offsets of several sources: give one of them as JSON")
    return json.dumps(ours[0].to_json()) if ours else content


def _index(group: str, value: object) -> int:
    names = {"earliest": EARLIEST, "latest": LATEST}
    if isinstance(value, str) and value.lower() in names:
        return names[value.lower()]
    if not isinstance(value, int) or isinstance(value, bool) or not EARLIEST <= value < _INT64_END:
        raise ValueError(f"group {group!r} must have an index, -2 (earliest) or -1 (latest)")
    return value


def times(value: str) -> TimeSpec:
    """A time for all groups, or JSON per group."""
    if not value.strip().startswith("{"):
        return parse_time(value)
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict) or not parsed:
        raise ValueError('per group it must be JSON like {"default": "2026-03-01T12:00:00Z"}')
    return {group_name(group): parse_time(str(moment)) for group, moment in sorted(parsed.items())}
