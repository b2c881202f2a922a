"""The record of soak runs: one line of ``SOAK.jsonl`` per run, void once the code that it judged has changed."""

from __future__ import annotations

import hashlib
import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
JUDGED = ("dledger_core/raft", "dledger_core/storage", "dledger_core/server")
"""A change in one of these voids every older line, unless a record names others."""


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


class SoakRecord:
    """The lines of one file; ``code`` identifies the committed code that a new line is about."""

    def __init__(self, path: Path, code: str | None = None, judged: tuple[str, ...] = JUDGED) -> None:
        self.path = path
        self.code = (
            code or hashlib.sha256(git("rev-parse", *(f"HEAD:{part}" for part in judged)).encode()).hexdigest()[:16]
        )

    def rows(self) -> list[dict[str, Any]]:
        """Return the lines about the present code, oldest first."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [row for row in map(json.loads, lines) if row["code"] == self.code]

    def add(self, **values: Any) -> None:
        """Append a line."""
        row = {
            "commit": git("rev-parse", "--short=12", "HEAD"),
            "code": self.code,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row | values) + "\n")

    def uncommitted(self) -> str:
        """Return the uncommitted changes of the package and of the tests except the record, as ``git status`` does."""
        runs = ("tests/sim", "tests/chaos", "tests/support", "benchmarks/endurance")
        return git("status", "--porcelain", "--", "dledger_core", *runs, ":!*/SOAK.jsonl")
