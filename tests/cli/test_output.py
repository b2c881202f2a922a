"""Results on stdout, progress on stderr, signals, and a stdout that does not accept all output."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dledger_core.cli import Progress, show_result, show_rows, stop_requests
from tests.cli.command import DLEDGER
from tests.rocketmq.convert.stores import store_of, unpacked

SIGNALS = [signal.SIGTERM, signal.SIGINT]
DISK_BYTES = 20_000


def test_piped_table_is_not_truncated(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows([{"path": "/a" * 200, "count": 1234567, "last_index": 1234567, "ok": True, "none": None}], "table")
    out = capsys.readouterr().out
    for part in ("/a" * 200, "1,234,567", " 1234567", "yes", "-", "last index"):
        assert part in out


def test_result_is_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    show_result({"entries_per_s": 1000, "text": "[bold]as it is[/bold]"}, "table", "title")
    out = capsys.readouterr().out
    assert "1,000" in out
    assert "[bold]as it is[/bold]" in out
    show_result({"a": 1}, "json")
    assert json.loads(capsys.readouterr().out) == {"a": 1}


def test_progress_writes_lines_without_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("copying", 4 << 20, unit="bytes", every_s=0) as progress:
        progress.update(1 << 20, detail="3 files")
        progress.update(4 << 20, title="verifying")
    with Progress("waiting") as progress:
        progress.update(10)  # before the interval is over
    out, err = capsys.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert first.startswith("copying: 1 of 4 MiB, 3 files, 25 %")
    assert second.startswith("verifying: 4 of 4 MiB, 100 %")


@pytest.mark.parametrize("number", SIGNALS)
def test_stop_request_sets_event_and_restores_handlers(number: signal.Signals) -> None:
    before = {each: signal.getsignal(each) for each in SIGNALS}
    with stop_requests() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        assert stop.is_set()
    assert {each: signal.getsignal(each) for each in SIGNALS} == before


def test_stop_requests_leave_signals_unchanged_outside_main_thread() -> None:
    before, inside = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with stop_requests():
            inside.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [before]


@pytest.mark.integration
@pytest.mark.parametrize("number", SIGNALS)
def test_reading_command_exits_130_on_signal(number: signal.Signals) -> None:
    """The command waits for a node that accepts its connection and does not respond."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        options = ["--peers", f"n0-127.0.0.1:{silent.getsockname()[1]}", "--timeout", "60"]
        command = [*DLEDGER, "tail", *options, "--protocol", "dledger-java"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            assert process.stderr.readline()
            accepted, _ = silent.accept()
            with accepted:
                process.send_signal(number)
                out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err.strip()) == (130, "", "")


def _limit_file_size() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (DISK_BYTES, DISK_BYTES))


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("form", ["json", "hex", "table", "raw"])
def test_full_disk_under_stdout_is_an_error(tmp_path: Path, form: str, unbuffered: str) -> None:
    """Without a buffer Python's text layer ignores a partial write: half of the output was lost with exit code 0."""
    store, _ = store_of(unpacked("dledger-0.3.1.2-three", tmp_path), "n0")
    command = [*DLEDGER, "dump", str(store), "--format", form]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    out, err = tmp_path / "out", subprocess.PIPE
    with out.open("wb") as file:
        done = subprocess.run(
            command, stdout=file, stderr=err, text=True, check=False, env=environment, preexec_fn=_limit_file_size
        )
    assert out.stat().st_size == DISK_BYTES
    assert (done.returncode, os.strerror(errno.EFBIG) in done.stderr) == (3, True), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_each_line_is_written_at_once_without_buffer(unbuffered: str) -> None:
    code = "import sys; from dledger_core.cli import emit; emit('x'); sys.stdin.read()"
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, env=environment, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdin is not None
        assert process.stdout is not None
        if unbuffered:
            assert process.stdout.readline() == "x\n"
        process.stdin.close()
        assert process.stdout.read() == ("" if unbuffered else "x\n")


def test_table_wider_than_the_terminal_shows_every_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"node_id": "n0", "address": "127.0.0.1:40911", "role": "unreachable"}
    row |= dict.fromkeys(
        ("first_index", "last_index", "commit_index", "visible_end", "data_bytes", "reachable"), 123456
    )
    for name, value in {"COLUMNS": "80", "TTY_COMPATIBLE": "1", "NO_COLOR": "1", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    show_rows([row] * 3, "table", "nodes")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1].split() == ["n0", "127.0.0.1:40911", "unreachable", *["123456"] * 4, *["123,456"] * 2]
    show_rows([{"store": "/data/" + "x" * 200, "what": "store"}], "table")
    folded = capsys.readouterr().out
    assert "".join(folded.split()).count("x") == 200
    assert max(map(len, folded.splitlines())) <= 80
