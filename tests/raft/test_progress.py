"""Progress: the leader's view of one member, as tables of events."""

from __future__ import annotations

import pytest

from dledger_core.config import RaftConfig
from dledger_core.ids import NO_INDEX, Index
from dledger_core.raft.progress import Progress, ProgressState


def replicating(match_index: int, *sent: int) -> Progress:
    progress = Progress(Index(match_index + 1))
    progress.accepted(Index(match_index))
    for last_index in sent:
        progress.sent(Index(last_index), 100)
    return progress


def test_progress_replicates_after_the_first_acceptance() -> None:
    progress = Progress(Index(8))
    assert progress.state is ProgressState.PROBE
    assert progress.accepted(Index(5))
    assert (progress.state, progress.match_index, progress.next_index) == (ProgressState.REPLICATE, 5, 6)


@pytest.mark.parametrize(
    ("acknowledged", "left", "nbytes"), [(5, 3, 300), (10, 2, 200), (12, 2, 200), (20, 1, 100), (30, 0, 0)]
)
def test_acknowledgement_frees_the_window(acknowledged: int, left: int, nbytes: int) -> None:
    progress = replicating(5, 10, 20, 30)
    progress.accepted(Index(acknowledged))
    assert (progress.inflight_messages, progress.inflight_bytes, progress.next_index) == (left, nbytes, 31)


def test_late_acknowledgements_change_nothing() -> None:
    progress = replicating(5, 10, 20)
    assert progress.accepted(Index(20))
    assert not progress.accepted(Index(10))
    assert not progress.accepted(Index(20))
    assert (progress.match_index, progress.next_index) == (20, 21)


@pytest.mark.parametrize(
    ("messages_max", "bytes_max", "full"), [(2, 1000, True), (3, 1000, False), (9, 200, True), (9, 201, False)]
)
def test_window_is_limited_in_messages_and_bytes(messages_max: int, bytes_max: int, full: bool) -> None:
    config = RaftConfig(inflight_messages_max=messages_max, inflight_bytes_max=bytes_max)
    assert replicating(5, 10, 20).is_full(config) is full


def test_first_rejection_of_several_moves_the_probe() -> None:
    progress = replicating(5, 10, 20, 30)
    assert progress.rejected(Index(10), Index(6))
    assert (progress.state, progress.next_index) == (ProgressState.PROBE, 6)
    progress.probe_sent = True
    assert not progress.rejected(Index(20), Index(6))
    assert progress.probe_sent


def test_rejection_at_or_below_match_index_is_ignored() -> None:
    progress = replicating(20, 30)
    assert not progress.rejected(Index(20), Index(6))
    assert progress.state is ProgressState.REPLICATE


def test_repeated_rejection_waits_for_the_next_heartbeat() -> None:
    progress = Progress(Index(8))
    progress.probe_sent = True
    assert not progress.rejected(Index(7), Index(8))
    assert progress.probe_sent
    assert progress.heartbeat_acked(1, Index(7), Index(0))
    assert not progress.probe_sent
    assert progress.check_due, "asks again without the payload"


def test_round_trip_without_acknowledgement_is_checked_once() -> None:
    progress = replicating(5, 10)
    progress.watch(1)
    assert progress.heartbeat_acked(1, Index(5), Index(0))
    progress.check_due = False
    assert not progress.heartbeat_acked(1, Index(5), Index(0)), "the same round again"


def test_acknowledgement_within_the_round_trip_is_not_a_loss() -> None:
    progress = replicating(5, 10, 20)
    progress.watch(1)
    progress.accepted(Index(10))
    assert not progress.heartbeat_acked(1, Index(5), Index(0))


def test_member_that_lost_acknowledged_entries_is_probed_again() -> None:
    progress = replicating(20, 30)
    progress.watch(1)
    assert progress.heartbeat_acked(1, Index(7), Index(0))
    assert (progress.state, progress.match_index, progress.next_index) == (ProgressState.PROBE, NO_INDEX, 8)


def test_old_response_with_a_lower_index_is_not_a_loss() -> None:
    progress = replicating(5, 20)
    progress.watch(1)
    progress.accepted(Index(20))
    assert not progress.heartbeat_acked(1, Index(6), Index(0))
    assert progress.match_index == 20


def test_member_with_a_snapshot_is_probed_once_its_log_reaches_the_leaders() -> None:
    progress = Progress(Index(3))
    progress.become_needs_snapshot()
    assert progress.heartbeat_acked(1, Index(8), Index(10))  # a snapshot may be packed by now
    assert progress.state is ProgressState.NEEDS_SNAPSHOT
    assert progress.heartbeat_acked(2, Index(9), Index(10))
    assert (progress.state, progress.next_index) == (ProgressState.PROBE, 10)


def test_snapshot_is_needed_though_part_of_first_batch_matches() -> None:
    progress = Progress(Index(27))
    progress.accepted(Index(26))
    progress.next_index = Index(25)  # the batch with entry 27 begins there, and entry 24 is deleted
    progress.become_needs_snapshot()
    assert (progress.match_index, progress.next_index) == (26, 27)


def test_member_that_responds_and_acknowledges_nothing_is_stalled() -> None:
    progress = Progress(Index(1))
    for now in range(20):  # nothing to acknowledge
        progress.heard(now, NO_INDEX)
    assert not progress.is_stalled(5)
    for now in range(20, 26):
        progress.heard(now, Index(3))
        assert progress.is_stalled(5) == (now > 24)
    progress.accepted(Index(2))
    progress.heard(26, Index(3))  # slow, and not stalled
    assert not progress.is_stalled(5)
