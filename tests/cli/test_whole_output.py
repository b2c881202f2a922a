"""What does not fit where stdout leads is an error, whether Python buffers it or not."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rocketmq.convert.stores import store_of, unpacked

_ROOM = 20_000


def _little_room() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_ROOM, _ROOM))


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("form", ["json", "hex", "table", "%i %x\\n"])
def test_a_disk_that_is_full(tmp_path: Path, form: str, unbuffered: str) -> None:
    """Upon the bare file Python's text layer ignores a short write: half the entries were gone, and the code was 0."""
    store, _ = store_of(unpacked("dledger-0.3.1.2-three", tmp_path), "n0")
    command = [sys.executable, "-m", "dledger_core.cli", "dump", str(store), "--format", form]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    out, err = tmp_path / "out", subprocess.PIPE
    with out.open("wb") as file:
        done = subprocess.run(
            command, stdout=file, stderr=err, text=True, check=False, env=environment, preexec_fn=_little_room
        )
    assert out.stat().st_size == _ROOM
    assert (done.returncode, "File too large" in done.stderr) == (3, True), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_every_line_leaves_at_once(unbuffered: str) -> None:
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
