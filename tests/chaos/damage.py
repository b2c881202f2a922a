"""Damage to a store at rest, of the kinds that the log promises to detect, with the means to undo it.

All of it lies where the checkpoint vouches for the data (and where a start looks): behind that, a bad record is the
torn tail of a crash. A copy of the whole store from an earlier time is not among them: nothing in it is wrong, so no
node can tell by itself. What can be told is an old copy of the data under a checkpoint that vouches for more.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dledger_core import open_store
from dledger_core.record import HEADER_BYTES
from dledger_core.storage.files.checkpoint import load_checkpoint
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.log_info import load_log_meta

PAGE_BYTES: Final = 4096
ENTRIES_MIN: Final = 50
"""A shorter log is not worth damaging."""

# Where the fields begin that no record can have wrong without notice: magic, size, index, position, crc, length.
_PROTECTED: Final = (*range(16), *range(24, 32), *range(40, 48))


@dataclass(frozen=True, slots=True)
class Spot:
    """What was damaged."""

    path: Path
    offset: int
    what: str


class Damage:
    """Damages one store and can undo it.

    Args:
        store: the store's directory; no process has it open.
        backup: a folder, not there yet, for the undamaged files.
        chance: decides where.
    """

    def __init__(self, store: Path, backup: Path, chance: random.Random) -> None:
        self.store = store
        self.backup = backup
        self.chance = chance
        self._saved: list[Path] = []
        checkpoint = load_checkpoint(OsFiles(), store / "meta" / "checkpoint")
        meta = load_log_meta(OsFiles(), store / "meta" / "log.json")
        self.durable_index = checkpoint.durable_index if checkpoint is not None else -1
        self.durable_end = checkpoint.position if checkpoint is not None else 0
        self.segment_bytes = meta.data_segment_bytes if meta is not None else 0

    @property
    def worthwhile(self) -> bool:
        """Whether enough of the log is vouched for."""
        return self.durable_index >= ENTRIES_MIN

    def undo(self) -> None:
        """Puts the undamaged files back."""
        for path in self._saved:
            kept = self.backup / path.relative_to(self.store)
            if path.is_dir():
                shutil.rmtree(path)
                shutil.copytree(kept, path)
            else:
                shutil.copy2(kept, path)
        self.forget()

    def forget(self) -> None:
        """Removes the undamaged files."""
        shutil.rmtree(self.backup)

    def _save(self, path: Path) -> None:
        kept = self.backup / path.relative_to(self.store)
        kept.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, kept)
        else:
            shutil.copy2(path, kept)
        self._saved.append(path)

    # --- kinds --------------------------------------------------------------------------------------------------------

    def flip(self) -> Spot:
        """Changes one bit of a record."""
        position, size = self._record()
        places = [*_PROTECTED, *range(HEADER_BYTES, size)]
        at = position + self.chance.choice(places if self.chance.random() < 0.5 else _PROTECTED)
        path, offset = self._file_of(at)
        self._save(path)
        with path.open("r+b") as file:
            file.seek(offset)
            before = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([before ^ 1 << self.chance.randrange(8)]))
        return Spot(path, offset, f"bit flip {at - position} bytes into a record")

    def truncate(self) -> Spot:
        """Cuts a data file short, in the middle of what is vouched for."""
        position, size = self._record()
        path, offset = self._file_of(position + self.chance.randrange(size))
        self._save(path)
        with path.open("r+b") as file:
            file.truncate(offset)
        return Spot(path, offset, "truncation")

    def misdirect(self) -> Spot:
        """Writes one page over another, as a disk does that writes to the wrong place."""
        while True:
            source, target = (self.chance.randrange(self.durable_end // PAGE_BYTES) * PAGE_BYTES for _ in range(2))
            (source_path, source_offset), (path, offset) = self._file_of(source), self._file_of(target)
            page, before = (_read(*place, PAGE_BYTES) for place in ((source_path, source_offset), (path, offset)))
            if page != before and target + PAGE_BYTES <= self.durable_end and any(before):
                break
        self._save(path)
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(page)
        return Spot(path, offset, f"page of position {source} written to {target}")

    def flip_index(self) -> Spot:
        """Changes one bit of where a row of an index file says that its record lies.

        Not of the term or the magic: of these the row is a witness, and a node lets its peers decide.
        """
        index = self.chance.randrange(self.durable_index)
        rows = sorted((self.store / "index").iterdir())
        base = max(int(path.name) for path in rows if int(path.name) <= index * 32)
        path, offset = self.store / "index" / f"{base:020d}", index * 32 - base + self.chance.randrange(4, 24)
        self._save(path)
        with path.open("r+b") as file:
            file.seek(offset)
            before = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([before ^ 1 << self.chance.randrange(8)]))
        return Spot(path, offset, f"bit flip in the index row of {index}")

    def stale(self, old: Path) -> Spot:
        """Puts an old copy of data and index in the place of the present ones; ``meta/`` stays."""
        for name in ("data", "index"):
            self._save(self.store / name)
            shutil.rmtree(self.store / name)
            shutil.copytree(old / name, self.store / name)
        return Spot(self.store / "data", 0, "data and index of an earlier time")

    # --- places -------------------------------------------------------------------------------------------------------

    def _record(self) -> tuple[int, int]:
        """Returns position and size of some record that is vouched for."""
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


Apply = Callable[[Damage], Spot]
KINDS: Final[dict[str, Apply]] = {
    "flip": Damage.flip,
    "truncate": Damage.truncate,
    "misdirect": Damage.misdirect,
    "flip-index": Damage.flip_index,
}
