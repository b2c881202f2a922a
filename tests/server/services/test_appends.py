"""The append service on a hand-driven replica with a real store: each request's reply, and when it gets it."""

from __future__ import annotations

import asyncio

import pytest

from dledger_core.config import LIMITS, Limits, StorageConfig
from dledger_core.control import PARTS_MAX, Part, TransactionId, column_crc, places_of
from dledger_core.errors import (
    BadRequestError,
    BusyError,
    FencedError,
    InvariantViolationError,
    LeadershipLostError,
    NotLeaderError,
    ProducersFullError,
    ProducerUnknownError,
    ProposalDroppedError,
    QueryUnknownError,
    SequenceConflictError,
    SequenceGapError,
    TransactionError,
    TransferringError,
)
from dledger_core.ids import NO_TERM, NodeId
from dledger_core.net.limits.budget import Budget
from dledger_core.record import MAGIC_CONTROL, Columns, ProposedBatch
from dledger_core.server.services.appends import AppendedRange
from dledger_core.storage.tables.producers import EXPIRY_MS
from tests.support.logs import rows_between
from tests.support.replica_group import Asker, HandDriven, break_invariant, entries
from tests.support.server_group import STORAGE

THREE = ("n0", "n1", "n2")
KEY = TransactionId("q", 0, "r")
QUARTER = bytes((8 << 20) // 4 - 48)
"""Four of these are as large as a batch may be; not with a control entry."""


@pytest.fixture
def n0(tmp_path):
    """A leader of three with its first entry committed; commits need ``acknowledge``."""
    with HandDriven(tmp_path / "s", voters=THREE) as node:
        node.lead()
        yield node
        assert not node.failures


@pytest.fixture
def unready(tmp_path):
    """A leader of three that has committed nothing in its term."""
    with HandDriven(tmp_path / "s", voters=THREE) as node:
        node.lead(commit=False)
        yield node
        assert not node.failures


@pytest.fixture
def ask(n0):
    return Asker(n0)


def commit(node):
    node.run()
    node.acknowledge()


def batches(node) -> list[tuple[int, int]]:
    return [(b.first_index, b.last_index) for b in node.log.read_batches(0, 1 << 30)]


def bodies(node) -> list[bytes]:
    rows = rows_between(node.log, 0, node.log.last_index() + 1)
    return [row.body for row in rows if row.magic != MAGIC_CONTROL]


# --- coalesce ------------------------------------------------------------------------------------------------------


def test_appends_in_one_iteration_become_one_batch(n0, ask):
    for i in range(100):
        ask.plain(b"%d" % i, b"x")
    n0.run()
    assert ask.answers == []
    n0.acknowledge()
    assert ask.ranges == [(1 + 2 * i, 2 + 2 * i) for i in range(100)]
    assert batches(n0) == [(0, 0), (1, 200)]
    assert bodies(n0)[::2] == [b"%d" % i for i in range(100)]
    assert {answer.term for answer in ask.answers} == {1}


def test_appends_are_joined_while_enough_batches_are_in_flight(n0):
    ask = Asker(n0, limits=Limits(batches_in_flight=2))
    for i in range(50):
        ask.plain(b"%d" % i)
        n0.run()
    assert len(batches(n0)) == 1 + 2
    n0.acknowledge()
    n0.acknowledge()
    assert ask.ranges == [(1 + i, 1 + i) for i in range(50)]
    assert batches(n0)[3:] == [(3, 50)]


def test_joined_batch_is_limited_in_bytes(n0):
    ask = Asker(n0, limits=Limits(coalesced_bytes=1000))
    for _ in range(10):
        ask.plain(bytes(280))
    commit(n0)
    assert ask.ranges == [(1 + i, 1 + i) for i in range(10)]
    assert [last - first + 1 for first, last in batches(n0)[1:]] == [3, 3, 3, 1]


def test_append_that_exceeds_limit_of_log_is_refused_alone(n0, ask):
    ask.plain(b"before")
    for request in (
        lambda: ask.plain(bytes(STORAGE.record_bytes_max)),
        lambda: ask.plain(*[bytes(3 << 20)] * 3),
        lambda: ask.produced("p", 0, 0, *[QUARTER] * 4),
        lambda: ask.attempt(KEY, "a", *[QUARTER] * 4),
        lambda: n0.replica.propose(ProposedBatch(Columns.from_bodies([bytes(STORAGE.record_bytes_max)]))),
    ):
        with pytest.raises(BadRequestError):
            request()
    ask.plain(*[QUARTER] * 4)
    ask.produced("p", 0, 0, b"first")
    commit(n0)
    n0.acknowledge()
    assert ask.ranges == [(1, 1), (2, 5), (7, 7)]


def test_busy_connection_delays_others_by_one_append(n0):
    ask = Asker(n0, limits=Limits(coalesced_bytes=1000))
    for i in range(9):
        ask.plain(b"%d" % i + bytes(279), source="busy")
    ask.produced("p", 0, 0, b"other", source="other")
    commit(n0)
    assert [body[:5] for body in bodies(n0)[:3]] == [b"other", b"0" + bytes(4), b"1" + bytes(4)]
    assert batches(n0)[1:3] == [(1, 4), (5, 7)]


def test_attempt_is_appended_after_all_that_waits(n0):
    ask = Asker(n0, limits=Limits(coalesced_bytes=1000))
    for name in (b"first", b"second"):
        ask.plain(name + bytes(600))
    ask.attempt(KEY, "a", b"row")
    ask.plain(b"later")
    commit(n0)
    assert [body.rstrip(b"\0") for body in bodies(n0)] == [b"first", b"second", b"row", b"later"]


def test_plain_append_does_not_wait_for_batches_of_attempts(n0):
    ask = Asker(n0, limits=Limits(batches_in_flight=1))
    for number in range(3):
        ask.attempt(KEY, f"a{number}", b"x")
    ask.plain(b"plain")
    n0.run()
    assert bodies(n0)[-1] == b"plain"


# --- producers -----------------------------------------------------------------------------------------------------


def test_appends_of_producers_share_a_batch_each_after_its_control_entry(n0, ask):
    ask.plain(b"plain", source="plain")
    for number in range(20):
        ask.produced(f"p{number}", 0, 0, b"%d" % number, b"x" * number, source=number)
    ask.produced("p3", 0, 1, b"next", source=3)
    ask.produced("p3", 0, 3, b"gap", source=3)
    n0.run()
    n0.acknowledge()
    n0.confirm()
    assert batches(n0) == [(0, 0), (1, 63)]
    rows = list(rows_between(n0.log, 1, 64))
    assert [row.magic == MAGIC_CONTROL for row in rows] == [True, False, False] * 20 + [True, False, False]
    assert rows[-1].body == b"plain"
    found = n0.replica.tables.producers
    assert [found.get(f"p{n}").appends[0].first_index for n in range(20)] == [2 + 3 * n for n in range(20)]
    expected = [(2 + 3 * n, 3 + 3 * n) for n in range(20)] + [(62, 62), (63, 63), SequenceGapError]
    assert sorted(map(str, ask.ranges)) == sorted(map(str, expected))


def test_batch_of_producers_has_the_same_effect_on_a_follower(n0, ask, tmp_path):
    with HandDriven(tmp_path / "follower") as follower:
        for number in range(5):
            ask.produced(f"p{number}", 0, 0, b"x", source=number)
        commit(n0)
        replicated = tuple(n0.log.read_batches(0, 1 << 20))
        follower.receive(entries(batches=replicated, commit_index=n0.replica.commit_index))
        follower.run()
        found = [node.replica.tables.producers for node in (n0, follower)]
        newest = [[table.get(f"p{number}").appends[0].first_index for number in range(5)] for table in found]
        assert newest == [[2, 4, 6, 8, 10]] * 2


def test_repeated_append_gets_first_result_in_flight_and_committed(n0, ask):
    ask.produced("p", 0, 0, b"a", b"b")
    ask.produced("p", 0, 1, b"c")
    ask.produced("p", 0, 0, b"a", b"b")
    n0.run()
    assert ask.answers == []
    n0.acknowledge()
    assert ask.ranges == [(2, 3), (2, 3), (5, 5)]
    ask.produced("p", 0, 2, b"d")
    ask.produced("p", 0, 0, b"a", b"b")
    n0.run()
    assert ask.ranges[3:] == [(2, 3)], "a later append is in flight"
    n0.acknowledge()
    n0.depose()
    n0.lead()
    assert n0.replica.soft_state.term > 1
    ask.produced("p", 0, 0, b"a", b"b")
    n0.run()
    assert ask.answers[-1] == ask.answers[0], "with the term of its entries, not the current one"
    assert bodies(n0) == [b"a", b"b", b"c", b"d"]


def test_append_replaced_by_committed_entries_has_unknown_outcome(n0, ask):
    """One message of the new leader ends this one's leadership, replaces its entry and commits another there."""
    ask.plain(b"replaced")
    n0.run()
    end = n0.log.read(0, 1, 1 << 20).nbytes
    new = {"first": 1, "term": 2, "prev_term": 1, "position": end, "commit_index": 2}
    n0.receive(entries(b"new", b"new", **new))
    n0.run()
    assert n0.replica.commit_index == 2
    assert ask.ranges == [LeadershipLostError]


def test_repeated_append_of_trimmed_entries_has_no_term(tmp_path):
    storage = StorageConfig(data_segment_bytes=1 << 16, index_segment_bytes=3200, preallocate_bytes=0)
    with HandDriven(tmp_path / "s", storage=storage) as n0:
        n0.lead()
        ask = Asker(n0)
        ask.produced("p", 0, 0, b"a")
        for _ in range(8):
            ask.plain(bytes(30_000))
            n0.run()
        n0.replica.store.trim(6)
        n0.run()
        assert n0.log.first_index() > 3
        ask.produced("p", 0, 0, b"a")
        n0.run()
        assert (ask.ranges[0], ask.ranges[-1]) == ((2, 2), (2, 2))
        assert (ask.answers[0].term, ask.answers[-1].term) == (1, NO_TERM)


@pytest.mark.parametrize("committed", [False, True], ids=["in-flight", "committed"])
@pytest.mark.parametrize(
    ("producer", "epoch", "sequence", "body", "error"),
    [
        ("stranger", 0, 1, b"x", ProducerUnknownError),
        ("p", 1, 3, b"x", SequenceGapError),
        ("p", 2, 1, b"x", SequenceGapError),
        ("p", 0, 1, b"x", FencedError),
        ("p", 1, 1, b"other", SequenceConflictError),
    ],
)
def test_append_out_of_sequence_is_rejected(n0, ask, committed, producer, epoch, sequence, body, error):
    ask.produced("p", 0, 0, b"old epoch")
    commit(n0)
    ask.produced("p", 1, 0, b"zero")
    ask.produced("p", 1, 1, b"one")
    if committed:
        commit(n0)
    ask.produced(producer, epoch, sequence, body)
    n0.confirm()
    assert type(ask.answers[-1]) is error
    n0.acknowledge()
    ask.produced("p", 1, 2, b"two")
    commit(n0)
    assert bodies(n0) == [b"old epoch", b"zero", b"one", b"two"]


def settle_leadership(n0, ask, deposed):
    """Nothing is answered before the other nodes have confirmed the leader, or deposed it."""
    n0.run()
    assert ask.answers == []
    if deposed:
        n0.depose()
    else:
        n0.confirm()


@pytest.mark.parametrize("deposed", [False, True], ids=["still-leads", "deposed"])
@pytest.mark.parametrize("error", [SequenceGapError, ProducerUnknownError, TransactionError])
def test_missing_entry_is_error_only_after_leadership_is_confirmed(n0, error, deposed):
    """A leader that was replaced without noticing lacks the new leader's entries: its rejection could be wrong."""
    Asker(n0).produced("known", 0, 0, b"known")
    commit(n0)
    ask = Asker(n0)
    if error is TransactionError:
        ask.transactions.commit(KEY, [Part(5, 5, 1, 1)], ask.answers.append)
    else:
        ask.produced("known" if error is SequenceGapError else "stranger", 0, 7, b"x")
    settle_leadership(n0, ask, deposed)
    assert ask.ranges == [NotLeaderError if deposed else error]


@pytest.mark.parametrize("deposed", [False, True], ids=["still-leads", "deposed"])
def test_state_is_returned_only_after_leadership_is_confirmed(n0, ask, deposed):
    """A frozen leader that thaws does not know that its successor has committed more appends of the producer."""
    ask.appends.when_ready(ask.answers.append)
    settle_leadership(n0, ask, deposed)
    assert ask.ranges == [NotLeaderError if deposed else (0, 0)]


def test_dropped_first_append_does_not_fence_older_epoch(n0, ask):
    ask.produced("p", 4, 0, b"a")
    commit(n0)
    n0.replica.leadership.transfer(NodeId("n1"))
    ask.produced("p", 5, 0, b"b")
    n0.run()
    assert type(ask.answers[-1]) is TransferringError
    for _ in range(40):  # until the transfer times out
        n0.replica.tick()
        n0.acknowledge()
    assert n0.replica.is_leader
    ask.produced("p", 4, 1, b"c")
    commit(n0)
    assert ask.ranges[-1] == (4, 4)


# --- leadership ----------------------------------------------------------------------------------------------------


def test_lost_leadership_leaves_outcome_of_proposed_appends_unknown(n0, ask):
    ask.plain(b"proposed")
    n0.run()
    for _ in range(5):
        ask.plain(b"x")
        n0.run()
    ask.produced("p", 0, 0, b"a")
    ask.plain(b"gathered")
    n0.depose()
    kinds = ask.ranges
    assert kinds.count(LeadershipLostError) + kinds.count(NotLeaderError) == len(kinds) == 8
    assert kinds[:4] == [LeadershipLostError] * 4, "these are in the log"
    assert NotLeaderError in kinds, "an append that was not proposed is certainly not in the log"
    assert ask.answers[0].outcome_unknown
    assert not next(a for a in ask.answers if type(a) is NotLeaderError).outcome_unknown
    with pytest.raises(NotLeaderError):
        ask.plain(b"later")


@pytest.mark.parametrize("deposed", [False, True], ids=["leads", "deposed"])
def test_producers_wait_until_leaders_tables_are_complete(unready, deposed):
    ask = Asker(unready, budget := Budget(1000))
    ask.produced("p", 0, 0, bytes(700))
    ask.produced("stranger", 0, 7, b"a")
    with pytest.raises(BusyError):
        ask.produced("q", 0, 0, bytes(700))
    unready.run()
    assert ask.answers == []
    if deposed:
        unready.depose()
        assert ask.ranges == [NotLeaderError, NotLeaderError]
    else:
        unready.acknowledge()
        unready.confirm()
        unready.acknowledge()
        assert ask.ranges == [ProducerUnknownError, (2, 2)]
    assert budget.taken_bytes == 0


def test_waiting_requests_are_limited_in_number(unready):
    ask = Asker(unready, limits=Limits(appends_until_ready=10))
    for _ in range(11):
        ask.appends.when_ready(ask.answers.append)
    assert len(ask.answers) == 1
    unready.acknowledge()
    unready.confirm()
    assert ask.ranges.count((0, 0)) == 10


# --- back-pressure -------------------------------------------------------------------------------------------------


def test_appends_above_budget_are_busy_until_others_commit(n0):
    ask = Asker(n0, budget := Budget(1 << 20, retry_after_ms=7))
    for _ in range(3):
        ask.plain(bytes(300 << 10))
    with pytest.raises(BusyError) as refused:
        ask.plain(bytes(300 << 10))
    assert refused.value.values["retry_after_ms"] == 7
    n0.run()
    with pytest.raises(BusyError):
        ask.produced("p", 0, 0, bytes(300 << 10))
    n0.acknowledge()
    assert ask.ranges == [(1, 1), (2, 2), (3, 3)]
    assert budget.taken_bytes == 0
    ask.produced("p", 0, 0, bytes(300 << 10))
    commit(n0)
    assert ask.ranges[-1] == (5, 5)


def test_append_larger_than_budget_is_served_alone(n0):
    ask = Asker(n0, Budget(1000))
    ask.plain(bytes(5000))
    with pytest.raises(BusyError):
        ask.plain(b"x")
    commit(n0)
    assert ask.ranges == [(1, 1)]


@pytest.mark.parametrize("end", ["commit", "depose", "reject"])
def test_every_reply_gives_bytes_back(n0, end):
    ask = Asker(n0, budget := Budget(1 << 20))
    ask.produced("p", 0, 0, b"a")
    commit(n0)
    ask.produced("p", 0, 1, b"b")
    ask.plain(b"c")
    ask.attempt(KEY, "attempt", b"d")
    if end == "reject":
        ask.produced("p", 0, 9, b"gap")
        ask.transactions.commit(KEY, [Part(9, 9, 1, 1)], ask.answers.append)
    assert budget.taken_bytes > 0
    if end == "depose":
        n0.depose()
    n0.run()
    if end != "depose":
        n0.acknowledge()
        n0.confirm()
    assert budget.taken_bytes == 0


# --- transactions --------------------------------------------------------------------------------------------------


def test_abort_never_raises(n0):
    """A timer calls it: an error goes to the reply, and the next call tries again."""
    ask = Asker(n0, Budget(1000))
    ask.plain(bytes(2000))
    ask.transactions.abort(KEY, ask.answers.append)
    ask.transactions.abort(TransactionId("q" * (LIMITS.id_bytes + 1), 0, "r"), ask.answers.append)
    n0.depose()
    ask.transactions.abort(KEY, ask.answers.append)
    assert ask.ranges == [BusyError, BadRequestError, NotLeaderError, NotLeaderError]


def test_abort_includes_attempts_in_flight(n0, ask):
    """The table does not contain them yet: otherwise readers would wait for the transaction's timeout."""
    ask.attempt(KEY, "a", b"row")
    n0.run()
    ask.transactions.abort(KEY, ask.answers.append)
    commit(n0)
    assert not n0.replica.tables.transactions.open
    ask.attempt(KEY, "a", b"late")
    commit(n0)
    assert not n0.replica.tables.transactions.open
    assert ask.ranges[:2] == [(2, 2), (3, 3)]
    assert batches(n0)[-1] == (3, 3), "the late attempt was rejected"


def test_commit_that_another_one_overtook_is_not_confirmed(n0, ask):
    """Both are in the log; the table takes the first one, and the second must not hear that its rows are there."""
    for attempt in ("a", "b"):
        ask.attempt(KEY, attempt, b"row")
        commit(n0)
    crc = column_crc(Columns.from_bodies([b"row"]).crcs)
    first, second = (Part(start, end, 1, crc) for start, end in ask.ranges)
    for part in (first, second):
        ask.transactions.commit(KEY, [part], ask.answers.append)
        n0.run()
    commit(n0)
    assert isinstance(ask.answers[2], AppendedRange)
    assert ask.ranges[3] is TransactionError
    committed = n0.replica.tables.transactions.committed(KEY)
    assert committed.places == places_of([first])


def test_abort_of_known_query_is_appended_once(n0, ask):
    ask.attempt(KEY, "a", b"row")
    for _ in range(2):
        ask.transactions.abort(KEY, ask.answers.append)
        commit(n0)
    assert batches(n0) == [(0, 0), (1, 2), (3, 3)]
    assert len(ask.ranges) == 3
    ask.transactions.abort(KEY._replace(batch_id=1), ask.answers.append)
    commit(n0)
    ask.attempt(KEY._replace(batch_id=1), "a", b"a straggler of it")
    n0.confirm()
    assert ask.ranges[-1] is TransactionError


@pytest.mark.parametrize("once", [True, False])
def test_abort_of_unknown_query_is_one_entry_and_refuses_a_late_append(n0, ask, once):
    """A driver aborts before a task's first append arrives, perhaps at the next leader: no reader waits for it."""
    for _ in range(2):
        ask.transactions.abort(KEY, ask.answers.append, once=once)
        commit(n0)
    assert batches(n0) == [(0, 0), (1, 2)], "in one batch, and only once"
    table = n0.replica.tables.transactions
    assert (table.state(KEY), len(table.queries), table.queries.one_time_count) == ("aborted", 1, int(once))
    n0.depose()
    n0.lead()
    commit(n0)
    ask.attempt(KEY, "a", b"late")
    n0.confirm()
    assert ask.ranges[-1] is TransactionError
    assert not table.open
    ask.attempt(KEY._replace(run_id="the next run"), "a", b"row")
    commit(n0)
    assert list(table.open) == [("q", 0)], "another run writes the micro-batch"


def test_abort_of_run_that_never_appeared_ends_the_open_one_of_a_dead_run(n0, ask):
    """A driver died, its restart fails before a task appends: readers wait for neither of them."""
    ask.attempt(KEY, "a", b"row")
    commit(n0)
    restart = KEY._replace(run_id="restart")
    ask.transactions.abort(restart, ask.answers.append)
    commit(n0)
    table = n0.replica.tables.transactions
    assert (dict(table.open), table.state(restart)) == ({}, "aborted")
    for late in (restart, KEY):
        ask.attempt(late, "a", b"late")
        n0.confirm()
    assert ask.ranges[-2:] == [TransactionError, FencedError]


def test_late_append_of_aborted_run_does_not_end_the_next_run(n0, ask):
    """The aborted run had not appended, so no other run had retired it."""
    ask.transactions.commit(KEY, [], ask.answers.append)
    commit(n0)
    failed, restart = (KEY._replace(batch_id=1, run_id=run) for run in ("failed", "restart"))
    ask.transactions.abort(failed, ask.answers.append)
    ask.attempt(restart, "a", b"row")
    commit(n0)
    ask.attempt(failed, "a", b"late")
    commit(n0)
    n0.confirm()
    assert ask.ranges[-1] is FencedError
    assert n0.replica.tables.transactions.open["q", 1].run_id == "restart"


def test_abort_of_unknown_query_without_run_leaves_nothing(n0, ask):
    ask.transactions.abort(KEY._replace(run_id=""), ask.answers.append)
    commit(n0)
    assert batches(n0) == [(0, 0)]
    assert not n0.replica.tables.transactions.queries


def test_run_is_aborted_by_batch_id_before_its_first_append_of_it(n0, ask):
    """A driver without query id: its run has written earlier micro-batches, and its task is late."""
    run, second = KEY._replace(run_id="label/run"), KEY._replace(run_id="label/run", batch_id=1)
    ask.transactions.commit(run, [], ask.answers.append)
    commit(n0)
    ask.transactions.abort(second._replace(query_id="", run_id="label/"), ask.answers.append)
    commit(n0)
    ask.attempt(second, "a", b"late")
    n0.confirm()
    assert ask.ranges[-1] is TransactionError
    assert not n0.replica.tables.transactions.open


@pytest.mark.parametrize("in_flight", [True, False])
def test_run_is_aborted_by_batch_id_without_query_id(n0, ask, in_flight):
    """A driver knows its run and the micro-batch; the query id only from a task that finished."""
    other = KEY._replace(query_id="other", run_id="l/other run")
    for key in (other, other._replace(query_id="another"), KEY._replace(run_id="label/run")):
        ask.attempt(key, "a", b"row")
    if not in_flight:
        commit(n0)
    names = (
        KEY._replace(run_id="another"),
        KEY._replace(batch_id=7),
        KEY._replace(run_id=""),
        KEY._replace(run_id="l/"),
    )
    for other in names:
        ask.transactions.abort(other._replace(query_id=""), ask.answers.append)
    ask.transactions.abort(KEY._replace(query_id="", run_id="label/"), ask.answers.append)
    commit(n0)
    assert list(n0.replica.tables.transactions.open) == [("other", 0), ("another", 0)], "two runs start with l/"


def test_renewed_transaction_is_not_aborted_nor_soon_by_a_new_leader(n0, ask):
    ask.attempt(KEY, "a", b"row")
    ask.attempt(KEY._replace(query_id="other"), "a", b"row")
    commit(n0)

    def is_open(query_id="q"):
        ask.transactions.abort_inactive(1000)
        commit(n0)
        return (query_id, 0) in n0.replica.tables.transactions.open

    n0.running_ms += 900
    for run_id in ("r", "another"):
        ask.transactions.renew(KEY._replace(run_id=run_id))
    n0.running_ms += 200
    assert is_open()
    assert not is_open("other")
    n0.depose()
    n0.running_ms += 10_000
    n0.lead()
    n0.running_ms += 1000
    assert is_open()
    n0.running_ms += 1
    assert not is_open()


def test_renewal_by_another_run_counts_for_nothing(n0, ask):
    ask.attempt(KEY, "a", b"row")
    commit(n0)
    n0.running_ms += 900
    ask.transactions.renew(KEY._replace(run_id="another"))
    n0.running_ms += 101
    ask.transactions.abort_inactive(1000)
    commit(n0)
    assert not n0.replica.tables.transactions.open


def test_query_that_no_group_knows_is_rejected_after_leadership_is_confirmed(n0, ask):
    ask.attempt(KEY._replace(batch_id=7), "a", b"row")
    assert ask.answers == []
    n0.confirm()
    assert ask.ranges == [QueryUnknownError]
    ask.transactions.append_attempt(
        Columns.from_bodies([b"row"]), KEY._replace(batch_id=7), "a", ask.answers.append, elsewhere=6
    )
    commit(n0)
    assert ask.ranges[-1] == (2, 2)
    assert n0.replica.tables.transactions.newest("q") == 6


def test_largest_transaction_fits_and_larger_one_is_rejected(n0, ask):
    big = (1 << 63) - 1
    key = TransactionId("q" * LIMITS.id_bytes, 1, "r" * LIMITS.id_bytes)
    with pytest.raises(BadRequestError):
        ask.transactions.commit(key, [Part(big, big, big, big)] * (PARTS_MAX + 1), ask.answers.append)
    ask.transactions.commit(key, [Part(big, big, big, big)] * PARTS_MAX, ask.answers.append)
    n0.confirm()
    assert ask.ranges == [TransactionError], "it fits, but the log has no such parts"


@pytest.mark.parametrize("field", ["query", "run", "attempt", "producer"])
def test_ids_are_limited_in_bytes(ask, field):
    long = "é" * (LIMITS.id_bytes // 2) + "x"
    key = TransactionId(long if field == "query" else "q", 0, long if field == "run" else "r")
    requests = {
        "producer": [lambda: ask.produced(long, 0, 0, b"a")],
        "attempt": [lambda: ask.attempt(key, long, b"a")],
    }.get(field, [lambda: ask.attempt(key, "a", b"a"), lambda: ask.transactions.commit(key, [], ask.answers.append)])
    for request in requests:
        with pytest.raises(BadRequestError) as refused:
            request()
        assert refused.value.values["limit"] == LIMITS.id_bytes


# --- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["commit", "depose", "tables"])
def test_reply_that_raises_concerns_no_other_request(tmp_path, end):
    def broken(_):
        raise RuntimeError("the connection is closed")

    with HandDriven(tmp_path / "s", voters=THREE) as n0:
        n0.lead(commit=end != "tables")
        ask = Asker(n0)
        for reply in (ask.answers.append, broken, ask.answers.append):
            if end == "tables":
                ask.appends.when_ready(reply)
            else:
                ask.appends.append(Columns.from_bodies([b"x"]), reply)
        n0.run()
        if end == "depose":
            n0.depose()
        else:
            n0.acknowledge()
            n0.confirm()
        expected = {"commit": [(1, 1), (3, 3)], "depose": [LeadershipLostError] * 2, "tables": [(0, 0)] * 2}
        assert ask.ranges == expected[end]
        assert not n0.failures


def test_broken_invariant_stops_replica_and_each_append_gets_reply(tmp_path):
    """Messages that were ready before the broken iteration are not sent either."""
    with HandDriven(tmp_path / "s", voters=THREE) as n0:
        n0.lead()
        n0.run()
        ask = Asker(n0)
        ask.plain(b"in flight")
        ask.produced("p", 0, 0, b"in flight")
        n0.run()
        end = n0.log.last_index()
        n0.replica.propose(ProposedBatch(Columns.from_bodies([b"ready"])))
        ask.plain(b"gathered")
        n0.replica.propose_soon(break_invariant)
        n0.sent.clear()
        n0.run()
        assert [kind.__name__ for kind in ask.ranges] == [*["LeadershipLostError"] * 2, "NotLeaderError"]
        assert [type(error) for error in n0.failures] == [InvariantViolationError]
        with pytest.raises(NotLeaderError):
            ask.plain(b"later")
        with pytest.raises(ProposalDroppedError):
            n0.replica.propose(ProposedBatch(Columns.from_bodies([b"later"])))
        n0.replica.tick()
        n0.run()
        assert n0.sent == []
        assert n0.log.last_index() == end


def test_leader_that_stops_refuses_appends_and_waits_for_those_in_flight(n0, ask):
    async def drain() -> None:
        stopping = asyncio.create_task(ask.appends.drain(60))
        await asyncio.sleep(0)
        with pytest.raises(TransferringError):
            ask.plain(b"too late")
        assert not stopping.done()
        n0.acknowledge()
        await stopping

    ask.plain(b"in flight")
    n0.run()
    asyncio.run(drain())
    assert ask.ranges == [(1, 1)]


# --- a full table of producers ----------------------------------------------------------------------------------------


def test_full_table_rejects_new_producer_and_keeps_known_ones(n0) -> None:
    ask = Asker(n0, limits=Limits(producers=3))
    ask.produced("a", 0, 0, b"1")
    ask.produced("a", 0, 1, b"2")
    n0.acknowledge()
    ask.produced("b", 0, 0, b"3")
    ask.produced("c", 0, 0, b"4")
    ask.produced("d", 0, 0, b"5")  # the two in flight count, although no table contains them yet
    n0.confirm()
    assert ask.ranges[2:] == [ProducersFullError]
    n0.acknowledge()
    ask.produced("e", 0, 0, b"6")
    n0.confirm()
    assert ask.ranges[-1] is ProducersFullError
    assert len(n0.replica.tables.producers) == 3
    ask.produced("a", 0, 1, b"2")
    ask.produced("a", 0, 2, b"7")
    ask.produced("b", 1, 0, b"8")
    n0.acknowledge()
    assert ask.ranges[1] == ask.ranges[-3]
    assert ask.ranges[-1][0] > ask.ranges[-2][0] > ask.ranges[-3][0]


@pytest.mark.parametrize(("epoch", "sequence"), [(0, 1), (1, 0)], ids=["next-sequence", "next-epoch"])
def test_dropped_append_leaves_its_producer_in_flight(n0, epoch: int, sequence: int) -> None:
    ask = Asker(n0, limits=Limits(producers=1))
    ask.produced("a", 0, 0, b"1")
    n0.run()
    n0.replica.leadership.transfer(NodeId("n1"))
    ask.produced("a", epoch, sequence, b"2")
    n0.run()
    assert ask.ranges == [TransferringError]
    for _ in range(40):  # until the transfer times out
        n0.replica.tick()
        n0.confirm()
    ask.produced("b", 0, 0, b"3")
    n0.confirm()
    assert ask.ranges[1:] == [ProducersFullError]
    ask.produced("a", 0, 0, b"1")
    n0.acknowledge()
    assert ask.ranges[2:] == [(2, 2), (2, 2)], "the first append, and its repetition"
    assert bodies(n0) == [b"1"]


def test_ids_used_once_fill_half_of_the_table(n0) -> None:
    ask = Asker(n0, limits=Limits(producers=4))
    for name in ("a", "b", "c"):
        ask.produced(name, 0, 0, b"x", once=True)
    n0.acknowledge()
    n0.confirm()
    assert sorted(map(str, ask.ranges)).count(str(ProducersFullError)) == 1
    for name in ("d", "e", "f"):
        ask.produced(name, 0, 0, b"x")
    n0.acknowledge()
    n0.confirm()
    assert (len(n0.replica.tables.producers), n0.replica.tables.producers.one_time_count) == (4, 2)


def test_producer_in_flight_counts_once_after_leadership_was_lost(n0) -> None:
    ask = Asker(n0, limits=Limits(producers=2))
    ask.produced("a", 0, 0, b"1")
    n0.run()
    n0.depose()
    n0.lead()  # its own log has the append, which commits now
    ask.produced("b", 0, 0, b"2")
    n0.acknowledge()
    assert ask.ranges[0] is LeadershipLostError
    assert list(n0.replica.tables.producers) == ["a", "b"]


def test_expired_producers_leave_full_table_without_an_append(n0) -> None:
    ask = Asker(n0, limits=Limits(producers=1))
    ask.produced("a", 0, 0, b"1")
    n0.acknowledge()
    n0.running_ms += EXPIRY_MS
    end = n0.replica.raft.last_index
    ask.appends.expire_old()
    assert n0.replica.raft.last_index == end, "nothing has expired, so nothing is appended"
    n0.running_ms += 1
    ask.appends.expire_old()
    n0.acknowledge()
    ask.produced("b", 0, 0, b"2")
    n0.acknowledge()
    assert list(n0.replica.tables.producers) == ["b"]


def test_expired_on_request_producer_is_unknown(n0, ask) -> None:
    ask.produced("a", 0, 0, b"1")
    n0.acknowledge()
    ask.appends.expire_producer("a", ask.answers.append)
    n0.acknowledge()
    end = n0.replica.raft.last_index
    ask.appends.expire_producer("a", ask.answers.append)
    n0.acknowledge()
    assert n0.replica.raft.last_index == end, "it is unknown already"
    ask.produced("a", 0, 1, b"2")
    n0.confirm()
    assert ask.ranges[-1] is ProducerUnknownError
    ask.produced("a", 0, 0, b"3")
    n0.acknowledge()
    assert ask.ranges[-1][0] > ask.ranges[0][0]
