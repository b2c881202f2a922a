"""Clients of complete replicas, and the check of their history against the log.

They append, retry, give up and repeat requests late. Every body is unique, so that the log itself shows in the end what
happened to each call: ``tests.support.checker`` judges the history, as it judges one of real processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from dledger_core.bootstrap import ARCHIVE_VERSION
from dledger_core.control import ArchivedRange, Part, TransactionId, column_crc
from dledger_core.errors import DLedgerError, FencedError, LogContestedError
from dledger_core.ids import Index
from dledger_core.raft import SetVersion
from dledger_core.record import Columns, ProposedBatch, merge_ranges
from dledger_core.server.services.appends import AppendedRange
from dledger_core.server.services.archive import range_of
from dledger_core.server.services.producers_in_flight import ProducerKey
from dledger_core.storage.read.visibility import Visibility
from tests.sim.safety import check
from tests.support.checker import check as check_calls
from tests.support.history import Append, Decision, Operation, ReplicaLog, hash_of
from tests.support.logs import Row, rows_between

if TYPE_CHECKING:
    from tests.sim.replica_member import ReplicaMember
    from tests.sim.simulator import Simulator

Outcome = AppendedRange | DLedgerError
Reply = Callable[[Outcome], None]
Request = Callable[["ReplicaMember", Reply], None]

CLIENT_TIMEOUT = 400


class History:
    """The calls of all clients, each from its start on; its outcome is unknown until it has ended."""

    def __init__(self, sim: Simulator) -> None:
        self.calls: list[Operation] = []
        self._sim = sim

    def append(self, client: str, **fields: str) -> tuple[int, Columns]:
        """Add an append of a few bodies that no other call has; return its number and the bodies."""
        source, padding = self._sim.source, b"." * self._sim.source.choice((0, 20, 90, 400))
        bodies = [b"%d/" % self._sim.number() + padding for _ in range(source.choice((1, 1, 2, 5)))]
        call = Append(client=client, hashes=tuple(map(hash_of, bodies)), **self._unknown, **fields)
        return self._add(call), Columns.from_bodies(bodies)

    def commit(self, client: str, transaction: str, attempts: tuple[str, ...]) -> int:
        """Add a commit; return its number."""
        decision = Decision(client=client, transaction=transaction, commit=True, attempts=attempts, **self._unknown)
        return self._add(decision)

    def end(self, number: int, outcome: Outcome | None) -> None:
        """Record the outcome of a call; None is unknown."""
        call, result = self.calls[number], dict[str, Any]()
        if isinstance(outcome, AppendedRange):
            result["status"] = "ok"
            if isinstance(call, Append):
                place = {"first": outcome.first_index, "last": outcome.last_index, "term": outcome.term}
                result |= place
        elif outcome is not None:
            result = {"status": "unknown" if outcome.outcome_unknown else "fail", "error": outcome.name}
        self.calls[number] = replace(call, end=float(self._sim.time.now), **result)

    @property
    def _unknown(self) -> dict[str, Any]:
        return {"start": float(self._sim.time.now), "end": math.inf, "status": "unknown"}

    def _add(self, call: Operation) -> int:
        self.calls.append(call)
        return len(self.calls) - 1


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
                done(outcome if self.sim is sim else None)  # a client that was moved has no connection to the old log

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
        number, columns = self.history.append(self.name)

        def done(outcome: Outcome | None) -> None:
            self.history.end(number, outcome)
            self.start()

        self.call(lambda member, reply: member.appends.append(columns, reply), done)


class ProducerClient(SimClient):
    """Appends with a producer id and retries until it succeeds; sometimes twice at once, sometimes in a new epoch."""

    epoch = 0
    sequence = 0

    def work(self) -> None:
        if self.sim.chance(0.03):
            self.epoch, self.sequence = self.epoch + 1, 0
        key = ProducerKey(self.name, self.epoch, self.sequence)
        self.sequence += 1
        number, columns = self.history.append(self.name, producer=f"{self.name}/{key.epoch}/{key.sequence}")
        self._send(columns, key, number)

    def _send(self, columns: Columns, key: ProducerKey, number: int) -> None:
        def request(member: ReplicaMember, reply: Reply) -> None:
            member.appends.append_produced(columns, key, reply)

        def done(outcome: Outcome | None) -> None:
            if isinstance(outcome, AppendedRange):
                self.history.end(number, outcome)
                self.start()
                return
            if outcome is not None:
                retriable = outcome.retriable or outcome.outcome_unknown or isinstance(outcome, LogContestedError)
                check(retriable, "a correct producer is rejected", self.name, key, outcome)
            self.sim.counters["appends repeated"] += 1
            self.retry(lambda: self._send(columns, key, number))

        if self.sim.chance(0.1):
            self.sim.counters["requests twice"] += 1
            self.sim.time.after(self.sim.source.choice((1, 50, 2000)), lambda: self.deliver(request))
        self.call(request, done)


class QueryClient(SimClient):
    """A streaming query: micro-batches as transactions, winning and orphaned attempts, restarts, aborts, late calls."""

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
                found[0] = member.replica.tables.transactions.state(key)
                reply(outcome)

            member.appends.when_ready(ready)

        def done(outcome: Outcome | None) -> None:
            if not isinstance(outcome, AppendedRange):
                self.start()
            elif found[0] == "committed":
                self._next()
            else:
                self._task(self.sim.source.randrange(1, 4), {})

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

    def _task(self, tasks_left: int, parts: dict[str, Part]) -> None:
        """Make one attempt of a task; when it fails, another one, as Spark does."""
        if not tasks_left:
            self._commit(parts)
            return
        key = self.key
        if self.sim.chance(0.03):
            self._abort(key)
            return
        attempt = f"{self.name}/{self.batch}/{self.sim.number()}"
        number, columns = self.history.append(self.name, attempt=attempt)

        def request(member: ReplicaMember, reply: Reply) -> None:
            member.transactions.append_attempt(columns, key, attempt, reply)

        def done(outcome: Outcome | None) -> None:
            self.history.end(number, outcome)
            if self.sim.chance(0.05):
                self._restart()
            elif not isinstance(outcome, AppendedRange):
                self._failed(outcome, lambda: self._task(tasks_left, parts))
            elif self.sim.chance(0.1):
                self.sim.counters["attempts orphaned"] += 1  # a speculative one: its duplicate wins
                self._task(tasks_left, parts)
            else:
                part = Part(outcome.first_index, outcome.last_index, columns.count, column_crc(columns.crcs))
                self._task(tasks_left - 1, parts | {attempt: part})

        self.call(request, done)

    def _abort(self, key: TransactionId) -> None:
        """Abort as a driver, perhaps before a task has appended; then a late task of the run must open nothing."""
        self._late(key, is_aborted=False)
        found = [""]

        def request(member: ReplicaMember, reply: Reply) -> None:
            def ended(outcome: Outcome) -> None:
                found[0] = member.replica.tables.transactions.state(key)
                reply(outcome)

            member.transactions.abort(key, ended)

        def done(outcome: Outcome | None) -> None:
            if outcome is None or (isinstance(outcome, DLedgerError) and not isinstance(outcome, FencedError)):
                self.retry(lambda: self.call(request, done))
                return
            is_decided = found[0] in ("aborted", "committed") or isinstance(outcome, FencedError)
            check(is_decided, "an abort has no effect", key, found[0])
            self.sim.counters["runs aborted"] += 1
            self._late(key, is_aborted=True)
            self._restart()

        self.call(request, done)

    def _late(self, key: TransactionId, *, is_aborted: bool) -> None:
        """Append in a task that its driver no longer knows."""
        attempt = f"{self.name}/{key.batch_id}/{self.sim.number()}"
        number, columns = self.history.append(self.name, attempt=attempt)

        def request(member: ReplicaMember, reply: Reply) -> None:
            member.transactions.append_attempt(columns, key, attempt, reply)

        def done(outcome: Outcome | None) -> None:
            # A correct client is never fenced, but this one writes for a run that has ended.
            self.history.end(number, None if isinstance(outcome, FencedError) else outcome)
            is_appended = isinstance(outcome, AppendedRange)
            check(not (is_appended and is_aborted), "an append of an aborted run", key, outcome)

        pause = self.sim.source.choice((1, 50, 1000))
        self.sim.time.after(pause, lambda: self.call(request, done))

    def _failed(self, outcome: DLedgerError | None, again: Callable[[], None]) -> None:
        """Retry a call that may succeed; otherwise start the micro-batch again."""
        if outcome is None or outcome.retriable or outcome.outcome_unknown:
            self.retry(again)
        else:
            self._restart()

    def _commit(self, parts: dict[str, Part]) -> None:
        key, transaction = self.key, f"{self.name}/{self.batch}"
        number = self.history.commit(self.name, transaction, tuple(parts))

        def request(member: ReplicaMember, reply: Reply) -> None:
            member.transactions.commit(key, list(parts.values()), reply)

        def done(outcome: Outcome | None) -> None:
            self.history.end(number, outcome)
            if isinstance(outcome, AppendedRange):
                self.sim.counters["transactions committed"] += 1
                self._next()
            elif self.sim.chance(0.2):
                self._restart()
            else:
                self._failed(outcome, lambda: self._commit(parts))

        if self.sim.chance(0.05):
            self.history.commit(self.name, transaction, tuple(parts))  # no client gets its response
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


class ArchiveClient(SimClient):
    """A job that proves ranges, ends the archive and begins it again; members delete what is archived.

    Its leader decides by its tables, and another member must have the same rows. Sometimes an entry comes without that,
    at another place: that of a second job, or of an earlier leader.
    """

    def work(self) -> None:
        source, seed = self.sim.source, self.sim.source.getrandbits(32)
        draw, length = source.random(), source.choice((1, 5, 40, 400))
        moved = source.choice((-3, -1, 1, 7)) if draw > 0.8 else 0

        def request(member: ReplicaMember, reply: Reply) -> None:
            archive, replica = member.archive, member.replica
            is_trimmed = archive.next_start < replica.raft.first_index
            if draw < 0.04 or (is_trimmed and draw < 0.2):
                archive.finish(reply)
                return
            if replica.is_leader and replica.raft.configuration.version < ARCHIVE_VERSION:
                member.propose_change(SetVersion(ARCHIVE_VERSION))
            start = max(archive.next_start + moved, replica.raft.first_index)
            end = min(replica.visible_end, start + length)
            known = self.sim.checker.configuration.configuration.version
            if not replica.is_leader or is_trimmed or start >= end or known < ARCHIVE_VERSION:
                reply(replica.not_leader())
                return
            found = range_of(replica.log, start, end, replica.visibility.orphaned(start, end))
            self._compare(found)
            if not moved:

                def recorded(outcome: Outcome) -> None:
                    replica.pins.set(["archive", 0], start, replica.pin_time_ms)
                    reply(outcome)

                replica.pins.set(["archive", 1000], start, replica.pin_time_ms)
                archive.record(found, "file:///archive", recorded)
                return
            fields = {"k": "archived", "r": found.row(), "u": "file:///late"} | ({"b": True} if draw < 0.9 else {})
            replica.propose(ProposedBatch(control=replica.pack_control(fields)))
            reply(replica.not_leader())

        def done(outcome: Outcome | None) -> None:
            self.sim.counters["ranges archived"] += isinstance(outcome, AppendedRange)
            member = self.sim.some_member() if draw < 0.6 else None
            if member is not None and member.up:
                (member.retain if draw > 0.2 else member.trim)(Random(seed))
            self.start()

        self.call(request, done)

    def _compare(self, found: ArchivedRange) -> None:
        """Compare a range with the same one of the members that have it."""
        for member in self.sim.members.values():
            if not member.up or member.is_damaged or member.core.first_index > found.start:
                continue
            if found.end <= min(member.replica.visible_end, member.readable_end):
                hidden = member.replica.visibility.orphaned(found.start, found.end)
                theirs = range_of(member.log, found.start, found.end, hidden)
                check(theirs == found, "two members would prove different rows", member.node_id, theirs, found)
                self.sim.counters["ranges compared"] += 1


def all_clients(sim: Simulator, history: History, suffix: str = "") -> list[SimClient]:
    kinds: tuple[type[SimClient], ...] = (
        PlainClient,
        PlainClient,
        ProducerClient,
        ProducerClient,
        QueryClient,
        QueryClient,
        ReadClient,
    )
    if sim.seed % 7 in (2, 3, 4):  # the others are as they were when their seeds were recorded
        kinds = (*kinds, ArchiveClient)
    return [kind(sim, history, f"{kind.__name__}{at}{suffix}") for at, kind in enumerate(kinds)]


def check_history(
    history: History, member: ReplicaMember, deleted: Mapping[int, Row], forgotten: Sequence[tuple[int, int]]
) -> None:
    """Check all calls against one member's committed log and the entries that were trimmed from its start.

    Args:
        history: the calls.
        member: the member.
        deleted: trimmed entries by index.
        forgotten: orphaned ranges of trimmed entries.
    """
    first, end = member.log.first_index(), member.replica.readable_end
    check(all(index in deleted for index in range(first)), "an entry is missing that no member trimmed", first)
    rows = [*(deleted[index] for index in range(first)), *rows_between(member.log, first, end)]
    tables = member.replica.tables.transactions
    orphaned = merge_ranges([*forgotten, *tables.orphaned.ranges])
    log = ReplicaLog.of(0, rows, Visibility(end, None, orphaned))
    undecided = {f"{query}/{batch}" for query, batch in tables.open}
    hidden = [
        value
        for call in history.calls
        if isinstance(call, Append)
        for value in call.hashes
        if call.attempt.rpartition("/")[0] in undecided
    ]
    log.visible[np.isin(log.hashes, np.array(hidden, np.uint64))] = False
    for violation in check_calls(history.calls, {member.node_id: log}).violations:
        check(False, violation.kind, violation.detail)
