"""A node that is told to end while it starts does so, whatever Python makes of the signal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dledger_core.cluster import free_ports

LOSES = """
import os, signal, sys, weakref
from dledger_core.cli import root, serve

class Gone: ...

def lose_a_signal():
    gone = Gone()
    watched = weakref.ref(gone, lambda _: os.kill(os.getpid(), signal.SIGTERM))  # what its handler raises is dropped
    del gone

replaced = getattr(serve, sys.argv.pop(1))

def losing(*args):
    lose_a_signal()
    return replaced(*args)

setattr(serve, replaced.__name__, losing)
root.main()
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("before", "code", "listened"), [("read_settings", 130, False), ("run", 0, True)], ids=["importing", "starting"]
)
def test_a_signal_that_python_dropped_still_ends_the_node(
    tmp_path: Path, before: str, code: int, listened: bool
) -> None:
    command = [sys.executable, "-c", LOSES, before, "serve", "--self-id", "n0", "--dir", str(tmp_path)]
    command += ["--peers", f"n0-127.0.0.1:{free_ports(1)[0]}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        stdout, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert "Exception ignored" in stderr, "the signal was not lost"
    assert (process.returncode, "listening" in stdout) == (code, listened), stderr
