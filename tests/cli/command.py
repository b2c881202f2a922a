"""The command in this process or in one of its own, with its exit code checked."""

from __future__ import annotations

import json
import re
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


class ErrorLine(str):
    """The line in which a command shows an error."""

    __slots__ = ()

    @property
    def code(self) -> str:
        """The error's code; empty for wrong usage."""
        found = re.match(r"error: \[([\w.]+)\] ", self)
        return "" if found is None else found[1]

    @property
    def values(self) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=([^ )]+)", self))


def last_error(stderr: str) -> ErrorLine:
    """Return the error with which a command ended, after notes and progress."""
    line = ErrorLine(stderr.strip().splitlines()[-1])
    assert line.startswith("error: ")
    return line


def error_of(*arguments: object, code: int = 3) -> ErrorLine:
    """Return the only line on stderr of a command that fails before it prints a result."""
    result = run(*arguments, code=code)
    assert (result.stdout, len(result.stderr.strip().splitlines())) == ("", 1), result.output
    return last_error(result.stderr)


def result_of(*arguments: object, code: int = 0, stdin: bytes | None = None) -> Any:
    """Return the JSON result of a command."""
    return json.loads(run(*arguments, "--format", "json", code=code, stdin=stdin).stdout)


def rows_of(*arguments: object, code: int = 0) -> list[dict[str, Any]]:
    """Return the objects of a command that prints one per line."""
    return [json.loads(line) for line in run(*arguments, "--format", "json", code=code).stdout.splitlines()]
