"""Files that take effect without a restart: certificates, keys and tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from dledger_core.errors import ConfigError

_LOG = logging.getLogger(__name__)
T = TypeVar("T")

_MISSING: Final = (0, 0, 0)


class Reloaded(Generic[T]):
    """A value made from files; made again once one of them has changed.

    Files that cannot be used are an error at first. Later the value that was made before stays, and the log reports the
    error: a certificate and its key are two files, and a node must not stop because only one of them is new yet.

    Args:
        paths: the files.
        make: makes the value; raises ConfigError.

    Attributes:
        generation: how often the value was made.
    """

    def __init__(self, paths: Sequence[Path], make: Callable[[], T]) -> None:
        self._paths = tuple(paths)
        self._make = make
        self._seen = self._stamps()
        self._value = make()
        self.generation = 1

    def get(self) -> T:
        """Return the value of the present files."""
        stamps = self._stamps()
        if stamps != self._seen:
            self._seen = stamps  # first: files that cannot be used are reported once, and not with each connection
            try:
                self._value = self._make()
                self.generation += 1
                _LOG.info("files reloaded: paths=%s", ",".join(map(str, self._paths)))
            except ConfigError as error:
                _LOG.error("files not reloaded, the earlier ones stay in use: error=%s", error)
        return self._value

    def _stamps(self) -> tuple[tuple[int, int, int], ...]:
        return tuple(map(_stamp, self._paths))


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return _MISSING
    return found.st_mtime_ns, found.st_size, found.st_ino
