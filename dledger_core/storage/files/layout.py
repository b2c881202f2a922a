"""Identity, paths and owner of a store, and the first files of a new one.

``meta/log.json`` has the identity and the constants of a log. It has a CRC, so that a damaged field name is not taken
for a missing field. To change the file by hand, remove the line ``crc32``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, NoReturn

from dledger_core.config import StorageConfig
from dledger_core.errors import ConfigError, StoreBusyError, StoreIncompleteError, StoreMismatchError
from dledger_core.ids import NO_TERM, NUMBER_MAX
from dledger_core.lineage import Ancestors, ancestors_of
from dledger_core.record import HEADER_BYTES, MAGIC_BLANK, MAGIC_DATA, MAGIC_MEMBERSHIP, Header, is_segment_name
from dledger_core.storage.files.ab_file import copies
from dledger_core.storage.files.file_system import File, Files, OsFiles, fields_crc, write_checked

FORMAT_VERSION: Final = 1
"""Of a new store."""
FORMAT_VERSION_MAX: Final = 2
"""The highest that this version opens: 2 is a store of a group of version 2, which earlier programs must not trim."""

REPLACE: Final = "move the store away, start the node, and run dledger member replace"
"""The way back of a store that cannot be repaired: an empty one has forgotten its votes, so it is another member."""

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
_KINDS: Final[dict[str, type | tuple[type, ...]]] = {
    "group": str,
    "node_id": str,
    "log_uuid": (str, NoneType),
    "store_uuid": (str, NoneType),
    "previous_term": (int, NoneType),
    "tables_index": (int, NoneType),
    "commitlog_prefix": (str, NoneType),
}
_META_LEFTOVERS = frozenset({"lock", "log.json.tmp", "identity", "identity.2", "identity.tmp", "identity.2.tmp"})
"""Files of a store that is not bootstrapped, or whose first file a crash interrupted."""
_JAVA_NAMES = frozenset({"data", "index", "currterm", "checkpoint"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMeta:
    """Identity and constants of a log.

    Attributes:
        format_version: of the files; a reader rejects a higher one.
        profile: ``A`` or ``B``.
        log_uuid: made when the group is bootstrapped, or by a conversion; None until then.
        group: name of the group.
        node_id: the node whose store this is.
        store_uuid: of the store; ``meta/identity`` decides whether it is a member. None before the bootstrap.
        data_segment_bytes: size of a data file.
        index_segment_bytes: size of an index file.
        first_position: start of the first data file.
        first_index: index of the first entry at ``first_position``.
        previous_term: term of the entry before ``first_index``, or None if unknown.
        tables_index: of a trimmed log: the stored tables include at least the control entries up to here (-1 = there
            were none); None if the log is complete and the tables can be derived from it.
        discarding: the store restarts at ``first_index``; remaining files belong to the log before.
        foreign_end: entries below were written by Java and may have neither flags nor CRC.
        broker_end_index: messages of entries below have queue offsets that a broker assigned.
        commitlog_prefix: fingerprint of the CommitLog that the log starts after; None if it starts after none.
        continues: the logs that the log continues, oldest first (``dledger recover --lost``).
    """

    profile: Literal["A", "B"]
    group: str
    node_id: str
    data_segment_bytes: int
    index_segment_bytes: int
    format_version: int = FORMAT_VERSION
    log_uuid: str | None = None
    store_uuid: str | None = None
    first_position: int = 0
    first_index: int = 0
    previous_term: int | None = None
    tables_index: int | None = None
    discarding: bool = False
    foreign_end: int = 0
    broker_end_index: int = 0
    commitlog_prefix: str | None = None
    continues: Ancestors = ()

    def effective(self, config: StorageConfig) -> StorageConfig:
        """Return ``config`` with the segment sizes and the profile of the log."""
        return replace(
            config,
            profile=self.profile,
            data_segment_bytes=self.data_segment_bytes,
            index_segment_bytes=self.index_segment_bytes,
        )


def parse_log_meta(found: Any, path: Path) -> LogMeta:
    """Return the identity of a map; raise TypeError or ValueError if it is malformed, StoreMismatchError if newer."""
    if not isinstance(found, dict):
        raise TypeError("not a map")
    version = found.get("format_version")
    if type(version) is int and version > FORMAT_VERSION_MAX:
        what = f"format version {version} is newer than this program's {FORMAT_VERSION_MAX}"
        raise StoreMismatchError(what, str(path), "upgrade the program")
    missing = [name for name in _REQUIRED if name not in found]
    if missing:
        raise TypeError(f"{missing[0]} is missing")
    known = {field.name: found[field.name] for field in fields(LogMeta) if field.name in found}
    meta = LogMeta(**known | {"continues": ancestors_of(found.get("continues", []))})
    for name in _NUMBERS:
        if type(getattr(meta, name)) is not int or not 0 <= getattr(meta, name) <= NUMBER_MAX:
            raise TypeError(f"{name} is wrong")
    if type(meta.discarding) is not bool:
        raise TypeError("discarding is wrong")
    for name, kinds in _KINDS.items():
        if not isinstance(getattr(meta, name), kinds) or isinstance(getattr(meta, name), bool):
            raise TypeError(f"{name} is wrong")
    if not NO_TERM <= (meta.previous_term or 0) <= NUMBER_MAX:
        raise TypeError("previous_term is wrong")
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
        return parse_log_meta(json.loads(data.decode()), path)
    except (ValueError, TypeError, RecursionError) as error:
        raise StoreMismatchError(
            f"the file is malformed: {error}",
            str(path),
            f"restore it from a backup; or {REPLACE}",
        ) from error


def save_log_meta(files: Files, path: Path, meta: LogMeta) -> None:
    """Replace ``meta/log.json``, atomically and durably."""
    write_checked(files, path, asdict(meta))


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths of one store."""

    root: Path

    @property
    def data(self) -> Path:
        """Directory of the data files."""
        return self.root / "data"

    @property
    def index(self) -> Path:
        """Directory of the index files."""
        return self.root / "index"

    @property
    def meta(self) -> Path:
        """Directory of the files that only native stores have."""
        return self.root / "meta"

    @property
    def log_meta(self) -> Path:
        """Identity of the log."""
        return self.meta / "log.json"

    @property
    def identity(self) -> Path:
        """Store uuid and bootstrap record."""
        return self.meta / "identity"

    @property
    def checkpoint(self) -> Path:
        """Lower bound on the durable and the committed entries."""
        return self.meta / "checkpoint"

    @property
    def hard_state(self) -> Path:
        """Term and vote."""
        return self.meta / "hard-state"

    @property
    def members(self) -> Path:
        """The configurations of the group that the store knows."""
        return self.meta / "members"

    @property
    def acknowledged(self) -> Path:
        """Votes and acknowledgements of the other stores, as received here."""
        return self.meta / "acknowledged"

    @property
    def currterm(self) -> Path:
        """Copy of term and vote for Java; never read by a node."""
        return self.root / "currterm"

    @property
    def tables(self) -> Path:
        """The tables that are derived from the log; see ``TableStore``."""
        return self.meta / "tables"

    @property
    def new_tables(self) -> Path:
        """The tables of a snapshot install, which replace the others once the log restarts."""
        return self.meta / "tables.new"

    @property
    def recovering(self) -> Path:
        """Marker of a recovering voter."""
        return self.meta / "recovering"

    @property
    def needs_verification(self) -> Path:
        """Marker of a store with a failed write."""
        return self.meta / "needs-verification"

    @property
    def quarantine(self) -> Path:
        """Reason why the replica does not participate in its group."""
        return self.meta / "quarantine"

    @property
    def converting(self) -> Path:
        """State of a conversion into this store, which is incomplete while the file exists."""
        return self.meta / "converting.json"

    @property
    def restoring(self) -> Path:
        """Marker of a store whose restore from a backup is not complete."""
        return self.meta / "restoring"

    @property
    def lock(self) -> Path:
        """Locked while a process has the store open."""
        return self.meta / "lock"


def refuse(error: OSError, path: Path) -> NoReturn:
    """Raise the error for a store that cannot be opened or created."""
    where = str(error.filename or path)
    raise ConfigError(
        f"the store cannot be opened: {error.strerror or error}",
        where,
        "check that the directory exists and is writable, and that the disk has free space",
    ) from error


def check_complete(files: Files, layout: Layout) -> None:
    """Raise StoreIncompleteError if a conversion into the store, or its restore, is not finished."""
    if files.read(layout.restoring) is not None:
        raise StoreIncompleteError(
            "the store is being restored, or its restore was interrupted",
            str(layout.root),
            "run the same dledger restore again; it starts from the beginning",
        )
    if files.read(layout.converting) is not None:
        raise StoreIncompleteError(
            "the store is being converted, or its conversion was interrupted",
            str(layout.root),
            "run the same dledger convert again, it resumes; or remove the directory",
        )


def open_identity(files: Files, layout: Layout, *, group: str, node_id: str) -> LogMeta | None:
    """Read the owner of a store; writes nothing.

    Returns:
        The identity of the native store, or None where a new one may be created.

    Raises:
        StoreMismatchError: it belongs to another group or node or to Java, or is not a store.
        StoreIncompleteError: a conversion into it, or its restore, is not finished.
    """
    check_complete(files, layout)
    meta = load_log_meta(files, layout.log_meta)
    if meta is None:
        _check_vacant(files, layout)
        return None
    for what, found, wanted in (("group", meta.group, group), ("node", meta.node_id, node_id)):
        if found != wanted:
            raise StoreMismatchError(
                f"the store belongs to {what} {found!r}, not {wanted!r}",
                str(layout.root),
                f"start with the right {what}, or use another directory",
            )
    return meta


def check_owner(directory: Path, *, group: str, node_id: str, files: Files | None = None) -> None:
    """Check that a directory is free for, or contains, the store of this group and node; writes nothing.

    Raises:
        StoreMismatchError: it contains something else.
        StoreIncompleteError: a conversion into it, or its restore, is not finished.
        ConfigError: it cannot be read.
    """
    try:
        open_identity(files or OsFiles(), Layout(directory), group=group, node_id=node_id)
    except OSError as error:
        refuse(error, directory)


def _check_vacant(files: Files, layout: Layout) -> None:
    names = set(files.listdir(layout.root) or ())
    in_meta = set(files.listdir(layout.meta) or ()) if "meta" in names else set()
    if names <= {"meta"} and in_meta <= _META_LEFTOVERS:
        return
    if lacks_identity(files, layout):
        raise StoreMismatchError(
            "meta/log.json is missing, so the store cannot be identified",
            str(layout.log_meta),
            f"restore it from a backup; or {REPLACE}",
        )
    unexpected = _unexpected(files, layout, names, in_meta)
    if unexpected is None:
        raise StoreMismatchError(
            "the directory contains a store written by Java DLedger (it has no meta/log.json)",
            str(layout.root),
            "use another directory, or convert the store with 'dledger convert'",
        )
    raise StoreMismatchError(
        f"the directory is not empty and not a store (it contains {unexpected!r})",
        str(layout.root),
        "use an empty or a new directory",
    )


def lacks_identity(files: Files, layout: Layout) -> bool:
    """Whether a store is native by its other files and its records, but has lost ``meta/log.json``."""
    if files.read(layout.log_meta) is not None:
        return False
    native = (*copies(layout.checkpoint), *copies(layout.hard_state), *copies(layout.members), layout.tables)
    if set(files.listdir(layout.meta) or ()) & {path.name for path in native}:
        return True
    header = _first_header(files, layout.data)
    # Java writes zeros where native records have flags, append time and CRC.
    return _is_record(header) and any(header[32:44])


def _unexpected(files: Files, layout: Layout, names: set[str], in_meta: set[str]) -> str | None:
    """Return the name of a file that Java DLedger does not write, or None."""
    if "meta" in names:
        return f"meta/{min(in_meta)}" if in_meta else "meta"
    for directory in (layout.data, layout.index):
        if directory.name in names:
            for name in files.listdir(directory) or ():
                if not is_segment_name(name):
                    return f"{directory.name}/{name}"
    if not names & _JAVA_NAMES:
        return min(names)
    header = _first_header(files, layout.data)
    if any(header[:4]) and not _is_record(header):
        return f"data/{(files.listdir(layout.data) or [''])[0]}"
    return None


def _first_header(files: Files, data: Path) -> bytes:
    """Return the bytes of the first record's header; empty if there is no data file."""
    names = [name for name in files.listdir(data) or () if is_segment_name(name)]
    return files.open(data / names[0]).pread(HEADER_BYTES, 0) if names else b""


def _is_record(header: bytes) -> bool:
    magic = Header.unpack(header).magic if len(header) == HEADER_BYTES else 0
    return magic == MAGIC_BLANK or MAGIC_DATA <= magic <= MAGIC_MEMBERSHIP


def lock_store(files: Files, layout: Layout) -> File:
    """Take the store's lock.

    Raises:
        StoreBusyError: another process has it.
    """
    files.mkdir(layout.meta)
    try:
        return files.lock(layout.lock)
    except BlockingIOError:
        holder = (files.read(layout.lock) or b"").decode("ascii", "replace").strip()
        raise StoreBusyError(
            "another process has the store open",
            str(layout.lock),
            "stop it first" + (f" (process {holder})" if holder else ""),
        ) from None


def claim_store(
    files: Files, layout: Layout, *, group: str, node_id: str, config: StorageConfig
) -> tuple[LogMeta, File]:
    """Lock the native store, or create an empty one; return its identity and the lock.

    ``meta/log.json`` is the first file of a new store: a crash leaves either nothing or a native store.
    """
    open_identity(files, layout, group=group, node_id=node_id)  # before anything is written into the directory
    lock = lock_store(files, layout)
    try:
        meta = open_identity(files, layout, group=group, node_id=node_id)
        if meta is None:
            meta = LogMeta(
                profile=config.profile,
                group=group,
                node_id=node_id,
                data_segment_bytes=config.data_segment_bytes,
                index_segment_bytes=config.index_segment_bytes,
            )
            save_log_meta(files, layout.log_meta, meta)
        files.mkdir(layout.data)
        files.mkdir(layout.index)
    except BaseException:
        lock.close()
        raise
    return meta, lock
