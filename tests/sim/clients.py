"""Clients of complete replicas, and the check of their history against the log.

They append, retry, give up and repeat requests late. Every body contains the number of its operation, so that the log
itself shows in the end what happened to each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from dledger_core.control import Part, TransactionId, column_crc
from dledger_core.errors import DLedgerError
from dledger_core.ids import Index
from dledger_core.record import MAGIC_DATA, Columns
from dledger_core.server.services.in_flight import AppendedRange, ProducerKey
from dledger_core.storage.read.visibility import Visibility
from tests.sim.safety import check
from tests.support.logs import rows_between

if TYPE_CHECKING:
    from tests.sim.replica_member import ReplicaMember
    from tests.sim.simulator import Simulator

Outcome = AppendedRange | DLedgerError
Reply = Callable[[Outcome], None]
Request = Callable[["ReplicaMember", Reply], None]

CLIENT_TIMEOUT = 400


@dataclass(slots=True)
class Operation:
    """One append; ``outcome`` is None while it is unknown."""

    number: int
    columns: Columns
    producer: ProducerKey | None = None
    transaction: TransactionId | None = None
    outcome: Outcome | None = None
    retried: bool = False


@dataclass(slots=True)
class Commit:
    """A commit that was sent for a transaction, and whether its client received the success."""

    parts: frozenset[Part]
    acknowledged: bool = False


@dataclass(slots=True)
class History:
    """All operations and commits of all clients."""

    operations: list[Operation] = field(default_factory=list)
    commits: dict[tuple[str, int], list[Commit]] = field(default_factory=dict)

    def operation(self, sim: Simulator) -> Operation:
        """Add an operation with bodies of its own."""
        number, padding = len(self.operations), b"." * sim.source.choice((0, 20, 90, 400))
        bodies = [b"%d/%d/" % (number, row) + padding for row in range(sim.source.choice((1, 1, 2, 5)))]
        self.operations.append(Operation(number, Columns.from_bodies(bodies)))
        return self.operations[-1]


class SimClient:
    """One client with at most one call in flight."""

    def __init__(self, sim: Simulator, history: History, name: str) -> None:
        self.sim = sim
        self.history = history
        self.name = name

    def start(self) -> None:
        """Start the next work a little later."""
        self.sim.time.after(self.sim.source.randrange(1, 2 * self.sim.client_pause), self.work)

    def work(self) -> None:
        """Do one thing, then ``start`` again."""
        raise NotImplementedError

    def retry(self, action: Callable[[], None]) -> None:
        self.sim.time.after(self.sim.source.randrange(1, 60), action)

    def call(self, request: Request, done: Callable[[Outcome | None], None]) -> None:
        """Send a request to some member; ``done`` gets its outcome once, or None after a timeout."""
        sim, finished = self.sim, [False]

        def finish(outcome: Outcome | None) -> None:
            if not finished[0]:
                finished[0] = True
                done(outcome)

        def reply(outcome: Outcome) -> None:
            if not sim.faults_on or not sim.chance(0.02):
                sim.time.after(sim.source.randrange(1, 6), lambda: finish(outcome))

        self.deliver(request, reply)
        sim.time.after(CLIENT_TIMEOUT, lambda: finish(None))

    def deliver(self, request: Request, reply: Reply = lambda _: None) -> None:
        """Send a request to some member, or lose it."""
        sim, member = self.sim, self.sim.some_member()
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
    """Appends without a producer id; never retries an append of unknown outcome."""

    def work(self) -> None:
        operation = self.history.operation(self.sim)

        def done(outcome: Outcome | None) -> None:
            operation.outcome = outcome
            self.start()

        self.call(lambda member, reply: member.appends.append(operation.columns, reply), done)


class ProducerClient(SimClient):
    """Appends with a producer id and retries until it succeeds; sometimes twice at once, sometimes in a new epoch."""

    epoch = 0
    sequence = 0

    def work(self) -> None:
        if self.sim.chance(0.03):
            self.epoch, self.sequence = self.epoch + 1, 0
        operation = self.history.operation(self.sim)
        operation.producer = ProducerKey(self.name, self.epoch, self.sequence)
        self.sequence += 1
        self._send(operation)

    def _send(self, operation: Operation) -> None:
        key = operation.producer
        assert key is not None

        def request(member: ReplicaMember, reply: Reply) -> None:
            member.appends.append_produced(operation.columns, key, reply)

        if self.sim.chance(0.1):
            self.sim.counters["requests twice"] += 1
            self.sim.time.after(self.sim.source.choice((1, 50, 2000)), lambda: self.deliver(request))
        self.call(request, lambda outcome: self._done(operation, outcome))

    def _done(self, operation: Operation, outcome: Outcome | None) -> None:
        if isinstance(outcome, AppendedRange):
            operation.outcome = outcome
            self.start()
            return
        if outcome is not None:
            retriable = outcome.retriable or outcome.outcome_unknown
            check(retriable, "a correct producer is rejected", self.name, operation.producer, outcome)
        operation.retried = True
        self.sim.counters["appends repeated"] += 1
        self.retry(lambda: self._send(operation))


class QueryClient(SimClient):
    """A streaming query: micro-batches as transactions, winning and orphaned attempts, restarts, late commits."""

    batch = 0
    run = 0

    @property
    def key(self) -> TransactionId:
        """The transaction in progress."""
        return TransactionId(self.name, self.batch, f"run{self.run}")

    def work(self) -> None:
        """Start the micro-batch, after asking whether an earlier run has committed it."""
        if self.sim.chance(0.1):
            self._new_run()
        key, found = self.key, [""]

        def request(member: ReplicaMember, reply: Reply) -> None:
            def ready(outcome: Outcome) -> None:
                found[0] = member.replica.tables.transactions.state(key)[0]
                reply(outcome)

            member.appends.when_ready(ready)

        def done(outcome: Outcome | None) -> None:
            if not isinstance(outcome, AppendedRange):
                self.start()
            elif found[0] == "committed":
                self._next()
            else:
                self._task(self.sim.source.randrange(1, 4), [])

        self.call(request, done)

    def _new_run(self) -> None:
        self.run += 1
        self.sim.counters["runs replaced"] += 1

    def _restart(self) -> None:
        self._new_run()
        self.start()

    def _next(self) -> None:
        self.batch += 1
        self.start()

    def _task(self, tasks_left: int, parts: list[Part]) -> None:
        """Make one attempt of a task; when it fails, another one, as Spark does."""
        if not tasks_left:
            self._commit(parts)
            return
        operation = self.history.operation(self.sim)
        operation.transaction = key = self.key

        def request(member: ReplicaMember, reply: Reply) -> None:
            member.appends.append_attempt(operation.columns, key, f"a{operation.number}", reply)

        def done(outcome: Outcome | None) -> None:
            operation.outcome = outcome
            if self.sim.chance(0.05):
                self._restart()
            elif not isinstance(outcome, AppendedRange):
                self._failed(outcome, lambda: self._task(tasks_left, parts))
            elif self.sim.chance(0.1):
                self.sim.counters["attempts orphaned"] += 1  # a speculative one: its twin wins
                self._task(tasks_left, parts)
            else:
                columns = operation.columns
                part = Part(outcome.first_index, outcome.last_index, columns.count, column_crc(columns.crcs))
                self._task(tasks_left - 1, [*parts, part])

        self.call(request, done)

    def _failed(self, outcome: DLedgerError | None, again: Callable[[], None]) -> None:
        """Retry a call that may succeed; otherwise start the micro-batch again."""
        if outcome is None or outcome.retriable or outcome.outcome_unknown:
            self.retry(again)
        else:
            self._restart()

    def _commit(self, parts: list[Part]) -> None:
        key, commit = self.key, Commit(frozenset(parts))
        self.history.commits.setdefault((key.query_id, key.batch_id), []).append(commit)

        def request(member: ReplicaMember, reply: Reply) -> None:
            member.appends.commit(key, parts, reply)

        def done(outcome: Outcome | None) -> None:
            if isinstance(outcome, AppendedRange):
                commit.acknowledged = True
                self.sim.counters["transactions committed"] += 1
                self._next()
            elif self.sim.chance(0.2):
                self._restart()
            else:
                self._failed(outcome, lambda: self._commit(parts))

        if self.sim.chance(0.05):
            self.sim.time.after(1000, lambda: self.deliver(request))
        self.call(request, done)


class ReadClient(SimClient):
    """Asks leaders for linearizable reads: none may be older than the commit index at the request."""

    def work(self) -> None:
        needed = self.sim.checker.commit_index

        def request(member: ReplicaMember, reply: Reply) -> None:
            def respond(index: Index | None) -> None:
                self.sim.counters["reads"] += 1
                check(index is None or index >= needed, "a stale read index", member.node_id, index, needed)
                reply(member.replica.not_leader())

            member.replica.ask_read_index(respond)

        self.call(request, lambda _: self.start())


def all_clients(sim: Simulator, history: History) -> list[SimClient]:
    kinds = (PlainClient, PlainClient, ProducerClient, ProducerClient, QueryClient, QueryClient, ReadClient)
    return [kind(sim, history, f"{kind.__name__}{at}") for at, kind in enumerate(kinds)]


Deleted = Mapping[int, tuple[int, bytes]]
"""Trimmed entries: index → (magic, body)."""


def check_history(history: History, member: ReplicaMember, deleted: Deleted) -> None:
    """Check all operations against one member's committed log and the entries that were trimmed from its start."""
    found = _ranges(member, deleted)
    for operation in history.operations:
        _check_operation(operation, found.get(operation.number, []))
    unexpected = found.keys() - {operation.number for operation in history.operations}
    check(not unexpected, "the log contains entries that no client appended", unexpected)
    _check_order(history.operations)
    _check_transactions(history, member, found)


def _entries(member: ReplicaMember, deleted: Deleted) -> Iterator[tuple[int, int, bytes]]:
    """Yield (index, magic, body) of every entry that was ever committed."""
    log = member.log
    at, end = log.first_index(), member.replica.readable_end
    for index in range(at):
        check(index in deleted, "an entry is missing that no member trimmed", index, at)
        yield index, *deleted[index]
    for row in rows_between(log, at, end):
        yield row.index, row.magic, row.body


def _ranges(member: ReplicaMember, deleted: Deleted) -> dict[int, list[tuple[int, int]]]:
    """Return the ranges [first, last] of each operation's bodies; a body out of order ends its range."""
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    expected = (-1, 0)
    for index, magic, body in _entries(member, deleted):
        if magic != MAGIC_DATA:
            expected = (-1, 0)
            continue
        number, row = map(int, body.split(b"/", 2)[:2])
        if (number, row) == expected and found[number]:
            found[number][-1] = (found[number][-1][0], index)
        else:
            found[number].append((index, index))
        expected = (number, row + 1)
    return found


def _check_operation(operation: Operation, ranges: list[tuple[int, int]]) -> None:
    check(len(ranges) <= 1, "an append is in the log twice, or split", operation, ranges)
    for first, last in ranges:
        check(last - first + 1 == operation.columns.count, "an append is in the log in part", operation, ranges)
    outcome = operation.outcome
    if isinstance(outcome, AppendedRange):
        reported = [(outcome.first_index, outcome.last_index)]
        check(ranges == reported, "an acknowledged append is lost or elsewhere", operation, ranges)
    elif isinstance(outcome, DLedgerError) and not outcome.outcome_unknown and not operation.retried:
        check(not ranges, "a rejected append is in the log", operation, ranges)


def _check_order(operations: list[Operation]) -> None:
    """Check that no two appends overlap, and that the sequences of a producer's epoch are in order."""
    appended = [
        (o.outcome.first_index, o.outcome.last_index, o) for o in operations if isinstance(o.outcome, AppendedRange)
    ]
    appended.sort(key=lambda row: row[:2])
    newest: dict[tuple[str, int], int] = {}
    for (_, last, _), (first, _, _) in pairwise(appended):
        check(first > last, "two appends have the same index", last, first)
    for _, _, operation in appended:
        if operation.producer is not None:
            key = (operation.producer.producer_id, operation.producer.epoch)
            in_order = newest.get(key, -1) < operation.producer.sequence
            check(in_order, "a producer's appends are out of order", key, operation)
            newest[key] = operation.producer.sequence


def _check_transactions(history: History, member: ReplicaMember, found: dict[int, list[tuple[int, int]]]) -> None:
    """Check that ``read_committed`` shows of each transaction exactly the rows that one commit listed."""
    tables = member.replica.tables.transactions
    end = member.replica.readable_end
    hidden = Visibility.of(tables, end).orphaned(0, end)
    visible: dict[tuple[str, int], set[tuple[int, int]]] = defaultdict(set)
    open_keys = set(tables.open)
    for operation in history.operations:
        key = operation.transaction
        if key is not None and (key.query_id, key.batch_id) not in open_keys:
            for first, last in found.get(operation.number, []):
                if not any(start <= first and last < stop for start, stop in hidden):
                    visible[key.query_id, key.batch_id].add((first, last))
    for commit_key, commits in history.commits.items():
        listed = [{(part.first, part.last) for part in commit.parts} for commit in commits]
        rows = visible.get(commit_key)
        check(rows is None or rows in listed, "a transaction shows rows that no commit listed", commit_key, rows)
        for commit, ranges in zip(commits, listed, strict=True):
            if commit.acknowledged:
                check(commit_key not in open_keys, "a committed transaction is open again", commit_key)
                check(rows == ranges, "a committed transaction shows other rows", commit_key, rows, ranges)
    unexpected = set(visible) - set(history.commits)
    check(not unexpected, "rows are visible without a commit", unexpected)
