"""Reports of the links to other nodes: their stores, lost connections, bytes that delay heartbeats."""

from __future__ import annotations

from dledger_core.ids import MemberId, NodeId, node_of
from dledger_core.raft import Floor
from dledger_core.server.replica.attachments import StoreClaim
from dledger_core.server.replica.ready_loop import ReadyLoop


class PeerReports:
    """Gives the reports of links to the core of one replica.

    Args:
        loop: the replica's.
    """

    def __init__(self, loop: ReadyLoop) -> None:
        self._loop = loop
        self._raft = loop.raft

    def check_attach(self, theirs: StoreClaim) -> None:
        """Check another member's store, which its node shows; a leader counts no entry that it lacks.

        Raises:
            IdentityLostError, EndLostError: it has forgotten what this node remembers, see ``PeerWatermarks.check``.
        """
        self._loop.run(self._raft.report_end, theirs.member, theirs.last_term, theirs.last_index)
        self._loop.peer_watermarks.check(self._loop.group, theirs, self._raft, self._loop.controls.commit_index)

    def attached(self, member: MemberId) -> None:
        """Record that the stores of this node and of ``member`` were checked by each other."""
        self._raft.report_attached(member)

    def raise_floor(self, needed: Floor | None) -> bool:
        """Raise the floor, because another node remembers more of this log than it contains; return whether it rose.

        Args:
            needed: the floor that the other node names: that of a leader at the end of its term, or one without an
                index. Acknowledged entries may be lost then, of any term up to the present one. None is such a floor
                too: version 0.2.0 names none.
        """
        before, term = self._raft.floor, self._raft.status().term
        # Never above the present term: a peer that names a higher one would keep this member from voting in terms in
        # which it has forgotten nothing.
        floor = Floor(term) if needed is None or needed.is_open or needed.term > term else needed
        self._loop.run(self._raft.raise_floor, floor)
        return self._raft.floor != before

    def unreachable(self, peer: NodeId) -> None:
        """Record that the connection to a peer was lost."""
        for member in self._raft.configuration.members:
            if node_of(member) == peer:
                self._loop.run(self._raft.report_unreachable, member)

    def receiving(self, member: MemberId) -> None:
        """Record that a member's bytes arrive and delay its heartbeats."""
        self._loop.run(self._raft.confirm_leader, member)

    def received(self, member: MemberId) -> None:
        """Record that a member receives bytes of this node that delay the heartbeats."""
        self._loop.run(self._raft.confirm_member, member)
