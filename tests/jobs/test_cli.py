"""What all jobs share: one JSON line at the end, exit codes, signals."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import click
import pytest

from dledger_core.errors import ConfigError, CorruptRecordError, NoLeaderError
from jobs._cli import Outcome, StoppedError, connection_options, parse_groups, progress, run_job, stop_requests


def run(
    capsys: pytest.CaptureFixture[str], body: Callable[[], Any], *arguments: str
) -> tuple[int, dict[str, Any], str]:
    @click.command()
    @connection_options
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
        (NoLeaderError("nobody"), 3, NoLeaderError.name),
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
def test_failures(error: BaseException, code: int, name: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    found, summary, err = run(capsys, fail(error))
    assert found == code
    assert summary.get("error") == name
    assert summary["status"] == ("stopped" if code == 2 else "error")
    assert code == 2 or err.startswith(("error: ", "Traceback"))


def test_a_summary_is_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> Outcome:
        progress("working")
        click.echo("table")
        return Outcome({"rows": 3}, 1)

    code, summary, err = run(capsys, body)
    assert (code, summary["rows"], summary["status"]) == (1, 3, "not ok")
    assert summary["duration_s"] >= 0
    assert err == "working\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_cleanly(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    closed = []

    def body() -> None:
        try:
            os.kill(os.getpid(), number)
            signal.pause()
        finally:
            closed.append(True)

    before = signal.getsignal(number)
    code, summary, _ = run(capsys, body)
    assert (code, summary["status"], closed) == (2, "stopped", [True])
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_python_dropped_comes_again(
    number: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone: ...

    dropped: list[object] = []

    def look(what: Any) -> None:
        dropped.append(what.exc_type)

    def body() -> None:
        gone = Gone()
        watched = weakref.ref(gone, lambda _: os.kill(os.getpid(), number))  # what its handler raises is dropped
        del gone
        threading.Event().wait(30)
        pytest.fail(f"the signal was lost with {watched}")

    monkeypatch.setattr(sys, "unraisablehook", look)
    code, summary, _ = run(capsys, body)
    assert (code, summary["status"]) == (2, "stopped")
    assert dropped == [StoppedError]
    assert sys.unraisablehook is look


def test_a_stream_is_asked_to_stop(capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> Outcome:
        with stop_requests() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            return Outcome({"asked": stop.wait(10)})

    code, summary, _ = run(capsys, body)
    assert (code, summary["asked"]) == (0, True)


@pytest.mark.parametrize("arguments", [("--tls-ca", "x"), ("--token-file", "x")])
def test_options_that_do_not_work_yet_are_refused(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, summary, _ = run(capsys, fail(AssertionError()), *arguments)
    assert code == 3
    assert "is not available yet" in summary["message"]


def test_a_job_that_reads_our_servers_only_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    code, summary, _ = run(capsys, fail(AssertionError()), "--protocol", "dledger-java")
    assert code == 3
    assert "does not read live servers of dledger-java at --protocol; give this job the stores" in summary["message"]


def test_groups() -> None:
    assert parse_groups("a, b") == ("a", "b")
    for wrong in ("", ",", "a,a", "a/b"):
        with pytest.raises(ConfigError):
            parse_groups(wrong)
