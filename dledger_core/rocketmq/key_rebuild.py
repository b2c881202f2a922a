"""Rebuilds a broker's index files from its log: all keys in the order of the log, in one pass on one machine.

A unit names the previous one of its hash slot, so the files of a log are one sequence.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dledger_core.errors import IndexOutOfRangeError
from dledger_core.rocketmq.message.columns import rows_of
from dledger_core.rocketmq.message.keys import Keys, keys_of
from dledger_core.rocketmq.message.layout import PHYSICAL_OFFSET_DELTA
from dledger_core.rocketmq.message.records import locate
from dledger_core.rocketmq.store.directory import Damaged, Deleted, LogDirectory, Span
from dledger_core.rocketmq.store.key_files import KeyFiles, KeyFileSize, key_file_paths
from dledger_core.storage.files.file_system import OsFiles

if TYPE_CHECKING:
    from dledger_core.storage import Visibility

_DIRECTORY: Final = "index"
_FLUSH_KEYS: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class RebuiltKeys:
    """The written index files.

    Attributes:
        directory: the ``index`` directory.
        files: number of files.
        keys: number of keys.
        messages: number of messages that were read.
        unread: positions [start, end) of the CommitLog that are damaged: keys of messages there are missing.
    """

    directory: str
    files: int
    keys: int
    messages: int
    unread: tuple[tuple[int, int], ...]

    def summary(self) -> dict[str, Any]:
        """Return the fields of the JSON summary."""
        unread = [list(each) for each in self.unread]
        return {"directory": self.directory, "files": self.files, "keys": self.keys, "damaged_positions": unread}


def rebuild_key_files(
    log: LogDirectory,
    span: Span,
    shown: Visibility | None,
    parent: Path,
    size: KeyFileSize,
    progress: Callable[[int], None] = lambda messages: None,
) -> RebuiltKeys:
    """Write the index files of a log to ``parent``/index: to a temporary directory first, which is then renamed.

    Args:
        log: the log, opened with ``opaque``: a broker indexes a damaged message too.
        span: what to read of it.
        shown: which entries of the log's store are read; None = all.
        parent: a directory without ``index``, or with an empty one.
        size: of the files.
        progress: called with the number of messages so far.

    Raises:
        CorruptRecordError: an entry of the log's store is damaged.
        IndexOutOfRangeError: retention deleted entries before they were read.
    """
    target, partial = parent / _DIRECTORY, parent / f".{_DIRECTORY}-{uuid.uuid4().hex}"
    keys = messages = 0
    unread: list[tuple[int, int]] = []
    try:
        partial.mkdir(parents=True)
        files = KeyFiles(OsFiles(), partial, size, int(time.time() * 1000))
        waiting = 0
        for count, found in _keys(log, span, shown, unread):
            files.add(found)
            messages, keys, waiting = messages + count, keys + len(found.hashes), waiting + len(found.hashes)
            if waiting > _FLUSH_KEYS:
                files.flush()
                waiting = 0
            progress(messages)
        files.flush()
        written = len(key_file_paths(partial))
        if target.is_dir():
            target.rmdir()
        partial.rename(target)
        OsFiles().sync_dir(parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return RebuiltKeys(str(target), written, keys, messages, tuple(unread))


def _keys(
    log: LogDirectory, span: Span, shown: Visibility | None, unread: list[tuple[int, int]]
) -> Iterator[tuple[int, Keys]]:
    """Yield the keys of each batch, with its number of messages."""
    for found in log.batches(span, shown=shown):
        if isinstance(found, Deleted):
            remedy = "run the command again: it reads the files that exist"
            raise IndexOutOfRangeError(str(found), str(log.path), remedy)
        if isinstance(found, Damaged):
            if "index" in found.error.values:  # else of the CommitLog, by positions
                raise found.error
            unread.append((found.start, found.end))
            continue
        located = locate(rows_of(found.column("body")))
        positions = np.asarray(found.column("position")).astype(np.int64)
        if found.column("index").null_count == 0:
            positions = positions + PHYSICAL_OFFSET_DELTA
        yield located.count, keys_of(located, positions[located.rows])
