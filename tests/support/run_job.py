"""A job, run as its command line would: in this process, or in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from jobs._cli import run_job
from tests.support.soon import soon

JOBS = Path(__file__).resolve().parents[2] / "jobs"


def start_job(job: str, arguments: list[str], directory: Path, **environment: str) -> subprocess.Popen[str]:
    """Start a job as a process in a working directory."""
    return subprocess.Popen(
        [sys.executable, str(JOBS / f"{job}.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=directory,
        env={**os.environ, "SPARK_MASTER": "local[1]", **environment},
    )


def wait_for(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    """Wait for an effect of a running job."""

    def is_there() -> bool:
        assert process.poll() is None
        return condition()

    soon(is_there, 400, every_s=0.2)


def run_in_process(
    command: click.Command, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, dict[str, Any], str]:
    """Returns exit code, summary and stderr."""
    with pytest.raises(SystemExit) as ended:
        run_job(command, arguments)
    out, err = capsys.readouterr()
    code = ended.value.code
    assert isinstance(code, int)
    return code, json.loads(out.strip().splitlines()[-1]), err
