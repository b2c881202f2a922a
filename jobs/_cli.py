"""What all jobs share on the command line: options, exit codes, the JSON summary, signals.

Usage::

    @click.command()
    @click.option("--table", required=True)
    @connection_options          # --tls-*, --token-file, --protocol: known, and refused
    @dry_run_option
    def command(table: str, dry_run: bool) -> Outcome:
        '''Help text.'''
        progress("reading ...")                     # stderr
        return Outcome({"rows": 5}, exit_code=EXIT_OK)

    def main() -> None:
        run_job(command)

``run_job`` prints the summary as the last line of stdout and exits. Exit codes: 0 ok, 1 finding, 2 incomplete,
3 usage or I/O error (also where click says 2), 4 storage failure. SIGTERM and Ctrl-C raise ``StoppedError`` in the
main thread, so ``with`` blocks close what is open, and the summary says ``"status": "stopped"`` with exit code 2.
A job that can finish its work in hand instead (a stream) polls::

    with stop_requests() as stop:
        while not query.awaitTermination(1) and not stop.is_set():
            ...
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from types import FrameType
from typing import Any, Final, NoReturn

import click

from dledger_core.cli.termination import lost_signals_return
from dledger_core.cli.whole_output import write_whole
from dledger_core.config import check_group_name
from dledger_core.errors import ConfigError, DLedgerError
from jobs._failures import find_failure

__all__ = [
    "EXIT_FINDING",
    "EXIT_INCOMPLETE",
    "EXIT_OK",
    "EXIT_STORAGE",
    "EXIT_USAGE",
    "MORE_FROM_SPARK",
    "PROTOCOLS",
    "Outcome",
    "StoppedError",
    "connection_options",
    "dry_run_option",
    "not_available",
    "parse_groups",
    "progress",
    "run_job",
    "security_options",
    "stop_requests",
    "verbose_option",
]

EXIT_OK: Final = 0
EXIT_FINDING: Final = 1
EXIT_INCOMPLETE: Final = 2
EXIT_USAGE: Final = 3
EXIT_STORAGE: Final = 4
MORE_FROM_SPARK: Final = "run it with --verbose to see Spark's own log"

PROTOCOLS: Final = click.Choice(["dledger", "dledger-java"])
_SECURITY_OPTIONS: Final = ("--tls-ca", "--tls-cert", "--tls-key", "--token-file")


class StoppedError(BaseException):
    """SIGTERM or Ctrl-C arrived; not an Exception, so that no handler takes it for a failure."""


@dataclass(frozen=True)
class Outcome:
    """What a job returns.

    Attributes:
        summary: printed as JSON; ``status`` and ``duration_s`` are added if absent.
        exit_code: one of the EXIT codes.
    """

    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int = EXIT_OK


def progress(text: str) -> None:
    """Prints one line for people, on stderr."""
    click.echo(text, err=True)


def not_available(option: str) -> ConfigError:
    """Returns the error for an option that is planned and does not work yet."""
    return ConfigError(f"{option} is not available yet", "", "leave it out")


def parse_groups(text: str) -> tuple[str, ...]:
    """Parses ``--groups a,b``.

    Raises:
        ConfigError: empty, malformed, or a group twice.
    """
    groups = tuple(filter(None, (name.strip() for name in text.split(","))))
    if not groups or len(set(groups)) != len(groups):
        raise ConfigError(f"malformed groups {text!r}", "--groups", "name each group once, separated by commas")
    for name in groups:
        check_group_name(name)
    return groups


def security_options(command: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Adds the options of secured clusters, and refuses them as long as they do not work."""

    @wraps(command)
    def checked(*args: Any, **options: Any) -> Outcome:
        for name in _SECURITY_OPTIONS:
            if options.pop(name[2:].replace("-", "_")) is not None:
                raise not_available(name)
        return command(*args, **options)

    for name in _SECURITY_OPTIONS:
        checked = click.option(name, metavar="FILE", hidden=True)(checked)
    return checked


def connection_options(command: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Adds the options of secured and of foreign clusters, for a job that reads our own servers only."""

    @wraps(command)
    def checked(*args: Any, protocol: str, **options: Any) -> Outcome:
        if protocol != "dledger":
            remedy = "give this job the stores of the Java nodes, or read the live group with ingest.py"
            raise ConfigError(f"this job does not read live servers of {protocol}", "--protocol", remedy)
        return command(*args, **options)

    return security_options(click.option("--protocol", type=PROTOCOLS, default="dledger", hidden=True)(checked))


def dry_run_option(command: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Adds ``--dry-run``."""
    return click.option("--dry-run", is_flag=True, help="Check the options and what would be read; write nothing.")(
        command
    )


def verbose_option(command: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Adds ``--verbose``."""
    return click.option("--verbose", is_flag=True, help="Show Spark's own log too, with its stack traces.")(command)


def run_job(command: click.Command, arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs a job's command, prints its JSON summary as the last line of stdout and exits."""
    began = time.monotonic()
    write_whole()
    outcome = _run(command, arguments)
    if outcome.summary:
        summary = {"status": "ok" if outcome.exit_code == EXIT_OK else "not ok", **outcome.summary}
        summary.setdefault("duration_s", round(time.monotonic() - began, 3))
        sys.stderr.flush()
        print(json.dumps(summary), flush=True)
    sys.exit(outcome.exit_code)


def _run(command: click.Command, arguments: Sequence[str] | None) -> Outcome:
    try:
        with _signals(_raise_stopped), lost_signals_return(StoppedError, KeyboardInterrupt):
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
        return _unexpected(error)


def _unexpected(error: Exception) -> Outcome:
    """Spark wraps what a task raised in its own long text: an error of ours in there is the one to report."""
    failure = find_failure(error)
    if failure.name is not None:
        return _failed(failure.name, failure.text, failure.exit_code)
    if failure.of_spark:
        return _failed("SPARK_FAILED", f"[SPARK_FAILED] {failure.text}; {MORE_FROM_SPARK}", failure.exit_code)
    traceback.print_exception(error)
    return _failed("INTERNAL", f"{type(error).__name__}: {failure.text}", EXIT_USAGE)


def _failed(name: str, text: str, exit_code: int) -> Outcome:
    text = " ".join(text.split())  # a data loss has three lines
    click.echo(f"error: {text}", err=True)
    return Outcome({"status": "error", "error": name, "message": text}, exit_code)


_Handler = Callable[[int, FrameType | None], Any]


@contextmanager
def _signals(handler: _Handler) -> Iterator[None]:
    """Sends SIGTERM and SIGINT to ``handler``; only the main thread may, elsewhere it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _raise_stopped(number: int, _frame: FrameType | None) -> None:
    raise StoppedError(number)


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """Inside, SIGTERM and Ctrl-C set the yielded event instead of raising ``StoppedError``."""
    stop = threading.Event()
    with _signals(lambda _number, _frame: stop.set()):
        yield stop
