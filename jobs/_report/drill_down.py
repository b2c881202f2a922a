"""One entry on several replicas, field by field, and the bytes that differ: a table of pages and of notebooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, NamedTuple

from .templates import render

__all__ = ["FieldRow", "Fields", "HexLine", "RangeDiff"]

_ROW: Final = 8
"""Bytes of a line: its digits and its text fit the width of a phone."""
_ROWS_AROUND: Final = 3
Fields = dict[str, Any]


class FieldRow(NamedTuple):
    """One field of an entry on all replicas.

    Attributes:
        name: of the field.
        values: by replica, without those that lack the field.
        odd: the replicas whose value is not the majority's.
    """

    name: str
    values: dict[str, Any]
    odd: frozenset[str]


class HexLine(NamedTuple):
    """One line of a body: the offset of its first byte, and per byte digits, text and whether it differs."""

    offset: int
    cells: tuple[tuple[str, str, bool], ...]


@dataclass(frozen=True)
class RangeDiff:
    """An entry on all replicas.

    Attributes:
        title: the finding and its index.
        advice: its meaning and the next step.
        fields: of each replica, by name.
        bodies: of the replicas that contain the entry.
        difference: offset in the body of the first byte that differs, or None.
        field: the message's field that it belongs to, if the body is a message.
    """

    title: str
    advice: str
    fields: Mapping[str, Fields]
    bodies: Mapping[str, bytes]
    difference: int | None = None
    field: str | None = None

    @property
    def where(self) -> str:
        """The first difference in words."""
        if self.difference is None:
            return "no body differs here" if self.bodies else ""
        return f"bodies differ from byte {self.difference} on" + (f": {self.field}" if self.field else "")

    @property
    def rows(self) -> list[FieldRow]:
        """The fields of all replicas, those that differ first; a replica without a field does not differ in it."""
        found = []
        for name in dict.fromkeys(name for fields in self.fields.values() for name in fields):
            values = {replica: fields[name] for replica, fields in self.fields.items() if name in fields}
            counts = Counter(map(str, values.values()))
            usual, count = counts.most_common(1)[0]
            tied = count * 2 <= len(values)  # without a majority all of them are shown as different
            odd = () if len(counts) == 1 else (one for one, value in values.items() if tied or str(value) != usual)
            found.append(FieldRow(name, values, frozenset(odd)))
        return sorted(found, key=lambda row: not row.odd)

    @property
    def hex_lines(self) -> dict[str, list[HexLine]]:
        """The lines around the first difference, by replica."""
        if self.difference is None:
            return {}
        begin = max(0, self.difference // _ROW - _ROWS_AROUND) * _ROW
        stop = begin + (2 * _ROWS_AROUND + 1) * _ROW
        columns = zip_longest(*(body[begin:stop] for body in self.bodies.values()))
        usual = [Counter(column).most_common(1)[0][0] for column in columns]
        return {
            name: [
                HexLine(at, tuple(_cells(body[at : min(at + _ROW, stop)], usual[at - begin :])))
                for at in range(begin, min(stop, len(body)), _ROW)
            ]
            for name, body in self.bodies.items()
        }

    def __repr__(self) -> str:
        lines = [self.title, self.advice, ""]
        lines += [
            f"{row.name}: " + ", ".join(f"{name}={value}" for name, value in row.values.items()) for row in self.rows
        ]
        lines += ["", self.where]
        for name, rows in self.hex_lines.items():
            lines += [f"{name}:"]
            for offset, cells in rows:
                digits = " ".join(digits for digits, _, _ in cells)
                lines.append(f"{offset:08x}  {digits:{3 * _ROW - 1}}  " + "".join(text for _, text, _ in cells))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return render("drill_down_alone.html", diff=self)


def _cells(data: bytes, usual: Sequence[int | None]) -> Iterator[tuple[str, str, bool]]:
    for code, expected in zip(data, usual, strict=False):
        yield f"{code:02x}", chr(code) if 32 <= code < 127 else ".", code != expected
