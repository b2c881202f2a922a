"""An A/B file: content of a store that outlives the loss of one of its two copies.

The copies are ``NAME`` and ``NAME.2``, maps with a CRC (``file_system.write_checked``). Both are replaced at each
write, the second one after the first, before anything leaves that depends on the content. Of two valid copies the one
of the later write counts, so a power cut between the two leaves the old content or the new one. The content is lost
only if neither copy is valid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from dledger_core.storage.files.file_system import Files, read_checked, write_checked

T = TypeVar("T")
_NUMBER: Final = "write"


def copies(path: Path) -> tuple[Path, Path]:
    """Return the paths of both copies."""
    return path, path.with_name(f"{path.name}.2")


@dataclass(frozen=True, slots=True)
class ABContent(Generic[T]):
    """Content of an A/B file.

    Attributes:
        value: that of the later valid copy; None if there is none.
        number: counts the writes.
        exists: whether there is a copy, valid or not.
        equal: whether both copies are valid and of one write.
    """

    value: T | None
    number: int
    exists: bool
    equal: bool


@dataclass(frozen=True, slots=True)
class ABFile(Generic[T]):
    """One A/B file of a store.

    Attributes:
        path: the first copy.
        parse: returns the content of a map, or None if it is not valid.
        fields: returns the map of a content.
    """

    path: Path
    parse: Callable[[dict[str, Any]], T | None]
    fields: Callable[[T], dict[str, Any]]

    def load(self, files: Files) -> ABContent[T]:
        """Read both copies."""
        exists, found = False, list[tuple[int, T]]()
        for path in copies(self.path):
            fields = read_checked(files, path)
            exists |= fields is not None
            number = (fields or {}).pop(_NUMBER, None)
            value = self.parse(fields) if fields and type(number) is int else None
            if value is not None:
                found.append((number, value))
        number, value = max(found, key=lambda each: each[0], default=(0, None))
        return ABContent(value, number, exists, equal=[each[0] for each in found] == [number, number])

    def save(self, files: Files, value: T) -> None:
        """Replace both copies, durably."""
        number = self.load(files).number + 1
        for path in copies(self.path):
            write_checked(files, path, self.fields(value) | {_NUMBER: number})

    def make_equal(self, files: Files) -> None:
        """Replace the copies by the later valid one, unless they are equal or neither is valid.

        Called before the content is used: until then a power cut between two writes has left it in one copy only.
        """
        found = self.load(files)
        if found.value is not None and not found.equal:
            self.save(files, found.value)
