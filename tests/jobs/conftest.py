"""Jobs that run in the process of the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jobs import rebuild_consume_queue
from tests.support.run_job import run_in_process

Rebuild = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def run_rebuild(capsys: pytest.CaptureFixture[str]) -> Rebuild:
    """Runs the rebuild with options (``on_duplicate="last"``); returns its exit code and its summary."""

    def run(**options: object) -> tuple[int, dict[str, Any]]:
        given = ((f"--{name.replace('_', '-')}", value) for name, value in options.items())
        arguments = [part for name, value in given for part in ((name,) if value is True else (name, str(value)))]
        code, summary, err = run_in_process(rebuild_consume_queue.command, capsys, *arguments)
        assert "Traceback" not in err
        return code, summary

    return run
