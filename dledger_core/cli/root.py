"""The command's root: finds commands, turns every error into one line and an exit code.

Exit codes: 0 ok, 1 finding, 2 incomplete, 3 usage or I/O error, 4 storage failure or store suspect, 130 interrupted.
A command returns its exit code, or None for 0; errors are raised.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import traceback
from typing import Any, Final

import click

from dledger_core.cli.exit_codes import EXIT_INTERRUPTED, EXIT_STORAGE, EXIT_USAGE
from dledger_core.cli.stopping import interrupt_on_sigterm
from dledger_core.errors import DLedgerError, InvariantViolationError

__all__ = ["main"]

_ENTRY_POINTS: Final = "dledger.commands"
"""Other packages add commands to this group of entry points."""

_COMMANDS: Final = {
    "append": "append:append",
    "convert": "convert:convert",
    "dev": "dev:dev",
    "doctor": "doctor:doctor",
    "dump": "dump:dump",
    "get": "read:get",
    "perf": "perf:perf",
    "repair": "repair:repair",
    "serve": "serve:serve",
    "status": "status:status",
    "tail": "read:tail",
    "transfer": "status:transfer",
    "verify": "store:verify",
}


class _ReaderGoneError(Exception):
    """Nobody reads our output any more."""


class _Root(click.Group):
    """A group whose commands live in modules that are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*_COMMANDS, *importlib.metadata.entry_points(group=_ENTRY_POINTS).names})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        try:
            if cmd_name in _COMMANDS:
                module, _, name = _COMMANDS[cmd_name].partition(":")
                command = getattr(importlib.import_module(f"dledger_core.cli.{module}"), name)
            else:
                found = importlib.metadata.entry_points(group=_ENTRY_POINTS, name=cmd_name)
                if not found:
                    return None
                command = next(iter(found)).load()
        except (ImportError, AttributeError) as error:
            raise DLedgerError(
                f"the command {cmd_name} cannot be loaded: {error}", "", "pip install 'dledger[all]'"
            ) from error
        if not isinstance(command, click.Command):
            raise TypeError(f"{cmd_name} is not a command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # A command that fails to import must not break the help page.
        rows = []
        for name in self.list_commands(ctx):
            try:
                command = self.get_command(ctx, name)
                rows.append((name, command.get_short_help_str(60) if command else ""))
            except DLedgerError as error:
                rows.append((name, f"({error.what})"))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def main(self, *args: Any, **extra: Any) -> Any:
        """Runs the command and exits."""
        interrupt_on_sigterm()
        sys.exit(self._run(*args, **extra))

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; click itself would end with 1, a finding, when the reader of the output has left."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise _ReaderGoneError from None

    def _run(self, *args: Any, **extra: Any) -> int:
        try:
            code = super().main(*args, **{"prog_name": "dledger"} | extra | {"standalone_mode": False})
            sys.stdout.flush()
        except (BrokenPipeError, _ReaderGoneError):
            # The reader of our output has seen enough; what is still buffered must not fail at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except Exception as error:  # noqa: BLE001  the last place where an error can become a line
            return _explain(error)
        return code if isinstance(code, int) else 0


def _explain(error: Exception) -> int:
    """Writes one line about ``error`` to stderr; returns the exit code."""
    if isinstance(error, click.exceptions.Abort):
        return EXIT_INTERRUPTED
    line, code = _line_of(error)
    click.secho(f"error: {line}", err=True, fg="red")
    if os.environ.get("DLEDGER_DEBUG") == "1":
        click.echo("".join(traceback.format_exception(error)), err=True)
    return code


def _line_of(error: Exception) -> tuple[str, int]:
    match error:
        case click.exceptions.NoArgsIsHelpError():
            return f"no command is given; see '{error.ctx.command_path} --help'", EXIT_USAGE
        case click.ClickException():
            context = getattr(error, "ctx", None)
            hint = f"; see '{context.command_path} --help'" if context else ""
            return error.format_message().rstrip(".") + hint, EXIT_USAGE
        case DLedgerError():
            return str(error), error.exit_code
        case InvariantViolationError():
            return f"{error}: a safety property is broken, this store is suspect; please report it", EXIT_STORAGE
        case OSError():
            about = f" at {error.filename}" if error.filename else ""
            remedy = "; check the path, its permissions and the room on the disk" if about else ""
            return f"{error.strerror or error}{about}{remedy}", EXIT_USAGE
        case _:
            known = f"{type(error).__name__}: {error}".splitlines()[0]
            return f"unexpected {known}; please report it with the output of DLEDGER_DEBUG=1", EXIT_USAGE


@click.group(
    "dledger",
    cls=_Root,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="""\b
Try it:
  dledger dev                    three nodes on this machine; it prints the line to export
  export DLEDGER_PEERS=...       in another terminal
  dledger append hello world
  dledger tail

Exit codes: 0 ok, 1 finding, 2 incomplete, 3 usage or I/O error, 4 storage failure.""",
)
@click.version_option(package_name="dledger", prog_name="dledger")
def main() -> None:
    """A replicated commit log: start nodes, append, read, inspect."""
