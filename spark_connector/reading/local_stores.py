"""Stores of a group's nodes on the machine of a task: read as files, so that no byte goes through a server.

The servers say what is to be read; a store on this machine serves a range only if its own record of what is committed
covers it, and only bytes that pass their checks. Whatever it cannot serve is asked of the servers.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dledger_core.config import parse_peers
from dledger_core.errors import DLedgerError, StoreMismatchError
from spark_connector.options import DLedgerOptions
from spark_connector.reading.logs import Chunk
from spark_connector.reading.planning import Range
from spark_connector.reading.visible import read_chunk

if TYPE_CHECKING:
    from dledger_core import StoreReader

__all__ = ["LocalStores"]

_KEPT_S: Final = 60.0
"""A view is kept so long: deleted files take space on the disk as long as it holds them."""

_views: dict[tuple[int, str], tuple[float, StoreReader]] = {}
_log = logging.getLogger("spark_connector")


class LocalStores:
    """Where stores of a group's replicas may lie on this machine. Used by one thread at a time."""

    def __init__(self, options: DLedgerOptions, group: str) -> None:
        wanted = options.read_from.removeprefix("node:") if options.read_from.startswith("node:") else None
        nodes = [str(peer.node_id) for peer in parse_peers(options.peers) if options.local_stores]
        self._options = options
        self._hides = options.isolation == "read_committed"
        self._paths = [
            str(Path(directory) / group / f"dledger-{node}")
            for directory in options.local_stores
            for node in nodes
            if wanted in (None, node)
        ]
        if self._paths:
            _let_go_of_old_views()

    def chunk(self, part: Range, start: int) -> Chunk | None:
        """Returns entries from ``start`` on as ``Log.chunk`` does, or None if no store here serves them."""
        for path in self._paths:
            try:
                view = self._view(path, part)
                if view is not None and view.first_index <= start:
                    nbytes = self._options.read_bytes(files=True)
                    return read_chunk(view, part, start, nbytes, uncommitted=not self._hides)
            except (DLedgerError, OSError) as error:
                _views.pop((os.getpid(), path), None)  # what is wrong may be the view: files come and go
                self._paths = [other for other in self._paths if other != path]
                _log.warning("%s does not serve index %d, other replicas are asked: %s", path, start, error)
        return None

    def _view(self, path: str, part: Range) -> StoreReader | None:
        """Returns a view that covers the range, the one that is kept if it does; None if there is none."""
        from dledger_core import open_store

        # Behind ``min_commit`` lies no outcome of a transaction that has entries in the range.
        end = max(part.end, part.min_commit + 1)
        if part.log is None or (self._hides and part.min_commit < 0):
            return None
        key = (os.getpid(), path)
        view = _views[key][1] if key in _views else None
        if view is None or _committed_end(view) < end or not _is_of(view, part):
            if _recorded_end(path) < end:
                return None
            view = open_store(path, since=view)
            _views[key] = (time.monotonic(), view)
            if not _is_of(view, part):
                raise StoreMismatchError("it is a store of another log", path, "name the directory of this cluster")
        known_end = _committed_end(view)
        return view if known_end >= end else None


def _let_go_of_old_views() -> None:
    oldest = time.monotonic() - _KEPT_S
    for key in [key for key, (opened, _) in list(_views.items()) if opened < oldest]:
        _views.pop(key, None)


def _is_of(view: StoreReader, part: Range) -> bool:
    return (view.log_uuid, view.group) == (part.log, part.group)


def _committed_end(view: StoreReader) -> int:
    return -1 if view.commit_index is None else view.commit_index + 1


def _recorded_end(path: str) -> int:
    """Returns the end of what a store says is committed, without opening it; -1 where none is, or it is suspect."""
    from dledger_core.storage.checkpoint import load_checkpoint
    from dledger_core.storage.files import OsFiles
    from dledger_core.storage.layout import Layout
    from dledger_core.storage.suspect import suspicion

    files, layout = OsFiles(), Layout(Path(path))
    found = load_checkpoint(files, layout.checkpoint)
    return -1 if found is None or suspicion(files, layout) is not None else found.commit_index + 1
