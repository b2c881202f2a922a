"""A replica's leadership: append times, log time, the catch-up rate, and the transfer of leadership."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

from dledger_core.config import Limits
from dledger_core.errors import DLedgerError, NotLeaderError
from dledger_core.ids import NO_INDEX, Index, MemberId, NodeId, Term, node_of
from dledger_core.raft import Role, SoftState
from dledger_core.server.replica.catch_up_rate import CatchUpRate
from dledger_core.server.replica.environment import Environment
from dledger_core.server.replica.log_time import LogTime
from dledger_core.server.replica.preferred_leaders import PreferredLeaders
from dledger_core.server.replica.ready_loop import ReadyLoop

_HAND_OVER_CHECK_S: Final = 0.02
"""Interval at which a leader that hands over checks that its successor is connected."""

_LOG = logging.getLogger(__name__)


class Leadership:
    """The leadership of one group, as its replica on this node sees it. Observes the loop before all services.

    Args:
        loop: the replica's; its log gets the append times.
        log_time: the group's.
        environment: clocks.
        limits: the node's limits.
        preferred: which node should lead.

    Attributes:
        rate: the rate at which files are read for members that lag.
    """

    def __init__(
        self,
        loop: ReadyLoop,
        log_time: LogTime,
        environment: Environment,
        limits: Limits,
        preferred: PreferredLeaders,
    ) -> None:
        log = loop.log
        self._loop = loop
        self._raft = loop.raft
        self._log_time = log_time
        self._preferred = preferred
        self._has_log_time = log.config.profile == "B"
        self._append_clock = log.clock
        self._clock_difference_ms = limits.clock_difference_ms
        self._term: Term | None = None
        self._ready_from = NO_INDEX
        self.rate = CatchUpRate(environment.monotonic_ms, lambda: log.staged_end)

    # --- what the loop reports -------------------------------------------------------------------------------

    def committed(self, commit_index: Index) -> None:
        """Measure how long the committed batches took."""
        self.rate.committed(commit_index)

    def role_changed(self, soft_state: SoftState) -> None:
        """Begin or end a leadership."""
        if soft_state.role is not Role.LEADER:
            self._term = None
            self.rate.forget()
            self._append_clock.follow()
            self._log_time.follow()
        elif soft_state.term != self._term:
            self._term = soft_state.term
            # Its log has every committed entry, but it knows which ones only once one of its own term is committed
            # (thesis section 6.4). By the tables from before it would accept a repeat, or reject a commit: the
            # simulation finds it (mutation "an unready leader decides by old tables").
            self._ready_from = self._raft.last_index if self._has_log_time else NO_INDEX
            self._append_clock.lead()
            self._preferred.lead()
            self._compare_times()
            if self._has_log_time:
                self._log_time.lead()

    def _compare_times(self) -> None:
        """Report that a clock of an earlier leader was ahead: append times never decrease."""
        ahead_ms = self._loop.log.newest_time_ms - self._append_clock.now_ms()
        if ahead_ms > self._clock_difference_ms:
            _LOG.warning(
                "append times ahead of the clock: group=%s node=%s ahead_ms=%d remedy=synchronize clocks; appends get "
                "the newest time of the log until the clock reaches it; for right times now append to a new group",
                self._loop.group,
                self._loop.node_id,
                ahead_ms,
            )

    def tick(self) -> bool:
        """Count a tick of a leader; return whether there is output."""
        used = self._raft.allow_catch_up(self.rate.bytes_per_tick)
        self.rate.tick(used=used)
        if (successor := self._preferred.tick()) is not None:
            self._raft.transfer_leadership(successor)
        return used or successor is not None

    # --- who leads -------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether this node leads and has committed an entry of its term, so that its tables are complete."""
        return self._loop.is_leader and self._loop.controls.commit_index >= self._ready_from

    @property
    def node(self) -> NodeId | None:
        """The node of the group's leader, None if this node knows none."""
        leader = self._loop.soft_state.leader_id
        return None if leader is None else node_of(leader)

    def not_leader(self) -> NotLeaderError:
        """Return the error that names the leader."""
        leader = self.node
        hint = f"ask {leader}" if leader and leader != self._loop.node_id else "retry"
        return NotLeaderError(
            f"{self._loop.node_id} is not the leader of group {self._loop.group}",
            "",
            hint,
            {"leader_id": leader, "group": self._loop.group},
        )

    # --- handing over ----------------------------------------------------------------------------------------

    def transfer(self, target: NodeId) -> None:
        """Start a transfer of leadership to another node's voter; raise as the core does."""
        voters = self._raft.configuration.voters
        member = next((voter for voter in voters if node_of(voter) == target), MemberId(target))
        self._loop.ask(self._raft.transfer_leadership, member)

    async def hand_over(self, timeout_s: float, is_connected: Callable[[NodeId], bool]) -> None:
        """Transfer leadership to a connected voter: to the one with the most entries, else to the next one.

        Returns when this node no longer leads, when no voter takes leadership, or after the timeout.
        """
        now = asyncio.get_running_loop().time
        deadline, loop = now() + timeout_s, self._loop
        for target in self._raft.successors():
            if not is_connected(node_of(target)):
                continue
            with contextlib.suppress(DLedgerError):  # it no longer leads, or has stopped
                self.transfer(node_of(target))
            while loop.is_leader and self._raft.transferee == target and is_connected(node_of(target)):
                if (left := deadline - now()) <= 0:
                    return
                await loop.changes.wait(min(left, _HAND_OVER_CHECK_S))
            # Each voter in turn: the best one may have a full disk and refuse
            # (test_leader_with_full_disk_offers_leadership_to_each_voter).
            if not loop.is_leader:
                return
