"""Clients of the whole simulation: they append, repeat, give up, come late and lie about nothing.

Every body names the operation that it belongs to, so that the log itself tells in the end what became of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dledger_core.control import Part, TransactionId, column_crc
from dledger_core.errors import DLedgerError
from dledger_core.ids import Index
from dledger_core.record import Columns
from dledger_core.server.services.appends import Appended, ProducerKey
from tests.support.checkers import check

if TYPE_CHECKING:
    from tests.support.replica_sim import ReplicaSim
    from tests.support.sim_member import SimMember

Outcome = Appended | DLedgerError
Reply = Callable[[Outcome], None]

CLIENT_TIMEOUT = 400


@dataclass(slots=True)
class Operation:
    """One append: ``outcome`` stays None while nobody knows."""

    number: int
    columns: Columns
    producer: ProducerKey | None = None
    transaction: TransactionId | None = None
    outcome: Outcome | None = None
    retried: bool = False


@dataclass(slots=True)
class Commit:
    """A commit that was sent for a transaction, and whether its success was heard."""

    parts: frozenset[Part]
    acknowledged: bool = False


@dataclass(slots=True)
class History:
    """All that clients did."""

    operations: list[Operation] = field(default_factory=list)
    commits: dict[tuple[str, int], list[Commit]] = field(default_factory=dict)

    def operation(self, source: ReplicaSim) -> Operation:
        """Makes an operation with bodies of its own."""
        number = len(self.operations)
        rows = source.source.choice((1, 1, 2, 5))
        padding = b"." * source.source.choice((0, 20, 90, 400))
        bodies = [b"%d/%d/" % (number, row) + padding for row in range(rows)]
        self.operations.append(Operation(number, Columns.from_bodies(bodies)))
        return self.operations[-1]


class SimClient:
    """One client with at most one call under way."""

    def __init__(self, sim: ReplicaSim, name: str) -> None:
        self.sim = sim
        self.name = name

    def start(self) -> None:
        """Begins to work."""
        self.rest()

    def rest(self) -> None:
        """Does the next piece of work a little later."""
        self.sim.time.after(self.sim.source.randrange(1, 2 * self.sim.client_pause), self.work)

    def work(self) -> None:
        """One piece of work; ends with ``rest``."""
        raise NotImplementedError

    def call(self, request: Callable[[SimMember, Reply], None], done: Callable[[Outcome | None], None]) -> None:
        """Sends a request to some node; ``done`` gets its answer once, or None after a time-out."""
        sim, answered = self.sim, [False]

        def finish(outcome: Outcome | None) -> None:
            if not answered[0]:
                answered[0] = True
                done(outcome)

        def reply(outcome: Outcome) -> None:
            if not sim.faults_on or not sim.chance(0.02):
                sim.time.after(sim.source.randrange(1, 6), lambda: finish(outcome))

        self.deliver(self.sim.some_member(), request, reply)
        sim.time.after(CLIENT_TIMEOUT, lambda: finish(None))

    def deliver(self, member: SimMember, request: Callable[[SimMember, Reply], None], reply: Reply) -> None:
        """Brings a request to a node, or loses it."""
        sim = self.sim
        if sim.faults_on and sim.chance(0.02):
            return

        def arrive() -> None:
            if member.stalled_until > sim.time.now:
                sim.time.after(member.stalled_until - sim.time.now, arrive)
                return

            def attempt() -> None:
                try:
                    request(member, reply)
                except DLedgerError as error:
                    reply(error)

            member.input(attempt)

        sim.time.after(sim.source.randrange(1, 6), arrive)


class PlainClient(SimClient):
    """Appends without a producer id; never repeats what it is not sure of."""

    def work(self) -> None:
        operation = self.sim.history.operation(self.sim)

        def done(outcome: Outcome | None) -> None:
            operation.outcome = outcome
            self.rest()

        self.call(lambda member, reply: member.appends.append(operation.columns, reply), done)


class ProducerClient(SimClient):
    """Appends with a producer id and repeats until it knows; sometimes twice at once, sometimes as a new epoch."""

    def __init__(self, sim: ReplicaSim, name: str) -> None:
        super().__init__(sim, name)
        self.epoch = 0
        self.sequence = 0

    def work(self) -> None:
        if self.sim.chance(0.03):
            self.epoch, self.sequence = self.epoch + 1, 0
        operation = self.sim.history.operation(self.sim)
        operation.producer = ProducerKey(self.name, self.epoch, self.sequence)
        self.sequence += 1
        self._send(operation)

    def _send(self, operation: Operation) -> None:
        key = operation.producer
        assert key is not None

        def request(member: SimMember, reply: Reply) -> None:
            member.appends.append_produced(operation.columns, key, reply)

        if self.sim.chance(0.1):
            self.sim.counters["requests twice"] += 1
            delay = self.sim.source.choice((1, 50, 2000))
            late = self.sim.some_member()
            self.sim.time.after(delay, lambda: self.deliver(late, request, lambda _: None))
        self.call(request, lambda outcome: self._heard(operation, outcome))

    def _heard(self, operation: Operation, outcome: Outcome | None) -> None:
        if isinstance(outcome, Appended):
            operation.outcome = outcome
            self.rest()
            return
        if outcome is not None:
            again = outcome.retriable or outcome.outcome_unknown
            check(again, "a producer that does everything right is refused", self.name, operation.producer, outcome)
        operation.retried = True
        self.sim.counters["appends repeated"] += 1
        self.sim.time.after(self.sim.source.randrange(1, 60), lambda: self._send(operation))


class QueryClient(SimClient):
    """A streaming query: micro-batches as transactions, attempts that win and lose, restarts, late commits."""

    def __init__(self, sim: ReplicaSim, name: str) -> None:
        super().__init__(sim, name)
        self.batch = 0
        self.run = 0
        self.tasks_left = 0
        self.parts: list[Part] = []

    @property
    def key(self) -> TransactionId:
        """The transaction under way."""
        return TransactionId(self.name, self.batch, f"run{self.run}")

    def work(self) -> None:
        """Begins the micro-batch, after asking whether an earlier run has committed it."""
        if self.sim.chance(0.1):
            self.run += 1
            self.sim.counters["runs replaced"] += 1
        key, found = self.key, [""]

        def request(member: SimMember, reply: Reply) -> None:
            def answer(outcome: Outcome) -> None:
                found[0] = member.replica.tables.transactions.state(key)[0]
                reply(outcome)

            member.appends.when_ready(answer)

        def done(outcome: Outcome | None) -> None:
            if not isinstance(outcome, Appended):
                self.rest()
            elif found[0] == "committed":
                self._next()
            else:
                self.tasks_left, self.parts = self.sim.source.randrange(1, 4), []
                self._task()

        self.call(request, done)

    def _next(self) -> None:
        self.batch += 1
        self.rest()

    def _task(self) -> None:
        """One attempt of a task; when it fails, another one, as Spark does."""
        if self.tasks_left == 0:
            self._commit()
            return
        operation = self.sim.history.operation(self.sim)
        operation.transaction = key = self.key

        def request(member: SimMember, reply: Reply) -> None:
            member.appends.append_attempt(operation.columns, key, f"a{operation.number}", reply)

        def done(outcome: Outcome | None) -> None:
            operation.outcome = outcome
            if self.sim.chance(0.05):
                self._restart()
            elif isinstance(outcome, Appended):
                columns = operation.columns
                part = Part(outcome.first_index, outcome.last_index, columns.count, column_crc(columns.crcs))
                if self.sim.chance(0.1):
                    self.sim.counters["attempts lost"] += 1  # a speculative one: its twin wins
                else:
                    self.parts.append(part)
                    self.tasks_left -= 1
                self._task()
            else:
                self._refused(outcome, self._task)

        self.call(request, done)

    def _refused(self, outcome: DLedgerError | None, again: Callable[[], None]) -> None:
        """Repeats what may succeed; else begins the micro-batch anew."""
        if outcome is None or outcome.retriable or outcome.outcome_unknown:
            self.sim.time.after(self.sim.source.randrange(1, 60), again)
        else:
            self._restart()

    def _restart(self) -> None:
        self.run += 1
        self.sim.counters["runs replaced"] += 1
        self.rest()

    def _commit(self) -> None:
        key, parts = self.key, list(self.parts)
        commit = Commit(frozenset(parts))
        self.sim.history.commits.setdefault((key.query_id, key.batch_id), []).append(commit)

        def request(member: SimMember, reply: Reply) -> None:
            member.appends.commit(key, parts, reply)

        def done(outcome: Outcome | None) -> None:
            if isinstance(outcome, Appended):
                commit.acknowledged = True
                self.sim.counters["transactions committed"] += 1
                self._next()
            elif self.sim.chance(0.2):
                self._restart()
            else:
                self._refused(outcome, self._commit)

        if self.sim.chance(0.05):
            late = self.sim.some_member()
            self.sim.time.after(1000, lambda: self.deliver(late, request, lambda _: None))
        self.call(request, done)


class ReadClient(SimClient):
    """Asks leaders for linearizable reads: none may be older than what was committed when it asked."""

    def work(self) -> None:
        needed = self.sim.checker.commit_index

        def done(outcome: Outcome | None) -> None:
            self.rest()

        def request(member: SimMember, reply: Reply) -> None:
            def answer(index: Index | None) -> None:
                self.sim.counters["reads"] += 1
                check(index is None or index >= needed, "a stale read index", member.node_id, index, needed)
                reply(member.replica.not_leader())

            member.replica.ask_read_index(answer)

        self.call(request, done)
