"""A group that starts after a classic CommitLog, in the layout of a broker that was upgraded to DLedger.

    DIR/GROUP/commitlog/00000000000000000000       the commitlog prefix: links; the last file is a copy with a BLANK
    DIR/GROUP/dledger-ID/data/00000000001073741824 the log: index 0 is at the end of the prefix

The source directory is only read. All nodes must start after the same bytes, otherwise positions would mean different
messages on each of them: a ``CommitLogFingerprint`` identifies these bytes.
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
from dledger_core.rocketmq.message.integrity import fault_text
from dledger_core.rocketmq.store.commit_log import (
    BLANK_MAGIC,
    CommitLogFile,
    FileStop,
    commit_log_files,
    message_faults,
)
from dledger_core.rocketmq.store.commitlog_prefix import CommitLogFingerprint
from dledger_core.rocketmq.store.location import COMMITLOG_DIRECTORY
from dledger_core.storage.files.file_system import Files, OsFiles
from dledger_core.storage.files.layout import Layout, LogMeta, lock_store, open_identity, refuse, save_log_meta

_BLANK: Final = struct.Struct(">ii")
_DIGEST_CHARS: Final = 32


@dataclass(frozen=True, slots=True)
class CheckedCommitLog:
    """A CommitLog that was read completely and is intact.

    Attributes:
        files: by position, all of one size, without empty ones at the end.
        stop: end of the messages in the last file, relative to the file.
        closed: whether a BLANK is there.
        fingerprint: of the files from the requested start on.
        stamps: inode, size and modification time of each file, from before it was read.
    """

    files: tuple[CommitLogFile, ...]
    stop: int
    closed: bool
    fingerprint: CommitLogFingerprint
    stamps: tuple[tuple[int, int, int], ...]


def read_commitlog(
    directory: Path, start: int | None = None, on_bytes: Callable[[int, int], None] | None = None
) -> CheckedCommitLog:
    """Read and check a complete CommitLog; write nothing.

    Args:
        directory: RocketMQ's ``commitlog`` directory; no broker may run on it.
        start: the fingerprint's first position; None = the start of the first file.
        on_bytes: called after each batch with the bytes read so far and in total.

    Raises:
        ConfigError: no such directory, files of different sizes, no messages, or no file starts at ``start``.
        StoreBusyError: a broker runs there.
        CorruptRecordError: a message is damaged, or a file ends in neither a BLANK nor zeros.
    """
    check_broker_idle(directory.resolve().parent)
    files = commit_log_files(directory)
    if files[-1].is_unused():
        raise ConfigError("the CommitLog contains no messages", str(directory), "start without --commitlog")
    stamps = _stamps(files)
    sizes = sorted({file.size for file in files})
    if len(sizes) > 1:
        found = {"sizes": ", ".join(map(str, sizes))}
        raise ConfigError("the CommitLog's files differ in size", str(directory), "name a complete CommitLog", found)
    begins = files[0].position if start is None else start
    if begins not in {file.position for file in files}:
        known = {"start": begins, "first": files[0].position}
        raise ConfigError(f"no file starts at position {begins}", str(directory), "copy it from another node", known)
    hasher, done = hashlib.sha256(), 0
    stop = FileStop(begins, "end")
    for file in files:
        counted = file.position >= begins
        for each in file.scan():
            if isinstance(each, FileStop):
                stop = each
                continue
            data = _checked(each, file)
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
    return CheckedCommitLog(files, stop.position - files[-1].position, stop.kind == "blank", fingerprint, stamps)


def start_store_after(
    commitlog: CheckedCommitLog,
    store: Path,
    *,
    group: str,
    node_id: str,
    config: StorageConfig,
    on_bytes: Callable[[int, int], None] | None = None,
    files: Files | None = None,
) -> None:
    """Create the commitlog prefix and an empty store after it; after a crash the same call resumes.

    Args:
        commitlog: from ``read_commitlog``.
        store: directory of the node's store, ``DIR/GROUP/dledger-ID``; the prefix is created next to it.
        group: the group.
        node_id: the node.
        config: of the store; its data files get the size of the CommitLog's files.
        on_bytes: as in ``read_commitlog``, which checks the files of an interrupted call.
        files: the store's file system.

    Raises:
        StoreMismatchError: the directory contains another store, or another prefix.
        ConfigError: the files can be neither linked nor copied, or have changed since they were read.
        StoreBusyError: a broker runs there now.
    """
    layout, files = Layout(store), files or OsFiles()
    if open_identity(files, layout, group=group, node_id=node_id) is not None:
        raise StoreMismatchError("the store exists already", str(layout.root), "start the node without --commitlog")
    target = store.parent / COMMITLOG_DIRECTORY
    _check_unchanged(commitlog)
    try:
        if not _create_prefix(commitlog, target, store.parent / f"{COMMITLOG_DIRECTORY}-{node_id}.part", files):
            _check_prefix(read_commitlog(target, commitlog.fingerprint.start, on_bytes), commitlog, target)
    except OSError as error:
        refuse(error, target)
    _check_unchanged(commitlog)  # the store does not exist yet, and the next call checks the prefix
    lock = lock_store(files, layout)
    try:
        config = replace(config, data_segment_bytes=commitlog.files[-1].size)
        meta = LogMeta(
            profile=config.profile,
            group=group,
            node_id=node_id,
            data_segment_bytes=config.data_segment_bytes,
            index_segment_bytes=config.index_segment_bytes,
            first_position=commitlog.fingerprint.end,
            commitlog_prefix=str(commitlog.fingerprint),
        )
        save_log_meta(files, layout.log_meta, meta)
    finally:
        lock.close()


def _checked(batch: pa.RecordBatch, file: CommitLogFile) -> memoryview:
    """Return the bytes of a batch of contiguous messages."""
    faults = message_faults(batch)
    if faults.any():
        row = int((faults != 0).argmax())
        position = batch.column("position")[row].as_py()
        raise CorruptRecordError(
            f"a message is damaged: {fault_text(faults[row])}",
            file.path,
            "audit the copies of the log, and copy the file from a node where it is intact",
            {"position": position},
        )
    return memoryview(batch.column("body").buffers()[2])


def _check_end(stop: FileStop, file: CommitLogFile, *, last: bool) -> None:
    left = file.end - stop.position  # unlike ``CommitLogFile.ends_at``: the last file must have room for a BLANK
    if stop.kind == "blank" or (last and stop.kind == "end" and left >= _BLANK.size):
        return
    raise CorruptRecordError(
        "a file of the CommitLog ends in neither messages nor a BLANK",
        file.path,
        "audit the copies of the log, and copy the file from a node where it is intact",
        {"position": stop.position, "left": left},
    )


def _create_prefix(commitlog: CheckedCommitLog, target: Path, part: Path, files: Files) -> bool:
    """Create the prefix directory durably; return False if it exists.

    It gets its name only when it is complete. Nodes that share a directory may do this at the same time.
    """
    shutil.rmtree(part, ignore_errors=True)
    if target.exists():
        return False
    files.mkdir(part)
    for file in commitlog.files[:-1]:
        _link(Path(file.path), part, files)
    _copy(Path(commitlog.files[-1].path), part, files)
    if not commitlog.closed:
        _close(part / Path(commitlog.files[-1].path).name, commitlog, files)
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
    """Check that a BLANK holds the rest of its file: reads by position use it."""
    with Path(file.path).open("rb") as opened:
        opened.seek(stop.position - file.position)
        length = int.from_bytes(opened.read(4), "big")
    if length != file.end - stop.position:
        raise CorruptRecordError(
            "the BLANK at the end of a file does not cover the rest of the file",
            file.path,
            "copy the file from a node where it is intact",
            {"position": stop.position, "length": length, "left": file.end - stop.position},
        )


def _stamps(files: tuple[CommitLogFile, ...]) -> tuple[tuple[int, int, int], ...]:
    found = [Path(file.path).stat() for file in files]
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in found)


def _check_unchanged(commitlog: CheckedCommitLog) -> None:
    """Raise ConfigError if the files have changed: nodes may wait hours for each other after the read."""
    directory = Path(commitlog.files[0].path).parent
    check_broker_idle(directory.resolve().parent)
    try:
        now = commit_log_files(directory)
    except ConfigError:  # they are no longer contiguous
        now = ()
    if now != commitlog.files or _stamps(now) != commitlog.stamps:
        what = "the CommitLog has changed since it was read"
        raise ConfigError(what, str(directory), "stop the process that writes there, and start again")


def _check_prefix(found: CheckedCommitLog, commitlog: CheckedCommitLog, target: Path) -> None:
    if found.fingerprint != commitlog.fingerprint or not found.closed:
        remedy = "move these files away, or copy the prefix from a node that has started"
        raise StoreMismatchError("the directory contains another commitlog prefix, or an open one", str(target), remedy)


def _link(source: Path, directory: Path, files: Files) -> None:
    """Link a file, or copy it: a broker never writes to a full file again, so both directories can share it."""
    try:
        (directory / source.name).hardlink_to(source)
    except OSError:  # a different file system, or one without hard links
        _copy(source, directory, files)


def _copy(source: Path, directory: Path, files: Files) -> None:
    shutil.copyfile(source, directory / source.name)
    with contextlib.closing(files.open(directory / source.name, write=True)) as copied:
        copied.datasync()


def _close(path: Path, commitlog: CheckedCommitLog, files: Files) -> None:
    """Write the BLANK with which RocketMQ closes the last file before an upgrade to DLedger."""
    with contextlib.closing(files.open(path, write=True)) as last:
        last.pwritev([_BLANK.pack(commitlog.files[-1].size - commitlog.stop, BLANK_MAGIC)], commitlog.stop)
        last.datasync()
