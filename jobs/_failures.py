"""Finds, in the error that Spark raised, the one line that says what happened.

Spark hands on what failed inside a task or a streaming query as text: Python's traceback, wrapped in Java exceptions,
each with its stack trace. An error of ours in there is the one to report; else Python's own, else the innermost cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from dledger_core import errors
from dledger_core.errors import DLedgerError, NoLeaderError, RequestTimedOutError, UnreachableError

__all__ = ["Failure", "find_failure", "naming_all_nodes"]

_OURS: Final = re.compile(
    r"(?:^|[\s:])(?:dledger_core|spark_connector)\.errors\.(?P<kind>\w+): "
    r"(?P<text>\[(?P<name>[A-Z][A-Z_.]*)\][^\n]+(?:\nCause: [^\n]*\n[^\n]*)?)"
)
"""An error as Python prints it: its class, then our code and text; a data loss has three lines."""

_PYTHON: Final = re.compile(r"^(?P<text>[A-Za-z_][\w.]*: [^\n]+)\n\s*SQLSTATE: 38000$", re.MULTILINE)
_CAUSE: Final = re.compile(r"^Caused by: (?P<kind>[\w.$]+)(?:: (?P<text>[^\n]+))?$", re.MULTILINE)
_STATE: Final = re.compile(r"\s*SQLSTATE: \w+\s*\Z")
_EXIT_OTHERWISE: Final = 3
_SILENCE: Final = (UnreachableError, NoLeaderError, RequestTimedOutError)


@dataclass(frozen=True)
class Failure:
    """What is reported.

    Attributes:
        name: stable code, as in the summary's ``error``; None if it is no error of ours.
        text: one line.
        exit_code: of the job.
        silent: the nodes stopped answering.
        of_spark: PySpark or Py4J raised it, so Spark's own log says more.
    """

    name: str | None
    text: str
    exit_code: int = _EXIT_OTHERWISE
    silent: bool = False
    of_spark: bool = False

    def line(self, source: Mapping[str, str], remedy: str) -> str:
        """Returns what to print: for nodes that stopped answering it names all of them and their groups."""
        return str(_silence(self, source, remedy)) if self.silent else self.text


def find_failure(error: BaseException) -> Failure:
    """Returns what is behind an error that PySpark or Py4J raised."""
    text = _long_text(error)
    java = getattr(error, "java_exception", None)
    of_spark = java is not None or hasattr(error, "_stackTrace")
    found = list(_OURS.finditer(text))
    if found:
        kind = getattr(errors, found[-1]["kind"], DLedgerError)
        silent = issubclass(kind, _SILENCE)
        name = UnreachableError.name if silent else found[-1]["name"]
        return Failure(name, _one_line(found[-1]["text"]), kind.exit_code, silent, of_spark)
    raised = list(_PYTHON.finditer(text))
    if raised:
        return Failure(None, _one_line(raised[-1]["text"]), of_spark=of_spark)
    causes = [match for match in _CAUSE.finditer(text) if match["text"]]
    if causes:
        line = f"{causes[-1]['kind'].rpartition('.')[2]}: {causes[-1]['text']}"
        return Failure(None, _one_line(line), of_spark=of_spark)
    # Py4J's own first line says only which call failed; the Java error follows.
    first = str(error if java is None else java.toString()).strip().partition("\n")[0]
    return Failure(None, _one_line(first), of_spark=of_spark)


@contextmanager
def naming_all_nodes(source: Mapping[str, str], remedy: str) -> Iterator[None]:
    """Inside, an error that says that one node does not answer becomes one that names all nodes and the groups.

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
        if not failure.silent or "peers" not in source:
            raise
        raise _silence(failure, source, remedy) from None


def _long_text(error: BaseException) -> str:
    """The error's text with Java's stack trace, which names the causes; PySpark keeps it apart from the text."""
    return f"{error}\n{getattr(error, '_stackTrace', None) or ''}"


def _silence(failure: Failure, source: Mapping[str, str], remedy: str) -> UnreachableError:
    groups = source.get("groups", "")
    what = f"no node serves group{'s' if ',' in groups else ''} {groups} any more"
    last = failure.text.partition("] ")[2].partition("; ")[0]
    return UnreachableError(what, source.get("peers", ""), remedy, {"last": last})


def _one_line(text: str) -> str:
    return _STATE.sub("", " ".join(text.split()))
