"""The directory of an export: its files, and the manifest that records which part of which log they contain.

::

    {"v": 1, "settings": {"to": "parquet", "isolation": "read-committed", "opaque": false, "filters": {}},
     "log": [{"first": 0, "next": 500, "log": "<uuid>", "term": 3, "check": 305419896, "file": "000…-000….parquet"}],
     "commitlog": []}

``next``, ``log``, ``term`` and ``check`` are those of a Spark offset: they identify the record before ``next``. The
parts of a CommitLog have positions: ``last`` is that of its last message, and ``check`` is of this message.

The manifest is written before a file gets its name. So a part whose file is missing was not finished, or its file was
deleted; the export continues after the part before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow as pa

from dledger_core.client import EntryCheck, LogPosition, Loss, LossKind, check_of, find_loss
from dledger_core.client.protocol import LogRange
from dledger_core.errors import (
    ArchiveDamagedError,
    ConfigError,
    CorruptRecordError,
    IndexOutOfRangeError,
    StoreBusyError,
    StoreMismatchError,
)
from dledger_core.rocketmq import Damaged, Deleted, LogDirectory, Span
from dledger_core.storage import StoreReader
from dledger_core.storage.files.file_system import OsFiles

MANIFEST: Final = "_dledger-export.json"
"""Readers of directories (Spark, PyArrow) leave out names with an underscore."""
_LOCK: Final = "_dledger-export.lock"
_VERSION: Final = 1
_TEMPORARY_NAME: Final = re.compile(r"(commitlog-)?[0-9]+\.part")
_PART_NAME: Final = re.compile(r"(commitlog-)?[0-9]{20}-[0-9]{20}\.[a-z]+")
_OTHER_DIRECTORY: Final = "use another directory"

Section = Literal["log", "commitlog"]


@dataclass(frozen=True)
class Part:
    """Entries that one file contains.

    Attributes:
        first: the first index; of a CommitLog the first position.
        next: end (exclusive).
        log: uuid of the log.
        term: term of the record before ``next``; -1 if unknown.
        check: check of that record, or of the message at ``last``; None if unknown.
        last: position of the last message of a CommitLog.
        file: name; None if no entry was selected.
    """

    first: int
    next: int
    log: str | None = None
    term: int = -1
    check: int | None = None
    last: int | None = None
    file: str | None = None

    @property
    def position(self) -> LogPosition:
        """The end of the part in its log."""
        return LogPosition(self.next, self.log, self.term, self.check)


@dataclass
class Dataset:
    """The files of an export, in their directory.

    Attributes:
        directory: of the files.
        settings: options that must be the same whenever the dataset is continued.
        parts: in order, by section.
    """

    directory: Path
    settings: Mapping[str, Any]
    parts: dict[Section, list[Part]] = field(default_factory=lambda: {"log": [], "commitlog": []})

    @classmethod
    @contextmanager
    def open(cls, directory: Path, settings: Mapping[str, Any]) -> Iterator[Dataset]:
        """Open a new or an existing dataset; nothing else can write there meanwhile.

        Raises:
            StoreBusyError: another export writes into the directory.
            ConfigError: the dataset has other settings, or the directory contains files of another export.
            StoreMismatchError: a file of the dataset is missing.
        """
        directory.mkdir(parents=True, exist_ok=True)
        files = OsFiles()
        try:
            lock = files.lock(directory / _LOCK)
        except BlockingIOError:
            holder = (files.read(directory / _LOCK) or b"").decode("ascii", "replace").strip()
            process = f" (process {holder})" if holder else ""
            remedy = f"run the command again when it has ended{process}, or {_OTHER_DIRECTORY}"
            raise StoreBusyError("another export writes into the directory", str(directory), remedy) from None
        try:
            found = cls(directory, settings)
            found._load()
            yield found
        finally:
            lock.close()

    def add(self, section: Section, part: Part, temporary: Path | None) -> None:
        """Record a part, and give its file the name."""
        parts = self.parts[section]
        if parts and parts[-1].file is None and parts[-1].next == part.first:
            part = replace(part, first=parts.pop().first)
        parts.append(part)
        self._save()
        if temporary is not None and part.file is not None:
            temporary.replace(self.directory / part.file)
            OsFiles().sync_dir(self.directory)

    def _save(self) -> None:
        kept = {section: [asdict(part) for part in parts] for section, parts in self.parts.items()}
        text = json.dumps({"v": _VERSION, "settings": self.settings} | kept, indent=1)
        OsFiles().replace(self.directory / MANIFEST, text.encode())

    def _load(self) -> None:
        path = self.directory / MANIFEST
        data = OsFiles().read(path)
        settings = self.settings if data is None else self._parse(path, data)
        for parts in self.parts.values():
            self._leave_out_missing(parts)
        for each in self.directory.iterdir():
            if _TEMPORARY_NAME.fullmatch(each.name):
                each.unlink()  # of an export that was killed
        named = {part.file for parts in self.parts.values() for part in parts}
        unknown = sorted(each.name for each in self.directory.iterdir() if _PART_NAME.fullmatch(each.name))
        if unknown := [name for name in unknown if name not in named]:
            raise ConfigError(
                f"the directory contains {unknown[0]}, and no manifest names its log",
                str(self.directory),
                f"{_OTHER_DIRECTORY}: version 0.2 wrote no manifest",
                {"files": len(unknown)},
            )
        if named <= {None}:
            self.parts = {"log": [], "commitlog": []}
        elif differing := {name: value for name, value in settings.items() if self.settings.get(name) != value}:
            shown = {name: f"{_text(value)}, not {_text(self.settings.get(name))}" for name, value in differing.items()}
            remedy = f"{_OTHER_DIRECTORY}, or the options of the dataset"
            raise ConfigError("the dataset was exported with other options", str(self.directory), remedy, shown)

    def _parse(self, path: Path, data: bytes) -> Mapping[str, Any]:
        """Read the parts, and return the settings."""
        try:
            found = json.loads(data)
            if found["v"] != _VERSION:
                remedy = f"use the version of dledger that wrote it, or {_OTHER_DIRECTORY}"
                raise ConfigError(f"the manifest has version {found['v']}", str(path), remedy)
            self.parts = {"log": [], "commitlog": []}
            for section, parts in self.parts.items():
                parts += [Part(**fields) for fields in found[section]]
            return dict(found["settings"])
        except (ValueError, TypeError, KeyError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError("the manifest is damaged", str(path), f"restore it, or {_OTHER_DIRECTORY}") from None

    def _leave_out_missing(self, parts: list[Part]) -> None:
        """Leave out the last parts if their files are missing.

        Raises:
            StoreMismatchError: a file between others is missing.
        """
        present = [part.file is None or (self.directory / part.file).is_file() for part in parts]
        if all(present):
            return
        at = present.index(False)
        if any(part.file is not None and there for part, there in zip(parts[at:], present[at:], strict=True)):
            remedy = f"restore the file, or {_OTHER_DIRECTORY}"
            raise StoreMismatchError(
                "a file of the dataset is missing", str(self.directory / str(parts[at].file)), remedy
            )
        del parts[at:]

    # --- where an export continues ------------------------------------------------------------------------------

    def start_in_log(self, opened: LogDirectory, asked: int | None) -> int:
        """Return the index at which the export starts or continues.

        Args:
            opened: the source.
            asked: the given first index; None = the log's first one, or the end of the dataset.

        Raises:
            StoreMismatchError: the source is not the dataset's log, or has another history.
            IndexOutOfRangeError: the entries after the dataset are deleted, ``asked`` is inside the dataset, or not in
                the log.
            CorruptRecordError: the record before the end of the dataset is damaged.
        """
        (low, high), parts = opened.indexes, self.parts["log"]
        if parts and asked == parts[0].first:
            asked = None  # retention may have deleted it meanwhile
        if asked is not None and not low <= asked <= high:
            raise IndexOutOfRangeError("the start is not in the log", str(opened.path), f"use {low} to {high}")
        if not parts:
            return low if asked is None else asked
        log, last = opened.log, parts[-1]
        if log is None:
            raise StoreMismatchError(
                "the dataset contains entries of a store, and the source is a classic CommitLog",
                str(self.directory),
                _OTHER_DIRECTORY,
            )
        self._check_start("index", asked, parts)
        view = LogRange(low, high, -1, log.log_uuid, log.chain)
        loss = find_loss(last.position, view, opened.check_of)
        is_later = asked is not None and asked > last.next
        if loss is not None and not (is_later and loss.kind is LossKind.RETENTION):
            raise self._error(loss, opened.path)
        return asked if asked is not None and is_later else last.next

    def _error(self, loss: Loss, source: Path) -> Exception:
        position, view, where = loss.position, loss.view, str(self.directory)
        values: dict[str, Any] = {"source": source, "end": position.next_index}
        if loss.kind is LossKind.RETENTION:
            what = f"entries {position.next_index} to {view.first_index - 1} are deleted, and the dataset lacks them"
            remedy = f"--from {view.first_index} continues without them; or {_OTHER_DIRECTORY}"
            return IndexOutOfRangeError(what, where, remedy, values)
        if loss.kind is LossKind.LOG_RECREATED:
            what = "the dataset contains entries of another log"
            values |= {"dataset_log": position.log_uuid, "log": view.log_uuid}
            return StoreMismatchError(what, where, _OTHER_DIRECTORY, values)
        if loss.kind is LossKind.OFFSET_BEYOND_END:
            what = "the log ends before the end of the dataset"
            remedy = f"export another replica, or a newer copy; if the log was created again, {_OTHER_DIRECTORY}"
            return StoreMismatchError(what, where, remedy, values | {"log_end": view.end})
        recorded = EntryCheck(position.term, position.check or 0)
        what = f"the log has another entry at index {position.next_index - 1} than the dataset"
        values |= {"dataset_entry": recorded, "entry": loss.found}
        remedy = f"the log was created again, or the dataset has entries that were never committed: {_OTHER_DIRECTORY}"
        return StoreMismatchError(what, where, remedy, values)

    def start_in_commitlog(self, opened: LogDirectory, asked: int | None) -> int | None:
        """Return the position at which the export of a CommitLog starts or continues; None without one.

        Args:
            opened: the source.
            asked: the given first position; None = of the CommitLog, or the end of the dataset.

        Raises:
            StoreMismatchError: the source is not the dataset's CommitLog.
            IndexOutOfRangeError: the messages after the dataset are deleted.
            CorruptRecordError: the last message of the dataset is damaged.
        """
        parts = self.parts["commitlog"]
        if not opened.classic:
            if parts and not self.parts["log"]:
                what = "the dataset contains messages of a classic CommitLog, and the source has none"
                raise StoreMismatchError(what, str(self.directory), _OTHER_DIRECTORY, {"source": opened.path})
            return None
        low = opened.classic[0].position
        if not parts:
            return None if self.parts["log"] else low if asked is None else asked  # indexes alone leave it out
        last = parts[-1]
        self._check_start("position", asked, parts)
        values = {"source": opened.path, "end": last.next}
        continued = last.next if asked is None or asked < last.next else asked
        if last.next < low and continued == last.next:
            what = f"messages at positions {last.next} to {low - 1} are deleted, and the dataset lacks them"
            remedy = f"--from @{low} continues without them; or {_OTHER_DIRECTORY}"
            raise IndexOutOfRangeError(what, str(self.directory), remedy, values)
        if last.last is not None and last.last >= low and message_check(opened, last.last) != last.check:
            what = f"the CommitLog has another message at position {last.last} than the dataset"
            raise StoreMismatchError(what, str(self.directory), _OTHER_DIRECTORY, values)
        return continued

    def _check_start(self, kind: str, asked: int | None, parts: list[Part]) -> None:
        """Raise IndexOutOfRangeError if an export from ``asked`` on would repeat entries of the dataset."""
        first, end = parts[0].first, parts[-1].next
        if asked is None or asked >= end or asked == first:
            return
        found = "the dataset already contains" if asked > first else "the dataset starts after"
        remedy = f"without --from the export continues at {end}; or {_OTHER_DIRECTORY}"
        values = {"first": first, "end": end}
        raise IndexOutOfRangeError(f"{found} {kind} {asked}", str(self.directory), remedy, values)


def message_check(opened: LogDirectory, position: int) -> int | None:
    """Return the check of the message that starts at a position of the CommitLog; None if none starts there.

    Raises:
        CorruptRecordError: it is damaged.
    """
    for found in opened.batches(Span((position, position + 1), (0, 0))):
        if isinstance(found, Damaged):
            raise found.error
        if not isinstance(found, Deleted) and found.num_rows and found.column("position")[0].as_py() == position:
            return check_of_message(found)
    return None


def check_of_message(entry: pa.RecordBatch) -> int:
    """Return the check of the first message of a batch of a CommitLog."""
    return check_of(0, 0, entry.column("position")[0].as_py(), entry.column("body")[0].as_py())


def end_of_part(opened: LogDirectory, log: StoreReader, start: int, end: int, file: str | None) -> Part:
    """Return the part [start, end) of the log in a directory, with the record before its end."""
    try:
        before = opened.check_of(end - 1)
    except (CorruptRecordError, ArchiveDamagedError):  # an entry that the part does not contain
        before = None
    if before is None:
        return Part(start, end, log.log_uuid, file=file)
    return Part(start, end, log.log_uuid, before.term, before.check, file=file)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
