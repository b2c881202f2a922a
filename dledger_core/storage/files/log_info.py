"""``meta/log.json``: identity and constants of a log, the first file of a new store.

It has a CRC, so that a damaged field name is not taken for a missing field. To change the file by hand, remove the line
``crc32``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal

from dledger_core.config import StorageConfig
from dledger_core.errors import ConfigError, StoreMismatchError
from dledger_core.storage.files.file_system import Files, fields_crc, write_checked

FORMAT_VERSION: Final = 1

_CRC: Final = "crc32"
_REQUIRED: Final = ("format_version", "profile", "group", "node_id", "data_segment_bytes", "index_segment_bytes")
_NUMBERS: Final = (
    "format_version",
    "data_segment_bytes",
    "index_segment_bytes",
    "first_position",
    "first_index",
    "foreign_end",
    "broker_end_index",
)
_NUMBER_MAX: Final = (1 << 56) - 1
"""So that the position of every index row fits 63 bits."""
_KINDS: Final[dict[str, type | tuple[type, ...]]] = {
    "group": str,
    "node_id": str,
    "log_uuid": (str, NoneType),
    "previous_term": (int, NoneType),
    "tables_index": (int, NoneType),
    "commitlog_prefix": (str, NoneType),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMeta:
    """Identity and constants of a log.

    Attributes:
        format_version: of the files; a reader rejects a higher one.
        profile: ``A`` or ``B``.
        log_uuid: made by the group's first leader; None until the node knows it.
        group: name of the group.
        node_id: the node whose store this is.
        data_segment_bytes: size of a data file.
        index_segment_bytes: size of an index file.
        first_position: start of the first data file.
        first_index: index of the first entry at ``first_position``.
        previous_term: term of the entry before ``first_index``, or None if unknown.
        tables_index: of a trimmed log: ``meta/tables`` includes at least the control entries up to here (-1 = there
            were none); None if the log is complete and the tables can be derived from it.
        discarding: the store restarts at ``first_index``; remaining files belong to the log before.
        foreign_end: entries below were written by Java and may have neither flags nor CRC.
        broker_end_index: messages of entries below have queue offsets that a broker assigned.
        commitlog_prefix: fingerprint of the CommitLog that the log starts after; None if it starts after none.
    """

    profile: Literal["A", "B"]
    group: str
    node_id: str
    data_segment_bytes: int
    index_segment_bytes: int
    format_version: int = FORMAT_VERSION
    log_uuid: str | None = None
    first_position: int = 0
    first_index: int = 0
    previous_term: int | None = None
    tables_index: int | None = None
    discarding: bool = False
    foreign_end: int = 0
    broker_end_index: int = 0
    commitlog_prefix: str | None = None

    def effective(self, config: StorageConfig) -> StorageConfig:
        """Return ``config`` with the segment sizes and the profile of the log."""
        return replace(
            config,
            profile=self.profile,
            data_segment_bytes=self.data_segment_bytes,
            index_segment_bytes=self.index_segment_bytes,
        )


def _parse(found: Any, path: Path) -> LogMeta:
    if not isinstance(found, dict):
        raise TypeError("not a map")
    version = found.get("format_version")
    if type(version) is int and version > FORMAT_VERSION:
        raise StoreMismatchError(
            f"format version {version} is newer than this program's {FORMAT_VERSION}", str(path), "upgrade the program"
        )
    missing = [name for name in _REQUIRED if name not in found]
    if missing:
        raise TypeError(f"{missing[0]} is missing")
    meta = LogMeta(**{field.name: found[field.name] for field in fields(LogMeta) if field.name in found})
    for name in _NUMBERS:
        if type(getattr(meta, name)) is not int or not 0 <= getattr(meta, name) <= _NUMBER_MAX:
            raise TypeError(f"{name} is wrong")
    if type(meta.discarding) is not bool:
        raise TypeError("discarding is wrong")
    for name, kinds in _KINDS.items():
        if not isinstance(getattr(meta, name), kinds) or isinstance(getattr(meta, name), bool):
            raise TypeError(f"{name} is wrong")
    try:
        meta.effective(StorageConfig())
    except ConfigError as error:
        raise TypeError(error.what) from None
    if found.get(_CRC, fields_crc(found)) != fields_crc(found):
        raise TypeError(f"it does not match its {_CRC}")
    return meta


def load_log_meta(files: Files, path: Path) -> LogMeta | None:
    """Return the identity of the store, or None if it has none.

    Raises:
        StoreMismatchError: the file is malformed or of a newer version.
    """
    data = files.read(path)
    if data is None:
        return None
    try:
        return _parse(json.loads(data.decode()), path)
    except (ValueError, TypeError, RecursionError) as error:
        raise StoreMismatchError(
            f"the file is malformed: {error}",
            str(path),
            "restore it from a backup, or move the store away and let the node catch up from its peers",
        ) from error


def save_log_meta(files: Files, path: Path, meta: LogMeta) -> None:
    """Replace ``meta/log.json``, atomically and durably."""
    write_checked(files, path, asdict(meta))
