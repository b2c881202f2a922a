"""The command's root: finds commands, turns every error into one line and an exit code.

Exit codes: 0 ok, 1 finding, 2 incomplete, 3 usage or I/O error, 4 storage failure or store suspect, 130 interrupted.
A command returns its exit code, or None for 0; errors are raised.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from typing import Any

import click

from dledger_core.cli.termination import is_interruption, termination_unwinds
from dledger_core.cli.whole_output import write_whole
from dledger_core.errors import DLedgerError, InvariantViolationError

__all__ = ["EXIT_FINDING", "EXIT_INCOMPLETE", "EXIT_INTERRUPTED", "EXIT_STORAGE", "EXIT_USAGE", "main"]

EXIT_FINDING = 1
EXIT_INCOMPLETE = 2
EXIT_USAGE = 3
EXIT_STORAGE = 4
EXIT_INTERRUPTED = 130

_COMMANDS = {
    "append": "append:append",
    "checkpoint": "checkpoint:checkpoint",
    "convert": "convert:convert",
    "demo": "demo:demo",
    "dev": "dev:dev",
    "doctor": "doctor:doctor",
    "dump": "dump:dump",
    "get": "read:get",
    "lag": "lag:lag",
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
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = _COMMANDS.get(cmd_name)
        if place is None:
            return None
        module, _, name = place.partition(":")
        gc.disable()  # what modules make lives on: a dozen collections would look at all of it in vain
        try:
            command = getattr(importlib.import_module(f"dledger_core.cli.{module}"), name)
        except ImportError as error:
            raise DLedgerError(
                f"the command {cmd_name} cannot be loaded: {error}", "", "pip install 'dledger[all]'"
            ) from error
        finally:
            gc.freeze()
            gc.enable()
        if not isinstance(command, click.Command):
            raise TypeError(f"{place} is not a command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # One command that cannot be loaded must not take the whole help away.
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
        # numpy's BLAS, of which nothing here makes use, would start and spin a thread per core in every process.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        write_whole()
        with termination_unwinds():
            code = self._run(*args, **extra)
        sys.exit(code)

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
    if isinstance(error, click.exceptions.Abort) or is_interruption(error):
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
