"""The second checker of a history: Porcupine, in Go, which shares no code with the one in Python.

``.ci/porcupine`` builds it; ``porcupine/main.go`` has the model of the log.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

from tests.support.soak_record import ROOT

PROGRAM: Final = ROOT / ".venv" / "porcupine" / "porcupine"
LIMIT_S: Final = 400


def linearizable(history: Path) -> tuple[bool, str]:
    """Check a history file; return whether it is linearizable, and the program's words."""
    found = subprocess.run([PROGRAM, history], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if found.returncode not in {0, 1}:
        raise RuntimeError(f"{PROGRAM} exited with code {found.returncode}: {found.stderr}")
    return found.returncode == 0, found.stdout.strip()
