"""The record of long simulation runs: one line of ``CAMPAIGN.jsonl`` per run, void once the code it ran has changed."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).parent / "CAMPAIGN.jsonl"
JUDGED = ("dledger_core/raft", "dledger_core/storage", "dledger_core/server")
"""A change here voids every older line."""


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def code_version() -> str:
    """Returns what identifies the committed code of ``JUDGED``."""
    return hashlib.sha256(git("rev-parse", *(f"HEAD:{path}" for path in JUDGED)).encode()).hexdigest()[:16]


def uncommitted() -> str:
    """Returns the uncommitted changes of ``JUDGED`` and of the tests but the record, as ``git status`` shows them."""
    return git("status", "--porcelain", "--", *JUDGED, "tests/sim", "tests/support", f":!{RECORD.relative_to(ROOT)}")


def lines(path: Path = RECORD) -> list[dict[str, Any]]:
    """Returns all lines, the oldest first."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def valid_lines(version: str, path: Path = RECORD) -> list[dict[str, Any]]:
    """Returns the lines that still say something about ``version``."""
    return [line for line in lines(path) if line["code"] == version]


def append_line(line: dict[str, Any], path: Path = RECORD) -> None:
    """Adds a line."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
