"""The leader's view of one other member: matched entries, messages in flight, next step.

The states are those of etcd/raft: probing sends one message per round trip until the logs match, because a window
full of entries after a wrong ``next_index`` would be rejected as a whole.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final

from dledger_core.config import RaftConfig
from dledger_core.errors import invariant
from dledger_core.ids import NO_INDEX, Index, Term
from dledger_core.raft.messages import Condition, Heartbeat, HeartbeatResponse

_REPEATS_MAX: Final = 32
"""Heartbeats of one round to a member: the next one has a new round, and the log time of then."""


class ProgressState(Enum):
    """How the leader sends to a member."""

    PROBE = "probe"
    """One message at a time until it is known where the logs match."""
    REPLICATE = "replicate"
    """Several in flight."""
    NEEDS_SNAPSHOT = "needs-snapshot"
    """The leader has deleted entries that it needs."""


@dataclass(slots=True)
class OutgoingSnapshot:
    """One transfer as the leader sees it.

    Attributes:
        number: distinguishes it from others of the same leader and term.
        first_index: index at which the follower restarts its log.
        previous_term: term of the entry before; NO_TERM if unknown.
        data: the packed state.
        offset: bytes that the follower is known to have.
        sent: the chunk at ``offset`` is in flight.
        ask_due: ask how much has arrived.
        asked: such a query is in flight.
    """

    number: int
    first_index: Index
    previous_term: Term
    data: bytes
    offset: int = 0
    sent: bool = False
    ask_due: bool = False
    asked: bool = False


class Progress:
    """Invariant: ``match_index < next_index``.

    Attributes:
        match_index: last index known durable there and equal to the leader's.
        next_index: first index of the next AppendEntries.
        state: PROBE, REPLICATE or NEEDS_SNAPSHOT.
        probe_sent: in PROBE, a message is in flight.
        check_due: send an empty AppendEntries at ``next_index`` that only asks whether the logs match there: in
            REPLICATE to find a loss at the end of the sent entries, in PROBE to ask again without the payload.
        outgoing: the snapshot transfer in progress.
        acked_round: highest heartbeat round echoed.
        heard_at: the leader's tick of the last response; None = none yet.
        condition: what the member reported with its last response to a heartbeat.
        removed_at: index of the entry that removed this member, and may not have received the commit of that.
        removal_notice_round: the first heartbeat round that carried that; 0 = none yet.
        beat: the last heartbeat, None = none yet.
        beat_response: the member's last response to a heartbeat.
    """

    __slots__ = (
        "_advanced_at",
        "_advanced_match",
        "_inflight",
        "_repeats",
        "_round_start",
        "_round_target",
        "_round_ticks",
        "_watch_match",
        "_watch_round",
        "acked_round",
        "beat",
        "beat_response",
        "check_due",
        "condition",
        "heard_at",
        "inflight_bytes",
        "match_index",
        "next_index",
        "outgoing",
        "probe_sent",
        "removal_notice_round",
        "removed_at",
        "state",
    )

    def __init__(self, next_index: Index, now: int = 0) -> None:
        self.match_index = NO_INDEX
        self.next_index = next_index
        self.state = ProgressState.PROBE
        self.probe_sent = False
        self.check_due = False
        self.outgoing: OutgoingSnapshot | None = None
        self.acked_round = 0
        self.inflight_bytes = 0
        self._inflight: deque[tuple[Index, int]] = deque()
        self._watch_round = 0
        self._watch_match = NO_INDEX
        self.heard_at: int | None = None
        self.condition = Condition.NONE
        self._advanced_at = now
        self._advanced_match = NO_INDEX
        self.removed_at: Index | None = None
        self.removal_notice_round = 0
        self._round_target = Index(next_index - 1)
        self._round_start = now
        self._round_ticks: int | None = None
        self.beat: Heartbeat | None = None
        self.beat_response: HeartbeatResponse | None = None
        self._repeats = 0

    @property
    def is_idle(self) -> bool:
        """Whether the member has all that was sent, and nothing is asked of it."""
        return (
            self.next_index == self.match_index + 1
            and self.state is ProgressState.REPLICATE
            and not self.check_due
            and self.removed_at is None
        )

    def beat_again(self, commit_index: Index) -> Heartbeat | None:
        """Return the last heartbeat if the next one would say the same, but for its round and the log time.

        The member has answered it. A network that repeats messages would deliver the same, so nothing depends on it but
        that both ends hear of each other.
        """
        beat = self.beat
        if (
            beat is None
            or self.acked_round < beat.round
            or self._repeats >= _REPEATS_MAX
            or beat.commit_index != min(self.match_index, commit_index)
            or not self.is_idle
        ):
            return None
        self._repeats += 1
        return beat

    @property
    def inflight_messages(self) -> int:
        """AppendEntries with batches that are not acknowledged."""
        return len(self._inflight)

    def heard(self, now: int, last_index: Index) -> None:
        """Record a response at the leader's tick ``now``, when its log ended at ``last_index``.

        A round ends when the member has all entries that the log had when the round started (thesis section 4.2.1).
        """
        self.heard_at = now
        if self.match_index > self._advanced_match or self.match_index >= last_index:
            self._advanced_at, self._advanced_match = now, self.match_index
        if self.match_index >= self._round_target:
            self._round_ticks = now - self._round_start
            self._round_target, self._round_start = last_index, now

    def is_active(self, now: int, ticks: int) -> bool:
        """Whether it responded within ``ticks``."""
        return self.heard_at is not None and now - self.heard_at <= ticks

    def is_stalled(self, ticks: int) -> bool:
        """Whether it responds, lacks entries, and has acknowledged none for ``ticks``: its disk may be full or hang."""
        return self.heard_at is not None and self.heard_at - self._advanced_at > ticks

    def is_caught_up(self, now: int, ticks: int) -> bool:
        """Whether the last round took at most ``ticks`` and the present one has not taken longer (thesis 4.2.1).

        As a voter it would then delay a commit by about that time at most, however many entries are appended meanwhile;
        a limit on the number of entries would mean another time for each rate of appends.
        """
        return self._round_ticks is not None and max(self._round_ticks, now - self._round_start) <= ticks

    def is_full(self, config: RaftConfig) -> bool:
        """Whether the window is used up; the last message may exceed the bytes by its own size."""
        return len(self._inflight) >= config.inflight_messages_max or self.inflight_bytes >= config.inflight_bytes_max

    def sent(self, last_index: Index, nbytes: int) -> None:
        """Record an AppendEntries in REPLICATE that ends at ``last_index``."""
        self._inflight.append((last_index, nbytes))
        self.inflight_bytes += nbytes
        self.next_index = Index(last_index + 1)
        self._check()

    def become_probe(self, next_index: Index) -> None:
        """Continue with one message at a time from ``next_index``."""
        self.state = ProgressState.PROBE
        self.next_index = max(next_index, Index(self.match_index + 1))
        self.probe_sent = False
        self._clear_inflight()

    def become_needs_snapshot(self) -> None:
        """Stop replicating: the leader has deleted entries that this follower needs.

        A batch is sent as a whole, so ``next_index`` may stand at the start of one that the follower has a part of.
        """
        self.state = ProgressState.NEEDS_SNAPSHOT
        self.next_index = max(self.next_index, Index(self.match_index + 1))
        self._clear_inflight()

    def accepted(self, match_index: Index) -> bool:
        """Record an acknowledgement; return whether ``match_index`` rose."""
        rose = match_index > self.match_index
        if rose:
            self.match_index = match_index
            inflight = self._inflight
            while inflight and inflight[0][0] <= match_index:
                self.inflight_bytes -= inflight.popleft()[1]
            self.next_index = max(self.next_index, Index(match_index + 1))
        if self.state is not ProgressState.REPLICATE and match_index >= self.match_index:
            self.state = ProgressState.REPLICATE
            self.next_index = Index(match_index + 1)
            self.check_due = False
            self.outgoing = None
        self._check()
        return rose

    def rejected(self, prev_index: Index, next_index: Index) -> bool:
        """Record a rejection and where to continue; return whether there is something to send now.

        One loss makes the follower reject all later messages in flight: only the first rejection counts, the rest are
        stale.
        """
        if self.state is ProgressState.REPLICATE:
            # It has acknowledged that entry since, so this rejection is an old one
            # (test_rejection_at_or_below_match_index_is_ignored).
            if prev_index <= self.match_index:
                return False
            self.become_probe(next_index)
            return True
        if self.state is ProgressState.PROBE and prev_index == self.next_index - 1:
            before = self.next_index
            self.become_probe(next_index)
            # The same question at once would get the same response; the next heartbeat asks again.
            self.probe_sent = self.next_index == before
            return not self.probe_sent
        return False

    def sent_beat(self, beat: Heartbeat) -> None:
        """Record a heartbeat of a new round."""
        self.beat, self._repeats = beat, 0
        self.watch(beat.round)

    def watch(self, heartbeat_round: int) -> None:
        """Remember match_index when a heartbeat is sent, unless an older one is still unanswered."""
        if self.acked_round >= self._watch_round:
            self._watch_round = heartbeat_round
            self._watch_match = self.match_index

    def heartbeat_acked(self, heartbeat_round: int, last_index: Index, first_index: Index) -> bool:
        """Record a heartbeat response; return whether there may be something to send.

        Args:
            heartbeat_round: the echoed round.
            last_index: the member's last durable index when it responded.
            first_index: the leader's first index.
        """
        watched = heartbeat_round >= self._watch_round > self.acked_round
        self.acked_round = max(self.acked_round, heartbeat_round)
        if watched and last_index < self._watch_match:
            self.ends_at(Index(last_index))  # its disk ignored a sync
            return True
        if self.state is ProgressState.REPLICATE:
            # Tests: test_slow_disk_of_a_follower_causes_no_resend,
            # test_heartbeat_finds_a_lost_message_without_resending_a_lost_response.
            # No acknowledgement for a round trip: a lost message, a lost response or a slow disk. Ask before sending
            # the entries again, because a slow disk would only get slower.
            self.check_due = watched and self.match_index == self._watch_match and bool(self._inflight)
            return self.check_due
        if self.state is ProgressState.NEEDS_SNAPSHOT:
            if self.outgoing is not None:
                self.outgoing.ask_due = watched
                return watched
            if last_index + 1 >= first_index:
                self.become_probe(Index(last_index + 1))
            return True  # else the snapshot may be ready meanwhile
        self.probe_sent = False
        self.check_due = True
        return True

    def ends_at(self, last_index: Index) -> bool:
        """Record the end of the member's log; return whether it has lost acknowledged entries.

        Nothing that it acknowledged counts then: forget match_index and probe again.
        """
        if last_index >= self.match_index:
            return False
        # Not ``last_index``: the log may have another leader's entries up to there
        # (test_member_that_lost_acknowledged_entries_is_probed_again).
        self.match_index = NO_INDEX
        self.become_probe(Index(last_index + 1))
        return True

    def _clear_inflight(self) -> None:
        self._inflight.clear()
        self.inflight_bytes = 0
        self.check_due = False
        self._check()

    def _check(self) -> None:
        invariant(
            self.match_index < self.next_index and self.inflight_bytes >= 0,
            "progress of a member is inconsistent",
            match_index=self.match_index,
            next_index=self.next_index,
            inflight_bytes=self.inflight_bytes,
        )
