"""The command in this process or in one of its own, with its exit code checked."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from click.testing import CliRunner, Result

from dledger_core.cli import main

DLEDGER = (sys.executable, "-m", "dledger_core.cli")


def run(*arguments: object, code: int | None = 0, stdin: bytes | None = None) -> Result:
    """Run the command in this process; ``code`` None accepts any exit code."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)
    assert code in (None, result.exit_code), result.output
    return result


def run_process(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    command = [*DLEDGER, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == code, done.stderr
    return done


def error_of(*arguments: object, code: int = 3) -> str:
    """Return the only line on stderr of a command that fails before it prints a result."""
    result = run(*arguments, code=code)
    (line,) = result.stderr.strip().splitlines()
    assert result.stdout == ""
    assert line.startswith("error: ")
    return line


def result_of(*arguments: object, code: int = 0, stdin: bytes | None = None) -> Any:
    """Return the JSON result of a command."""
    return json.loads(run(*arguments, "--format", "json", code=code, stdin=stdin).stdout)


def rows_of(*arguments: object, code: int = 0) -> list[dict[str, Any]]:
    """Return the objects of a command that prints one per line."""
    return [json.loads(line) for line in run(*arguments, "--format", "json", code=code).stdout.splitlines()]
