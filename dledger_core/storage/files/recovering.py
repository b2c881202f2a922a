"""``meta/recovering``: the end of this log was lost, and with it the knowledge of what was acknowledged there.

The checkpoint lags behind what was acknowledged. Where damage reaches the end of what it vouches for, entries behind
that may be gone without a trace, and a repair cannot tell. Such a node must not vote before it holds, durably, a
committed entry of a term above the one it was in when it was damaged: that term's leader was elected without it, so by
a majority of which each member kept its promises, and an entry that is committed there comes after everything that was
ever committed with this node's help (Leader Completeness, Raft section 5.4.3). The same holds where it has matched all
that such a leader held. The core decides (``RaftState.has_vote``); the mark makes a restart remember.
"""

from __future__ import annotations

import contextlib
import json
import logging
from typing import Final

from dledger_core import checksum
from dledger_core.ids import Term
from dledger_core.storage.files.file_system import Files
from dledger_core.storage.files.layout import Layout

__all__ = ["RecoveringMark", "clear_recovering", "mark_recovering", "recovering_above"]

_LOG = logging.getLogger(__name__)
_NAME: Final = "recovering"


def _encode(above: int) -> bytes:
    fields = json.dumps({"above": above})
    return f'{{"crc": {checksum.crc32(fields.encode())}, "recovering": {fields}}}\n'.encode()


def mark_recovering(files: Files, layout: Layout, above: Term) -> None:
    """Takes a node's vote, durably, until it holds a committed entry of a term above ``above``."""
    files.replace(layout.meta / _NAME, _encode(above))


def clear_recovering(files: Files, layout: Layout) -> None:
    """Gives a node's vote back, durably."""
    if files.read(layout.meta / _NAME) is not None:
        files.unlink(layout.meta / _NAME)
        files.sync_dir(layout.meta)


def recovering_above(files: Files, layout: Layout, term: Term) -> Term | None:
    """Returns above which term a committed entry must be held before the node votes; None if it has its vote.

    Args:
        files: the file system.
        layout: the store.
        term: the node's own; it is the answer where the mark is damaged, for a higher one is never wrong.
    """
    data = files.read(layout.meta / _NAME)
    if data is None:
        return None
    with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
        above = int(json.loads(data)["recovering"]["above"])
        if _encode(above) == data:
            return Term(above)
    return term


class RecoveringMark:
    """Whether the node of an open store has a vote. Called by the writer thread.

    Args:
        files: the file system.
        layout: the store.
        term: the node's.

    Attributes:
        above: it is_recovering until it holds a committed entry of a higher term; None = it has its vote.
    """

    def __init__(self, files: Files, layout: Layout, term: Term) -> None:
        self._files = files
        self._layout = layout
        self.above = recovering_above(files, layout, term)
        if self.above == term:  # a damaged mark does not say another term at each start
            mark_recovering(files, layout, term)

    def end(self) -> None:
        """Gives the vote back: the core has found that all is here, durably, that the node may have acknowledged."""
        if self.above is not None:
            clear_recovering(self._files, self._layout)
            self.above = None
            _LOG.warning("%s: what was committed is here again, so the node has its vote again", self._layout.root)
