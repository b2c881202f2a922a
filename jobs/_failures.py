"""The one line that reports an error which Spark raised.

Spark passes on as text what failed inside a task or a streaming query. An error of ours in that text is the one to
report; it keeps its code and its exit code. Otherwise Spark's own condition is reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from dledger_core import DLedgerError, NoLeaderError, RequestTimedOutError, UnreachableError

__all__ = ["Failure", "find_failure", "naming_all_nodes"]

_OURS: Final = re.compile(r"Error: \[(?P<name>[A-Z][A-Z_.]*)\] [^\n]+(?:\nCause: [^\n]*\n[^\n]*)?")
"""An error of ours as Python prints it: class, code and text; a data loss has three lines."""
_UNREACHABLE: Final = {UnreachableError.name, NoLeaderError.name, RequestTimedOutError.name}
_MORE: Final = "run it with --verbose to see Spark's own log"


@dataclass(frozen=True)
class Failure:
    """A failure as a job reports it.

    Attributes:
        name: code, as in the summary's ``error``.
        text: one line that begins with the code.
        exit_code: of the job.
        unreachable: the nodes stopped answering.
    """

    name: str
    text: str
    exit_code: int = 3
    unreachable: bool = False

    def line(self, source: Mapping[str, str], remedy: str) -> str:
        """Return the line to print; for nodes that stopped answering it names all of them and their groups."""
        return str(_all_nodes(self, source, remedy)) if self.unreachable else self.text


def find_failure(error: BaseException) -> Failure | None:
    """Return the failure behind an error that PySpark or Py4J raised; None for another error without ours in it."""
    kinds = _kinds()
    ours = [match for match in _OURS.finditer(f"{type(error).__name__}: {error}") if match["name"] in kinds]
    if ours:
        name, text = ours[-1]["name"], ours[-1][0].removeprefix("Error: ")
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
    elif isinstance(error, (PySparkException, Py4JError)):  # also: the JVM exited
        text = str(error).partition("\n")[0]
    else:
        return None
    return Failure("SPARK_FAILED", f"[SPARK_FAILED] {_one_line(text)}; {_MORE}")


@contextmanager
def naming_all_nodes(source: Mapping[str, str], remedy: str) -> Iterator[None]:
    """Turn an error about one node that does not answer into one that names all nodes and the groups.

    Args:
        source: options of the data source.
        remedy: what to do then.

    Raises:
        UnreachableError: the nodes stopped answering.
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
    """Exit codes of our errors by their codes."""
    import spark_connector.errors  # noqa: F401  (its classes are found below)

    found, pending = {DLedgerError.name: DLedgerError.exit_code}, [DLedgerError]
    while pending:
        kinds: list[Any] = pending.pop().__subclasses__()
        found |= {kind.name: kind.exit_code for kind in kinds if kind.name not in found}
        pending += kinds
    return found


def _all_nodes(failure: Failure, source: Mapping[str, str], remedy: str) -> UnreachableError:
    groups = source.get("groups", "")
    what = f"no node serves group{'s' if ',' in groups else ''} {groups} any more"
    last = failure.text.partition("] ")[2].partition("; ")[0]
    return UnreachableError(what, source.get("peers", ""), remedy, {"last": last})


def _last_line(text: str) -> str:
    """Return the last line that is not indented: of a Python traceback, its error."""
    return next((line for line in reversed(text.splitlines()) if line.strip() and not line[0].isspace()), text)


def _one_line(text: str) -> str:
    return " ".join(text.split())
