"""The HTML templates of this directory; every value is escaped."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

__all__ = ["counted", "half_open", "render", "shown"]

_WORD_MAX: Final = 24
_PIECE: Final = 12
_BRIEF_MAX: Final = 36
_SEPARATOR: Final = re.compile(r"(?<=[-/_.:=,;%| ])")


def render(name: str, **values: Any) -> str:
    """Return a template filled with these values."""
    return str(_environment().get_template(name).render(values))


@cache
def _environment() -> Environment:
    loader = FileSystemLoader(Path(__file__).parent)
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.filters |= {"shown": shown, "breakable": breakable, "counted": counted, "brief": brief}
    found.globals |= {"half_open": half_open}
    return found


def half_open(start: int, end: int) -> str:
    """Return a range of indexes as text: without thousands separators, whose comma would look like another one."""
    return f"[{start}, {end})"


def shown(value: Any) -> str:
    """Return the text of a cell: ``-`` for None, lists joined, no thousands separators."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case dict():
            return ", ".join(f"{name} {shown(one)}" for name, one in value.items())
        case list() | tuple():
            return ", ".join(map(shown, value))
    return str(value)


def counted(value: Any) -> str:
    """Return a count with thousands separators; other values as ``shown`` has them."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else shown(value)


def brief(value: Any) -> str:
    """Return a name or a path whose long parts are shortened in the middle; the complete one is in the finding."""
    return "/".join(map(_middle_out, shown(value).split("/")))


def _middle_out(part: str) -> str:
    return part if len(part) <= _BRIEF_MAX else f"{part[: _BRIEF_MAX // 2]}…{part[-_BRIEF_MAX // 3 :]}"


def breakable(value: Any) -> Markup:
    """Return a text in which a line may end after each separator, and inside words that are too long for a line."""
    pieces: list[str] = []
    for part in _SEPARATOR.split(shown(value)):
        step = _PIECE if len(part) > _WORD_MAX else len(part) or 1
        pieces += (part[at : at + step] for at in range(0, len(part), step))
    return Markup("<wbr>").join(pieces).replace(" <wbr>", " ")
