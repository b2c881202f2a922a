"""The files of a backup: a directory per group, with records as stored on disk and a manifest.

::

    DEST/lock                           locked while a backup writes
    DEST/GROUP/manifest.json            the last complete backup; it names the other files, their sizes and checksums
    DEST/GROUP/unfinished.json          files of a backup that is not complete yet
    DEST/GROUP/POSITION-FIRST-END       records of one segment: from position POSITION on, entries [FIRST, END)
    DEST/GROUP/tables-CHECKSUM          rows of the tables

No file changes once it is complete: the records of a segment that grew are written to another file. So the backup that
the manifest names is intact while the next one is made, and programs that copy new files to an object store suffice.
The manifest is replaced last, and then the files that it does not name are removed.
"""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from dledger_core.errors import CorruptRecordError, DiskFullError, StoreBusyError, StoreMismatchError
from dledger_core.lineage import AncestorLog
from dledger_core.storage.files.file_system import Files, read_checked, remove_durably, write_checked
from dledger_core.storage.files.layout import LogMeta, parse_log_meta
from dledger_core.storage.files.members_file import ConfigurationEntry, entries_of, rows_of_entries

LOCK: Final = "lock"
MANIFEST: Final = "manifest.json"
_UNFINISHED: Final = "unfinished.json"
_VERSION: Final = 1
_CHUNK_BYTES: Final = 4 << 20
_OURS: Final = re.compile(r"[0-9]{20}-[0-9]{20}-[0-9]{20}|tables-[0-9a-f]{16}|.*\.tmp")


@dataclass(frozen=True, slots=True)
class BackupFile:
    """A file of a backup.

    Attributes:
        name: of the file.
        size: its bytes.
        sha256: checksum of its content.
    """

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SegmentFile(BackupFile):
    """The records of one segment.

    Attributes:
        position: of the first record.
        first_index: its index.
        end_index: end (exclusive) of the entries.
    """

    position: int
    first_index: int
    end_index: int

    @property
    def end_position(self) -> int:
        """End of the last record."""
        return self.position + self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBackup:
    """A complete backup of one group.

    Attributes:
        meta: identity and constants of the log; ``node_id`` is the node whose log was read.
        term: the highest term that this node knew.
        members: configurations of the entries, in order.
        end: the last entry; the uuid is that of the log.
        segments: files with the records, in order.
        tables: the file with the rows of the tables.
    """

    meta: LogMeta
    term: int
    members: tuple[ConfigurationEntry, ...]
    end: AncestorLog
    segments: tuple[SegmentFile, ...]
    tables: BackupFile

    @property
    def files(self) -> tuple[BackupFile, ...]:
        """All files that it names."""
        return (*self.segments, self.tables)

    @property
    def end_position(self) -> int:
        """End of the last record."""
        return self.segments[-1].end_position if self.segments else self.meta.first_position


def load_manifest(files: Files, directory: Path) -> GroupBackup | None:
    """Return the last complete backup of a group, or None if there is none.

    Raises:
        StoreMismatchError: the manifest is damaged, or of a newer version.
    """
    path = directory / MANIFEST
    fields = read_checked(files, path)
    if fields is None:
        return None
    version = fields.get("version")
    if type(version) is int and version > _VERSION:
        raise StoreMismatchError(f"the manifest has version {version}", str(path), "upgrade the program")
    try:
        return GroupBackup(
            meta=parse_log_meta(fields["meta"], path),
            term=int(fields["term"]),
            members=entries_of(fields["members"]),
            end=AncestorLog(**fields["end"]),
            segments=tuple(SegmentFile(**row) for row in fields["segments"]),
            tables=BackupFile(**fields["tables"]),
        )
    except (KeyError, TypeError, ValueError):
        raise StoreMismatchError(
            "the manifest is damaged", str(path), "restore the file, or make a backup in another directory"
        ) from None


def save_manifest(files: Files, directory: Path, backup: GroupBackup) -> None:
    """Replace the manifest, and remove the files that it does not name."""
    fields: dict[str, Any] = {
        "version": _VERSION,
        "meta": asdict(backup.meta),
        "term": backup.term,
        "members": rows_of_entries(backup.members),
        "end": asdict(backup.end),
        "segments": [asdict(each) for each in backup.segments],
        "tables": asdict(backup.tables),
    }
    write_checked(files, directory / MANIFEST, fields)
    remove_durably(files, directory / _UNFINISHED)
    named = {each.name for each in backup.files}
    for name in files.listdir(directory) or ():
        if _OURS.fullmatch(name) and name not in named:
            files.unlink(directory / name)
    files.sync_dir(directory)


def load_unfinished(files: Files, directory: Path, log_uuid: str) -> tuple[SegmentFile, ...]:
    """Return the complete files of a backup of this log that is not complete."""
    fields = read_checked(files, directory / _UNFINISHED) or {}
    if fields.get("log") != log_uuid:
        return ()
    return tuple(SegmentFile(**row) for row in fields["segments"])


def save_unfinished(files: Files, directory: Path, log_uuid: str, segments: tuple[SegmentFile, ...]) -> None:
    """Record the files that are complete, so that an interrupted backup is continued."""
    rows = [asdict(each) for each in segments]
    write_checked(files, directory / _UNFINISHED, {"log": log_uuid, "segments": rows})


def groups_of(files: Files, destination: Path) -> list[str]:
    """Return the groups of a backup directory, whether their backup is complete or not."""
    names = [name for name in files.listdir(destination) or () if name != LOCK]
    kept = (MANIFEST, _UNFINISHED)
    return [name for name in names if any(files.read(destination / name / each) is not None for each in kept)]


@contextmanager
def locked(files: Files, destination: Path) -> Iterator[None]:
    """Create a backup directory, and lock it until the block ends.

    Raises:
        StoreBusyError: another backup or a restore uses it.
        StoreMismatchError: it contains something else.
        DiskFullError: its disk is full.
    """
    with as_full(destination):
        files.mkdir(destination)
        names = files.listdir(destination) or ()
        if names and LOCK not in names and not groups_of(files, destination):
            raise StoreMismatchError(
                f"the directory is not empty and not a backup (it contains {names[0]!r})",
                str(destination),
                "use an empty or a new directory",
            )
        try:
            lock = files.lock(destination / LOCK)
            files.sync_dir(destination)
        except BlockingIOError:
            holder = (files.read(destination / LOCK) or b"").decode("ascii", "replace").strip()
            process = f" (process {holder})" if holder else ""
            raise StoreBusyError(
                "another backup or a restore uses the directory",
                str(destination),
                f"run the command again when it has ended{process}, or use another directory",
            ) from None
    try:
        yield
    finally:
        lock.close()


@contextmanager
def as_full(path: Path) -> Iterator[None]:
    """Raise DiskFullError for the OSError of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFullError(
            "the disk is full",
            str(error.filename or path),
            "free space, then run the same command again: it continues, and complete files are not copied again",
        ) from error


def sha256_of(files: Files, path: Path) -> tuple[int, str]:
    """Return size and checksum of a file, which is read completely."""
    file, found, at = files.open(path), hashlib.sha256(), 0
    try:
        while chunk := file.pread(_CHUNK_BYTES, at):
            found.update(chunk)
            at += len(chunk)
    finally:
        file.close()
    return at, found.hexdigest()


def is_intact(files: Files, directory: Path, wanted: BackupFile) -> bool:
    """Whether a file is there with its size and checksum."""
    try:
        return sha256_of(files, directory / wanted.name) == (wanted.size, wanted.sha256)
    except FileNotFoundError:
        return False


def damaged(directory: Path, wanted: BackupFile) -> CorruptRecordError:
    """Return the error for a file that is not intact."""
    return CorruptRecordError(
        "a file of the backup is missing or damaged: it differs from size and checksum in the manifest",
        str(directory / wanted.name),
        "run the command again if a backup was made meanwhile; otherwise use another copy of the backup",
        {"size": wanted.size, "sha256": wanted.sha256},
    )


class NewFile:
    """A file that is being written: it gets its name when it is complete and was read back.

    Args:
        files: the file system.
        path: temporary name.
    """

    def __init__(self, files: Files, path: Path) -> None:
        self._files = files
        self._path = path
        self._file = files.open(path, write=True, create=True)
        self._file.truncate(0)
        self._sha256 = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self._file.pwritev([data], self.size)
        self._sha256.update(data)
        self.size += len(data)

    @property
    def sha256(self) -> str:
        """Checksum of the bytes so far."""
        return self._sha256.hexdigest()

    def finish(self, name: str) -> BackupFile:
        """Make the file durable, read it back and give it its name.

        Raises:
            CorruptRecordError: the disk returned other bytes than were written.
        """
        self._file.datasync()
        self._file.close()
        done = BackupFile(name, self.size, self.sha256)
        if sha256_of(self._files, self._path) != (done.size, done.sha256):
            raise CorruptRecordError(
                "the file has other bytes than were written", str(self._path), "check the disk of the backup"
            )
        self._files.rename(self._path, name)
        return done

    def close(self) -> None:
        """Close the file without giving it its name."""
        self._file.close()
