"""The groups that are attached to one connection between two nodes.

This node offers each group that it hosts with a number of its own, and takes the offers of the other side after a check
of the store that they show. Messages flow once both have taken the other's offer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from dledger_core.checksum import Buffer
from dledger_core.errors import DLedgerError, error_from_wire
from dledger_core.ids import NO_INDEX, Index, MemberId, NodeId, Term, member_id, store_of
from dledger_core.net import codec
from dledger_core.net.attach import ATTACH, ATTACH_REFUSED, Attach, AttachRefused, floor_of_row, floor_row
from dledger_core.net.frame import Frame, encode_frame
from dledger_core.net.protocol import Type
from dledger_core.raft import Message
from dledger_core.raft.floor import Floor

RETRY_SHARE: Final = 4
"""A refused attach is sent again after this share of the time in which a silent link counts as lost."""
_CLOSED: Final = (None, None)


@dataclass(frozen=True, slots=True)
class StoreClaim:
    """State of a group's store, as its node shows it in an attach.

    Attributes:
        member: node and store.
        log_uuid: identity of the log, None while it is not known.
        term: the store's term.
        last_term: term of its last entry.
        last_index: index of its last entry.
        version: the highest group version that the node understands.
        commit_index: the last entry that it knows to be committed.
        commit_term: term of its entry at ``committed_index``; None if it is not known, or not sent by a node of 0.2.0.
        floor: the floor of its votes.
        shows_floor: whether its node shows floors, and only a term that is durable.
    """

    member: MemberId
    log_uuid: str | None
    term: Term
    last_term: Term
    last_index: Index
    version: int
    commit_index: Index = NO_INDEX
    commit_term: Term | None = None
    floor: Floor | None = None
    shows_floor: bool = False

    @property
    def committed_index(self) -> Index:
        """The last entry of the store that it knows to be committed."""
        return min(self.commit_index, self.last_index)


class AttachHost(Protocol):
    """The groups of this node, as links see them."""

    def hosted_groups(self) -> Iterable[str]:
        """Return the names of the groups to attach."""

    def identity(self, group: str) -> StoreClaim | None:
        """Return this node's store of a group, None unless it is hosted now."""

    def check_attach(self, group: str, theirs: StoreClaim) -> None:
        """Raise the DLedgerError that refuses another node's store."""

    def attached(self, group: str, member: MemberId) -> None:
        """Handle that messages of a group can be sent to a member: its store was checked, and it refused none."""

    def attach_refused(self, group: str, node_id: NodeId, error: DLedgerError) -> None:
        """Handle that another node refused this node's store."""


class Attachments:
    """The attached groups of one connection.

    Args:
        node_id: the other node.
        host: the groups of this node.
        check_holder: raises the error for a store that another node holds.
        send: sends buffers to the other node.
    """

    def __init__(
        self, node_id: NodeId, host: AttachHost, check_holder: Callable[[str, MemberId], None],
        send: Callable[[list[Buffer]], object],
    ) -> None:  # fmt: skip
        self._node_id = node_id
        self._host = host
        self._check_holder = check_holder
        self._send = send
        self._numbers = 0
        self._offered: dict[int, tuple[str, MemberId]] = {}
        self._offer_of: dict[str, int] = {}
        self._theirs: dict[str, tuple[int, MemberId]] = {}
        self._refused: dict[str, bool] = {}  # group → whether to try again
        self._ticks = 0
        self._open: dict[str, tuple[int, MemberId]] = {}
        self._ends: dict[int, codec.Ends] = {}
        self._beats: codec.Beats = {}

    # --- offers of this node ---------------------------------------------------------------------------------

    def offer_all(self) -> None:
        """Offer every group that is hosted here and not offered yet."""
        for group in self._host.hosted_groups():
            if group not in self._offer_of:
                self.offer(group)

    def offer(self, group: str) -> None:
        """Offer a group under a new number; its previous number becomes void."""
        identity = self._host.identity(group)
        previous = self._offer_of.pop(group, 0)
        # A message under the old number was for another store of this node; taken, it would be an acknowledgement of
        # the wrong disk (test_changed_identity_is_new_attach_and_old_number_is_dropped).
        self._offered.pop(previous, None)
        self._forget(previous)
        self._refused.pop(group, None)
        if identity is None:
            self._update(group)
            return
        self._numbers += 1
        self._offered[self._numbers] = group, identity.member
        self._offer_of[group] = self._numbers
        self._update(group)
        message = Attach(
            group=group,
            number=self._numbers,
            log_uuid=identity.log_uuid,
            store_uuid=store_of(identity.member),
            term=identity.term,
            last_term=identity.last_term,
            last_index=identity.last_index,
            version=identity.version,
            commit_index=identity.commit_index,
            commit_term=identity.commit_term,
            floor=floor_row(identity.floor) if identity.shows_floor else None,
        )
        self._send(encode_frame(ATTACH.encode(message)))

    def tick(self, retry_ticks: int) -> None:
        """Count a tick; offer the refused groups again after a pause."""
        self._ticks += 1
        if self._ticks >= retry_ticks:
            self._ticks = 0
            # The other node may host the group soon (test_attach_is_tried_again_while_group_waits).
            for group in [group for group, again in self._refused.items() if again]:
                self.offer(group)

    # --- their offers and responses ----------------------------------------------------------------------------

    def on_frame(self, frame: Frame) -> DLedgerError | None:
        """Take an ATTACH or its refusal; return the error with which an attach was refused here."""
        if frame.header["t"] == Type.ATTACH:
            return self._take(ATTACH.decode(frame.header))
        self._on_refused(ATTACH_REFUSED.decode(frame.header))
        return None

    def _take(self, message: Attach) -> DLedgerError | None:
        group, member = message.group, member_id(self._node_id, message.store_uuid)
        theirs = StoreClaim(
            member,
            message.log_uuid,
            Term(message.term),
            Term(message.last_term),
            Index(message.last_index),
            message.version,
            Index(message.commit_index),
            None if message.commit_term is None else Term(message.commit_term),
            floor_of_row(message.floor),
            message.floor is not None,
        )
        # First: while the new store is checked, nothing counts for the old one.
        self._theirs.pop(group, None)
        self._update(group)
        try:
            self._check_holder(group, member)
            self._host.check_attach(group, theirs)
        except DLedgerError as error:
            refusal = AttachRefused(number=message.number, error=error.to_wire())
            self._send(encode_frame(ATTACH_REFUSED.encode(refusal)))
            return error
        self._theirs[group] = message.number, member
        self._update(group)
        # Without an offer of its own the other side would wait for the next retry
        # (test_group_hosted_later_is_attached).
        if group in self._refused or group not in self._offer_of:
            self.offer(group)  # the other side hosts the group now
        return None

    def _on_refused(self, message: AttachRefused) -> None:
        offered = self._offered.get(message.number)
        if offered is not None:
            group, error = offered[0], error_from_wire(message.error)
            self._refused[group] = error.retriable
            self._update(group)
            self._host.attach_refused(group, self._node_id, error)

    # --- messages ------------------------------------------------------------------------------------------------

    def number_of(self, group: str, target: MemberId) -> int | None:
        """Return the number of messages to a member; None if it is not attached, or refused this node's store."""
        number, member = self._open.get(group, _CLOSED)
        return number if member == target else None

    def members(self) -> list[tuple[str, MemberId]]:
        """Return (group, member) of each group of which messages can be sent to the other node."""
        return [(group, member) for group, (_, member) in self._open.items()]

    @property
    def is_foreign(self) -> bool:
        """Whether the other node has no store of any group here, and no offer is retried."""
        return bool(self._refused) and not self._theirs and not any(self._refused.values())

    def messages_of(self, frame: Frame) -> list[tuple[str, Message]]:
        """Return the messages of a received frame, each with its group, without those whose number is unknown.

        Raises:
            ProtocolError: it is not a message between replicas, or malformed.
        """
        return codec.frame_to_messages(frame, self._ends.get, self._beats)

    def _forget(self, number: int) -> None:
        self._ends.pop(number, None)
        self._beats.pop(number, None)

    def _update(self, group: str) -> None:
        """Update the lookup tables of messages after a change of a group's attach."""
        number, theirs = self._offer_of.get(group, 0), self._theirs.get(group)
        self._open.pop(group, None)
        self._forget(number)
        if number and theirs is not None:
            self._ends[number] = codec.Ends(group, theirs[1], self._offered[number][1])
            # Where the other side refused, its messages still count here: they show what it remembers, and its term.
            if group not in self._refused:
                self._open[group] = theirs
                self._host.attached(group, theirs[1])

    def stores_of(self, group: str) -> set[str]:
        """Return the uuid of the attached store of a group, if it has one."""
        found = self._theirs.get(group)
        return {store_of(found[1])} if found is not None else set()
