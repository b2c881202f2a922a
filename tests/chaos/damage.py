"""Damage to the store of a stopped node, of the kinds that the log guarantees to detect.

All of it is in entries that the checkpoint covers (and that a start checks): after them, a bad record is the torn tail
of a crash. A complete store of an earlier time is not among the kinds: it is consistent, so no node can detect it
alone. An old copy of the data under a newer checkpoint can be detected.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dledger_core import open_store
from dledger_core.record import HEADER_BYTES
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import load_log_meta
from dledger_core.storage.files.meta_files import load_checkpoint
from tests.support.damage import overwrite

PAGE_BYTES: Final = 4096
ENTRIES_MIN: Final = 50
"""A shorter log is not worth damaging."""

_CHECKED: Final = (*range(16), *range(24, 32), *range(40, 48))
"""The bytes of a header in which every error is detected: magic, size, index, position, crc, length."""


class Damage:
    """Damages one store, which no process has open. Each kind returns a description of the damage."""

    def __init__(self, store: Path, chance: random.Random) -> None:
        self.store = store
        self.chance = chance
        checkpoint = load_checkpoint(OsFiles(), store / "meta" / "checkpoint")
        meta = load_log_meta(OsFiles(), store / "meta" / "log.json")
        self.durable_index = checkpoint.durable_index if checkpoint is not None else -1
        self.durable_end = checkpoint.position if checkpoint is not None else 0
        self.segment_bytes = meta.data_segment_bytes if meta is not None else 0

    @property
    def worthwhile(self) -> bool:
        """Whether the checkpoint covers enough of the log."""
        return self.durable_index >= ENTRIES_MIN

    def _write(self, path: Path, offset: int, data: bytes, what: str) -> str:
        overwrite(path, offset, data)
        return f"{what}: {path}, offset {offset}"

    def _flip(self, path: Path, offset: int, what: str) -> str:
        return self._write(path, offset, bytes([_read(path, offset, 1)[0] ^ 1 << self.chance.randrange(8)]), what)

    # --- kinds --------------------------------------------------------------------------------------------------------

    def flip(self) -> str:
        """Change one bit of a record."""
        position, size = self._record()
        anywhere = self.chance.random() < 0.5
        at = self.chance.choice([*_CHECKED, *range(HEADER_BYTES, size)] if anywhere else _CHECKED)
        path, offset = self._file_of(position + at)
        return self._flip(path, offset, f"bit flip {at} bytes into a record")

    def truncate(self) -> str:
        """Truncate a data file in the middle of the entries that the checkpoint covers."""
        position, size = self._record()
        path, offset = self._file_of(position + self.chance.randrange(size))
        os.truncate(path, offset)
        return f"truncation of {path} to {offset}"

    def misdirect(self) -> str:
        """Write one page over another, as a disk does that writes to the wrong sector."""
        pages = self.durable_end // PAGE_BYTES
        while True:
            source, target = (self.chance.randrange(pages) * PAGE_BYTES for _ in range(2))
            page, before = (_read(*self._file_of(position), PAGE_BYTES) for position in (source, target))
            if page != before and target + PAGE_BYTES <= self.durable_end and any(before):
                break
        path, offset = self._file_of(target)
        return self._write(path, offset, page, f"page of position {source} written to {target}")

    def flip_index(self) -> str:
        """Change one bit of the position, size or index in a row of an index file.

        The term and the magic of a row are cross-checks of its record, so a node asks its peers about these.
        """
        index = self.chance.randrange(self.durable_index)
        base = max(int(path.name) for path in (self.store / "index").iterdir() if int(path.name) <= index * 32)
        path, offset = self.store / "index" / f"{base:020d}", index * 32 - base + self.chance.randrange(4, 24)
        return self._flip(path, offset, f"bit flip in the index row of {index}")

    def stale(self, old: Path) -> str:
        """Replace data and index by an old copy; ``meta/`` stays."""
        for name in ("data", "index"):
            shutil.rmtree(self.store / name)
            shutil.copytree(old / name, self.store / name)
        return f"data and index of an earlier time in {self.store}"

    def _record(self) -> tuple[int, int]:
        """Return position and size of some record that the checkpoint covers."""
        with open_store(self.store) as reader:
            index = self.chance.randrange(reader.first_index, self.durable_index + 1)
            row = reader.read(index, index + 1)
            return row["position"][0].as_py(), HEADER_BYTES + len(row["body"][0].as_py())

    def _file_of(self, position: int) -> tuple[Path, int]:
        base = position // self.segment_bytes * self.segment_bytes
        return self.store / "data" / f"{base:020d}", position - base


def _read(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(length)


KINDS: Final[dict[str, Callable[[Damage], str]]] = {
    "flip": Damage.flip,
    "truncate": Damage.truncate,
    "misdirect": Damage.misdirect,
    "flip-index": Damage.flip_index,
}
