"""Types of option values for the model in ``options``: each parses the text of an option.

A validator passes a value of the right type on. A wrong text is a ValueError that describes the valid values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from dledger_core import check_group_name, parse_duration, parse_groups, parse_peers
from spark_connector.errors import CheckpointError
from spark_connector.offsets import StreamOffset
from spark_connector.spark_checkpoint import read_offsets

__all__ = [
    "EARLIEST",
    "LATEST",
    "Count",
    "Delay",
    "Duration",
    "Group",
    "Groups",
    "Lowered",
    "OffsetsOption",
    "Pattern",
    "Peers",
    "Replica",
    "StartSpec",
    "Tags",
    "Text",
    "TimeOption",
    "TimeSpec",
    "Topics",
]

EARLIEST: Final = -2
LATEST: Final = -1
_INT64_END: Final = 1 << 63
_MILLIS: Final = re.compile(r"\d{1,15}", re.ASCII)

StartSpec = Literal["earliest", "latest"] | Mapping[str, int]
"""Start or end: the same for all groups, or per group an index, EARLIEST or LATEST."""

TimeSpec = int | Mapping[str, int]
"""Milliseconds since the epoch: one for all groups, or per group."""


def _of_text(parse: Callable[[str], Any]) -> BeforeValidator:
    """Return a validator that parses a text and passes every other value on."""
    return BeforeValidator(lambda value: parse(value.strip()) if isinstance(value, str) else value)


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("it is empty")
    return text


def _peers(text: str) -> str:
    parse_peers(text)
    return text


def _pattern(text: str) -> str:
    try:
        re.compile(_not_empty(text))
    except re.error as error:
        raise ValueError(f"it must be a regular expression, and {error}") from None
    return text


def _replica(text: str) -> str:
    if text.lower() in ("any", "leader", "follower"):
        return text.lower()
    if text.startswith("node:") and text != "node:":
        return text
    raise ValueError("it must be any, leader, follower or node:ID")


def _listed(text: str, separator: str, item: str) -> tuple[str, ...]:
    if text.startswith("["):
        try:
            parts = json.loads(text)
        except ValueError:
            parts = None
        if not isinstance(parts, list) or not all(isinstance(part, str) and part for part in parts):
            raise ValueError(f"it must be {item}s, or a JSON list of them")
    else:
        parts = [part.strip() for part in re.split(separator, text) if part.strip()]
    if not parts:
        raise ValueError(f"it names no {item}")
    return tuple(dict.fromkeys(parts))


def _tags(text: str) -> tuple[str, ...]:
    found = _listed(text, r"\|\||,", "tag")
    return () if found == ("*",) else found  # no filter, as in RocketMQ


def _offsets(text: str) -> StartSpec:
    if text.startswith("@"):
        text = _file(text[1:])
    if text.lower() in ("earliest", "latest"):
        return "earliest" if text.lower() == "earliest" else "latest"
    try:
        parsed = json.loads(text)
        stored = StreamOffset.from_text(parsed)
    except ValueError:
        raise ValueError(
            'it must be earliest, latest or JSON like {"default": 1200}, or @FILE with that content'
        ) from None
    except CheckpointError as error:
        raise ValueError(error.what) from None
    parsed = parsed if stored is None else stored.next_indexes
    if not isinstance(parsed, dict) or not parsed:
        raise ValueError('it must be JSON like {"default": 1200}')
    return {check_group_name(group): _index(group, index) for group, index in sorted(parsed.items())}


def _file(path: str) -> str:
    """Return the content of a file; of a micro-batch file in a Spark checkpoint the offset of this source."""
    try:
        content = Path(path).read_text(encoding="utf-8").strip()
        offsets = [ends for ends in read_offsets(Path(path)) if ends is not None] if content.startswith("v1\n") else []
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"cannot read the file: {error}") from None
    except CheckpointError as error:
        raise ValueError(error.what) from None
    if len(offsets) > 1:
        raise ValueError("the file contains offsets of several sources: give one of them as JSON")
    return json.dumps(offsets[0].to_json()) if offsets else content


def _index(group: str, value: object) -> int:
    names = {"earliest": EARLIEST, "latest": LATEST}
    if isinstance(value, str) and value.lower() in names:
        return names[value.lower()]
    if not isinstance(value, int) or isinstance(value, bool) or not EARLIEST <= value < _INT64_END:
        raise ValueError(f"group {group!r} must have an index, -2 (earliest) or -1 (latest)")
    return value


def _times(text: str) -> TimeSpec:
    if not text.startswith("{"):
        return _time(text)
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict) or not parsed or any(isinstance(moment, bool) for moment in parsed.values()):
        raise ValueError('per group it must be JSON like {"default": "2026-03-01T12:00:00Z"}')
    return {check_group_name(group): _time(str(moment)) for group, moment in sorted(parsed.items())}


def _time(text: str) -> int:
    """Return milliseconds since the epoch, from that number or an ISO-8601 time.

    A time without a zone is in UTC: the session's time zone is unknown here, and a table must not depend on it.
    """
    if _MILLIS.fullmatch(text):
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("it must be milliseconds since the epoch, or a time like 2026-03-01T12:00:00Z") from None
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    millis = round((moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1000)
    if millis < 0:
        raise ValueError("it is before 1970")
    return millis


Text = Annotated[str, _of_text(_not_empty)]
Peers = Annotated[str, _of_text(_peers)]
Group = Annotated[str, _of_text(check_group_name)]
Groups = Annotated[tuple[str, ...], _of_text(parse_groups)]
Pattern = Annotated[str, _of_text(_pattern)]
Replica = Annotated[str, _of_text(_replica)]
Topics = Annotated[tuple[str, ...], _of_text(lambda text: _listed(text, ",", "topic"))]
Tags = Annotated[tuple[str, ...], _of_text(_tags)]
OffsetsOption = Annotated[StartSpec, _of_text(_offsets)]
TimeOption = Annotated[TimeSpec, _of_text(_times)]
Duration = Annotated[int, _of_text(lambda text: max(1, round(parse_duration(text) * 1000)))]
"""Milliseconds above 0."""
Delay = Annotated[int, _of_text(lambda text: round(parse_duration(text, allow_zero=True) * 1000))]
"""Milliseconds, or 0."""
Count = Annotated[int, Field(gt=0, lt=_INT64_END)]
Lowered = _of_text(str.lower)
"""For words that may be written in capitals."""
