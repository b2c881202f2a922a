"""What besides its records keeps a node from starting on a store: found by ``verify``, changing nothing."""

from __future__ import annotations

from collections.abc import Iterator

from dledger_core.errors import CorruptRecordError
from dledger_core.ids import Index, Position
from dledger_core.record import is_segment_name
from dledger_core.storage.check.verify import Finding
from dledger_core.storage.files.file_system import Files
from dledger_core.storage.files.hard_state import load_hard_state
from dledger_core.storage.files.layout import Layout, lacks_identity
from dledger_core.storage.files.log_info import LogMeta
from dledger_core.storage.write.trim import load_tables

__all__ = ["start_findings"]


def start_findings(
    files: Files, layout: Layout, meta: LogMeta | None, *, last_index: int, last_term: int
) -> Iterator[Finding]:
    """Yields what ``CommitLog.open`` would refuse although every record may be whole.

    Args:
        files: the file system.
        layout: the store.
        meta: its identity, or None; a store of Java's is not a node's to start on and gives nothing.
        last_index: the log's last entry.
        last_term: the term of that entry; 0 if there is none.
    """
    end = Index(last_index + 1)
    if meta is None:
        if lacks_identity(files, layout):
            message = "the file is missing; what follows was read as if Java had written it"
            yield Finding("CORRUPT", "error", end, end, str(layout.log_meta), Position(0), message)
        return
    for folder in (layout.data, layout.index):
        for name in files.listdir(folder) or ():
            if not is_segment_name(name):
                message = "the file does not belong here; move it out of the store"
                yield Finding("FOREIGN_FILE", "error", end, end, str(folder / name), Position(0), message)
    for load in (
        lambda: load_hard_state(files, layout.root, last_term or meta.previous_term or 0),
        lambda: load_tables(files, layout, meta),
    ):
        try:
            load()
        except CorruptRecordError as error:
            yield Finding("CORRUPT", "error", end, end, error.where, Position(0), error.what)
