"""One line is found in the long texts that Spark makes of an error."""

from __future__ import annotations

import pytest

from dledger_core.errors import CorruptRecordError, DLedgerError, NoLeaderError, UnreachableError
from jobs._failures import find_failure, naming_all_nodes

WRAPPED = """[TASK_WRITE_FAILED] Task failed while writing rows to file:/tmp/t. SQLSTATE: 58030
\tat org.apache.spark.sql.delta.files.DeltaFileFormatWriter$.executeTask(DeltaFileFormatWriter.scala:471)
Caused by: org.apache.spark.api.python.PythonException: [PYTHON_EXCEPTION] An exception was thrown: Traceback (most …):
  File "connector.py", line 57, in read_partition
    for chunk in chunks:
{error}
 SQLSTATE: 38000
\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:665)
\t... 12 more
"""
SOURCE = {"groups": "a,b", "peers": "n0-h:1;n1-h:2"}


class CapturedError(Exception):
    """PySpark's errors keep Java's stack trace apart from their text."""

    def __init__(self, text: str) -> None:
        super().__init__("[STREAM_FAILED] Query [id = 1] terminated with exception SQLSTATE: XXKST")
        self._stackTrace = text


def wrapped(error: Exception) -> str:
    kind = type(error)
    return WRAPPED.format(error=f"{kind.__module__}.{kind.__qualname__}: {error}")


@pytest.mark.parametrize(
    "error",
    [
        CorruptRecordError("damaged", "file", "restore it", {"position": 5}),
        DLedgerError("odd"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("carrier", [RuntimeError, CapturedError])
def test_an_error_of_ours_is_found_however_deep(error: DLedgerError, carrier: type[Exception]) -> None:
    failure = find_failure(carrier(wrapped(error)))
    assert (failure.name, failure.text, failure.exit_code) == (error.name, str(error), error.exit_code)
    assert failure.of_spark == (carrier is CapturedError)
    assert failure.line(SOURCE, "wait") == str(error)


def test_a_data_loss_keeps_its_three_lines_as_one() -> None:
    text = "spark_connector.errors.LogRecreatedError: [DLEDGER_DATA_LOSS.X] gone\nCause: new log\nTo go on, stop"
    failure = find_failure(RuntimeError(f"Traceback\n{text}\n\tat java.Thread"))
    assert failure.text == "[DLEDGER_DATA_LOSS.X] gone Cause: new log To go on, stop"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (WRAPPED.format(error="ValueError: bad column"), "ValueError: bad column"),
        (
            "x.A: outer\n\tat a.b(C.java:1)\nCaused by: java.io.IOException: No space left\n\tat d.e(F.java:2)",
            "IOException: No space left",
        ),
        ("Caused by: java.lang.NullPointerException\n\tat a.b(C.java:1)", "[STREAM_FAILED] Query [id = 1] terminated"),
    ],
)
def test_otherwise_the_innermost_cause_with_a_text(text: str, found: str) -> None:
    failure = find_failure(CapturedError(text))
    assert failure.name is None
    assert failure.text.startswith(found)
    assert "\n" not in failure.text
    assert "SQLSTATE" not in failure.text


@pytest.mark.parametrize("error", [UnreachableError("refused", "h:2", "start it"), NoLeaderError("nobody")], ids=repr)
def test_silent_nodes_are_all_named(error: DLedgerError) -> None:
    with pytest.raises(UnreachableError) as caught, naming_all_nodes(SOURCE, "start them"):
        raise CapturedError(wrapped(error))
    line = str(caught.value)
    assert line == find_failure(CapturedError(wrapped(error))).line(SOURCE, "start them")
    assert line.startswith("[UNREACHABLE] no node serves groups a,b any more at n0-h:1;n1-h:2 (last=")
    assert error.what in line
    assert line.endswith("; start them")


def test_other_errors_pass_unchanged() -> None:
    error = CapturedError(wrapped(CorruptRecordError("damaged")))
    with pytest.raises(CapturedError) as caught, naming_all_nodes(SOURCE, "start them"):
        raise error
    assert caught.value is error
