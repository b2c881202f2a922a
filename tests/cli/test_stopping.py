"""SIGTERM and Ctrl-C end a command, and work that polls sees them as a request."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dledger_core.cli import stop_requests
from dledger_core.cluster import free_ports

NUMBERS = [signal.SIGTERM, signal.SIGINT]


@pytest.mark.parametrize("number", NUMBERS)
def test_stop_request_sets_event_and_restores_handlers(number: signal.Signals) -> None:
    before = {each: signal.getsignal(each) for each in NUMBERS}
    with stop_requests() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        assert stop.is_set()
    assert {each: signal.getsignal(each) for each in NUMBERS} == before


def test_stop_requests_leave_signals_alone_outside_main_thread() -> None:
    before, inside = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with stop_requests():
            inside.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [before]


@pytest.mark.integration
@pytest.mark.parametrize("number", NUMBERS)
def test_reading_command_exits_130_on_signal(tmp_path: Path, number: signal.Signals) -> None:
    """The command waits for a node that does not answer."""
    peers = f"n0-127.0.0.1:{free_ports(1)[0]}"
    command = [sys.executable, "-m", "dledger_core.cli", "tail", "--peers", peers, "--timeout", "60"]
    command += ["--protocol", "dledger-java"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "waiting" in process.stderr.readline()
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err.strip()) == (130, "", "")
