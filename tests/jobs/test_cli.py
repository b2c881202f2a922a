"""The command line of a job: the JSON line at the end, exit codes, signals, and errors that Spark raised."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from dledger_core import ConfigError, CorruptRecordError, DLedgerError, LogRange, NoLeaderError, UnreachableError
from dledger_core.client import LogPosition, Loss, LossKind
from dledger_core.client_config import LOCAL_PEERS
from jobs._cli import (
    NodeAccess,
    Outcome,
    StoppedError,
    environment_access,
    find_failure,
    format_option,
    naming_all_nodes,
    node_access_options,
    progress,
    run_job,
    servers_options,
    servers_or_stores,
)
from spark_connector.errors import LogRecreatedError


def run(
    capsys: pytest.CaptureFixture[str], body: Callable[[], Any], *arguments: str
) -> tuple[int, dict[str, Any], str]:
    @click.command()
    def command() -> Any:
        return body()

    with pytest.raises(SystemExit) as stopped:
        run_job(command, arguments)
    out, err = capsys.readouterr()
    return int(stopped.value.code), json.loads(out.splitlines()[-1]), err


def fail(error: BaseException) -> Callable[[], Any]:
    def body() -> Any:
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "code", "name"),
    [
        (ConfigError("wrong"), 3, "CONFIG"),
        (NoLeaderError("no leader"), 2, NoLeaderError.name),
        (CorruptRecordError("damaged"), 4, CorruptRecordError.name),
        (FileNotFoundError(2, "no such file", "x"), 3, "IO"),
        (click.UsageError("what"), 3, "USAGE"),
        (RuntimeError("bug"), 3, "INTERNAL"),
        (
            RuntimeError(
                f"Traceback\n  in f\ndledger_core.errors.CorruptRecordError: {CorruptRecordError('damaged')}\n"
            ),
            4,
            CorruptRecordError.name,
        ),
        (StoppedError(), 2, None),
        (KeyboardInterrupt(), 2, None),
    ],
    ids=repr,
)
def test_error_has_exit_code_and_name(
    error: BaseException, code: int, name: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    found, summary, err = run(capsys, fail(error))
    assert found == code
    assert summary.get("error") == name
    assert summary["status"] == ("error" if name else "stopped")
    assert name is None or err.startswith(("error: ", "Traceback"))


def test_summary_is_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> Outcome:
        progress("working")
        click.echo("table")
        return Outcome({"rows": 3}, 1)

    code, summary, err = run(capsys, body)
    assert (code, summary["rows"], summary["status"]) == (1, 3, "not ok")
    assert summary["duration_s"] >= 0
    assert err == "working\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_job_and_restores_handler(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    closed = []

    def body() -> None:
        try:
            signal.raise_signal(number)
            threading.Event().wait(60)
            pytest.fail("the signal did not interrupt the job")
        finally:
            closed.append(True)

    # A plain process starts with these handlers; a Spark session of an earlier test may have replaced one.
    plain = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}[signal.Signals(number)]
    before = signal.signal(number, plain)
    try:
        code, summary, _ = run(capsys, body)
        assert (code, summary["status"], closed) == (2, "stopped", [True])
        assert signal.getsignal(number) is plain
    finally:
        signal.signal(number, before)


SUMMARY = {
    "rows": 12_345,
    "appends_per_s": 6_000,
    "checks": {"each event once": True},
    "offsets": {"a": {"from": 0, "lag": {"records": 7}}, "b": {"from": 3, "lag": {"records": 8}}},
    "findings": [{"class": "CORRUPT", "at": [1, 2]}] * 30,
    "skipped": [],
}


@pytest.mark.parametrize(
    ("terminal", "arguments", "is_json"),
    [(False, (), True), (True, (), False), (True, ("--format", "json"), True), (False, ("--format", "table"), False)],
)
def test_summary_is_shown_once_as_json_or_as_tables(
    terminal: bool,
    arguments: tuple[str, ...],
    is_json: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @click.command()
    @format_option
    def command() -> Outcome:
        return Outcome(SUMMARY, notes=("look at it",))

    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    with pytest.raises(SystemExit):
        run_job(command, arguments)
    out, err = capsys.readouterr()
    assert err.splitlines()[0 if is_json else -1] == "look at it"
    if is_json:
        [line] = out.splitlines()
        assert json.loads(line).items() >= SUMMARY.items()
        return
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    words = plain.split()
    for word in ("12,345", "6,000", "yes", "offset", "7", "8", "CORRUPT"):
        assert word in words
    assert words.count("CORRUPT") == 20
    assert "10 more rows of findings" in err
    assert not set("{}[]'") & set(plain)


def test_failure_in_terminal_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def command() -> Outcome:
        raise ConfigError("wrong", "here", "change it")

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with pytest.raises(SystemExit) as ended:
        run_job(command, ())
    out, err = capsys.readouterr()
    assert (ended.value.code, out, len(err.splitlines())) == (3, "", 1)


SOURCE = {"groups": "a,b", "peers": "n0-h:1;n1-h:2"}
REMEDY = "start them"
DATA_LOSS = LogRecreatedError.of("a", Loss(LossKind.LOG_RECREATED, LogPosition(5, "log-1"), LogRange(0, 9, 8, "log-2")))


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


@pytest.mark.parametrize(
    "error", [in_task(CorruptRecordError("damaged")), RuntimeError("bug in [CORRUPT] code")], ids=["damage", "a bug"]
)
def test_other_errors_are_passed_on(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, naming_all_nodes(SOURCE, REMEDY):
        raise error
    assert caught.value is error
    assert (find_failure(error) is None) == isinstance(error, RuntimeError)


def fail_task(batches: Any) -> Any:
    for _ in batches:
        raise CorruptRecordError("damaged", "file", "restore it")
    yield from ()


def write_batch(spark: Any, directory: Path) -> None:
    spark.range(3).mapInArrow(fail_task, "id long").write.format("delta").save(str(directory / "table"))


def write_stream(spark: Any, directory: Path) -> None:
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 3).load()
    writer = rows.select("value").mapInArrow(fail_task, "value long").writeStream.format("delta")
    query = writer.option("checkpointLocation", str(directory / "checkpoint")).start(str(directory / "table"))
    try:
        query.awaitTermination(300)
    finally:
        query.stop()


@pytest.mark.spark
@pytest.mark.parametrize("write", [write_batch, pytest.param(write_stream, marks=pytest.mark.soak)])
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


def test_job_takes_tls_and_token_from_file_of_client_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").touch(0o600)
    (tmp_path / "client.toml").write_text("peers = 'n0-h:1'\ntls-ca = 'ca.pem'\ntoken-file = 'token'\n")
    expected = {"tls.ca": str(tmp_path / "ca.pem"), "token.file": str(tmp_path / "token")}

    @click.command()
    @node_access_options
    def command(**given: Any) -> Outcome:
        return Outcome({"source": NodeAccess.parse(given).access.of_source})

    def source(*arguments: str) -> object:
        return command.main(arguments, standalone_mode=False).summary["source"]

    assert source("--client-config", str(tmp_path / "client.toml")) == expected
    assert source() == environment_access().of_source == {}
    monkeypatch.setenv("DLEDGER_CLIENT_CONFIG", str(tmp_path / "client.toml"))
    assert source() == environment_access().of_source == expected
    assert source("--tls-ca", "/other.pem")["tls.ca"] == "/other.pem"


def test_job_takes_peers_and_groups_from_variable_or_file_unless_store_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "client.toml").write_text("peers = 'n0-file:1'\ngroup = 'of-file'\n")

    @click.command()
    @servers_options(doing="read")
    @node_access_options
    @click.option("--store")
    def command(**given: Any) -> Outcome:
        found = servers_or_stores(given, "store")
        return Outcome({"found": (found["peers"], found["groups"])})

    def found(*arguments: str) -> object:
        return command.main(arguments, standalone_mode=False).summary["found"]

    config = ("--client-config", str(tmp_path / "client.toml"))
    assert found() == (LOCAL_PEERS, None)
    assert LOCAL_PEERS in capsys.readouterr().err
    assert found(*config) == ("n0-file:1", "of-file")
    monkeypatch.setenv("DLEDGER_PEERS", "n0-variable:1")
    monkeypatch.setenv("DLEDGER_GROUP", "of-variable")
    assert found(*config) == found() == ("n0-variable:1", "of-variable")
    assert found("--peers", "n0-option:1", "--groups", "a,b") == ("n0-option:1", "a,b")
    assert found("--store", "s", *config) == (None, None)
    assert found("--store", "s", "--peers", "n0-option:1") == ("n0-option:1", None)
