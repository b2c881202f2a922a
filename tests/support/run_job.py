"""A job, run in this process as its command line would."""

from __future__ import annotations

import json
from typing import Any

import click
import pytest

from jobs._cli import run_job


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
