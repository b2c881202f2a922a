from __future__ import annotations

import pytest

from dledger_core.cli import Progress


def test_progress_writes_line_when_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("copying", 4 << 20, unit="bytes", every_s=0) as progress:
        progress.update(1 << 20, detail="3 files")
        progress.update(4 << 20, title="verifying")
    captured = capsys.readouterr()
    first, second = captured.err.splitlines()
    assert first.startswith("copying: 1 of 4 MiB, 3 files, 25 %")
    assert second.startswith("verifying: 4 of 4 MiB, 100 %")
    assert captured.out == ""


def test_progress_writes_nothing_before_interval(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("copying") as progress:
        progress.update(10)
    assert capsys.readouterr().err == ""
