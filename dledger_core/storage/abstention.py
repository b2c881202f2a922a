"""``meta/abstains``: the end of this log was lost, and with it the knowledge of what was acknowledged there.

The checkpoint lags behind what was acknowledged. Where damage reaches the end of what it vouches for, entries behind
that may be gone without a trace, and a repair cannot tell. Such a node must not vote before it holds, durably, a
committed entry of a term above the one it was in when it was damaged: that term's leader was elected without it, so by
a majority of which each member kept its promises, and an entry that is committed there comes after everything that was
ever committed with this node's help (Leader Completeness, Raft section 5.4.3).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Final

from dledger_core.errors import CorruptRecordError
from dledger_core.ids import Term
from dledger_core.storage.files import Files
from dledger_core.storage.layout import Layout

__all__ = ["Abstention", "mark_abstaining"]

_LOG = logging.getLogger(__name__)
_NAME: Final = "abstains"


def mark_abstaining(files: Files, layout: Layout, above: Term) -> None:
    """Takes a node's vote, durably, until it holds a committed entry of a term above ``above``."""
    files.replace(layout.meta / _NAME, f'{{"above": {above}}}\n'.encode())


class Abstention:
    """Whether a store's node has a vote.

    Args:
        files: the file system.
        layout: the store.

    Raises:
        CorruptRecordError: the mark is there and cannot be read, so nobody knows when it ends.

    Attributes:
        above: it abstains until it holds a committed entry of a higher term; None = it has its vote.
    """

    def __init__(self, files: Files, layout: Layout) -> None:
        self._files = files
        self._meta = layout.meta
        self.above: Term | None = None
        data = files.read(self._meta / _NAME)
        if data is None:
            return
        try:
            self.above = Term(int(json.loads(data)["above"]))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise CorruptRecordError(
                "the mark of a node without a vote cannot be read",
                str(self._meta / _NAME),
                'write {"above": N} to it, with the currTerm of the file currterm for N',
            ) from None

    def end(self) -> None:
        """Gives the vote back, durably."""
        if self.above is not None:
            self._files.unlink(self._meta / _NAME)
            self._files.sync_dir(self._meta)
            self.above = None

    def end_with(self, term_at: Callable[[int], int], held: range) -> None:
        """Gives the vote back if the last of the entries that are committed and durable here has a term high enough."""
        if self.above is not None and held and term_at(held[-1]) > self.above:
            self.end()
            _LOG.warning("%s: what was committed is here again, so the node has its vote again", self._meta.parent)
