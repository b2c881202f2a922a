"""A bounded run of the chaos command, as users of the long one start it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.linearizability import PROGRAM
from tests.support.soak_record import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.slow]

MINUTES = 0.5
SEED = 20
STOP_S = 180


def test_short_chaos_run_keeps_every_guarantee(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.chaos", "--minutes", str(MINUTES), "--seed", str(SEED), "--out", tmp_path]
    # The command ends its nodes and its mount itself, so it is asked to stop and not killed.
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        try:
            printed, _ = run.communicate(timeout=400)
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGTERM)
            printed, _ = run.communicate(timeout=STOP_S)
    assert run.returncode == 0, printed
    assert "verdict" in printed
    assert not PROGRAM.exists() or "appends: Ok" in printed, "Porcupine checks the same history"
    assert os.listdir(tmp_path) == [], "a successful round leaves no file"
