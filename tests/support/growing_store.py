"""A store that grows as its writer would make it grow: a copy whose files hold only the first entries at first."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from dledger_core.record import INDEX_RECORD_BYTES
from dledger_core.storage import StoreReader, open_store


def everything(reader: StoreReader) -> list[dict[str, Any]]:
    """All entries of a store."""
    rows: list[dict[str, Any]] = []
    at = int(reader.first_index)
    while at <= reader.last_index:
        batch = reader.read(at, reader.last_index + 1)
        rows += batch.to_pylist()
        at += batch.num_rows
    return rows


class GrowingStore:
    """A copy of a store that holds only its first entries at first; ``with_index``: so does its index."""

    def __init__(self, source: Path, target: Path, *, with_index: bool) -> None:
        shutil.copytree(source, target)
        self.source, self.path, self.with_index = source, target, with_index
        with open_store(source) as reader:
            self.rows = everything(reader)

    def hold(self, count: int) -> None:
        """Lets the files hold ``count`` entries; what follows is zeros, as in a file that is filled up ahead."""
        end = self.rows[count]["position"] if count < len(self.rows) else 1 << 60
        index_end = count * INDEX_RECORD_BYTES if self.with_index else INDEX_RECORD_BYTES
        for folder, stop in (("data", end), ("index", index_end)):
            for file in sorted((self.source / folder).iterdir()):
                data, base = file.read_bytes(), int(file.name)
                keep = max(0, min(len(data), stop - base))
                _overwrite(self.path / folder / file.name, data[:keep] + bytes(len(data) - keep))
        for checkpoint in self.path.glob("checkpoint*"):  # of generation A
            last = min(count, len(self.rows)) - 1
            new = checkpoint.with_name("new checkpoint")
            new.write_text(f"committedIndex={last}\nendIndex={last}\n", encoding="utf-8")
            new.replace(checkpoint)


def _overwrite(path: Path, content: bytes) -> None:
    """Write from the first byte that differs: a writer never makes its file shorter, which a reader would see."""
    before = np.frombuffer(path.read_bytes(), np.uint8)
    differs = np.flatnonzero(before != np.frombuffer(content, np.uint8))
    if len(differs):
        with path.open("r+b") as file:
            file.seek(int(differs[0]))
            file.write(content[differs[0] :])
