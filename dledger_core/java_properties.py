"""Java's properties files as ``Properties.load`` reads bytes: ISO 8859-1, comments, continued lines, escapes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

__all__ = ["MalformedError", "Property", "read_java_properties"]

_BLANKS: Final = " \t\f"
_LINE_END: Final = re.compile(r"\r\n|\r|\n")
_ESCAPE: Final = re.compile(r"\\(?:u(.{0,4})|(.?))", re.DOTALL)
_CONTROL: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_KEY_END: Final = re.compile(r"(?<!\\)(?:\\\\)*([=:\t\f ])")


class MalformedError(ValueError):
    """A Unicode escape without four hexadecimal digits, in line ``line``."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(f"\\u{text} is not a character")
        self.line = line


@dataclass(frozen=True, slots=True)
class Property:
    """One pair.

    Attributes:
        line: number of its first line, from 1.
        key: the name.
        value: the text; trailing blanks stay, as in Java.
    """

    line: int
    key: str
    value: str


def read_java_properties(data: bytes) -> list[Property]:
    """Return all pairs in order; if a key is repeated, Java uses the last one.

    Raises:
        MalformedError: an escape that Java rejects.
    """
    found = []
    for number, line in _logical_lines(data.decode("latin-1")):
        key, value = _split(line)
        found.append(Property(number, _unescaped(number, key), _unescaped(number, value)))
    return found


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines that are neither empty nor comments, continued ones joined, with the number of the first."""
    begun, joined = 0, ""
    for number, raw in enumerate(_LINE_END.split(text), 1):
        line = raw.lstrip(_BLANKS)
        if not joined:
            if not line or line[0] in "#!":
                continue
            begun = number
        slashes = len(line) - len(line.rstrip("\\"))
        if slashes % 2:
            joined += line[:-1]
            continue
        yield begun, joined + line
        joined = ""
    if joined:
        yield begun, joined


def _split(line: str) -> tuple[str, str]:
    end = _KEY_END.search(line)
    if end is None:
        return line, ""
    rest = line[end.start(1) :].lstrip(_BLANKS)
    if rest[:1] in ("=", ":"):
        rest = rest[1:].lstrip(_BLANKS)
    return line[: end.start(1)], rest


def _unescaped(number: int, text: str) -> str:
    def replaced(found: re.Match[str]) -> str:
        code, letter = found.groups()
        if code is None:
            return _CONTROL.get(letter, letter)
        if not re.fullmatch("[0-9A-Fa-f]{4}", code):
            raise MalformedError(number, code)
        return chr(int(code, 16))

    units = _ESCAPE.sub(replaced, text)
    return units.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # a surrogate pair is one character
