"""A command that is told to end does so, whatever Python makes of the signal."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dledger_core.cluster import free_ports

LOSES = """
import importlib, os, sys, time, weakref
from dledger_core.cli import root

place, number = sys.argv.pop(1), int(sys.argv.pop(1))

class Gone: ...

def lose_a_signal():
    gone = Gone()
    watched = weakref.ref(gone, lambda _: os.kill(os.getpid(), number))  # what its handler raises is dropped
    del gone

def losing(*args, **more):
    lose_a_signal()
    time.sleep(60)
    return replaced(*args, **more)

module, _, name = place.partition(":")
module = importlib.import_module(f"dledger_core.cli.{module}")
replaced = getattr(module, name)
setattr(module, name, losing)
root.main()
"""

WRAPS = """
import os, sys, time
from pydantic_core import SchemaSerializer, core_schema
from dledger_core.cli import root, serve

class Signalled:
    def __repr__(self):
        os.kill(os.getpid(), int(sys.argv[-1]))
        time.sleep(60)
        return ""

def wrapping(*_, **__):
    SchemaSerializer(core_schema.literal_schema([Signalled()]))  # it turns what the handler raises into an error

serve.read_settings = wrapping
root.main(sys.argv[1:-1])
"""


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("place", ["serve:read_settings", "serve:run", "demo:check_session"])
def test_a_signal_that_python_dropped_still_ends_the_command(
    tmp_path: Path, place: str, number: signal.Signals
) -> None:
    command = [sys.executable, "-c", LOSES, place, str(int(number))]
    if place.startswith("serve"):
        command += ["serve", "--self-id", "n0", "--dir", str(tmp_path), "--peers", f"n0-127.0.0.1:{free_ports(1)[0]}"]
    else:
        command += ["demo", "--keep", str(tmp_path / "kept")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        stdout, stderr = process.communicate(timeout=50)
    finally:
        process.kill()
        process.wait()
    assert "Exception ignored" in stderr, "the signal was not lost"
    assert (process.returncode, stdout) == (130, ""), stderr


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_pydantic_made_an_error_of_ends_the_command(tmp_path: Path, number: signal.Signals) -> None:
    options = ["serve", "--self-id", "n0", "--dir", str(tmp_path), "--peers", f"n0-127.0.0.1:{free_ports(1)[0]}"]
    command = [sys.executable, "-c", WRAPS, *options, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
