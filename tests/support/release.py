"""The code of release 0.2.0, from the history: rolling upgrades are tried with it, and costs compared."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(os.environ.get("DLEDGER_CHECKOUT") or Path(__file__).resolve().parents[2])
"""The checkout, also for a copy of the code without history."""
COMMIT: Final = "80f2d4250d365bd5afed425228a7f280d77a3efc"
"""The commit of 0.2.0: a clone without its tag has it too."""


def extract_release(directory: Path) -> None:
    """Write the package as 0.2.0 has it; a process with this directory in PYTHONPATH runs it."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", COMMIT, "dledger_core", "pyproject.toml"], check=False, capture_output=True
    )
    if archive.returncode:
        message = f"the history lacks release 0.2.0: {archive.stderr.decode().strip()}"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as content:
        content.extractall(directory)
    command = [sys.executable, "-c", "import dledger_core; print(dledger_core.__file__)"]
    environment = os.environ | {"PYTHONPATH": str(directory)}
    found = subprocess.run(command, check=True, capture_output=True, env=environment, cwd=directory.parent, text=True)
    assert found.stdout.startswith(str(directory)), "the processes would run this version"
