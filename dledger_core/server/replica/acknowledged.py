"""Votes and acknowledgements of the other members' stores, as this node received them.

A disk that was set back in time has forgotten a vote or entries that it acknowledged, and its files do not show it. The
nodes that received these messages remember them: per store the newest term in which it voted, acknowledged or led, and
the highest index that it acknowledged in that term. A store that shows less when it attaches is refused. Both are kept
in memory and written with the checkpoint, so a restart of all nodes may forget the newest ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dledger_core.errors import EndLostError, IdentityLostError
from dledger_core.ids import NO_INDEX, node_of, store_of
from dledger_core.raft import AppendEntries, AppendEntriesResponse, Message, RequestVoteResponse
from dledger_core.server.replica.attachments import ShownStore

_STORES_MAX: Final = 1024


class Acknowledged:
    """Votes and acknowledgements of a group's other stores.

    Args:
        known: (term, index) by store uuid, as written before.
        is_durable: whether an acknowledged entry is on the disk of its store; otherwise a power loss may shorten a log.
    """

    def __init__(self, known: Mapping[str, tuple[int, int]], *, is_durable: bool = True) -> None:
        self._known = dict(known)
        self._is_durable = is_durable
        self._is_written = True

    def observe(self, message: Message) -> None:
        """Record a message that its sender sent only after term, vote and entries were on its disk."""
        match message:
            case AppendEntriesResponse(accepted=True):
                found = int(message.term), int(message.match_index)
            case RequestVoteResponse(granted=True, pre=False) | AppendEntries():
                found = int(message.term), int(NO_INDEX)
            case _:
                return
        store = store_of(message.sender)
        if (
            store
            and found > self._known.get(store, (-1, -1))
            and (store in self._known or len(self._known) < _STORES_MAX)
        ):
            self._known[store] = found
            self._is_written = False

    def unwritten(self) -> dict[str, tuple[int, int]] | None:
        """Return all of it to write, None if nothing has changed since the last call."""
        if self._is_written:
            return None
        self._is_written = True
        return dict(self._known)

    def check(self, group: str, theirs: ShownStore) -> None:
        """Check a store that attaches.

        Raises:
            IdentityLostError: it shows a lower term than it has voted or acknowledged in.
            EndLostError: it shows a shorter log than it has acknowledged in its term.
        """
        term, index = self._known.get(store_of(theirs.member), (-1, -1))
        node_id = str(node_of(theirs.member))
        values = {"group": group, "term": term, "index": index, "shown_term": theirs.term}
        if theirs.term < term:
            raise IdentityLostError(
                f"the store of {node_id} has forgotten term {term}, in which it voted or acknowledged entries",
                f"group {group}",
                f"its disk was set back in time: run dledger member replace {node_id}",
                values,
            )
        # In a later term a leader may have replaced entries that were acknowledged before, if they were not committed.
        if self._is_durable and theirs.term == term and theirs.last_index < index:
            raise EndLostError(
                f"the store of {node_id} ends at index {theirs.last_index}, and has acknowledged index {index}",
                f"group {group}",
                "it votes again once a leader elected without it has sent everything",
                values | {"last_index": theirs.last_index},
            )
