"""An error that Spark raised is one line, with the code and exit code of the DLedgerError that caused it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from dledger_core import CorruptRecordError, DLedgerError, NoLeaderError, UnreachableError
from jobs._cli import find_failure, naming_all_nodes
from spark_connector.errors import LogRecreatedError

SOURCE = {"groups": "a,b", "peers": "n0-h:1;n1-h:2"}
REMEDY = "start them"
DATA_LOSS = LogRecreatedError.of("a", "log-1", "log-2", 5, 0, 9)


def in_task(error: Exception) -> PySparkException:
    """The error as Spark passes it on from a task, with its JVM stack trace."""
    return PySparkException(
        "[TASK_WRITE_FAILED] Task failed while writing rows to file:/tmp/t. SQLSTATE: 58030\n\nJVM stacktrace:\n"
        "org.apache.spark.SparkException: [TASK_WRITE_FAILED] Task failed while writing rows. SQLSTATE: 58030\n"
        "\tat Writer$.executeTask(Writer.scala:471)\n"
        "Caused by: org.apache.spark.SparkException: [PYTHON_EXCEPTION] An exception was thrown:\n"
        'Traceback (most recent call last):\n  File "connector.py", line 57, in read\n    for chunk in chunks:\n'
        f"{type(error).__module__}.{type(error).__qualname__}: {error}\n SQLSTATE: 38000\n\t... 12 more\n"
    )


@pytest.mark.parametrize(
    "error", [CorruptRecordError("damaged", "file", "restore it", {"position": 5}), DLedgerError("odd"), DATA_LOSS]
)
def test_native_error_keeps_code_and_exit_code_in_task(error: DLedgerError) -> None:
    failure = find_failure(in_task(error))
    assert failure is not None
    assert (failure.name, failure.exit_code) == (error.name, error.exit_code)
    assert failure.text == failure.line(SOURCE, REMEDY) == " ".join(str(error).split())


def test_error_of_spark_is_its_condition_with_parameters() -> None:
    trace = 'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: bad column\n SQLSTATE: 38000'
    error = PySparkException(message="text", errorClass="STREAM_FAILED", messageParameters={"message": trace})
    failure = find_failure(error)
    assert failure is not None
    assert (failure.name, failure.exit_code) == ("SPARK_FAILED", 3)
    assert failure.text.startswith("[SPARK_FAILED] STREAM_FAILED (message: ValueError: bad column); ")


def test_error_of_neither_is_not_failure() -> None:
    assert find_failure(RuntimeError("bug in [CORRUPT] code")) is None


@pytest.mark.parametrize(
    "error", [UnreachableError("refused", "h:2", "start it"), NoLeaderError("no leader")], ids=repr
)
def test_unreachable_nodes_are_all_named(error: DLedgerError) -> None:
    with pytest.raises(UnreachableError) as caught, naming_all_nodes(SOURCE, REMEDY):
        raise in_task(error)
    failure = find_failure(in_task(error))
    assert failure is not None
    assert (failure.name, str(caught.value)) == (UnreachableError.name, failure.line(SOURCE, REMEDY))
    for part in (*SOURCE.values(), error.what, REMEDY):
        assert part in str(caught.value)


def test_naming_all_nodes_passes_on_other_errors() -> None:
    error = in_task(CorruptRecordError("damaged"))
    with pytest.raises(PySparkException) as caught, naming_all_nodes(SOURCE, REMEDY):
        raise error
    assert caught.value is error


def fail(batches: Any) -> Any:
    for _ in batches:
        raise CorruptRecordError("damaged", "file", "restore it")
    yield from ()


def write_batch(spark: Any, directory: Path) -> None:
    spark.range(3).mapInArrow(fail, "id long").write.format("delta").save(str(directory / "table"))


def write_stream(spark: Any, directory: Path) -> None:
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 3).load()
    writer = rows.select("value").mapInArrow(fail, "value long").writeStream.format("delta")
    query = writer.option("checkpointLocation", str(directory / "checkpoint")).start(str(directory / "table"))
    try:
        query.awaitTermination(300)
    finally:
        query.stop()


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas")
@pytest.mark.parametrize("write", [write_batch, write_stream])
def test_storage_error_keeps_exit_code_when_delta_write_fails(
    write: Callable[[Any, Path], None], spark: Any, tmp_path: Path
) -> None:
    with pytest.raises((PySparkException, Py4JJavaError)) as caught:
        write(spark, tmp_path)
    failure = find_failure(caught.value)
    assert failure is not None
    assert (failure.name, failure.exit_code) == (CorruptRecordError.name, 4)
    assert failure.text == str(CorruptRecordError("damaged", "file", "restore it"))


@pytest.mark.spark
def test_java_error_is_its_first_line(spark: Any, tmp_path: Path) -> None:
    with pytest.raises((PySparkException, Py4JJavaError)) as caught:
        spark.range(3).write.format("absent").save(str(tmp_path / "table"))
    failure = find_failure(caught.value)
    assert failure is not None
    assert failure.name == "SPARK_FAILED"
    assert "[DATA_SOURCE_NOT_FOUND]" in failure.text
    assert "\n" not in failure.text
