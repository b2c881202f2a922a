"""The command line of all jobs: options, the summary, exit codes, signals.

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

``run_job`` prints the summary and exits: as tables if stdout is a terminal, otherwise, and with ``--format json``, as
JSON in the last line of stdout. SIGTERM and Ctrl-C raise KeyboardInterrupt until
the job starts Spark; from then on they set an event that the job polls (``run_stoppable``). Either way the
summary says ``"status": "stopped"`` with exit code 2.
"""

from __future__ import annotations

import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Final, NoReturn, Self

import click
from click.core import ParameterSource
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

import spark_connector.errors  # noqa: F401  (registers its error classes)
from dledger_core import ClientConfig, ConfigError, DLedgerError, NoLeaderError, RequestTimedOutError, UnreachableError
from dledger_core.archive import read_storage
from dledger_core.cli import (
    ACCESS_HELP,
    EXIT_FINDING,
    EXIT_INCOMPLETE,
    EXIT_OK,
    EXIT_USAGE,
    Access,
    Format,
    asked_peers,
    client_config_option,
    interrupt_on_sigterm,
    peers_option,
    variable_of,
)
from dledger_core.cli import say as progress

from ._summary import show_summary

__all__ = [
    "EXIT_FINDING",
    "EXIT_INCOMPLETE",
    "EXIT_OK",
    "Failure",
    "JobOptions",
    "NodeAccess",
    "Outcome",
    "StoppedError",
    "archive_options",
    "dry_run_option",
    "environment_access",
    "find_failure",
    "format_option",
    "naming_all_nodes",
    "node_access_options",
    "progress",
    "run_job",
    "servers_options",
    "servers_or_stores",
    "verbose_option",
]


class StoppedError(BaseException):
    """SIGTERM or Ctrl-C arrived. It is not an Exception, so that no handler treats it as a failure."""


@dataclass(frozen=True)
class Outcome:
    """The result of a job.

    Attributes:
        summary: printed; ``status`` and ``duration_s`` are added if absent.
        exit_code: one of the EXIT codes.
        notes: lines for stderr: after tables, and before JSON, which is the last line of a job.
    """

    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int = EXIT_OK
    notes: tuple[str, ...] = ()


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
            option = f" of --{str(first['loc'][0]).replace('_', '-')}" if first["loc"] else ""
            what = f"wrong value {first['input']!r}{option}: {first['msg']}"
            raise ConfigError(what, "", "correct the value, see --help") from None


class NodeAccess(JobOptions):
    """Options of a job that connects to nodes: its certificate or token, as names of files.

    Attributes:
        tls_ca: the authority of the nodes' certificates; None = plaintext.
        tls_cert: the job's certificate.
        tls_key: its key.
        token_file: the file with the job's token.
    """

    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    token_file: str | None = None

    @model_validator(mode="after")
    def _check_access(self) -> Self:
        _ = self.access
        return self

    @property
    def access(self) -> Access:
        """The options as one value; raises ConfigError if one of them lacks --tls-ca."""
        return Access.of(tls_ca=self.tls_ca, tls_cert=self.tls_cert, tls_key=self.tls_key, token_file=self.token_file)


class ArchiveAccess(NodeAccess):
    """Options of a job that reads trimmed entries from the archive.

    Attributes:
        archive: its location; ``true`` for the table that the log names; None = the archive is not read.
        archive_storage: options of ``deltalake`` for the location.
    """

    archive: str | None = None
    archive_storage: Annotated[
        dict[str, str], BeforeValidator(lambda path: read_storage(path, "--archive-storage") if path else {})
    ] = Field(default={}, repr=False)  # may have credentials

    @model_validator(mode="after")
    def _check_storage(self) -> Self:
        if self.archive is None and self.archive_storage:
            raise ConfigError("--archive-storage has no effect without --archive", "", "add --archive true")
        return self

    @property
    def archive_of_source(self) -> dict[str, str]:
        """The options of ``format("dledger")``."""
        storage = {f"archive.{name}": value for name, value in self.archive_storage.items()}
        return {} if self.archive is None else {"archive": self.archive} | storage


def environment_access() -> Access:
    """Return the access that the environment names, for notebooks: DLEDGER_TLS_CA and the others."""
    found = ClientConfig.in_effect()
    return Access(tls=found.tls, token=found.token)


def node_access_options(command: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Add the options of ``NodeAccess``, and ``--client-config``, which sets them."""
    for name, text in reversed(ACCESS_HELP.items()):
        variable = variable_of(name)
        command = click.option(f"--{name}", metavar="FILE", envvar=variable, show_envvar=True, help=text)(command)
    return client_config_option(show_envvar=True)(command)


def archive_options(*, doing: str) -> Callable[[Callable[..., Outcome]], Callable[..., Outcome]]:
    """Add the options of ``ArchiveAccess``.

    Args:
        doing: what the job does with the archive, for the help.
    """

    def add(command: Callable[..., Outcome]) -> Callable[..., Outcome]:
        text = f"{doing}: true for the table that the log names, or the location of a copy."
        storage = "JSON file with deltalake's options for the archive's location, such as credentials."
        command = click.option("--archive-storage", metavar="FILE", help=storage)(command)
        return click.option("--archive", metavar="true|LOCATION", help=text)(command)

    return add


def servers_options(*, doing: str) -> Callable[[Callable[..., Outcome]], Callable[..., Outcome]]:
    """Add ``--peers`` and ``--groups``, which a variable and the file of ``--client-config`` set as for every command.

    Args:
        doing: what the job does with the servers, for the help: ``read``.
    """

    def add(command: Callable[..., Outcome]) -> Callable[..., Outcome]:
        groups = click.option(
            "--groups",
            envvar=variable_of("group"),
            show_envvar=True,
            help=f"Logs to {doing}, separated by commas.  [default: default]",
        )
        return peers_option(required=False, asks_local=True)(groups(command))

    return add


def servers_or_stores(given: dict[str, Any], *stores: str) -> dict[str, Any]:
    """Return the options of a job that reads servers, or one of ``stores`` if that is given.

    Peers and groups of the environment or of a file do not count next to a store. Without either it asks local nodes.
    """
    if not any(given[name] for name in stores):
        return given | {"peers": asked_peers(given["peers"])}
    context = click.get_current_context()
    found = {
        name for name in ("peers", "groups") if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE
    }
    return given | dict.fromkeys(found)


def dry_run_option(command: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Add ``--dry-run``."""
    return click.option("--dry-run", is_flag=True, help="Check the options and what would be read; write nothing.")(
        command
    )


def verbose_option(command: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Add ``--verbose``."""
    return click.option("--verbose", is_flag=True, help="Show Spark's own log too, with its stack traces.")(command)


def format_option(command: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Add ``--format``, which ``run_job`` applies to the summary."""

    def choose(context: click.Context, _parameter: click.Parameter, value: Format | None) -> None:
        if isinstance(context.obj, dict):  # not where a job calls another one
            context.obj["format"] = value

    return click.option(
        "--format",
        type=click.Choice(["table", "json"]),
        expose_value=False,
        is_eager=True,
        callback=choose,
        help="Format of the summary on stdout.  [default: table in a terminal, else json]",
    )(command)


def run_job(command: click.Command, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a job's command, print its summary and exit."""
    began = time.monotonic()
    chosen = dict[str, Format | None]()
    outcome = _run(command, arguments, chosen)
    if outcome.summary:
        summary = {"status": "ok" if outcome.exit_code == EXIT_OK else "not ok", **outcome.summary}
        summary.setdefault("duration_s", round(time.monotonic() - began, 3))
        output = chosen.get("format") or ("table" if sys.stdout.isatty() else "json")
        for note in outcome.notes if output == "json" else ():
            progress(note)
        sys.stderr.flush()
        show_summary(summary, output)
        for note in outcome.notes if output == "table" else ():
            progress(note)
    sys.exit(outcome.exit_code)


def _run(command: click.Command, arguments: Sequence[str] | None, chosen: dict[str, Format | None]) -> Outcome:
    try:
        with _interrupted_by_sigterm():
            result = command.main(args=arguments, standalone_mode=False, obj=chosen)
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
    except Exception as error:  # noqa: BLE001  (Python's exit code 1 for a traceback would mean a finding)
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


_NATIVE: Final = re.compile(r"Error: \[(?P<name>[A-Z][A-Z_.]*)\] [^\n]+(?:\nCause: [^\n]*\n[^\n]*)?")
"""A DLedgerError as Python prints it: class, code and text; a data loss has three lines."""
_UNREACHABLE: Final = {UnreachableError.name, NoLeaderError.name, RequestTimedOutError.name}
_MORE: Final = "run the job with --verbose to see Spark's log"


@dataclass(frozen=True)
class Failure:
    """A failure as a job reports it.

    Attributes:
        name: code, as in ``error`` of the summary.
        text: one line that starts with the code.
        exit_code: of the job.
        unreachable: whether the nodes stopped responding.
    """

    name: str
    text: str
    exit_code: int = EXIT_USAGE
    unreachable: bool = False

    def line(self, source: Mapping[str, str], remedy: str) -> str:
        """Return the line to print; if the nodes stopped responding, it names all of them and their groups."""
        return str(_all_nodes(self, source, remedy)) if self.unreachable else self.text


def find_failure(error: BaseException) -> Failure | None:
    """Return the failure that caused an error of PySpark or Py4J; None for any other error.

    Spark passes on as text what failed in a task or a streaming query. A DLedgerError in that text is the one to
    report: it keeps its code and its exit code. Otherwise Spark's own condition is reported.
    """
    kinds = _kinds()
    found = [match for match in _NATIVE.finditer(f"{type(error).__name__}: {error}") if match["name"] in kinds]
    if found:
        name, text = found[-1]["name"], found[-1][0].removeprefix("Error: ")
        unreachable = name in _UNREACHABLE
        return Failure(UnreachableError.name if unreachable else name, _one_line(text), kinds[name], unreachable)
    try:
        from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
        from pyspark.errors import PySparkException
    except ImportError:
        return None
    if isinstance(error, Py4JJavaError):
        text = str(error.java_exception).partition("\n")[0]
    elif isinstance(error, PySparkException) and error.getCondition() is not None:
        values = (f"{key}: {_last_line(value)}" for key, value in (error.getMessageParameters() or {}).items())
        text = f"{error.getCondition()} ({', '.join(values)})"
    elif isinstance(error, (PySparkException, Py4JError)):  # the JVM may have exited
        text = str(error).partition("\n")[0]
    else:
        return None
    return Failure("SPARK_FAILED", f"[SPARK_FAILED] {_one_line(text)}; {_MORE}")


@contextmanager
def naming_all_nodes(source: Mapping[str, str], remedy: str) -> Iterator[None]:
    """Replace an error about one unreachable node by one that names all nodes and the groups.

    Args:
        source: options of the data source.
        remedy: of the new error.

    Raises:
        UnreachableError: the nodes stopped responding.
    """
    try:
        yield
    except Exception as error:
        failure = find_failure(error)
        if failure is None or not failure.unreachable or "peers" not in source:
            raise
        raise _all_nodes(failure, source, remedy) from None


@cache
def _kinds() -> dict[str, int]:
    """Return the exit code of each DLedgerError class, by its name."""
    found, pending = {DLedgerError.name: DLedgerError.exit_code}, [DLedgerError]
    while pending:
        kinds: list[Any] = pending.pop().__subclasses__()
        found |= {kind.name: kind.exit_code for kind in kinds if kind.name not in found}
        pending += kinds
    return found


def _all_nodes(failure: Failure, source: Mapping[str, str], remedy: str) -> UnreachableError:
    groups = source.get("groups", source.get("groupsPattern", ""))
    what = f"all nodes of group{'s' if ',' in groups else ''} {groups} stopped responding"
    last = failure.text.partition("] ")[2].partition("; ")[0]
    return UnreachableError(what, source.get("peers", ""), remedy, {"last": last})


def _last_line(text: str) -> str:
    """Return the last line that is not indented: of a Python traceback, its error."""
    return next((line for line in reversed(text.splitlines()) if line.strip() and not line[0].isspace()), text)


def _one_line(text: str) -> str:
    return " ".join(text.split())
