"""``jobs/ingest.py`` as a separate process, which streams the log into a Delta table."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from dledger_core import DLedgerError

__all__ = ["IngestProcess"]

_INGEST: Final = Path(__file__).resolve().parents[1] / "ingest.py"
_STOP_S: Final = 180.0
"""Includes the time for the running micro-batch."""
_LINES_SHOWN: Final = 15


class IngestProcess:
    """A running ingest; a context manager that ends it.

    Args:
        arguments: its command line.
        table: the Delta table that they name.
        log_path: file for its stderr.
    """

    def __init__(self, arguments: list[str], table: Path, log_path: Path) -> None:
        self._table = table
        self._log_path = log_path
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(_INGEST), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches the demo alone, which then stops it
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=_STOP_S)
        with contextlib.suppress(ProcessLookupError):  # the session contains its JVM too
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def wait_for_rows(self) -> None:
        """Wait until the table has its first rows.

        Raises:
            DLedgerError: the process ended before.
        """
        while not any(self._table.glob("_delta_log/*.json")):
            if self._process.poll() is not None:
                raise self._failed()
            time.sleep(0.1)

    def stop(self) -> dict[str, Any]:
        """Stop it with SIGTERM and return its summary.

        Raises:
            DLedgerError: it failed, or did not stop in time.
        """
        self._process.terminate()
        try:
            out, _ = self._process.communicate(timeout=_STOP_S)
            summary: dict[str, Any] = json.loads(out.splitlines()[-1])
        except (subprocess.TimeoutExpired, IndexError, ValueError):
            raise self._failed() from None
        if summary.get("status") != "stopped":
            raise self._failed()
        return summary

    def _failed(self) -> DLedgerError:
        last = self._log_path.read_text(errors="replace").splitlines()[-_LINES_SHOWN:]
        code = self._process.poll()
        what = (
            f"the ingest did not stop within {_STOP_S:g} s"
            if code is None
            else f"the ingest ended with exit code {code}"
        )
        return DLedgerError(f"{what}: {' | '.join(last)}", "", "run the demo with --keep and read ingest.log there")
