"""A group that goes on behind a classic CommitLog, laid out as RocketMQ lays out a broker's upgrade to DLedger.

    DIR/GROUP/commitlog/00000000000000000000       the old files: links; the last one is a copy, closed by a BLANK
    DIR/GROUP/dledger-ID/data/00000000001073741824 the log: index 0 lies where the old files end

The old directory is only read. All nodes must go on from the same bytes, or positions would mean different messages on
each of them: a ``CommitLogFingerprint`` identifies these bytes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pyarrow as pa

from dledger_core.config import StorageConfig
from dledger_core.errors import ConfigError, CorruptRecordError, StoreMismatchError
from dledger_core.rocketmq.convert.source import check_broker_idle
from dledger_core.rocketmq.store.commit_log import (
    BLANK_MAGIC,
    CommitLogFile,
    FileStop,
    commit_log_files,
    fault_text,
    message_faults,
)
from dledger_core.rocketmq.store.commitlog_prefix import CommitLogFingerprint
from dledger_core.rocketmq.store.directory import COMMITLOG_DIRECTORY
from dledger_core.storage.files.file_system import Files, OsFiles
from dledger_core.storage.files.layout import Layout, lock_store, open_identity, refuse
from dledger_core.storage.files.log_info import LogMeta, save_log_meta

__all__ = ["OldLog", "begin_behind", "read_old_log"]

_BLANK: Final = struct.Struct(">ii")
_DIGEST_CHARS: Final = 32


@dataclass(frozen=True, slots=True)
class OldLog:
    """A CommitLog that was read from end to end and is whole.

    Attributes:
        files: by position, all of one size, without empty ones at the end.
        stop: where in the last file its messages end, relative to the file.
        closed: a BLANK lies there.
        fingerprint: of the files from the requested start on.
        stamps: of each file, as it was before it was read: inode, size and time of the last change.
    """

    files: tuple[CommitLogFile, ...]
    stop: int
    closed: bool
    fingerprint: CommitLogFingerprint
    stamps: tuple[tuple[int, int, int], ...]


def read_old_log(
    directory: Path, start: int | None = None, on_bytes: Callable[[int, int], None] | None = None
) -> OldLog:
    """Reads and checks a CommitLog whole; writes nothing.

    Args:
        directory: RocketMQ's ``commitlog`` folder; no broker may run on it.
        start: the fingerprint's first position; None = where the first file begins.
        on_bytes: called now and then with the bytes read and the bytes there are.

    Raises:
        ConfigError: no such directory, files of different sizes, nothing in them, or ``start`` begins no file.
        StoreBusyError: a broker runs there.
        CorruptRecordError: a message is damaged, or a file ends in something else than messages do.
    """
    check_broker_idle(directory.resolve().parent)
    files = commit_log_files(directory)
    if files[-1].is_unused():
        raise ConfigError("its files hold nothing", str(directory), "start without --commitlog")
    stamps = _stamps(files)
    sizes = sorted({file.size for file in files})
    if len(sizes) > 1:
        found = {"sizes": ", ".join(map(str, sizes))}
        raise ConfigError("its files differ in size", str(directory), "name a CommitLog that is whole", found)
    begins = files[0].position if start is None else start
    if begins not in {file.position for file in files}:
        held = {"start": begins, "first": files[0].position}
        raise ConfigError(f"no file begins at position {begins}", str(directory), "copy it from another node", held)
    hasher, done = hashlib.sha256(), 0
    stop = FileStop(begins, "end")
    for file in files:
        counted = file.position >= begins
        for found_here in file.scan():
            if isinstance(found_here, FileStop):
                stop = found_here
                continue
            data = _checked(found_here, file)
            done += len(data)
            if counted:
                hasher.update(data)
            if on_bytes is not None:
                on_bytes(done, len(files) * file.size)
        _check_end(stop, file, last=file is files[-1])
        if stop.kind == "blank":
            _check_blank(stop, file)
        if counted:
            hasher.update(_BLANK.pack(file.end - stop.position, BLANK_MAGIC))
    fingerprint = CommitLogFingerprint(begins, files[-1].end, hasher.hexdigest()[:_DIGEST_CHARS])
    return OldLog(files, stop.position - files[-1].position, stop.kind == "blank", fingerprint, stamps)


def begin_behind(
    old: OldLog,
    store: Path,
    *,
    group: str,
    node_id: str,
    config: StorageConfig,
    on_bytes: Callable[[int, int], None] | None = None,
    files: Files | None = None,
) -> None:
    """Lays out the old files and an empty store behind them; after a crash the same call goes on.

    Args:
        old: from ``read_old_log``.
        store: directory of the node's store, ``DIR/GROUP/dledger-ID``; the old files go beside it.
        group: the group.
        node_id: the node.
        config: of the store; data files are as large as those of the CommitLog.
        on_bytes: as in ``read_old_log``, which reads again what an interrupted call had laid out.
        files: the store's file system.

    Raises:
        StoreMismatchError: the directory holds another store, or other old files.
        ConfigError: the files can be neither linked nor copied, or have changed since they were read.
        StoreBusyError: a broker runs there now.
    """
    layout, files = Layout(store), files or OsFiles()
    if open_identity(files, layout, group=group, node_id=node_id) is not None:
        raise StoreMismatchError("the store has begun already", str(layout.root), "serve it as it is")
    target = store.parent / COMMITLOG_DIRECTORY
    _check_unchanged(old)
    try:
        if not _lay_out(old, target, store.parent / f"{COMMITLOG_DIRECTORY}-{node_id}.part", files):
            _check_laid_out(read_old_log(target, old.fingerprint.start, on_bytes), old, target)
    except OSError as error:
        refuse(error, target)
    _check_unchanged(old)  # nothing has begun yet, and what was laid out is compared by the next call
    lock = lock_store(files, layout)
    try:
        config = replace(config, data_segment_bytes=old.files[-1].size)
        meta = LogMeta(
            profile=config.profile,
            group=group,
            node_id=node_id,
            data_segment_bytes=config.data_segment_bytes,
            index_segment_bytes=config.index_segment_bytes,
            first_position=old.fingerprint.end,
            behind=str(old.fingerprint),
        )
        save_log_meta(files, layout.log_meta, meta)
    finally:
        lock.close()


def _checked(batch: pa.RecordBatch, file: CommitLogFile) -> memoryview:
    """Returns the bytes of a batch of messages, which lie one behind the other."""
    faults = message_faults(batch)
    if faults.any():
        row = int((faults != 0).argmax())
        position = batch.column("position")[row].as_py()
        raise CorruptRecordError(
            f"a message is damaged: {fault_text(faults[row])}",
            file.path,
            "audit the copies of the log, and copy the file from a node that has it whole",
            {"position": position},
        )
    return memoryview(batch.column("body").buffers()[2])


def _check_end(stop: FileStop, file: CommitLogFile, *, last: bool) -> None:
    left = file.end - stop.position
    if stop.kind == "blank" or (last and stop.kind == "end" and left >= _BLANK.size):
        return
    raise CorruptRecordError(
        "a file of the CommitLog ends in neither messages nor a BLANK",
        file.path,
        "audit the copies of the log, and copy the file from a node that has it whole",
        {"position": stop.position, "left": left},
    )


def _lay_out(old: OldLog, target: Path, part: Path, files: Files) -> bool:
    """Makes the folder of old files, durably; returns False if it is there.

    It has its name only when it is whole. Nodes that share a directory may do this at the same time.
    """
    shutil.rmtree(part, ignore_errors=True)
    if target.exists():
        return False
    files.mkdir(part)
    for file in old.files[:-1]:
        _link(Path(file.path), part, files)
    _copy(Path(old.files[-1].path), part, files)
    if not old.closed:
        _close(part / Path(old.files[-1].path).name, old, files)
    files.sync_dir(part)
    try:
        part.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(part)
        return False
    files.sync_dir(target.parent)
    return True


def _check_blank(stop: FileStop, file: CommitLogFile) -> None:
    """A BLANK tells how much of its file is left; who reads by position goes by that."""
    with Path(file.path).open("rb") as opened:
        opened.seek(stop.position - file.position)
        length = int.from_bytes(opened.read(4), "big")
    if length != file.end - stop.position:
        raise CorruptRecordError(
            "the BLANK at the end of a file has another length than what is left",
            file.path,
            "copy the file from a node that has it whole",
            {"position": stop.position, "length": length, "left": file.end - stop.position},
        )


def _stamps(files: tuple[CommitLogFile, ...]) -> tuple[tuple[int, int, int], ...]:
    found = [Path(file.path).stat() for file in files]
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in found)


def _check_unchanged(old: OldLog) -> None:
    """Nodes may have waited for one another for hours since the files were read."""
    folder = Path(old.files[0].path).parent
    check_broker_idle(folder.resolve().parent)
    try:
        now = commit_log_files(folder)
    except ConfigError:  # they do not even continue each other
        now = ()
    if now != old.files or _stamps(now) != old.stamps:
        found = "its files have changed since they were read"
        raise ConfigError(found, str(folder), "stop who writes there, start again")


def _check_laid_out(found: OldLog, old: OldLog, target: Path) -> None:
    if found.fingerprint != old.fingerprint or not found.closed:
        remedy = "name a CommitLog elsewhere and move these away, or copy them from a node that has begun"
        raise StoreMismatchError("the old files that lie here are others, or not closed", str(target), remedy)


def _link(source: Path, folder: Path, files: Files) -> None:
    """A broker never writes into a full file again, so one file can serve both directories."""
    try:
        (folder / source.name).hardlink_to(source)
    except OSError:  # another file system, or one that knows no links
        _copy(source, folder, files)


def _copy(source: Path, folder: Path, files: Files) -> None:
    shutil.copyfile(source, folder / source.name)
    with contextlib.closing(files.open(folder / source.name, write=True)) as copied:
        copied.datasync()


def _close(path: Path, old: OldLog, files: Files) -> None:
    """Writes the BLANK with which RocketMQ closes the last file before DLedger takes over."""
    with contextlib.closing(files.open(path, write=True)) as last:
        last.pwritev([_BLANK.pack(old.files[-1].size - old.stop, BLANK_MAGIC)], old.stop)
        last.datasync()
