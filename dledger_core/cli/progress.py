"""Progress on stderr: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self

import click

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

__all__ = ["Progress", "say"]

_MIB: Final = 1 << 20


def say(text: str) -> None:
    """Write one line to stderr."""
    click.echo(text, err=True)


class Progress:
    """The progress of one piece of work; a context manager.

    Args:
        title: what is done, such as ``copying``.
        total: the end; None = unknown.
        unit: of ``done`` and ``total``, such as ``entries``; ``bytes`` are shown in MiB.
        bar: show a bar if stderr is a terminal. False for a command that prints to stdout meanwhile.
        every_s: seconds between two lines, and before the first one, where there is no bar.
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
        self._task = self._bar.add_task(title, total=total, figures="") if self._bar is not None else None
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
        """Show that ``done`` of the total is done.

        Args:
            done: absolute, in the unit.
            total: the end, if it changed.
            title: what is done from now on, if it changed.
            detail: text after the figures.
        """
        self._total = self._total if total is None else total
        self._title = self._title if title is None else title
        if self._bar is not None and self._task is not None:
            figures = self._figures(done, detail)
            self._bar.update(self._task, completed=done, total=self._total, description=self._title, figures=figures)
            return
        now = time.monotonic()
        if now - self._last_line >= self._every_s:
            self._last_line = now
            share = f", {100 * done / self._total:.0f} %" if self._total else ""
            say(f"{self._title}: {self._figures(done, detail)}{share} ({now - self._began:.0f} s)")

    def say(self, text: str) -> None:
        """Write one line to stderr, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            say(text)

    def _figures(self, done: int, detail: str) -> str:
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
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
