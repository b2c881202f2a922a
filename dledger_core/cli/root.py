"""The command ``dledger``: finds commands, and turns every error into one line and an exit code.

A command returns its exit code, or None for 0; errors are raised.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import traceback
from typing import Any, Final

import click

from dledger_core.cli.help import Option
from dledger_core.cli.options import RESULT_FORMAT
from dledger_core.cli.output import emit, interrupt_on_sigterm
from dledger_core.environment import install_command
from dledger_core.errors import DLedgerError, InvariantViolationError
from dledger_core.exit_codes import EXIT_INTERRUPTED, EXIT_OK, EXIT_STORAGE, EXIT_USAGE

_ENTRY_POINTS: Final = "dledger.commands"
"""Other packages add commands to this group of entry points."""

_COMMANDS: Final = (
    "append", "backup", "completion", "convert", "dev", "doctor", "dump", "epochs", "export", "get", "init", "look",
    "member", "perf", "producer", "recover", "repair", "restore", "salvage", "serve", "status", "tail", "tls", "topics",
    "transaction", "transfer", "verify",
)  # fmt: skip
"""Each is the module of its name, with a click command of its name."""


_OF_SPARK: Final = ("delta", "jinja2", "pandas", "pyspark")

_INSTEAD: Final = {
    "dledger --help": ("help", "man", "usage"),
    "dledger --version": ("version",),
    "dledger append": ("produce", "publish", "put", "send", "write"),
    "dledger dev": ("cluster", "demo", "local", "up"),
    "dledger look": ("describe", "info", "ls", "show"),
    "dledger member list": ("list-members", "members", "nodes", "peers"),
    "dledger perf append": ("bench", "benchmark"),
    "dledger producer list": ("producers",),
    "dledger salvage": ("rescue", "undelete"),
    "dledger serve": ("node", "server", "start"),
    "dledger status --all-groups": ("groups", "list", "list-groups"),
    "dledger tail": ("cat", "consume", "follow", "read", "subscribe", "watch"),
    "dledger topics": ("queues", "topic"),
    "dledger transaction list": ("transactions",),
    "dledger transfer": ("elect", "leader"),
    "dledger verify": ("fsck", "scan"),
}
"""Commands, and the names under which a newcomer looks for them."""


class _ClosedPipeError(Exception):
    """The reader of stdout has closed the pipe."""


class _Root(click.Group):
    """A group whose commands are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*_COMMANDS, *importlib.metadata.entry_points(group=_ENTRY_POINTS).names})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        try:
            if cmd_name in _COMMANDS:
                command = getattr(importlib.import_module(f"dledger_core.cli.{cmd_name}"), cmd_name)
            else:
                found = importlib.metadata.entry_points(group=_ENTRY_POINTS, name=cmd_name)
                if not found:
                    return None
                command = next(iter(found)).load()
        except (ImportError, AttributeError) as error:
            of_spark = isinstance(error, ImportError) and (error.name or "").partition(".")[0] in _OF_SPARK
            remedy = install_command("spark") if of_spark else "run 'pip check', which names missing packages"
            raise DLedgerError(f"the command {cmd_name} cannot be loaded: {error}", "", remedy) from error
        if not isinstance(command, click.Command):
            raise TypeError(f"{cmd_name} is not a command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.exceptions.NoSuchCommand as error:
            instead = next((line for line, names in _INSTEAD.items() if error.command_name in names), None)
            if instead is not None:
                text = f"No such command {error.command_name!r}; run '{instead}'"
                raise click.exceptions.NoSuchCommand(error.command_name, text, ctx=ctx) from None
            # click suggests only commands that are loaded already.
            known = self.list_commands(ctx)
            raise click.exceptions.NoSuchCommand(error.command_name, possibilities=known, ctx=ctx) from None

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
        """Run the command and exit."""
        interrupt_on_sigterm()
        sys.exit(self._run(*args, **extra))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; click itself would exit with 1, a finding, when the reader of stdout is closed."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise _ClosedPipeError from None
        except DLedgerError as error:
            if error.outcome_unknown and ctx.meta.get(RESULT_FORMAT) == "json":
                emit(json.dumps(error.report(), default=str))
            raise

    def _run(self, *args: Any, **extra: Any) -> int:
        try:
            code = super().main(*args, **{"prog_name": "dledger"} | extra | {"standalone_mode": False})
            sys.stdout.flush()
        except click.exceptions.NoArgsIsHelpError as error:
            if error.ctx is not None:
                emit(error.ctx.get_help())
            return EXIT_OK
        except (BrokenPipeError, _ClosedPipeError):
            # The reader, such as head, needs no more output; buffered output must not fail at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_OK
        except Exception as error:  # noqa: BLE001  the last place where an error can become one line
            return _explain(error)
        return code if isinstance(code, int) else EXIT_OK


def _explain(error: Exception) -> int:
    """Write one line about ``error`` to stderr; return the exit code."""
    if isinstance(error, click.exceptions.Abort):
        return EXIT_INTERRUPTED
    line, code = _line_of(error)
    click.secho(f"error: {line}", err=True, fg="red")
    if os.environ.get("DLEDGER_DEBUG") == "1":
        click.echo("".join(traceback.format_exception(error)), err=True)
    return code


def _line_of(error: Exception) -> tuple[str, int]:
    match error:
        case click.exceptions.MissingParameter(param=click.Option() as option) if option.opts:
            remedy = option.missing if isinstance(option, Option) and option.missing else f"give it {_value_of(option)}"
            return f"missing {option.opts[0]}: {remedy}", EXIT_USAGE
        case click.ClickException():
            context = getattr(error, "ctx", None)
            hint = f"; see '{context.command_path} --help'" if context else ""
            text = error.format_message().rstrip(".").replace("Missing argument", "missing argument")
            return text + hint, EXIT_USAGE
        case DLedgerError():
            return str(error), error.exit_code
        case InvariantViolationError():
            return f"{error}: a safety property is violated, the store needs verification; report it", EXIT_STORAGE
        case OSError():
            about = f" at {error.filename}" if error.filename else ""
            remedy = "; check the path, its permissions and the free disk space" if about else ""
            return f"{error.strerror or error}{about}{remedy}", EXIT_USAGE
        case _:
            known = f"{type(error).__name__}: {error}".splitlines()[0]
            return f"unexpected {known}; report it with the output of DLEDGER_DEBUG=1", EXIT_USAGE


def _value_of(option: click.Option) -> str:
    return f"a value, {option.help.rstrip('.')}" if option.help else "a value"


@click.group(
    "dledger",
    cls=_Root,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="""\b
First steps:
  dledger dev                    three nodes on this machine
  dledger append hello world     in another terminal
  dledger tail

Exit codes: 0 success, 1 finding, 2 incomplete or no node answers, 3 usage or I/O error, 4 storage failure.""",
)
@click.version_option(package_name="dledger", prog_name="dledger")
def main() -> None:
    """A replicated commit log: start nodes, append, read, inspect."""
