"""Memory of the other members' stores: terms and acknowledgements, as this node received them.

A disk that was set back in time has forgotten a vote or entries that it acknowledged, and its files do not show it. The
nodes that received these messages remember them, per store:

* the highest term that it showed, voted or led in. A store that attaches with a lower term has forgotten its vote.
* the highest (term, index) that it acknowledged. In this term a log never gets shorter. In any later term a leader may
  have replaced entries, but not committed ones. A store that shows less has lost its end.
* the highest term that it led in. A leader sends entries before its own disk has them, so after a crash it may have
  less of its term than a follower. It must elect no log with less, but it has forgotten nothing: its term and vote are
  durable before it leads. In a later term its entries may have been replaced too.

A leader's count of its own entries is not remembered: the floor at the end of its term here covers them.

All of it is kept in memory and written with the checkpoint, so a crash of all nodes may forget the newest values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Protocol

from dledger_core.errors import EndLostError, IdentityLostError
from dledger_core.ids import NO_INDEX, NO_TERM, Index, Term, node_of, store_of
from dledger_core.net.attach import floor_row
from dledger_core.raft import (
    AppendEntries,
    AppendEntriesResponse,
    Heartbeat,
    InstallSnapshot,
    Message,
    RequestVote,
    RequestVoteResponse,
)
from dledger_core.raft.floor import Floor, higher
from dledger_core.server.replica.attachments import StoreClaim
from dledger_core.storage.files.acknowledged_file import Remembered

_STORES_MAX: Final = 1024
_UNKNOWN: Final = Remembered()


class LogHere(Protocol):
    """The log of this node, with which a shown store is compared."""

    def term_at(self, index: Index) -> Term | None:
        """Return the term of an entry, or None if the log does not contain it."""

    def last_index_up_to(self, term: Term) -> Index:
        """Return the last index whose entry has at most this term, NO_INDEX if there is none."""


class PeerWatermarks:
    """Memory of a group's other stores.

    Args:
        known: the memory by store uuid, as written before.
        is_durable: whether an acknowledged entry is on the disk of its store; otherwise a power loss may shorten a log.
    """

    def __init__(self, known: Mapping[str, Remembered], *, is_durable: bool = True) -> None:
        self._known = dict(known)
        self._is_durable = is_durable
        self._is_written = True

    def observe(self, message: Message) -> None:
        """Record what a message shows of its sender's disk.

        A member sends its term, its vote and an acknowledgement only when they are durable; a pre-vote asks for a term
        that its sender does not have yet.
        """
        # Its term is a question. Remembered, it would make an honest store look like one that has forgotten a vote, and
        # stop it.
        if isinstance(message, RequestVote | RequestVoteResponse) and message.pre:
            return
        store = store_of(message.sender)
        known, term = self._known.get(store, _UNKNOWN), int(message.term)
        if isinstance(message, AppendEntriesResponse) and message.accepted:
            found = (term, int(message.match_index))
            if found > known.acknowledged:
                self._remember(store, replace(known, term=max(term, known.term), acknowledged=found))
        elif isinstance(message, AppendEntries | Heartbeat | InstallSnapshot) and term > known.led:
            self._remember(store, replace(known, term=max(term, known.term), led=term))
        elif term > known.term:
            self._remember(store, replace(known, term=term))

    def _remember(self, store: str, found: Remembered) -> None:
        # Stores of members that were replaced stay; without a limit the checkpoint would grow with each replacement.
        if store and (store in self._known or len(self._known) < _STORES_MAX):
            self._known[store] = found
            self._is_written = False

    def truncated(self, index: Index) -> None:
        """Record that this log was truncated from ``index`` on.

        A leader that lacks these entries replaced them: they were not committed, and others may be at their indexes.
        """
        for store, known in self._known.items():
            term, acknowledged = known.acknowledged
            # Expected on, such an entry would refuse a store that followed the same leader
            # (test_entries_that_a_later_leader_replaced_here_are_not_expected).
            if acknowledged >= index:
                self._remember(store, replace(known, acknowledged=(term, int(index) - 1)))

    def unwritten(self) -> dict[str, Remembered] | None:
        """Return all of it to write, None if nothing has changed since the last call."""
        if self._is_written:
            return None
        self._is_written = True
        return dict(self._known)

    def check(self, group: str, theirs: StoreClaim, log: LogHere, commit_index: Index) -> None:
        """Check a store that attaches, and remember the term that it shows.

        Args:
            group: the group.
            theirs: the store.
            log: the log of this node.
            commit_index: the last entry that this node knows to be committed.

        Raises:
            IdentityLostError: it shows a lower term than it has shown, voted or led in.
            EndLostError: it shows less than it must have, and not the floor that it needs, which the error names.
        """
        store, node_id = store_of(theirs.member), str(node_of(theirs.member))
        known = self._known.get(store, _UNKNOWN)
        values = {"group": group, "term": known.term, "index": known.acknowledged[1], "shown_term": theirs.term}
        if theirs.term < known.term:
            raise IdentityLostError(
                f"the store of {node_id} has forgotten term {known.term}, in which it voted, led or acknowledged "
                "entries",
                f"group {group}",
                f"its disk was set back in time: run dledger member replace {node_id}",
                values,
            )
        if self._is_durable and (floor := _needed(known, theirs, log, commit_index)) is not None:
            raise EndLostError(
                f"the store of {node_id} ends at index {theirs.last_index} of term {theirs.last_term}, and has "
                f"acknowledged or led to index {max(floor.index or NO_INDEX, known.acknowledged[1])}",
                f"group {group}",
                "its vote elects no log without these entries; it catches up from the next leader",
                values | {"last_index": theirs.last_index, "floor": floor_row(floor)},
            )
        # So that a store that shows a term, and is set back later, is noticed by all
        # (test_term_shown_at_attach_is_remembered_where_it_is_durable).
        if theirs.shows_floor and theirs.term > known.term:  # other nodes may show a term that is not durable yet
            self._remember(store, replace(known, term=int(theirs.term)))


def _needed(known: Remembered, theirs: StoreClaim, log: LogHere, commit_index: Index) -> Floor | None:
    """Return the floor that a store needs because it has lost entries; None if it has lost none, or has the floor.

    A node that shows no floors could not show that it has one: it is asked only for what it can leave, its term.
    """
    term, index = known.acknowledged
    if theirs.term != term:
        index = min(index, commit_index, log.last_index_up_to(Term(term))) if theirs.shows_floor else NO_INDEX
    led = Term(known.led)
    end = log.last_index_up_to(led)
    # What counts of an acknowledgement are entries of its own term: a majority commits no other one. A log whose last
    # entry is older lacks them, however long it is: a tail of an earlier leader that was not replaced yet.
    entry_term = log.term_at(Index(index)) or NO_TERM
    if theirs.last_index < index or theirs.last_term < entry_term <= term:
        needed = Floor(Term(term), None)
    elif (
        theirs.shows_floor
        and theirs.term == led == log.term_at(end)
        and (theirs.last_term, theirs.last_index) < (led, end)
    ):
        needed = Floor(led, end)
    else:
        return None
    return None if higher(theirs.floor, needed) == theirs.floor else needed
