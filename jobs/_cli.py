"""The command line of all jobs: options, the JSON summary, exit codes, signals.

Usage::

    @click.command()
    @click.option("--table", required=True)
    @dry_run_option
    def command(table: str, dry_run: bool) -> Outcome:
        '''Help text.'''
        progress("reading ...")                     # stderr
        return Outcome({"rows": 5}, exit_code=EXIT_OK)

    def main() -> None:
        run_job(command)

``run_job`` prints the summary as the last line of stdout and exits. SIGTERM and Ctrl-C raise KeyboardInterrupt until
the job starts Spark; from then on they set an event that the job polls (``run_stoppable``). Either way the
summary says ``"status": "stopped"`` with exit code 2.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self

import click
from pydantic import BaseModel, ConfigDict, ValidationError

from dledger_core import ConfigError, DLedgerError
from dledger_core.cli import EXIT_FINDING, EXIT_INCOMPLETE, EXIT_OK, EXIT_USAGE, emit, interrupt_on_sigterm
from dledger_core.cli import say as progress
from jobs._failures import find_failure

__all__ = [
    "EXIT_FINDING",
    "EXIT_INCOMPLETE",
    "EXIT_OK",
    "JobOptions",
    "Outcome",
    "StoppedError",
    "dry_run_option",
    "progress",
    "run_job",
    "verbose_option",
]


class StoppedError(BaseException):
    """SIGTERM or Ctrl-C arrived; not an Exception, so that no handler takes it for a failure."""


@dataclass(frozen=True)
class Outcome:
    """The result of a job.

    Attributes:
        summary: printed as JSON; ``status`` and ``duration_s`` are added if absent.
        exit_code: one of the EXIT codes.
    """

    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int = EXIT_OK


class JobOptions(BaseModel):
    """Base of a job's options, which its command passes on by name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Self:
        """Check the options.

        Raises:
            ConfigError: an option is wrong; a validator's own ConfigError is passed on.
        """
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raised = first.get("ctx", {}).get("error")
            if isinstance(raised, ConfigError):
                raise raised from None
            option = f"--{str(first['loc'][0]).replace('_', '-')} " if first["loc"] else ""
            raise ConfigError(f"{option}{first['input']!r}: {first['msg']}", "", "correct the value") from None


def dry_run_option(command: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Add ``--dry-run``."""
    return click.option("--dry-run", is_flag=True, help="Check the options and what would be read; write nothing.")(
        command
    )


def verbose_option(command: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Add ``--verbose``."""
    return click.option("--verbose", is_flag=True, help="Show Spark's own log too, with its stack traces.")(command)


def run_job(command: click.Command, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a job's command, print its JSON summary as the last line of stdout and exit."""
    began = time.monotonic()
    outcome = _run(command, arguments)
    if outcome.summary:
        summary = {"status": "ok" if outcome.exit_code == EXIT_OK else "not ok", **outcome.summary}
        summary.setdefault("duration_s", round(time.monotonic() - began, 3))
        sys.stderr.flush()
        emit(json.dumps(summary))
    sys.exit(outcome.exit_code)


def _run(command: click.Command, arguments: Sequence[str] | None) -> Outcome:
    try:
        with _interrupted_by_sigterm():
            result = command.main(args=arguments, standalone_mode=False)
        return result if isinstance(result, Outcome) else Outcome()  # --help gives an int
    except (StoppedError, click.Abort, KeyboardInterrupt):
        return Outcome({"status": "stopped"}, EXIT_INCOMPLETE)
    except click.ClickException as error:
        where = f"; see --help of {error.ctx.info_name}" if isinstance(error, click.UsageError) and error.ctx else ""
        return _failed("USAGE", f"{error.format_message().rstrip('.')}{where}", EXIT_USAGE)
    except DLedgerError as error:
        return _failed(error.name, str(error), error.exit_code)
    except OSError as error:
        return _failed("IO", str(error), EXIT_USAGE)
    except Exception as error:  # noqa: BLE001  (exit code 1, Python's own for a traceback, would mean a finding)
        failure = find_failure(error)
        if failure is not None:
            return _failed(failure.name, failure.text, failure.exit_code)
        traceback.print_exception(error)
        return _failed("INTERNAL", f"{type(error).__name__}: {error}", EXIT_USAGE)


def _failed(name: str, text: str, exit_code: int) -> Outcome:
    text = " ".join(text.split())  # a data loss has three lines
    progress(f"error: {text}")
    return Outcome({"status": "error", "error": name, "message": text}, exit_code)


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    interrupt_on_sigterm()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
