"""Log time: what counts, who carries it, and what expires by it although wall clocks jump."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dledger_core import control
from dledger_core.control import TransactionId
from dledger_core.errors import CorruptRecordError, ProducerUnknownError
from dledger_core.ids import NUMBER_MAX, Index
from dledger_core.raft import Heartbeat
from dledger_core.record import ProposedBatch
from dledger_core.server.replica.log_time import LogTime, RunningTime
from dledger_core.storage.tables.producers import EXPIRY_MS
from dledger_core.storage.tables.tables import LogTables
from tests.support.replica_group import Asker, HandDriven
from tests.support.server_group import RAFT, STORAGE, ServerGroup, eventually

MINUTE = 60_000
DAY = 24 * 60 * MINUTE
TIMEOUT = 15 * MINUTE
QUERY = TransactionId("query", 0, "run")
THREE = ("n0", "n1", "n2")
NO_NOOP = replace(RAFT, noop_on_election=False)


def recorded(n0: HandDriven) -> list[int | None]:
    """Return the log times of the control entries in the log, in ms."""
    found = n0.log.control_entries(0, n0.log.last_index() + 1)
    return [control.log_time(control.unpack(body)) for _, _, body in found]


def is_open(n0: HandDriven) -> bool:
    return (QUERY.query_id, QUERY.batch_id) in n0.replica.tables.transactions.open


@pytest.mark.parametrize("during", [True, False], ids=["before it opens", "while it is open"])
@pytest.mark.parametrize("jump", [30 * DAY, -30 * DAY], ids=["forward", "back"])
def test_transaction_is_aborted_by_log_time_whatever_clocks_show(tmp_path, jump, during) -> None:
    with HandDriven(tmp_path) as n0:
        n0.lead()
        ask = Asker(n0)
        n0.wall_ms += jump if during else 0
        ask.attempt(QUERY, "attempt", b"row")
        n0.run()
        n0.wall_ms += -jump if during else jump
        n0.running_ms += TIMEOUT
        ask.transactions.abort_inactive(TIMEOUT)
        n0.run()
        assert is_open(n0)
        n0.running_ms += 1
        ask.transactions.abort_inactive(TIMEOUT)
        n0.run()
        assert not is_open(n0)


def test_transaction_is_aborted_by_ready_leader_only(tmp_path) -> None:
    with HandDriven(tmp_path, voters=THREE) as n0:
        n0.lead()
        ask = Asker(n0)
        ask.attempt(QUERY, "attempt", b"row")
        n0.acknowledge()
        n0.running_ms += TIMEOUT + 1
        n0.depose()
        ask.transactions.abort_inactive(TIMEOUT)
        n0.run()
        assert is_open(n0)
        assert len(ask.answers) == 1


def test_producer_expires_by_log_time_whatever_clocks_show(tmp_path) -> None:
    with HandDriven(tmp_path) as n0:
        n0.lead()
        ask = Asker(n0)
        ask.produced("p", 0, 0, b"first")
        n0.run()
        for jump in (8 * DAY, -16 * DAY, 60 * DAY):
            n0.wall_ms += jump
            ask.produced("other", jump, 0, b"x")
            n0.run()
        ask.produced("p", 0, 0, b"first")
        n0.run()
        assert ask.ranges[0] == ask.ranges[-1], "a repeat is not appended again"
        n0.running_ms += EXPIRY_MS + 1
        ask.produced("other", 60 * DAY + 1, 0, b"x")
        n0.run()
        ask.produced("p", 0, 1, b"second")
        n0.run()
        assert ask.ranges[-1] is ProducerUnknownError


def test_leader_records_log_time_every_ten_minutes_while_it_appends(tmp_path) -> None:
    with HandDriven(tmp_path) as n0:
        n0.running_ms = 77 * MINUTE  # of an earlier leader, or of none
        n0.lead()
        ask = Asker(n0)
        for minutes in (9, 1, 9, 60, 1):
            n0.running_ms += minutes * MINUTE
            n0.run()
            ask.plain(b"a", b"b")
            n0.run()
        assert recorded(n0) == [0, 10 * MINUTE, 79 * MINUTE], "an idle leader writes nothing"
        ask.produced("p", 0, 0, b"x")
        n0.run()
        n0.running_ms += 9 * MINUTE
        ask.plain(b"a")
        n0.run()
        assert recorded(n0)[3:] == [80 * MINUTE], "an entry of a producer holds it too"
        assert not any(isinstance(answer, BaseException) for answer in ask.answers)


def test_log_time_continues_after_restart_from_the_log(tmp_path) -> None:
    with HandDriven(tmp_path) as n0:
        n0.lead()
        n0.running_ms += 20 * MINUTE
        Asker(n0).plain(b"a")
        n0.run()
        n0.running_ms += MINUTE
    with HandDriven(tmp_path) as n0:
        assert n0.replica.log_time.now_ms == 20 * MINUTE
        n0.running_ms += DAY
        assert n0.replica.log_time.now_ms == 20 * MINUTE, "no node leads"
        n0.lead()
        n0.running_ms += MINUTE
        assert n0.replica.log_time.now_ms == 21 * MINUTE
        assert recorded(n0) == [0, 20 * MINUTE, 20 * MINUTE]


def test_follower_learns_log_time_from_heartbeats_of_its_leader(tmp_path) -> None:
    with HandDriven(tmp_path, voters=THREE) as n0:
        log_time = n0.replica.log_time
        beat = {"commit_index": Index(-1), "round": 1}
        n0.step(Heartbeat, "n1", 5, log_time_ms=3 * DAY, **beat)
        n0.run()
        n0.running_ms += DAY
        assert log_time.now_ms == 3 * DAY, "it does not count itself"
        n0.step(Heartbeat, "n2", 4, log_time_ms=30 * DAY, **beat)
        n0.step(Heartbeat, "n1", 5, log_time_ms=2 * DAY, **beat)
        n0.run()
        assert log_time.now_ms == 3 * DAY, "neither a deposed leader nor an earlier heartbeat counts"
        n0.lead()
        assert recorded(n0) == [3 * DAY]
        n0.running_ms += MINUTE
        n0.sent.clear()
        for _ in range(20):
            n0.replica.tick()
        n0.run()
        assert {message.log_time_ms for message in n0.sent if isinstance(message, Heartbeat)} == {3 * DAY + MINUTE}


def test_follower_does_not_count_after_its_leadership(tmp_path) -> None:
    with HandDriven(tmp_path, voters=THREE) as n0:
        n0.lead()
        n0.running_ms += MINUTE
        n0.depose()
        n0.running_ms += DAY
        assert n0.replica.log_time.now_ms == MINUTE


def test_new_leader_continues_from_uncommitted_entry(tmp_path) -> None:
    with HandDriven(tmp_path, voters=THREE) as n0:
        n0.lead(commit=False)
        n0.running_ms += DAY
        n0.replica.propose(ProposedBatch(control=n0.replica.pack_control({})))
        n0.run()
    with HandDriven(tmp_path, voters=THREE) as n0:
        n0.lead(commit=False)
        n0.run()
        assert recorded(n0)[-1] == DAY


def test_log_of_profile_a_has_no_log_time(tmp_path) -> None:
    with HandDriven(tmp_path, storage=replace(STORAGE, profile="A"), raft=NO_NOOP) as n0:
        n0.lead()
        n0.running_ms += DAY
        Asker(n0).plain(b"a")
        n0.run()
        assert (recorded(n0), n0.log.last_index(), n0.replica.log_time.now_ms) == ([], 0, 0)


def test_stalls_and_suspends_do_not_count() -> None:
    clock = [1000]
    running = RunningTime(lambda: clock[0], stall_ms=400)
    log_time = LogTime(running.now_ms)
    log_time.lead()
    for elapsed in (20, 400, 30 * DAY, 20):
        clock[0] += elapsed
        running.tick()
    assert log_time.now_ms == 20 + 400 + 400 + 20


async def test_log_time_of_running_nodes_advances_while_one_leads(tmp_path) -> None:
    async with ServerGroup(tmp_path) as group:
        times = [group.hosted(node).replica.log_time for node in group.nodes]
        await eventually(lambda: min(log_time.now_ms for log_time in times) > 100, timeout_s=4.0)


def test_log_time_never_falls_and_counts_while_leading_only() -> None:
    running = [0]
    log_time = LogTime(lambda: running[0])
    log_time.observe(100)
    log_time.lead()
    running[0] = 50
    log_time.lead()
    log_time.observe(120)
    assert log_time.now_ms == 150
    log_time.observe(1000)
    running[0] = 60
    assert log_time.now_ms == 1010
    log_time.follow()
    running[0] = 90
    log_time.follow()
    log_time.observe(900)
    assert log_time.now_ms == 1010


@pytest.mark.parametrize("value", [-1, 1.5, True, "1", NUMBER_MAX + 1])
def test_impossible_log_time_is_rejected(value: object) -> None:
    with pytest.raises(CorruptRecordError):
        LogTables().apply(Index(0), 1000, control.pack({"t": value}))


def test_entry_without_or_with_earlier_log_time_is_as_old_as_the_one_before() -> None:
    tables = LogTables()
    for index, fields in enumerate(({"t": 500}, {}, {"t": 499})):
        tables.apply(Index(index), 1000, control.pack(fields))
        assert tables.log_time_ms == 500
    assert LogTables.restore(tables.snapshot()).log_time_ms == 500


def test_highest_log_time_of_a_heartbeat_stops_no_later_leader(tmp_path) -> None:
    with HandDriven(tmp_path, voters=THREE) as n0:
        n0.step(Heartbeat, "n1", 5, log_time_ms=NUMBER_MAX, commit_index=Index(-1), round=1)
        n0.run()
        n0.lead(commit=False)
        n0.running_ms += MINUTE
        n0.replica.propose(ProposedBatch(control=n0.replica.pack_control({})))
        n0.run()
        assert recorded(n0) == [NUMBER_MAX, NUMBER_MAX]
        assert n0.replica.log_time.now_ms == NUMBER_MAX
