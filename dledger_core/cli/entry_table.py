"""Entries as a table that fits a terminal: one line per entry, long values shortened in the middle.

A column without room for a useful part of its values is left out, the least important one first, and so is a column
without values; ``--wide`` shows all of them in full. The first entries determine the columns; a new heading follows
when an entry has a value for another one, for example at the first message of a log. An entry of a classic CommitLog
has no index: its cell is ``@POSITION``, which ``get`` and ``--from`` accept.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from rich.cells import cell_len

from dledger_core.cli.output import emit, say
from dledger_core.cli.previews import preview, shortened, visible
from dledger_core.control import unpack
from dledger_core.errors import CorruptRecordError

_PIPED_WIDTH: Final = 200
_BODY_LEAST: Final = 20
_GAP: Final = "  "
_MEASURED: Final = 1000
_LISTED_WIDTH: Final = 4000
_KINDS: Final = {2: "control", 3: "membership"}


@dataclass(frozen=True, slots=True)
class _Column:
    """A column.

    Attributes:
        name: of the value; ``bytes`` and ``time`` are computed.
        heading: its heading.
        rank: importance; columns with a higher rank are left out first.
        least: width below which it is left out; 0 = numbers, which are never shortened.
        most: width above which it is not needed.
        extra: left out, without a note, before a value or a body is shortened that takes up to half of the line.
    """

    name: str
    heading: str
    rank: int
    least: int = 0
    most: int = 0
    extra: bool = False


_INDEX: Final = _Column("index", "index", 0)
_TIME: Final = _Column("time", "time (UTC)", 1, 19, 23)
_HIDDEN: Final = _Column("hidden", "hidden", 1)
_COLUMNS: Final = (
    _INDEX,
    _Column("term", "term", 8, extra=True),
    _Column("position", "position", 9, extra=True),
    _TIME,
    _HIDDEN,
    _Column("topic", "topic", 2, 12, 40),
    _Column("queue_id", "queue", 3),
    _Column("queue_offset", "offset", 4),
    _Column("tags", "tags", 6, 6, 24),
    _Column("keys", "keys", 5, 8, 40),
    _Column("msg_id", "message id", 10, 32, 56, extra=True),
    _Column("bytes", "bytes", 7, extra=True),
)


def table_width() -> int:
    """Return the width of the terminal, or of ``COLUMNS``; a wide one for a pipe or a file."""
    return shutil.get_terminal_size((_PIPED_WIDTH, 24)).columns


class EntryTable:
    """Prints entries as they arrive, batch by batch.

    Args:
        width: cells of a line; None = as wide as the values are.
    """

    def __init__(self, width: int | None) -> None:
        self._width = width
        self._columns: tuple[_Column, ...] = ()
        self._widths: list[int] = []
        self._with_values: set[_Column] = set()
        self._missing = ""

    def write(self, batch: pa.RecordBatch) -> None:
        """Print the entries of ``batch``, after a heading if the columns are others."""
        if not batch.num_rows:
            return
        columns = (column for column in _COLUMNS if column is not _HIDDEN or "hidden" in batch.schema.names)
        cells = {column: self._cells(column, batch) for column in columns}
        bodies = _bodies(batch)
        lines = self._headings(cells, bodies)
        rows = zip(*(cells[column] for column in self._columns), strict=True)
        for body, row in zip(bodies, rows, strict=True):
            start = self._start(row)
            lines.append(start + body.text(None if self._width is None else self._width - cell_len(start)))
        emit("\n".join(lines))

    def _cells(self, column: _Column, batch: pa.RecordBatch) -> list[str]:
        found = _texts(column, batch)
        if column is _INDEX:
            positions = batch.column("position").to_pylist()
            return [f"@{at}" if text is None else text for text, at in zip(found, positions, strict=True)]
        if column is _HIDDEN:  # the body of a control entry says that it is one
            found = [None if text == "control" else text for text in found]
        return ["-" if text is None else visible(text) for text in found]

    def _headings(self, cells: Mapping[_Column, list[str]], bodies: Sequence[_Body]) -> list[str]:
        """Choose the columns if there are values of new ones; return the line of headings if others were chosen."""
        with_values = self._with_values | {column for column, texts in cells.items() if set(texts) != {"-"}}
        if with_values == self._with_values:
            return []
        self._with_values = with_values
        wanted = {
            column: max(map(cell_len, [column.heading, *texts[:_MEASURED]]))
            for column, texts in cells.items()
            if column in with_values or self._width is None
        }
        widths = wanted
        if self._width is not None:
            half = self._width // 2
            longest = max(cell_len(body.text(half)) for body in bodies[:_MEASURED])
            widths = _fitted(wanted, longest, self._width)
        columns = tuple(column for column in _COLUMNS if column in widths)
        missing = " and ".join(column.heading for column in wanted if column not in widths and not column.extra)
        if missing and missing != self._missing:
            self._missing = missing
            say(f"note: the line is too narrow for {missing}; --wide shows every column")
        if columns == self._columns:
            return []
        begin = [""] if self._columns else []
        self._columns, self._widths = columns, [widths[column] for column in columns]
        return [*begin, f"{self._start(column.heading for column in columns)}body"]

    def _start(self, cells: Iterable[str]) -> str:
        """Return the line before the body."""
        fitted = zip(self._columns, self._widths, cells, strict=True)
        return "".join(self._fit(column, width, cell) + _GAP for column, width, cell in fitted)

    def _fit(self, column: _Column, width: int, cell: str) -> str:
        if not column.least:
            return cell.rjust(width)
        if self._width is not None:
            cell = cell[:width] if column is _TIME else shortened(cell, width)
        return cell + " " * (width - cell_len(cell))


class EntryList:
    """Prints each entry as names and values, one below the other.

    Args:
        complete: print complete bodies.
    """

    def __init__(self, *, complete: bool) -> None:
        self._body_width = None if complete else _LISTED_WIDTH

    def write(self, batch: pa.RecordBatch) -> None:
        """Print the entries of ``batch``."""
        columns = [column for column in _COLUMNS if column is not _HIDDEN]
        rows = zip(*(_texts(column, batch) for column in columns), strict=True)
        properties = _named(batch, "properties").to_pylist()
        for texts, pairs, body in zip(rows, properties, _bodies(batch), strict=True):
            found = {column.heading: text for column, text in zip(columns, texts, strict=True)}
            found["properties"] = ",".join(f"{name}={value}" for name, value in pairs or ())
            found["body"] = body.text(self._body_width)
            emit("\n".join(f"{name:<10}  {visible(text)}" for name, text in found.items() if text))


def _texts(column: _Column, batch: pa.RecordBatch) -> list[str | None]:
    """Return the values of a column as texts."""
    if column is _TIME:
        times = pc.coalesce(batch.column("timestamp"), _named(batch, "store_timestamp", batch.column("timestamp").type))
        values = pc.strftime(times.cast(pa.timestamp("ms", tz="UTC"), safe=False), "%Y-%m-%dT%H:%M:%S")
    elif column.name == "bytes":
        values = pc.binary_length(batch.column("body"))
    else:
        values = _named(batch, column.name)
    texts: list[str | None] = values.cast(pa.string()).to_pylist()
    return texts


def _named(batch: pa.RecordBatch, name: str, kind: pa.DataType | None = None) -> pa.Array:
    return batch.column(name) if name in batch.schema.names else pa.nulls(batch.num_rows, kind or pa.string())


def _fitted(wanted: Mapping[_Column, int], body: int, width: int) -> dict[_Column, int]:
    """Return the columns that fit, with their widths; the body gets at least a quarter of the line.

    Args:
        wanted: widths of the longest values.
        body: width of the longest body, at most half of the line.
        width: of the line.
    """
    least_body = max(_BODY_LEAST, width // 4)
    spare = width - least_body
    chosen: dict[_Column, int] = {}
    for extra in (False, True):  # no extra column while values of another one are shortened
        if extra:
            spare -= max(0, body - least_body)
        ranked = sorted((column for column in wanted if column.extra is extra), key=lambda column: column.rank)
        for column in ranked:
            least = column.least or wanted[column]
            if column is _INDEX or least + len(_GAP) <= spare:
                chosen[column] = least
                spare -= least + len(_GAP)
        for column in ranked:
            if column in chosen and column is not _TIME:
                more = max(0, min(wanted[column], column.most, chosen[column] + spare) - chosen[column])
                chosen[column] += more
                spare -= more
    if _TIME in chosen and wanted[_TIME] - _TIME.least <= spare:
        chosen[_TIME] = wanted[_TIME]  # a time is complete or ends with its seconds
    return chosen


@dataclass(frozen=True, slots=True)
class _Body:
    """A body, or the reason why there is none."""

    data: bytes | None
    error: str | None
    magic: int | None

    def text(self, width: int | None) -> str:
        """Return the body in at most ``width`` cells."""
        if self.data is not None and self.magic not in _KINDS:
            return preview(self.data, width)
        if self.data is None:
            text = f"({visible(self.error or 'no body')})"
        else:
            text = f"({_KINDS[self.magic or 0]}) {_control(self.data)}"
        return text if width is None else shortened(text, width)


def _bodies(batch: pa.RecordBatch) -> list[_Body]:
    return list(map(_Body, *(_named(batch, name).to_pylist() for name in ("body", "error", "magic"))))


def _control(body: bytes) -> str:
    """Return the content of a control entry."""
    try:
        fields = unpack(body)
    except CorruptRecordError:
        return preview(body)
    kind = fields.pop("k", "" if "voters" in fields else "no-op")
    return visible(" ".join([str(kind), *(f"{name}={value}" for name, value in fields.items())]).strip())
