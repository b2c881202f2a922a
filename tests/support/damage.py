"""Damage of stored logs: bytes of a file, and one table of what happens to data files, for every kind of log.

``KINDS`` is applied to the stores of brokers, Java and nodes in directories (``contracts/test_damage_table.py``, and a
rebuild in ``jobs``), and to a native store on the simulated disk (``storage/damage.py``, where start, ``verify`` and
repair meet it).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dledger_core import open_store
from dledger_core.record import HEADER_BYTES
from dledger_core.storage.files.file_system import Files, OsFiles
from tests.support.faulty_files import FaultyFiles

MESSAGE_BODY_AT = 88
_MESSAGE = struct.pack(">i", -626843481)  # the magic number of RocketMQ, whose package the layers below do without


def overwrite(path: Path, offset: int, data: bytes) -> None:
    """Write bytes in place: a program may have the file open."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int, bits: int = 0x40) -> None:
    overwrite(path, offset, bytes([path.read_bytes()[offset] ^ bits]))


def remove(files: FaultyFiles, *paths: Path) -> None:
    """Lose files of the simulated disk, durably."""
    for names in (files.names, files.durable_names):
        for path in paths:
            names.pop(path, None)


def flip_durably(files: FaultyFiles, *paths: Path, at: int = 20) -> None:
    """Flip a bit of files of the simulated disk."""
    for path in paths:
        inode = files.names[path]
        inode.content[at] ^= 1
        inode.durable[:] = inode.content


def zero_from(files: FaultyFiles, directory: Path, position: int) -> None:
    """Zero the segments of a directory from an offset on, durably, as a disk that lost them."""
    for path, inode in files.names.items():
        if path.parent == directory:
            start = max(0, position - int(path.name))
            inode.content[start:] = bytes(len(inode.content[start:]))
            inode.pending, inode.durable = [], bytearray(inode.content)


def place_of(store: Path, index: int) -> tuple[Path, int]:
    """The data file of an entry, and the entry's offset there."""
    with open_store(store) as reader:
        position = int(reader.raw(index, index + 1, 1).headers["position"][0])
    file = max(path for path in (store / "data").iterdir() if int(path.name) <= position)
    return file, position - int(file.name)


def flip_entry(store: Path, index: int, at: int = HEADER_BYTES + 2) -> None:
    """Flip a bit of a record, by default of its body."""
    path, offset = place_of(store, index)
    flip(path, offset + at, 1)


def messages_in(content: bytes) -> list[int]:
    """The offsets of messages that have a body."""
    found, at = [], content.find(_MESSAGE)
    while at >= 0:
        if int.from_bytes(content[at + MESSAGE_BODY_AT - 8 : at + MESSAGE_BODY_AT - 4]) > 4:
            found.append(at - 4)
        at = content.find(_MESSAGE, at + 1)
    return found


@dataclass(frozen=True)
class DataFiles:
    """The data files of a log, which no process has open.

    Attributes:
        directory: where they are.
        starts: positions of records; None: those of the messages in the files.
        body_at: offset of a body in its record.
        files: the disk.
    """

    directory: Path
    starts: Sequence[int] | None = None
    body_at: int = MESSAGE_BODY_AT
    files: Files = field(default_factory=OsFiles)

    def paths(self) -> list[Path]:
        return [self.directory / name for name in self.files.listdir(self.directory) or ()]

    def content(self, path: Path) -> bytes:
        return self.files.read(path) or b""

    def middle(self) -> Path:
        """A file that is not the last one."""
        paths = self.paths()
        return paths[(len(paths) - 1) // 2]

    def middle_of(self, path: Path) -> int:
        """The offset of a record in the middle of a file."""
        content = self.content(path)
        if self.starts is None:
            found = messages_in(content)
        else:
            found = [at - int(path.name) for at in self.starts if 0 <= at - int(path.name) < len(content)]
        return found[len(found) // 2]

    def write(self, path: Path, offset: int, data: bytes) -> None:
        """Overwrite bytes, durably."""
        file = self.files.open(path, write=True)
        file.pwritev([data], offset)
        file.datasync()
        file.close()

    def zero(self, path: Path, offset: int, length: int | None = None) -> None:
        end = len(self.content(path)) if length is None else offset + length
        self.write(path, offset, bytes(end - offset))

    def remove(self, path: Path) -> None:
        self.files.unlink(path)
        self.files.sync_dir(self.directory)


def flipped_body(log: DataFiles) -> None:
    path = log.middle()
    at = log.middle_of(path) + log.body_at
    log.write(path, at, bytes([log.content(path)[at] ^ 1]))


def zeros(log: DataFiles) -> None:
    path = log.middle()
    log.zero(path, log.middle_of(path), 300)


def lost_file(log: DataFiles) -> None:
    log.remove(log.middle())


def lost_last_file(log: DataFiles) -> None:
    log.remove(log.paths()[-1])


def lost_end(log: DataFiles) -> None:
    path = log.paths()[-1]
    log.zero(path, log.middle_of(path))


def swapped(log: DataFiles) -> None:
    paths = log.paths()
    one, other = paths[-3:-1] if len(paths) > 2 else paths
    content = log.content(one), log.content(other)
    log.write(other, 0, content[0])
    log.write(one, 0, content[1])


def old_copy(log: DataFiles) -> None:
    """A full file is again as it was when it was half full."""
    path = log.middle()
    log.zero(path, log.middle_of(path))


Damage = Callable[[DataFiles], None]
KINDS: dict[str, Damage] = {
    make.__name__: make for make in (flipped_body, zeros, lost_file, lost_last_file, lost_end, swapped, old_copy)
}
