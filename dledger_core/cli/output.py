"""How commands report and end: results on stdout, notes and progress on stderr, signals.

A command that only reads is interrupted: SIGTERM and Ctrl-C raise KeyboardInterrupt. Work that must stop between two
steps polls an event instead.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import click

from dledger_core.errors import in_words

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.table import Table
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def interrupt_on_sigterm() -> None:
    """Let SIGTERM raise KeyboardInterrupt, as Ctrl-C does. Call it from the main thread."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """Set the yielded event on SIGTERM or Ctrl-C, until the block ends.

    Signals reach the main thread only: in another thread the event is never set.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {
        number: signal.signal(number, lambda _number, _frame: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


Format = Literal["table", "json"]
"""The values of ``--format``."""

_MIB: Final = 1 << 20
_UNCUT_WIDTH = 1000
_WORD_MAX = 21
"""No column of a table is narrower than its words up to this length, such as an address."""
_ADDRESSES = re.compile(r"(?:^|[_ ])(?:index|term|end|start|from|to|latest|position|port|pid)(?:$|[_ ])")
"""Numbers that are copied into other commands are shown without separators."""


def emit(data: str | bytes | memoryview) -> None:
    """Write all of ``data`` to stdout and flush it; text gets a line end if it has none.

    Without a buffer (``PYTHONUNBUFFERED``) a write may be partial, for example on a nearly full disk. The loop writes
    the rest or gets the error.

    Raises:
        OSError: the data could not be written.
    """
    if isinstance(data, str):
        data = (data if data.endswith("\n") else data + "\n").encode(sys.stdout.encoding or "utf-8", "backslashreplace")
    sys.stdout.flush()
    left = memoryview(data)
    while left:
        left = left[sys.stdout.buffer.write(left) :]
    sys.stdout.buffer.flush()


def show_result(result: Mapping[str, Any], output: Format, title: str = "") -> None:
    """Write one result: names and values."""
    if output == "json":
        emit(json.dumps(result, default=str))
        return
    from rich.text import Text

    table = _table(title)
    table.show_header = False
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in result.items():
        table.add_row(Text(name.replace("_", " ")), Text(_shown(name, value)))
    _emit_table(table)


def show_rows(rows: Sequence[Mapping[str, Any]], output: Format, title: str = "") -> None:
    """Write rows with the same names; the names of the first row are the columns."""
    if output == "json":
        emit(json.dumps(rows, default=str))
        return
    if not rows:
        return
    from rich.text import Text

    texts = {name: [_shown(name, row[name]) for row in rows] for name in rows[0]}
    numeric = {name for name, value in rows[0].items() if isinstance(value, (int, float))}
    table = _table(title)
    for name, column in texts.items():
        heading = name.replace("_", " ")
        words = [len(word) for text in (heading, *column) for word in text.split()]
        least = max((length for length in words if length <= _WORD_MAX), default=1)
        table.add_column(heading, justify="right" if name in numeric else "left", overflow="fold", min_width=least)
    for row in zip(*texts.values(), strict=True):
        table.add_row(*map(Text, row))
    _emit_table(table)


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value) if _ADDRESSES.search(name) else f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_shown(name, each) for each in value) or "-"
    return in_words(value)


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title or None, title_justify="left", box=box.SIMPLE)


def _emit_table(table: Table) -> None:
    """Write a table; if the terminal is too narrow, with less space and with cells of several lines."""
    from rich.console import Console

    console = Console()
    uncut = Console(width=_UNCUT_WIDTH, height=console.height)  # both, or a dumb terminal has 80 columns
    if console.is_terminal and uncut.measure(table).maximum > console.width:
        table.box, table.padding = None, (0, 1, 0, 0)
        for column in table.columns:
            column.header = str(column.header).replace(" ", "\n")
        least = sum((column.min_width or 1) + 1 for column in table.columns)
        console = Console(width=max(console.width, least), height=console.height)
    elif not console.is_terminal:
        console = uncut
    with console.capture() as captured:
        console.print(table)
    emit(captured.get())


def say(text: str) -> None:
    """Write one line to stderr."""
    click.echo(text, err=True)


def say_waiting(group: str, entries: int, transaction: object | None) -> None:
    """Say how many committed entries wait for an open transaction, if any do.

    Args:
        group: their group.
        entries: their number.
        transaction: the oldest one; None if the principal may not ask for it.
    """
    if entries:
        named = transaction or f"'dledger transaction list --group {group}' shows it"
        say(f"group {group}: {entries:,} committed entries wait for an open transaction: {named}")


class Progress:
    """Progress of one task, as a context manager: a bar on a terminal, a line every few seconds elsewhere.

    Args:
        title: name of the task, such as ``copying``.
        total: number of units; None = unknown.
        unit: unit of ``done`` and ``total``; ``bytes`` are shown in MiB.
        bar: show a bar if stderr is a terminal. Use False for a command that prints to stdout at the same time.
        every_s: seconds between two lines, and before the first line, without a bar.
    """

    def __init__(
        self,
        title: str,
        total: int | None = None,
        *,
        unit: Literal["bytes", "entries"] | str = "entries",
        bar: bool = True,
        every_s: float = 2.0,
    ) -> None:
        self._title, self._total, self._unit, self._every_s = title, total, unit, every_s
        self._bar = _new_bar() if bar and sys.stderr.isatty() else None
        self._task = self._bar.add_task(title, total=total, numbers="") if self._bar is not None else None
        self._began = self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, *, total: int | None = None, title: str | None = None, detail: str = "") -> None:
        """Show ``done`` units of the total.

        Args:
            done: number of units since the start.
            total: new total, if it changed.
            title: new title, if it changed.
            detail: text after the numbers.
        """
        self._total = self._total if total is None else total
        self._title = self._title if title is None else title
        if self._bar is not None and self._task is not None:
            numbers = self._numbers(done, detail)
            self._bar.update(self._task, completed=done, total=self._total, description=self._title, numbers=numbers)
            return
        now = time.monotonic()
        if now - self._last_line >= self._every_s:
            self._last_line = now
            share = f", {100 * done / self._total:.0f} %" if self._total else ""
            say(f"{self._title}: {self._numbers(done, detail)}{share} ({now - self._began:.0f} s)")

    def say(self, text: str) -> None:
        """Write one line to stderr, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            say(text)

    def _numbers(self, done: int, detail: str) -> str:
        scale, unit = (_MIB, "MiB") if self._unit == "bytes" else (1, self._unit)
        total = f" of {self._total / scale:,.0f}" if self._total else ""
        return f"{done / scale:,.0f}{total} {unit}" + (f", {detail}" if detail else "")


def _new_bar() -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    return Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
