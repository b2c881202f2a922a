"""Logs in a directory: a store, a classic CommitLog, or a broker's directory with both.

::

    store/dledger-n0/data/00000000000000000000     a node's store, native or Java's (only native stores have meta/)
    store/commitlog/00000000000000000000           a classic CommitLog, alone or before the store next to it
    data/default/dledger-n0/data/…                 a node's directory: stores of its groups, one or two levels down
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dledger_core.errors import StoreMismatchError
from dledger_core.record import is_segment_name
from dledger_core.storage.files.layout import Layout

COMMITLOG_DIRECTORY: Final = "commitlog"
"""Name of the CommitLog's directory next to a store, in a broker's directory."""
_NAMED_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class Location:
    """The logs that a directory contains.

    Attributes:
        path: the directory.
        store: the store: the directory itself, or the only one in a broker's directory.
        commitlog: the directory of a classic CommitLog: the directory itself, or the one in a broker's directory.
        stores: stores one or two levels below, if the directory is not a log itself.
    """

    path: Path
    store: Path | None = None
    commitlog: Path | None = None
    stores: tuple[Path, ...] = ()

    @property
    def is_store(self) -> bool:
        """Whether the directory itself is a store."""
        return self.store == self.path

    @property
    def is_commitlog(self) -> bool:
        """Whether the directory itself is a classic CommitLog."""
        return self.commitlog == self.path

    def check(self) -> None:
        """Check that there is a log, and one store at most.

        Raises:
            StoreMismatchError: it is not; the remedy names the stores below.
        """
        if self.store is None and self.stores:
            several = len(self.stores) > 1
            raise StoreMismatchError(
                "the directory contains several stores" if several else "the directory is not a store",
                str(self.path),
                f"use {self._named()}",
            )
        if self.store is None and self.commitlog is None:
            raise _nothing(self.path)

    def after(self, commitlog: Path | None) -> Location:
        """Return the logs to read: those here, or the store here and a CommitLog elsewhere that precedes it.

        Raises:
            StoreMismatchError: there is no log, or no store that ``commitlog`` could precede.
        """
        self.check()
        if commitlog is None:
            return self
        if not self.is_store:
            remedy = "name the store that --commitlog precedes"
            raise StoreMismatchError("not a store (it has no data/)", str(self.path), remedy)
        return replace(self, commitlog=commitlog)

    def one_store(self) -> Path:
        """Return the directory itself, which must be a store.

        Raises:
            StoreMismatchError: it is not; the remedy names the stores below.
        """
        if self.is_store:
            return self.path
        if self.stores or self.store is not None:
            raise StoreMismatchError("the directory is not a store", str(self.path), f"use {self._named()}")
        if self.commitlog is not None:
            raise StoreMismatchError(
                "the directory contains a classic CommitLog and no store",
                str(self.path),
                f"audit it with jobs/audit_replicas.py --replica NAME={self.commitlog}, or convert it: dledger convert",
            )
        raise _nothing(self.path)

    def _named(self) -> str:
        return " or ".join(map(str, self.stores[:_NAMED_MAX] or (self.store,)))


def locate(path: Path | str) -> Location:
    """Return the logs that a directory contains; reads names only.

    Raises:
        StoreMismatchError: ``path`` is not a directory.
    """
    path = Path(path)
    if not path.is_dir():
        raise StoreMismatchError("not a directory", str(path), "name a store or a CommitLog directory")
    if _is_store(path):
        return Location(path, store=path)
    if _has_segments(path):
        return Location(path, commitlog=path)
    commitlog = path / COMMITLOG_DIRECTORY
    near = [each for each in sorted(path.glob("dledger-*")) if _is_store(each)]
    below = tuple(each for pattern in ("*", "*/*") for each in sorted(path.glob(pattern)) if _is_store(each))
    return Location(
        path,
        store=near[0] if len(near) == 1 else None,
        commitlog=commitlog if _has_segments(commitlog) else None,
        stores=below,
    )


def _is_store(path: Path) -> bool:
    """Whether a directory has data files, or, where these are lost, the identity of a native store."""
    layout = Layout(path)
    return layout.data.is_dir() or layout.log_meta.is_file()


def _has_segments(path: Path) -> bool:
    return path.is_dir() and any(is_segment_name(each.name) and each.is_file() for each in path.iterdir())


def _nothing(path: Path) -> StoreMismatchError:
    return StoreMismatchError(
        "the directory contains neither a store nor a CommitLog",
        str(path),
        "name the directory that holds data/ and index/, or RocketMQ's commitlog directory",
    )
