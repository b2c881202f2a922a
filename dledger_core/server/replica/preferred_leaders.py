"""The policy of preferred leaders: a leader offers leadership to a better preferred node that has caught up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dledger_core.ids import MemberId, NodeId, node_of
from dledger_core.raft import ProgressState, RawNode

_PAUSE: Final = 16
"""Checks between two offers, so that a node that cannot win an election does little harm."""
_BY_HAND_PAUSE: Final = 750
"""The same (about five minutes) for a leader that is not preferred and was elected by a transfer: an operator requested
it, or the nodes have different preferred leaders and must not transfer leadership in a circle."""


class PreferredLeaders:
    """The policy of one replica.

    Args:
        raft: the core.
        node_id: this node.
        preferred: nodes that should lead once they have caught up, best first.
        period_ticks: ticks between two checks.
    """

    def __init__(self, raft: RawNode, node_id: NodeId, preferred: Sequence[NodeId], period_ticks: int) -> None:
        self._raft = raft
        rank = preferred.index(node_id) if node_id in preferred else len(preferred)
        self._is_preferred = rank < len(preferred)
        self._better = tuple(preferred[:rank])
        self._period_ticks = period_ticks
        self._ticks = self._pause = 0

    def lead(self) -> None:
        """Begin a leadership."""
        self._ticks = 0
        # Without the pause an operator's transfer would be undone at once
        # (test_preferred_node_waits_minutes_after_a_transfer_by_hand).
        self._pause = _BY_HAND_PAUSE if self._raft.is_elected_by_transfer and not self._is_preferred else 0

    def tick(self) -> MemberId | None:
        """Count a tick of a leader; return the member to which it should transfer leadership now, or None."""
        self._ticks += 1
        if not self._better or self._ticks < self._period_ticks:
            return None
        self._ticks = 0
        if self._pause > 0:
            self._pause -= 1
            return None
        found = self._successor()
        if found is not None:
            self._pause = _PAUSE
        return found

    def _successor(self) -> MemberId | None:
        status = self._raft.status()
        # A leader that has committed nothing yet has just won; its followers' progress is not known.
        if status.transferee is not None or self._raft.term_at(status.commit_index) != status.term:
            return None
        for preferred in self._better:
            for member, progress in status.progress.items():
                # A transfer holds up appends until the successor has everything, so only to one that nearly has.
                if (
                    node_of(member) == preferred
                    and status.configuration.is_voter(member)
                    and progress.is_active
                    and progress.state is ProgressState.REPLICATE
                    and progress.match_index >= status.commit_index
                ):
                    return member
        return None
