"""RaftLog and its parts: tables, and a Hypothesis machine against a plain list."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dledger_core.errors import InvariantViolationError
from dledger_core.ids import NO_INDEX, NO_TERM, Index, NodeId, Term
from dledger_core.raft import BATCHES_MAX, Batch, Configuration, ConfigurationInForce, Ready, TermRange, check_pointers
from dledger_core.raft.log import BATCH_OVERHEAD_BYTES, BATCHES_KEPT_MAX, RaftLog, RecentBatches, TermRanges
from tests.support.memory_store import Content, MemoryStore, log_of

BIG = 1 << 20


def log_on(store: MemoryStore, **options: Any) -> RaftLog:
    return RaftLog(store, configurations=store.configurations(), **options)


def log_with(*terms: int, commit_index: int = NO_INDEX, recent_bytes_max: int = BIG) -> RaftLog:
    return log_on(MemoryStore(log_of(*terms)), commit_index=Index(commit_index), recent_bytes_max=recent_bytes_max)


def batch(first_index: int, count: int, term: int, nbytes: int = 10) -> Batch:
    return Batch(Index(first_index), count, Term(term), nbytes, Content(f"{term}.{first_index}"))


def terms_of(log: RaftLog) -> list[int | None]:
    return [log.term_at(Index(index)) for index in range(log.first_index, log.last_index + 1)]


@pytest.mark.parametrize(
    ("index", "term"), [(-2, None), (-1, NO_TERM), (0, 1), (1, 1), (2, 3), (3, 5), (4, 5), (5, None)]
)
def test_log_knows_the_term_of_each_entry(index: int, term: int | None) -> None:
    assert log_with(1, 1, 3, 5, 5).term_at(Index(index)) == term


@pytest.mark.parametrize(
    ("prev_index", "prev_term", "commit_index", "matches"),
    [
        (-1, NO_TERM, -1, True),
        (2, 2, -1, True),
        (2, 1, -1, False),
        (3, 3, -1, True),
        (3, 2, -1, False),
        (4, 3, -1, False),
        pytest.param(1, NO_TERM, 2, True, id="a committed index matches any term"),
    ],
)
def test_log_matches_an_index_with_its_term(prev_index: int, prev_term: int, commit_index: int, matches: bool) -> None:
    assert log_with(1, 1, 2, 3, commit_index=commit_index).matches(Index(prev_index), Term(prev_term)) is matches


@pytest.mark.parametrize(("term", "last_index"), [(1, 0), (2, 2), (3, None), (4, 4), (5, None), (0, None)])
def test_log_finds_the_last_index_of_a_term(term: int, last_index: int | None) -> None:
    assert log_with(1, 2, 2, 4, 4).last_index_of_term(Term(term)) == last_index


@pytest.mark.parametrize(("term", "last_index"), [(0, NO_INDEX), (1, 0), (2, 2), (3, 2), (4, 4), (9, 4)])
def test_log_finds_last_index_of_terms_up_to_one(term: int, last_index: int) -> None:
    log = log_with(1, 2, 2, 4, 4, commit_index=4)
    assert log.last_index_up_to(Term(term)) == last_index
    log.trim(Index(3))
    assert log.last_index_up_to(Term(term)) == (last_index if term >= 2 else NO_INDEX), "trimmed: not known"
    assert log_with().last_index_up_to(Term(term)) == NO_INDEX


@pytest.mark.parametrize(
    ("incoming", "terms", "truncate_from"),
    [
        pytest.param([batch(3, 1, 2)], [1, 1, 1, 2], None, id="continues"),
        pytest.param([batch(1, 1, 1), batch(2, 1, 1)], [1, 1, 1], None, id="known already"),
        pytest.param([batch(1, 1, 1)], [1, 1, 1], None, id="late copy truncates nothing"),
        pytest.param([batch(2, 1, 1), batch(3, 2, 2)], [1, 1, 1, 2, 2], None, id="partly known"),
        pytest.param([batch(1, 1, 2)], [1, 2], 1, id="conflict"),
        pytest.param([batch(1, 1, 1), batch(2, 3, 2)], [1, 1, 2, 2, 2], 2, id="known, then conflict"),
        pytest.param([], [1, 1, 1], None, id="nothing"),
    ],
)
def test_merge_truncates_only_at_a_conflict(incoming: list[Batch], terms: list[int], truncate_from: int | None) -> None:
    log = log_with(1, 1, 1)
    log.merge(tuple(incoming))
    assert terms_of(log) == terms
    assert log.take_output(1)[0] == truncate_from


@pytest.mark.parametrize("incoming", [batch(1, 1, 2), batch(2, 3, 1)], ids=["committed conflict", "known in part"])
def test_merge_rejects_a_batch_that_breaks_the_log(incoming: Batch) -> None:
    log = log_with(1, 1, 1, commit_index=1)
    with pytest.raises(InvariantViolationError):
        log.merge((incoming,))
    assert terms_of(log) == [1, 1, 1]


def test_merge_skips_batches_that_are_trimmed_here() -> None:
    log = log_with(1, 1, 2, 2, 3, commit_index=4)
    log.trim(Index(3))
    log.merge((batch(0, 1, 1), batch(1, 1, 1)))
    assert terms_of(log) == [2, 3]


def test_truncation_of_entries_without_a_ready_does_not_reach_the_disk() -> None:
    log = log_with(1)
    log.append(batch(1, 2, 2))
    log.truncate(Index(1))
    log.append(batch(1, 1, 3))
    assert log.take_output(1) == (None, (batch(1, 1, 3),))


def test_truncation_takes_back_entries_in_flight() -> None:
    log = log_with(1)
    log.append(batch(1, 4, 2))
    log.take_output(1)
    log.truncate(Index(1))
    log.append(batch(1, 2, 3))
    assert log.take_output(2)[0] == 1
    assert not log.persisted(1)
    assert log.durable_index == 0
    assert log.persisted(2)
    assert log.durable_index == 2


def test_two_truncations_give_the_lower_one() -> None:
    log = log_with(1, 1, 1, 1)
    log.merge((batch(3, 1, 2),))
    log.merge((batch(1, 1, 3),))
    assert log.take_output(1) == (1, (batch(1, 1, 3),))


@pytest.mark.parametrize("recent_bytes_max", [0, BIG])
def test_batches_from_starts_with_the_batch_that_contains_the_index(recent_bytes_max: int) -> None:
    store = MemoryStore([batch(0, 3, 1), batch(3, 2, 1), batch(5, 4, 1)])
    log = log_on(store, commit_index=NO_INDEX, recent_bytes_max=recent_bytes_max)
    assert [b.first_index for b in log.batches_from(Index(4), 20)] == [3, 5]
    assert [b.first_index for b in log.batches_from(Index(4), 1)] == [3]


def test_batches_from_skips_a_tail_that_is_being_truncated() -> None:
    store = MemoryStore(log_of(1, 1, 1, 1))
    log = log_on(store, commit_index=NO_INDEX, recent_bytes_max=0)
    log.merge((batch(2, 1, 2),))
    assert [(b.first_index, b.term) for b in log.batches_from(Index(1), BIG)] == [(1, 1)]
    assert [(b.first_index, b.term) for b in log.batches_from(Index(2), BIG)] == [(2, 2)]


def test_trim_keeps_the_term_before_the_first_entry() -> None:
    log = log_with(1, 1, 2, 2, 3, commit_index=4)
    log.trim(Index(3))
    assert (log.first_index, log.term_at(Index(2)), log.term_at(Index(1))) == (3, 2, None)


def test_trim_rejects_uncommitted_entries() -> None:
    with pytest.raises(InvariantViolationError):
        log_with(1, 1, 1, commit_index=0).trim(Index(2))


def test_trimmed_log_has_its_first_index_and_previous_term() -> None:
    store = MemoryStore(log_of(1, 2, 2, 3))
    store.trim(Index(2))
    log = log_on(store, commit_index=NO_INDEX, recent_bytes_max=BIG)
    assert (log.first_index, log.commit_index, log.term_at(Index(1)), log.last_term) == (2, 1, 2, 3)


def test_term_ranges_reject_a_falling_term() -> None:
    ranges = TermRanges([TermRange(Index(0), Term(3))])
    with pytest.raises(InvariantViolationError):
        ranges.append(Index(1), Term(2))


@pytest.mark.parametrize("recent_bytes_max", [0, 1 << 30], ids=["from the store", "from memory"])
def test_batches_from_limits_the_number_of_batches(recent_bytes_max: int) -> None:
    total = 2 * BATCHES_MAX + 10
    store = MemoryStore()
    log = log_on(store, commit_index=NO_INDEX, recent_bytes_max=recent_bytes_max)
    for index in range(total):
        log.append(batch(index, 1, 1, nbytes=1))
    _, batches = log.take_output(1)
    store.apply(Ready(number=1, batches=batches))
    log.persisted(1)
    start, sizes = 0, []
    while start < total:
        found = log.batches_from(Index(start), BIG)
        assert found[0].first_index == start
        sizes.append(len(found))
        start = found[-1].last_index + 1
    assert sizes == [BATCHES_MAX, BATCHES_MAX, 10]


def test_recent_batches_are_limited_in_bytes_and_keep_undurable_ones() -> None:
    recent = RecentBatches(10 * (100 + BATCH_OVERHEAD_BYTES))
    for index in range(1000):
        recent.append(batch(index, 1, 1, nbytes=100))
        recent.evict(Index(index - 50))
    assert 50 <= len(recent) <= 51
    recent.evict(Index(999))
    assert len(recent) == 10
    assert recent.first_index == 990
    assert [b.first_index for b in recent.slice(Index(995), 250)] == [995, 996]


def test_recent_batches_are_limited_in_number() -> None:
    recent = RecentBatches(1 << 30)
    for index in range(3 * BATCHES_KEPT_MAX):
        recent.append(Batch(Index(index), 1, Term(1), 100, None))
    recent.evict(Index(BATCHES_KEPT_MAX - 1))
    assert recent.first_index == BATCHES_KEPT_MAX, "undurable batches stay"
    recent.evict(Index(3 * BATCHES_KEPT_MAX - 1))
    assert len(recent) == BATCHES_KEPT_MAX


def test_configurations_keep_the_one_in_force_before_the_first_entry() -> None:
    log = log_with(1)
    for version in range(1, 4):
        body = Configuration(frozenset({NodeId("n0")}), version=version).to_bytes()
        log.append(Batch(Index(2 * version - 1), 1, Term(1), 1, Content("c", body)))
        log.append(batch(2 * version, 1, 1))
    log.take_output(1)
    log.persisted(1)
    log.commit_to(Index(6))
    for first_index in (1, 2, 3, 4, 6):
        log.trim(Index(first_index))
        found = [log.configurations.before(Index(index)) for index in range(first_index, 8)]
        assert [one.configuration.version for one in found] == [index // 2 for index in range(first_index, 8)]


@pytest.mark.parametrize(
    "indexes", [[], [0], [-1, -1], [1, 0], [-1, 2]], ids=["none", "none before", "twice", "order", "past the end"]
)
def test_configurations_that_do_not_fit_the_log_are_refused(indexes: list[int]) -> None:
    configuration = Configuration(frozenset({NodeId("n0")}))
    known = [ConfigurationInForce(Index(index), configuration) for index in indexes]
    with pytest.raises(InvariantViolationError):
        RaftLog(MemoryStore(log_of(1, 1)), commit_index=NO_INDEX, recent_bytes_max=BIG, configurations=known)


class LogMachine(RuleBasedStateMachine):
    """A log with its disk against a list of terms: appends, truncations, Readys, late confirmations."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.log = log_on(self.store, commit_index=NO_INDEX, recent_bytes_max=1500)
        self.model: list[tuple[int, str]] = []
        self.starts: list[int] = []
        self.term = 1
        self.number = 0
        self.in_flight: list[tuple[int, Index | None, tuple[Batch, ...]]] = []
        self.payload = 0
        self.versions: list[tuple[int, int]] = [(NO_INDEX, 0)]

    @rule(rise=st.booleans())
    def append_configuration(self, rise: bool) -> None:
        self.term += rise
        self.payload += 1
        first = len(self.model)
        self.starts.append(first)
        self.model.append((self.term, f"p{self.payload}"))
        self.versions.append((first, self.payload))
        body = Configuration(frozenset({NodeId("n0")}), version=self.payload).to_bytes()
        self.log.append(Batch(Index(first), 1, Term(self.term), len(body), Content(f"p{self.payload}", body)))

    @rule(count=st.integers(1, 4), nbytes=st.integers(0, 600), rise=st.booleans())
    def append(self, count: int, nbytes: int, rise: bool) -> None:
        self.term += rise
        self.payload += 1
        first = len(self.model)
        self.starts.append(first)
        self.model += [(self.term, f"p{self.payload}")] * count
        self.log.append(Batch(Index(first), count, Term(self.term), nbytes, Content(f"p{self.payload}")))

    @precondition(lambda self: self.starts)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        above = [start for start in self.starts if start > self.log.commit_index]
        if above:
            start = data.draw(st.sampled_from(above))
            self.log.truncate(Index(start))
            del self.model[start:]
            self.starts = [at for at in self.starts if at < start]
            self.versions = [found for found in self.versions if found[0] < start]
            self.term += 1

    @rule()
    def take(self) -> None:
        self.number += 1
        self.in_flight.append((self.number, *self.log.take_output(self.number)))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.in_flight)))
        for _, truncate_from, batches in self.in_flight[:count]:
            for write in ([] if truncate_from is None else [truncate_from]) + list(batches):
                self.store.write(write)
        self.log.persisted(self.in_flight[count - 1][0])
        del self.in_flight[:count]

    @precondition(lambda self: self.starts)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        ends = [start - 1 for start in self.starts[1:]]
        if ends:
            self.log.commit_to(Index(data.draw(st.sampled_from(ends))))

    @invariant()
    def agrees_with_the_model(self) -> None:
        check_pointers(self.log.pointers())
        for index in range(len(self.model) + 1):
            found = self.log.configurations.before(Index(index))
            assert (found.index, found.configuration.version) == [one for one in self.versions if one[0] < index][-1]
        assert terms_of(self.log) == [term for term, _ in self.model]
        durable = self.log.durable_index
        assert [self.store.batch_at(Index(at)).payload for at in range(durable + 1)] == [
            payload for _, payload in self.model[: durable + 1]
        ]
        sent: list[str] = []
        while len(sent) < len(self.model):
            for batch in self.log.batches_from(Index(len(sent)), 700):
                sent += [str(batch.payload)] * batch.count
        assert sent == [payload for _, payload in self.model]


TestLogMachine = LogMachine.TestCase
TestLogMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
