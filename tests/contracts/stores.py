"""One small class for each kind of store that the package reads: how to make one, and which entries it has then.

The entries are those of another account than the reader's: the test's own for native stores, Java's for its stores,
those of RocketMQ's own files.
"""

from __future__ import annotations

import hashlib
import shutil
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar, NamedTuple

from dledger_core.config import StorageConfig
from dledger_core.control import pack
from dledger_core.ids import Term
from dledger_core.raft.ready import HardState
from dledger_core.server.maintenance.backup import back_up_stores
from dledger_core.server.maintenance.restore import restore
from dledger_core.storage import CommitLog
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import Layout, load_log_meta
from dledger_core.storage.files.meta_files import hard_state_file
from dledger_core.storage.tables.tables import LogTables, TableChanges
from tests.rocketmq.convert.stores import converted, manifest, store_of, unpacked
from tests.rocketmq.golden import MIXED, THREE, extract
from tests.rocketmq.golden import messages as stored_messages
from tests.support.growing_store import GrowingStore
from tests.support.logs import append, found_store

CLASSIC_END = 1 << 18


class Stored(NamedTuple):
    """An entry, with the SHA-256 of its body. Messages of a CommitLog have no index, term and magic."""

    index: int | None
    term: int | None
    magic: int | None
    body: str


class Made(NamedTuple):
    """A store with its entries; those below ``committed`` are committed, by all that the store records."""

    path: Path
    entries: list[Stored]
    committed: int


def sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


class Store:
    """A kind of store. ``make`` is called once; each test has a copy."""

    has_times: ClassVar[bool] = False
    """Whether it records append times."""
    checks_bodies: ClassVar[bool] = False
    """Whether a changed body is noticed."""

    def make(self, directory: Path) -> Made:
        raise NotImplementedError

    def make_empty(self, directory: Path) -> Path:
        """Make a store without entries."""
        raise NotImplementedError

    def delete_first(self, path: Path) -> None:
        """Delete the first data files, as retention of the store's program does."""
        raise NotImplementedError

    def growing(self, directory: Path) -> Iterator[Path]:
        """Yield a store as its program makes it grow."""
        raise NotImplementedError


class Native(Store):
    """Written by this program."""

    has_times, checks_bodies = True, True
    config: ClassVar = StorageConfig(data_segment_bytes=1 << 14, index_segment_bytes=1 << 10, preallocate_bytes=0)

    def write(self, log: CommitLog) -> list[Stored]:
        entries = []
        for number in range(60):
            term, bodies = 1 + number // 25, [b"%d/%d " % (number, at) + bytes(100 * at) for at in range(5)]
            control = pack({}) if number % 25 == 0 and self.config.profile == "B" else None
            batch = append(log, bodies, term, control=control, now_ms=1000 + number)
            at = batch.first_index
            if control is not None:
                entries.append(Stored(at, term, 2, sha256(control)))
                at += 1
            entries += [Stored(at + place, term, 1, sha256(body)) for place, body in enumerate(bodies)]
        return entries

    def make(self, directory: Path) -> Made:
        path = directory / "dledger-n0"
        found_store(path, config=self.config)
        log = CommitLog.open(path, group="g", node_id="n0", config=self.config)
        entries = self.write(log)
        log.close(log.last_index())
        return Made(path, entries, len(entries))

    def make_empty(self, directory: Path) -> Path:
        path = directory / "dledger-n0"
        found_store(path, config=self.config)
        CommitLog.open(path, group="g", node_id="n0", config=self.config).close()
        return path

    def delete_first(self, path: Path) -> None:
        log = opened(path)
        last, tables = log.last_index(), LogTables()
        for index, time_ms, body in log.control_entries(0, last + 1):
            tables.apply(index, time_ms, body)
        log.trim(last, TableChanges.complete(tables), last)
        log.close(last)

    def growing(self, directory: Path) -> Iterator[Path]:
        path = self.make(directory).path
        yield path
        for number in (1, 2, 30):
            log = opened(path)
            append(log, [b"grown"] * number, 9)
            log.close(log.last_index())
            yield path


def opened(path: Path) -> CommitLog:
    """Open a native store for writing; a restored one has no term until its node starts."""
    files, layout = OsFiles(), Layout(path)
    meta, hard_state = load_log_meta(files, layout.log_meta), hard_state_file(layout.hard_state)
    assert meta is not None
    if not hard_state.load(files).exists:
        hard_state.save(files, HardState(Term(3), None))
    return CommitLog.open(path, group=meta.group, node_id=meta.node_id)


class ProfileA(Native):
    """Written by this program in the format of Java's generation A."""

    has_times, checks_bodies = False, False
    config: ClassVar = StorageConfig(
        data_segment_bytes=1 << 14, index_segment_bytes=1 << 10, preallocate_bytes=0, profile="A"
    )


class OldLeader(Native):
    """Written by this program: the last entries were never committed."""

    def make(self, directory: Path) -> Made:
        made = super().make(directory)
        log = opened(made.path)
        first = log.last_index() + 1
        append(log, [b"ghost"] * 3, 3)
        log.close(first - 1)
        ghosts = [Stored(first + at, 3, 1, sha256(b"ghost")) for at in range(3)]
        return made._replace(entries=made.entries + ghosts)


class Restored(Native):
    """Restored from a backup."""

    def make(self, directory: Path) -> Made:
        made = super().make(directory / "before")
        back_up_stores([made.path], directory / "backup")
        (report,) = restore(directory / "backup", directory / "node")
        return made._replace(path=Path(report.store))


class Converted(Native):
    """Converted from a store of Java's generation B, which records no commit index."""

    has_times = False

    def make(self, directory: Path) -> Made:
        made = JavaB().make(directory)
        path = directory / "node" / "g" / "dledger-n0"
        converted(made.path, path)
        return made._replace(path=path, committed=0)


class Java(Store):
    """Written by Java DLedger."""

    archive: ClassVar[str]

    def make(self, directory: Path) -> Made:
        folder = unpacked(self.archive, directory)
        path, node = store_of(folder, "")
        entries = [Stored(*line) for line in manifest(folder, node)]
        return Made(path, entries, len(entries))

    def make_empty(self, directory: Path) -> Path:
        path = directory / "dledger-n0"
        (path / "data").mkdir(parents=True)
        return path

    def delete_first(self, path: Path) -> None:
        for file in sorted((path / "data").iterdir())[:2]:
            file.unlink()

    def growing(self, directory: Path) -> Iterator[Path]:
        source = self.make(directory / "complete").path
        for with_index in (True, False):
            store = GrowingStore(source, directory / f"{with_index}" / "dledger-n0", with_index=with_index)
            total = len(store.rows)
            for count in (1, 2, total // 3, total // 3, total - 1, total, total // 2):  # at last a shorter log
                store.hold(count)
                yield store.path


class JavaA(Java):
    """Written by generation A, which records a commit index."""

    archive = "dledger-0.3.1.2-single"


class JavaB(Java):
    """Written by generation B."""

    archive = "dledger-0.4.0-single"


class Broker(Java):
    """Written by RocketMQ; its entries are messages."""

    def make(self, directory: Path) -> Made:
        path = extract(THREE, "n0/dledger-n0", directory)
        bodies = stored_messages(THREE)
        entries = [Stored(*_header(path, position - 48), sha256(body)) for position, body in bodies.items()]
        return Made(path, entries, len(entries))


def _header(path: Path, position: int) -> tuple[int, int, int]:
    """Return index, term and magic of a record, by the format that Java documents."""
    files = sorted((path / "data").iterdir())
    file = next(file for file in reversed(files) if int(file.name) <= position)
    magic, _, index, term = struct.unpack_from(">iiqq", file.read_bytes(), position - int(file.name))
    return index, term, magic


class Classic(Store):
    """A CommitLog of RocketMQ without DLedger."""

    def make(self, directory: Path) -> Made:
        path = extract(MIXED, "n0/commitlog", directory)
        return Made(path, _classic(), 0)


class Mixed(Store):
    """A CommitLog of RocketMQ, and the DLedger store after it."""

    def make(self, directory: Path) -> Made:
        extract(MIXED, "n0/commitlog", directory)
        path = extract(MIXED, "n0/dledger-n0", directory)
        entries = _classic()
        after = [at for at in stored_messages(MIXED) if at >= CLASSIC_END]
        entries += [Stored(*_header(path, at - 48), sha256(stored_messages(MIXED)[at])) for at in after]
        return Made(path.parent, entries, len(after))


def _classic() -> list[Stored]:
    """Return the messages of the CommitLog, which ends where the store begins."""
    return [Stored(None, None, None, sha256(body)) for at, body in stored_messages(MIXED).items() if at < CLASSIC_END]


_KEPT = TemporaryDirectory()
"""Until the process ends."""


@cache
def _made(kind: type[Store]) -> Made:
    return kind().make(Path(_KEPT.name) / kind.__name__)


def copy_of(kind: type[Store], directory: Path) -> Made:
    """Return a copy of a store of this kind."""
    made = _made(kind)
    return made._replace(path=Path(shutil.copytree(made.path, directory / made.path.name)))
