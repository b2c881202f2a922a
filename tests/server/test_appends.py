"""The append service on a real replica and store, driven by hand: who is answered what, and when."""

from __future__ import annotations

import pytest

from dledger_core.config import LIMITS, StorageConfig
from dledger_core.control import PARTS_MAX, Part, TransactionId
from dledger_core.errors import (
    BadRequestError,
    BusyError,
    FencedError,
    InvariantViolationError,
    LeadershipLostError,
    NotLeaderError,
    ProducerUnknownError,
    ProposalDroppedError,
    SequenceConflictError,
    SequenceGapError,
    TransactionError,
    TransferringError,
)
from dledger_core.ids import NO_TERM, NodeId
from dledger_core.net.frame import ARRAY_LENGTH_MAX, encode_frame
from dledger_core.net.protocol import HEADER_BYTES_MAX
from dledger_core.record import MAGIC_CONTROL, Columns, ProposedBatch
from dledger_core.server.services.flow import Budget
from dledger_core.storage.tables.tables import TablesSnapshot
from tests.support.replica_group import Asker, HandDriven
from tests.support.server_group import STORAGE

THREE = ("n0", "n1", "n2")


@pytest.fixture
def n0(tmp_path):
    """A leader of three with its first entry committed; commits need ``acknowledge``."""
    with HandDriven(tmp_path / "s", voters=THREE) as node:
        node.lead()
        yield node
    assert not node.failures


@pytest.fixture
def ask(n0):
    return Asker(n0)


def batches(node) -> list[tuple[int, int]]:
    return [(b.first_index, b.last_index) for b in node.log.read_batches(0, 1 << 30)]


def bodies(node) -> list[bytes]:
    found, at = [], 0
    records = node.log.read(0, 1 << 40, 1 << 30)
    for row in records.headers:
        if row["magic"] != MAGIC_CONTROL:
            found.append(bytes(records.bodies[at : at + int(row["length"])]))
        at += int(row["length"])
    return found


# --- coalescing ------------------------------------------------------------------------------------------------


def test_appends_of_one_turn_become_one_batch(n0, ask):
    for i in range(100):
        ask.plain(b"%d" % i, b"x")
    n0.run()
    assert ask.answers == []
    n0.acknowledge()
    assert ask.ranges == [(1 + 2 * i, 2 + 2 * i) for i in range(100)]
    assert batches(n0) == [(0, 0), (1, 200)]
    assert bodies(n0)[::2] == [b"%d" % i for i in range(100)]
    assert {answer.term for answer in ask.answers} == {1}


def test_appends_wait_for_company_while_batches_are_in_flight(n0, ask):
    for i in range(50):
        ask.plain(b"%d" % i)
        n0.run()
    assert len(batches(n0)) == 1 + 4, "four batches are under way, the other 46 appends wait"
    n0.acknowledge()
    n0.acknowledge()
    assert ask.ranges == [(1 + i, 1 + i) for i in range(50)]
    assert batches(n0)[5:] == [(5, 50)]


def test_a_batch_of_many_is_bounded(n0, ask):
    body = bytes(300 << 10)
    for _ in range(10):
        ask.plain(body)
    n0.run()
    n0.acknowledge()
    assert ask.ranges == [(1 + i, 1 + i) for i in range(10)]
    assert [last - first + 1 for first, last in batches(n0)[1:]] == [3, 3, 3, 1]


def test_an_append_that_the_log_cannot_take_is_refused_alone(n0, ask):
    """A body above the bound; a batch above it; one that only its control entry lifts above the bound."""
    ask.plain(b"before")
    refused = [
        lambda: ask.plain(bytes(STORAGE.record_bytes_max)),
        lambda: ask.plain(*[bytes(3 << 20)] * 3),
        lambda: ask.produced("p", 0, 0, *[bytes((8 << 20) // 4 - 48)] * 4),
        lambda: ask.attempt(TransactionId("q", 0, "r"), "a", *[bytes((8 << 20) // 4 - 48)] * 4),
    ]
    for request in refused:
        with pytest.raises(BadRequestError, match="send at most"):
            request()
    ask.plain(*[bytes((8 << 20) // 4 - 48)] * 4)
    ask.produced("p", 0, 0, b"first")
    n0.run()
    n0.acknowledge()
    n0.acknowledge()
    assert ask.ranges == [(2, 2), (3, 3), (4, 7)]


def test_what_the_log_refuses_at_the_last_moment_does_not_stop_the_replica(n0, ask):
    """``Replica.propose`` itself checks, whoever calls it."""
    with pytest.raises(BadRequestError):
        n0.replica.propose(ProposedBatch(Columns.from_bodies([bytes(STORAGE.record_bytes_max)])))
    ask.plain(b"goes on")
    n0.run()
    n0.acknowledge()
    assert ask.ranges == [(1, 1)]


# --- producers ---------------------------------------------------------------------------------------------------


def test_a_repeat_in_flight_and_after_commit_gets_the_first_result(n0, ask):
    ask.produced("p", 0, 0, b"a", b"b")
    ask.produced("p", 0, 1, b"c")
    ask.produced("p", 0, 0, b"a", b"b")
    n0.run()
    assert ask.answers == []
    n0.acknowledge()
    assert ask.ranges == [(2, 3), (2, 3), (5, 5)]
    ask.produced("p", 0, 0, b"a", b"b")
    assert ask.answers[-1] == ask.answers[0]
    assert bodies(n0) == [b"a", b"b", b"c"]


def test_a_repeat_is_answered_with_the_term_of_its_entries(n0, ask):
    ask.produced("p", 0, 0, b"a")
    n0.run()
    n0.acknowledge()
    n0.depose()
    n0.lead()
    assert n0.replica.soft_state.term > 1
    ask.produced("p", 0, 0, b"a")
    assert ask.answers[-1] == ask.answers[0]
    assert ask.answers[-1].term == 1


def test_a_repeat_of_deleted_entries_says_that_the_term_is_unknown(tmp_path):
    storage = StorageConfig(data_segment_bytes=1 << 16, index_segment_bytes=3200, preallocate_bytes=0)
    with HandDriven(tmp_path / "s", storage=storage) as n0:
        n0.lead()
        ask = Asker(n0)
        ask.produced("p", 0, 0, b"a")
        for _ in range(8):
            ask.plain(bytes(30_000))
            n0.run()
        n0.replica.save_checkpoint()
        n0.run()
        tables = TablesSnapshot.of(n0.replica.tables)
        n0.replica.raft.trim(n0.log.trim(6, tables, n0.replica.commit_index))
        assert n0.log.first_index() > 3
        ask.produced("p", 0, 0, b"a")
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
def test_what_breaks_the_sequence_is_refused(n0, ask, committed, producer, epoch, sequence, body, error):
    for at, name in enumerate(("p", "q")):
        ask.produced(name, 0, 0, b"old epoch")
        n0.run()
        n0.acknowledge()
        assert len(ask.answers) == at + 1
    ask.produced("p", 1, 0, b"zero")
    ask.produced("p", 1, 1, b"one")
    if committed:
        n0.run()
        n0.acknowledge()
    ask.produced(producer, epoch, sequence, body)
    n0.confirm()
    assert type(ask.answers[-1]) is error
    n0.acknowledge()
    ask.produced("p", 1, 2, b"two")
    n0.run()
    n0.acknowledge()
    assert bodies(n0) == [b"old epoch", b"old epoch", b"zero", b"one", b"two"]


@pytest.mark.parametrize("deposed", [False, True], ids=["still-leads", "deposed"])
@pytest.mark.parametrize(
    ("what", "error"),
    [("gap", SequenceGapError), ("stranger", ProducerUnknownError), ("commit", TransactionError)],
)
def test_what_is_missing_is_a_refusal_only_once_the_leader_knows_that_it_leads(n0, what, error, deposed):
    """A leader that was replaced without noticing lacks what the new one has committed: it must not refuse for good."""
    Asker(n0).produced("gap", 0, 0, b"known")
    n0.run()
    n0.acknowledge()
    ask = Asker(n0)
    if what == "commit":
        ask.appends.commit(TransactionId("q", 0, "r"), [Part(5, 5, 1, 1)], ask.answers.append)
    else:
        ask.produced(what, 0, 7, b"x")
    n0.run()
    assert ask.answers == []
    if deposed:
        n0.depose()
    else:
        n0.confirm()
    assert ask.ranges == [NotLeaderError if deposed else error]


def test_a_refused_first_append_leaves_no_trace_of_its_epoch(n0, ask):
    """Epoch 5 never reached the log, so epoch 4 is not fenced."""
    ask.produced("p", 4, 0, b"a")
    n0.run()
    n0.acknowledge()
    n0.replica.transfer_leadership(NodeId("n1"))
    ask.produced("p", 5, 0, b"b")
    assert type(ask.answers[-1]) is TransferringError
    for _ in range(40):  # the transfer is given up, and the others are heard
        n0.replica.tick()
        n0.acknowledge()
    assert n0.replica.is_leader
    ask.produced("p", 4, 1, b"c")
    n0.run()
    n0.acknowledge()
    assert ask.ranges[-1] == (4, 4)
    assert len(ask.appends._producers) == 0


# --- leadership --------------------------------------------------------------------------------------------------


def test_leadership_lost_in_the_middle_is_an_unknown_outcome(n0, ask):
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
    assert kinds[:4] == [LeadershipLostError] * 4, "they are in the log: nobody knows"
    assert NotLeaderError in kinds, "what was not proposed is certainly not there"
    assert ask.answers[0].outcome_unknown
    assert not next(a for a in ask.answers if type(a) is NotLeaderError).outcome_unknown
    with pytest.raises(NotLeaderError):
        ask.plain(b"later")


def test_a_leader_asks_nobody_for_a_sequence_before_its_tables_are_complete(tmp_path):
    with HandDriven(tmp_path / "s", voters=THREE) as n0:
        n0.lead(commit=False)
        ask = Asker(n0)
        ask.produced("p", 0, 0, b"a")
        ask.produced("stranger", 0, 7, b"a")
        n0.run()
        assert ask.answers == []
        n0.acknowledge()
        n0.confirm()
        assert ask.ranges == [ProducerUnknownError]
        n0.acknowledge()
        assert ask.ranges == [ProducerUnknownError, (2, 2)]


def test_appends_that_wait_for_a_leader_are_told_when_it_steps_down(tmp_path):
    with HandDriven(tmp_path / "s", voters=THREE) as n0:
        n0.lead(commit=False)
        budget = Budget(1 << 20)
        ask = Asker(n0, budget)
        ask.produced("p", 0, 0, b"a")
        n0.depose()
        assert ask.ranges == [NotLeaderError]
        assert budget.taken_bytes == 0


# --- back-pressure -----------------------------------------------------------------------------------------------


def test_busy_and_recovery_from_it(n0):
    budget = Budget(1 << 20)
    ask = Asker(n0, budget)
    for _ in range(3):
        ask.plain(bytes(300 << 10))
    with pytest.raises(BusyError) as refused:
        ask.plain(bytes(300 << 10))
    assert refused.value.values["retry_after_ms"] == 50
    n0.run()
    with pytest.raises(BusyError):
        ask.produced("p", 0, 0, bytes(300 << 10))
    n0.acknowledge()
    assert ask.ranges == [(1, 1), (2, 2), (3, 3)]
    assert budget.taken_bytes == 0
    ask.produced("p", 0, 0, bytes(300 << 10))
    n0.run()
    n0.acknowledge()
    assert ask.ranges[-1] == (5, 5)


def test_one_append_larger_than_the_whole_budget_is_served_alone(n0):
    ask = Asker(n0, Budget(1000))
    ask.plain(bytes(5000))
    with pytest.raises(BusyError):
        ask.plain(b"x")
    n0.run()
    n0.acknowledge()
    assert ask.ranges == [(1, 1)]


def test_appends_that_wait_for_the_tables_count_too(tmp_path):
    with HandDriven(tmp_path / "s", voters=THREE) as n0:
        n0.lead(commit=False)
        ask = Asker(n0, Budget(1 << 20))
        ask.produced("p", 0, 0, bytes(700 << 10))
        with pytest.raises(BusyError):
            ask.produced("q", 0, 0, bytes(700 << 10))


def test_an_abort_never_raises(n0):
    """The leader's own clock calls it: what is in the way is told to the reply, and the next second tries again."""
    ask = Asker(n0, Budget(1000))
    ask.plain(bytes(2000))
    ask.appends.abort(TransactionId("q", 0, "r"), ask.answers.append)
    ask.appends.abort(TransactionId("q" * (LIMITS.id_bytes + 1), 0, "r"), ask.answers.append)
    n0.depose()
    ask.appends.abort(TransactionId("q", 0, "r"), ask.answers.append)
    assert ask.ranges == [BusyError, BadRequestError, NotLeaderError, NotLeaderError]


def test_an_abort_ends_the_transaction_of_attempts_in_flight(n0, ask):
    """The table does not know them yet: an abort that did nothing would leave readers waiting for its timeout."""
    transaction = TransactionId("q", 0, "r")
    ask.attempt(transaction, "a", b"row")
    n0.run()
    ask.appends.abort(transaction, ask.answers.append)
    n0.run()
    n0.acknowledge()
    assert not n0.replica.tables.transactions.open
    ask.attempt(transaction, "a", b"late")
    n0.run()
    n0.acknowledge()
    assert not n0.replica.tables.transactions.open
    assert ask.ranges[:2] == [(2, 2), (3, 3)]
    assert batches(n0)[-1] == (3, 3), "the late attempt was refused"


def test_an_abort_of_what_is_over_appends_nothing(n0, ask):
    transaction = TransactionId("q", 0, "r")
    for _ in range(2):
        ask.appends.abort(transaction, ask.answers.append)
        n0.run()
        n0.acknowledge()
    assert batches(n0) == [(0, 0), (1, 1)]
    assert len(ask.ranges) == 2


def test_the_bound_is_the_nodes_and_not_the_groups(tmp_path):
    budget = Budget(1 << 20)
    with HandDriven(tmp_path / "a", voters=THREE) as one, HandDriven(tmp_path / "b", voters=THREE) as other:
        one.lead()
        other.lead()
        asks = [Asker(one, budget), Asker(other, budget)]
        asks[0].plain(bytes(700 << 10))
        with pytest.raises(BusyError):
            asks[1].plain(bytes(700 << 10))
        one.run()
        one.acknowledge()
        asks[1].plain(bytes(700 << 10))


def test_questions_that_wait_for_the_tables_are_bounded_in_number(tmp_path):
    with HandDriven(tmp_path / "s", voters=THREE) as n0:
        n0.lead(commit=False)
        ask = Asker(n0)
        for _ in range(LIMITS.appends_until_ready + 1):
            ask.appends.when_ready(ask.answers.append)
        assert len(ask.answers) == 1
        n0.acknowledge()
        assert ask.ranges.count((0, 0)) == LIMITS.appends_until_ready


@pytest.mark.parametrize("end", ["commit", "depose", "refuse"])
def test_every_way_to_an_answer_gives_the_bytes_back(n0, end):
    budget = Budget(1 << 20)
    ask = Asker(n0, budget)
    key = TransactionId("q", 0, "r")
    ask.produced("p", 0, 0, b"a")
    n0.run()
    n0.acknowledge()
    ask.produced("p", 0, 1, b"b")
    ask.plain(b"c")
    ask.attempt(key, "attempt", b"d")
    if end == "refuse":
        ask.produced("p", 0, 9, b"gap")
        ask.appends.commit(key, [Part(9, 9, 1, 1)], ask.answers.append)
    assert budget.taken_bytes > 0
    if end == "depose":
        n0.depose()
    n0.run()
    if end != "depose":
        n0.acknowledge()
        n0.confirm()
    assert budget.taken_bytes == 0


# --- replies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [False, True], ids=["committed", "leadership-lost"])
def test_a_reply_that_fails_concerns_nobody_else(n0, ask, lost):
    def broken(_):
        raise RuntimeError("this connection is gone")

    ask.plain(b"before")
    ask.appends.append(Columns.from_bodies([b"broken"]), broken)
    ask.plain(b"after")
    n0.run()
    if lost:
        n0.depose()
        assert ask.ranges == [LeadershipLostError] * 2
    else:
        n0.acknowledge()
        assert ask.ranges == [(1, 1), (3, 3)]
    assert not n0.failures


def test_a_reply_that_fails_does_not_stop_those_that_wait_for_the_tables(tmp_path):
    def broken(_):
        raise RuntimeError("this connection is gone")

    with HandDriven(tmp_path / "s", voters=THREE) as n0:
        n0.lead(commit=False)
        ask = Asker(n0)
        ask.appends.when_ready(broken)
        ask.appends.when_ready(ask.answers.append)
        n0.acknowledge()
        assert ask.ranges == [(0, 0)]
        assert not n0.failures


# --- a replica that stopped --------------------------------------------------------------------------------------


def test_a_broken_invariant_while_proposing_stops_the_replica(tmp_path):
    with HandDriven(tmp_path / "s", voters=THREE) as n0:
        n0.lead()
        ask = Asker(n0)
        n0.replica.raft._log._ranges._terms[-1] = 99  # the log is ahead of the term now
        ask.produced("p", 0, 0, b"a")
        assert ask.ranges == [ProposalDroppedError]
        assert [type(error) for error in n0.failures] == [InvariantViolationError]
        n0.sent.clear()
        with pytest.raises(NotLeaderError):
            ask.plain(b"later")
        n0.replica.tick()
        n0.run()
        assert n0.sent == []


def test_a_turn_that_breaks_an_invariant_hands_out_nothing(tmp_path):
    """The gathered appends are proposed at the start of the turn; what was ready before them stays inside too."""
    with HandDriven(tmp_path / "s", voters=THREE) as n0:
        n0.lead()
        n0.run()
        ask = Asker(n0)
        n0.replica.propose(ProposedBatch(Columns.from_bodies([b"ready to leave"])))
        ask.plain(b"gathered")
        n0.replica.raft._log._ranges._terms[-1] = 99
        n0.sent.clear()
        n0.run()
        assert ask.ranges == [ProposalDroppedError]
        assert [type(error) for error in n0.failures] == [InvariantViolationError]
        assert n0.sent == []
        assert n0.log.last_index() == 0


# --- bounds ------------------------------------------------------------------------------------------------------


def test_a_transaction_has_a_bound_that_fits_everywhere(n0, ask):
    big = (1 << 63) - 1
    fields = {"state": "committed", "parts": [[big] * 4] * PARTS_MAX, "index": big, "t": 1, "r": big}
    assert len(encode_frame(fields)[0]) < HEADER_BYTES_MAX
    assert PARTS_MAX < ARRAY_LENGTH_MAX
    key = TransactionId("q" * LIMITS.id_bytes, 1, "r" * LIMITS.id_bytes)
    with pytest.raises(BadRequestError, match=r"16001 parts.*at most 16000"):
        ask.appends.commit(key, [Part(big, big, big, big)] * (PARTS_MAX + 1), ask.answers.append)
    ask.appends.commit(key, [Part(big, big, big, big)] * PARTS_MAX, ask.answers.append)
    n0.confirm()
    assert ask.answers[0].code == 605, "it fits; there are no such parts in the log"


@pytest.mark.parametrize("what", ["query", "run", "attempt", "producer"])
def test_ids_have_a_bound(n0, ask, what):
    long = "é" * (LIMITS.id_bytes // 2) + "x"
    key = TransactionId(long if what == "query" else "q", 0, long if what == "run" else "r")
    requests = {
        "producer": [lambda: ask.produced(long, 0, 0, b"a")],
        "attempt": [lambda: ask.attempt(key, long, b"a")],
    }.get(
        what,
        [
            lambda: ask.attempt(key, "a", b"a"),
            lambda: ask.appends.commit(key, [], ask.answers.append),
        ],
    )
    for request in requests:
        with pytest.raises(BadRequestError, match="the limit is 512"):
            request()
