"""The command line of a job: the JSON line at the end, exit codes, signals."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from typing import Annotated, Any

import click
import pytest
from pydantic import BeforeValidator

from dledger_core import ConfigError, CorruptRecordError, NoLeaderError, parse_groups
from dledger_core.cli import stop_requests
from jobs._cli import JobOptions, Outcome, StoppedError, progress, run_job


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
        (NoLeaderError("no leader"), 3, NoLeaderError.name),
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
    assert summary["status"] == ("stopped" if code == 2 else "error")
    assert code == 2 or err.startswith(("error: ", "Traceback"))


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


def test_signal_sets_event_of_stream(capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> Outcome:
        with stop_requests() as stop:
            signal.raise_signal(signal.SIGTERM)
            return Outcome({"asked": stop.wait(10)})

    code, summary, _ = run(capsys, body)
    assert (code, summary["asked"]) == (0, True)


class _Options(JobOptions):
    count: int
    groups: Annotated[tuple[str, ...], BeforeValidator(parse_groups)] = ()


def test_wrong_option_is_config_error_in_one_line() -> None:
    assert _Options.parse({"count": 1, "groups": "a, b"}).groups == ("a", "b")
    for wrong in ({"count": "x"}, {}, {"count": 1, "other": 2}, {"count": 1, "groups": "a,a"}):
        with pytest.raises(ConfigError) as caught:
            _Options.parse(wrong)
        assert "\n" not in str(caught.value)
