"""Texts that people read, kept as files: ``make snapshots`` accepts the present ones."""

from __future__ import annotations

import os
from pathlib import Path


def check_snapshot(path: Path, text: str) -> None:
    """Compare ``text`` with the file, or write the file when ``DLEDGER_SNAPSHOTS`` is ``accept``."""
    if os.environ.get("DLEDGER_SNAPSHOTS") == "accept":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"no snapshot {path}: run make snapshots"
    assert text == path.read_text(), f"{path} differs: read it, then run make snapshots"
