"""Logs in a directory: a store, a classic CommitLog, a broker's directory with both, or a directory above several.

::

    store/dledger-n0/data/00000000000000000000     a node's store, native or Java's (only native stores have meta/)
    store/commitlog/00000000000000000000           a classic CommitLog, alone or before the store next to it
    data/default/dledger-n0/data/…                 a node's directory: stores of its groups, up to three levels down

Names alone do not decide: a broker may keep the data files of its store in directories of any name
(``storePathDLedgerCommitLog``), and these are named like the files of a CommitLog. So the first bytes of a file count.
"""

from __future__ import annotations

import shlex
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Final

from dledger_core.errors import StoreMismatchError
from dledger_core.record import HEADER_BYTES, MAGIC_CONTROL, MAGIC_DATA, MAGIC_MEMBERSHIP, is_segment_name
from dledger_core.rocketmq.message.layout import MAGIC_V1, MAGIC_V2
from dledger_core.rocketmq.store.commit_log import BLANK_MAGIC
from dledger_core.storage.files.layout import Layout

COMMITLOG_DIRECTORY: Final = "commitlog"
"""Name of the CommitLog's directory next to a store, in a broker's directory."""
_NAMED_MAX: Final = 4
_STORE_PARTS: Final = ("data", "index")
_DEPTH: Final = 3
_SEARCHED_MAX: Final = 4096
"""Directories that are searched below one."""
_SAMPLED_FILES: Final = 8
_RECORD_HEAD: Final = struct.Struct(">iiqqq12xi")
"""Magic, size, index, term, position and length of the body."""
_MESSAGE_HEAD: Final = struct.Struct(">ii")
"""Size and magic of a message."""
_NOT_SEARCHED: Final = frozenset(
    {"batchconsumequeue", "compaction", "config", "consumequeue", "consumequeue_ext", "index", "timerlog", "timerwheel"}
)
"""Directories of a broker that contain no log; some of their files are named like those of a CommitLog."""


class Part(Enum):
    """A directory that looks like a log and cannot be read as one."""

    DATA_FILES = "data files of a DLedger store, in a directory of their own (storePathDLedgerCommitLog)"
    WITHOUT_DATA = "a DLedger store without data/: its data files are elsewhere (storePathDLedgerCommitLog) or lost"
    OTHER_DATA = "its data/ has no data files of a log"
    UNREADABLE = "it cannot be read"
    NOT_SEARCHED = f"more than {_SEARCHED_MAX:,} directories are below it, and not all were searched"
    ANOTHER = "another log, below a broker's directory"


@dataclass(frozen=True, slots=True)
class Skipped:
    """A directory that was left out.

    Attributes:
        path: the directory.
        part: the reason.
    """

    path: Path
    part: Part

    def __str__(self) -> str:
        return f"{self.path}: {self.part.value}"


@dataclass(frozen=True, slots=True)
class Location:
    """The logs that a directory contains.

    Attributes:
        path: the directory.
        store: the store: the directory itself, or the only one in a broker's or a node's directory.
        commitlog: the directory of a classic CommitLog: the directory itself, or the one in a broker's directory.
        stores: stores up to three levels below, if the directory is not a log itself; for a store's ``data/`` or
            ``index/`` that store.
        several: the logs in the directory, if there is more than one, each with its own directory.
        skipped: directories below that look like a log and are none.
    """

    path: Path
    store: Path | None = None
    commitlog: Path | None = None
    stores: tuple[Path, ...] = ()
    several: tuple[Location, ...] = ()
    skipped: tuple[Skipped, ...] = field(default=(), compare=False)

    @property
    def is_store(self) -> bool:
        """Whether the directory itself is a store."""
        return self.store == self.path

    @property
    def is_commitlog(self) -> bool:
        """Whether the directory itself is a classic CommitLog."""
        return self.commitlog == self.path

    @property
    def logs(self) -> tuple[Location, ...]:
        """All logs in the directory: none, itself, or several."""
        return self.several or ((self,) if self.store is not None or self.commitlog is not None else ())

    @property
    def broker(self) -> Path:
        """The directory around the log, in which a broker keeps its queues and its configuration."""
        log = self.store or self.commitlog
        return self.path if log is None else log.parent

    def check(self) -> None:
        """Check that there is a log, and one store at most.

        Raises:
            StoreMismatchError: it is not; the remedy names the logs below.
        """
        if self.several:
            named = " or ".join(str(each.path) for each in self.several[:_NAMED_MAX])
            raise StoreMismatchError("the directory contains several stores", str(self.path), f"use {named}")
        if self.logs:
            return
        if self.stores:
            raise StoreMismatchError("the directory is a part of a store", str(self.path), f"use {self.stores[0]}")
        raise _nothing(self.path, self.skipped)

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
        """Return the store whose entries are all that the directory contains.

        Raises:
            StoreMismatchError: there is none, there are several, or messages of a classic CommitLog precede it; the
                remedy names the stores.
        """
        self.check()
        if self.store is not None and self.commitlog is None:
            return self.store
        if self.store is None:
            raise StoreMismatchError(
                "the directory contains a classic CommitLog and no store",
                str(self.path),
                f"audit it with jobs/audit_replicas.py --replica NAME={self.commitlog}, or convert it: dledger convert",
            )
        raise StoreMismatchError(
            "the messages of a classic CommitLog precede the store and have no indexes",
            str(self.path),
            f"name {self.store} for the entries after them, or copy both into a store: dledger convert",
        )


def locate(path: Path | str) -> Location:
    """Return the logs that a directory contains; reads names, and the first bytes of files that could be a log's.

    Raises:
        StoreMismatchError: ``path`` is not a directory.
    """
    path = Path(path)
    if not path.is_dir():
        what = "not a directory" if path.exists() else "the directory does not exist"
        raise StoreMismatchError(what, str(path), "name a store or a CommitLog directory")
    if _is_store(path):
        return Location(path, store=path)
    if path.name in _STORE_PARTS and _is_store(path.parent):
        return Location(path, stores=(path.parent,))
    part = _part(path)
    if part in (Part.DATA_FILES, Part.WITHOUT_DATA):
        return Location(path, skipped=(Skipped(path, part),))
    if _has_segments(path):
        return Location(path, commitlog=path)
    return _Search(path).location()


def log_around(path: Path) -> Path | None:
    """Return the log or the broker's directory of which a directory is a part, up to two levels above it."""
    for above in path.resolve().parents[:2]:
        named = [each for each in _children(above) if each.name.startswith("dledger-") and _is_store(each)]
        if _is_store(above) or _is_commitlog(above) or _is_commitlog(above / COMMITLOG_DIRECTORY) or len(named) == 1:
            return above
    return None


class _Search:
    """A search for logs below a directory that is none."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._searched = 0
        self._skipped: list[Skipped] = []

    def location(self) -> Location:
        found = list(self._logs(self._root, _DEPTH))
        # A broker's own log is meant, not a copy that is kept in its directory.
        own = [each for each in found if self._is_own(each)]
        if own and len(own) < len(found):
            self._skipped += [Skipped(each.path, Part.ANOTHER) for each in found if each not in own]
        stores = tuple(each.store for each in found if each.store is not None)
        logs, skipped = own or found, tuple(self._skipped)
        if len(logs) == 1:
            return Location(self._root, logs[0].store, logs[0].commitlog, stores, skipped=skipped)
        return Location(self._root, stores=stores, several=tuple(logs), skipped=skipped)

    def _is_own(self, log: Location) -> bool:
        classic = log.commitlog is not None and log.commitlog == self._root / COMMITLOG_DIRECTORY
        store = log.store is not None and log.store.parent == self._root and log.store.name.startswith("dledger-")
        return classic or store

    def _logs(self, directory: Path, depth: int) -> Iterator[Location]:
        """Yield the logs in a directory, the nearest first."""
        if self._searched == _SEARCHED_MAX:
            self._skipped.append(Skipped(self._root, Part.NOT_SEARCHED))
        self._searched += 1
        if self._searched > _SEARCHED_MAX:
            return
        try:
            children = _children(directory)
        except OSError:
            self._skipped.append(Skipped(directory, Part.UNREADABLE))
            return
        stores: list[Path] = []
        classic: list[Path] = []
        others: list[Path] = []
        for child in children:
            try:
                kinds = stores if _is_store(child) else classic if _is_commitlog(child) else others
            except OSError:
                self._skipped.append(Skipped(child, Part.UNREADABLE))
                continue
            kinds.append(child)
        commitlog = directory / COMMITLOG_DIRECTORY
        if len(stores) == 1 and commitlog in classic:  # it precedes the store next to it
            yield Location(directory, stores.pop(), commitlog)
            classic.remove(commitlog)
        yield from (Location(store, store=store) for store in stores)
        for path in classic:
            yield Location(directory if path == commitlog and not stores else path, commitlog=path)
        for child in others:
            part = _part(child)
            below = list(self._logs(child, depth - 1)) if depth > 1 and part in (None, Part.OTHER_DATA) else []
            if part is not None and not below:
                self._skipped.append(Skipped(child, part))
            yield from below


def _children(path: Path) -> list[Path]:
    return [each for each in sorted(path.iterdir()) if each.name not in _NOT_SEARCHED and each.is_dir()]


def _is_store(path: Path) -> bool:
    """Whether a directory has data files, or, where these are lost, the identity of a store."""
    layout = Layout(path)
    if layout.log_meta.is_file():
        return True
    if not layout.data.is_dir():
        return False
    return _has_segments(layout.data) or _has_segments(layout.index) or _has_java_files(path)


def _has_java_files(path: Path) -> bool:
    return (path / "currterm").is_file()


def _is_commitlog(path: Path) -> bool:
    """Whether a directory below another one is a CommitLog: by its name, unless its files are others, or its files."""
    if not _has_segments(path):
        return False
    content = _content(path)
    return content == "messages" or (path.name == COMMITLOG_DIRECTORY and content is None)


def _part(path: Path) -> Part | None:
    layout = Layout(path)
    if _has_segments(path) and _content(path) == "records":
        return Part.DATA_FILES
    if layout.data.is_dir():
        return Part.OTHER_DATA
    return Part.WITHOUT_DATA if _has_segments(layout.index) and _has_java_files(path) else None


def commitlog_next_to(store: Path) -> Path | None:
    """Return the directory of the CommitLog that a broker keeps next to a store; None if there are no files of one."""
    path = store.absolute().parent / COMMITLOG_DIRECTORY
    return path if path.is_dir() and any(is_segment_name(each.name) for each in path.iterdir()) else None


def _has_segments(path: Path) -> bool:
    return path.is_dir() and any(True for _ in _segments(path))


def _segments(path: Path) -> Iterator[Path]:
    return (each for each in path.iterdir() if is_segment_name(each.name) and each.is_file())


def _content(path: Path) -> str | None:
    """Return the kind of a directory's files: ``records`` of a log, ``messages`` of a CommitLog, or None."""
    for file in sorted(_segments(path))[:_SAMPLED_FILES]:
        with file.open("rb") as opened:
            head = opened.read(HEADER_BYTES)
        if len(head) < HEADER_BYTES:
            continue
        magic, size, _, _, position, length = _RECORD_HEAD.unpack(head)
        known = (MAGIC_DATA, MAGIC_CONTROL, MAGIC_MEMBERSHIP)
        if magic in known and size == HEADER_BYTES + length and position == int(file.name):
            return "records"
        size, magic = _MESSAGE_HEAD.unpack_from(head)
        if size > 0 and magic in (MAGIC_V1, MAGIC_V2, BLANK_MAGIC):
            return "messages"
    return None


def _nothing(path: Path, skipped: tuple[Skipped, ...]) -> StoreMismatchError:
    """Return the error of a directory without a log; for parts of one store the remedy puts them together."""
    data = [each.path for each in skipped if each.part is Part.DATA_FILES]
    rest = [each.path for each in skipped if each.part is Part.WITHOUT_DATA]
    if data or rest:
        files = " ".join(f"{shlex.quote(str(each.absolute()))}/*" for each in data) or "DATA-DIRECTORIES/*"
        store = f"{shlex.quote(str(rest[0].absolute()))}/*" if len(rest) == 1 else "STORE/*"
        what = "the data files of a DLedger store are not in its data/ (storePathDLedgerCommitLog)"
        link = f"mkdir -p linked/data && ln -s {files} linked/data/ && ln -s {store} linked/ && dledger look linked"
        return StoreMismatchError(what, str(path), f"link the parts into one store: {link}")
    named = "; ".join(str(each) for each in skipped[:_NAMED_MAX])
    remedy = "name the directory that holds data/ and index/, or RocketMQ's commitlog directory"
    return StoreMismatchError(
        "the directory contains neither a store nor a CommitLog",
        str(path),
        f"{remedy}; left out: {named}" if named else remedy,
    )
