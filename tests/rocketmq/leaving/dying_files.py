"""A file system on which a run ends at a given operation; a write may be done in part before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from dledger_core.storage.files.file_system import File, OsFiles


class Killed(Exception):  # noqa: N818
    """The program ends here; what it wrote stays."""


def _raise() -> NoReturn:
    raise Killed


class DyingFile:
    """An open file whose writes count as operations too; the program may be killed in the middle of one."""

    def __init__(self, file: File, files: DyingFiles) -> None:
        self._file, self._files = file, files

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._file, name)
        return self._files.counted(found) if name in ("pwritev", "truncate", "datasync") else found

    def pwritev(self, buffers: Any, offset: int) -> None:
        data = b"".join(map(bytes, buffers))

        def half() -> None:
            self._file.pwritev([data[: len(data) // 2]], offset)

        self._files.counted(self._file.pwritev, half)([data], offset)


class DyingFiles(OsFiles):
    """The real file system, until the operation with this number, which happens or not; then the program is killed.

    ``die`` ends the run: with an exception, or the process itself.
    """

    def __init__(self, at: int, *, after: bool = False, die: Callable[[], NoReturn] = _raise) -> None:
        self.left, self.after, self.operations, self.die = at, after, 0, die

    def counted(self, found: Callable[..., Any], half: Callable[[], None] | None = None) -> Callable[..., Any]:
        def count(*given: Any, **more: Any) -> Any:
            self.operations += 1
            number = self.operations
            if number == self.left and not self.after:
                if half is not None:
                    half()
                self.die()
            result = found(*given, **more)
            if number == self.left:
                self.die()
            return result

        return count

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("open", "replace", "rename", "mkdir", "unlink", "sync_dir"):
            return found
        counted = self.counted(found)
        if name != "open":
            return counted
        return lambda *given, **more: DyingFile(counted(*given, **more), self)
