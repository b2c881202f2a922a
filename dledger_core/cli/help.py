"""Help pages: options in sections, the environment variables that a command reads, examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import click

_LAST_SECTIONS: Final = ("Connection", "Security", "Output")
_EVERY_COMMAND: Final = {"DLEDGER_DEBUG": "1 adds the traceback to an error"}


class Option(click.Option):
    """An option with a section of the help page.

    Args:
        section: heading above the option.
        missing: remedy of the error if the option is required and not given.
        given: see ``click.Option``.
    """

    def __init__(self, *names: Any, section: str = "Options", missing: str = "", **given: Any) -> None:
        super().__init__(*names, **given)
        self.section, self.missing = section, missing


class Command(click.Command):
    """A command whose help page groups options and lists environment variables.

    Args:
        environment: variables that the command reads, in addition to those of its options, with their meaning.
        given: see ``click.Command``.
    """

    def __init__(self, *names: Any, environment: Mapping[str, str] | None = None, **given: Any) -> None:
        super().__init__(*names, **given)
        self._environment = environment or {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options section by section, then the environment variables."""
        sections: dict[str, list[tuple[str, str]]] = {}
        environment = dict(self._environment)
        for option in self.get_params(ctx):
            if not isinstance(option, click.Option):
                continue
            record = option.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(option, "section", "Options"), []).append(record)
            if isinstance(option.envvar, str):
                environment[option.envvar] = f"value of {option.opts[0]}"
        for section in sorted(sections, key=lambda name: _LAST_SECTIONS.index(name) if name in _LAST_SECTIONS else -1):
            with formatter.section(section):
                formatter.write_dl(sections[section])
        with formatter.section("Environment variables"):
            formatter.write_dl(list((environment | _EVERY_COMMAND).items()))


class CommandGroup(click.Group):
    """A group of commands with such help pages."""

    command_class = Command


command: Final = partial(click.command, cls=Command)
"""The decorator of a command, as ``click.command``; its help page has sections and the environment variables."""
option: Final[Callable[..., Callable[[Any], Any]]] = partial(click.option, cls=Option)
"""The decorator of an option, as ``click.option``, with ``section`` and ``missing``."""


def examples(*lines: str) -> str:
    """Return a command's epilog: example lines, kept as they are."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])
