"""The writers of a run: plain appends, producers and queries that come and go, and some that stay.

Each of them knows the guarantees of the log, and reports an answer that differs to the ledger. Time is log time, as the
auditor reads it: an answer that depends on expiry is judged by the log times before and after the question, so a slow
machine violates no guarantee.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import time
from array import array
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from uuid import uuid4

from benchmarks.endurance.auditor import DAY_MS, LASTING_MS, ONE_TIME_MS, Auditor
from benchmarks.endurance.ledger import Ledger
from dledger_core import AsyncClient
from dledger_core.client import fingerprint_of
from dledger_core.client.routing.retry import is_temporary, is_unknown
from dledger_core.control import Part, TransactionId, fingerprint_sum
from dledger_core.errors import (
    DLedgerError,
    FencedError,
    IndexOutOfRangeError,
    ProducerUnknownError,
    QueryUnknownError,
    TransactionError,
)

GIVE_UP_S: Final = 60.0
PLAIN_BYTES: Final = 4096
PLAIN_PAUSE_S: Final = 0.02
READ_PAUSE_S: Final = 0.05
READ_BYTES: Final = 64 << 10
STAYING: Final = 20
"""Producers of each kind that stay for the whole run."""
WATCHED_SHARE: Final = 0.05
"""Of the ids that come and go: they are asked for shortly before and after they expire."""


class Load(NamedTuple):
    """How much comes and goes in a run.

    Attributes:
        seconds: length of the run.
        producers: distinct producers.
        queries: distinct queries.
        speed: ms of log time per ms.
        timeout_ms: log time after which an inactive transaction is aborted.
        seed: of every choice.
    """

    seconds: float
    producers: int
    queries: int
    speed: int
    timeout_ms: int
    seed: int

    @property
    def days(self) -> float:
        """Days of log time in the run."""
        return self.seconds * 1000 * self.speed / DAY_MS


@dataclass
class Committed:
    """A micro-batch that is committed, as its driver remembers it."""

    transaction: TransactionId
    parts: list[Part]
    rows: int
    fingerprint: int


class Writers:
    """All writers of a run, on one event loop.

    Args:
        client: for everything that comes and goes.
        measured: for plain appends and reads.
        auditor: says which log time it is.
        ledger: gets rows and violations.
        load: how much of it.
    """

    def __init__(
        self, client: AsyncClient, measured: AsyncClient, auditor: Auditor, ledger: Ledger, load: Load
    ) -> None:
        self._client = client
        self._measured = measured
        self._auditor = auditor
        self._ledger = ledger
        self._load = load
        self._chance = random.Random(load.seed)
        self._due: list[tuple[int, int, Callable[[], Awaitable[None]]]] = []
        self._order = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._began = time.monotonic()
        self._stopping = False
        self.first_index = 0
        self.took_ms = self.new_times()
        """Milliseconds of each append and read since the last sample."""

    @staticmethod
    def new_times() -> dict[str, array[float]]:
        """Return an empty array for any kind of call."""
        return defaultdict(lambda: array("f"))

    # --- the run ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write for the length of the run, until every writer has ended."""
        self._began = time.monotonic()
        self._stay()
        loops = [
            self._plain(),
            self._read(),
            self._ask(),
            self._come(self._load.producers, self._producer),
            self._come(self._load.queries, self._query),
        ]
        await asyncio.gather(*loops)
        while self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def seconds(self) -> float:
        """Length of the run."""
        return self._load.seconds

    @property
    def elapsed(self) -> float:
        """Part of the run that is over, from 0 to 1."""
        return min(1.0, (time.monotonic() - self._began) / self._load.seconds)

    def _start(self, work: Awaitable[None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001 - reported as a violation
                self._ledger.violated(f"a writer failed: {error!r}")

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _come(self, count: int, behave: Callable[[int], Awaitable[None]]) -> None:
        """Start ``count`` writers, evenly over the run."""
        started = 0
        while started < count:
            for number in range(started, min(count, int(count * self.elapsed) + 1)):
                self._start(behave(number))
                started = number + 1
            await asyncio.sleep(0.02)

    def _later(self, due_ms: float, ask: Callable[[], Awaitable[None]]) -> None:
        heapq.heappush(self._due, (int(due_ms), next(self._order), ask))

    async def _ask(self) -> None:
        """Start what is due at a log time; what is due after the run does not happen."""
        while self.elapsed < 1:
            while self._due and self._due[0][0] <= self._auditor.log_time_ms:
                self._start(heapq.heappop(self._due)[2]())
            await asyncio.sleep(0.02)

    # --- measured --------------------------------------------------------------------------------------------

    async def _plain(self) -> None:
        while self.elapsed < 1:
            numbers, bodies = self._ledger.rows(1, PLAIN_BYTES)
            began = time.perf_counter()
            try:
                result = await self._measured.append(bodies)
            except DLedgerError as error:
                self._ledger.counts[f"plain append failed with {error.name}"] += 1
                if not is_unknown(error):
                    self._ledger.dropped(numbers)
            else:
                self._ledger.kept(numbers, result.first_index)
                self.took_ms["plain append"].append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(PLAIN_PAUSE_S)

    async def _read(self) -> None:
        """Read a few records from anywhere in the log, from any replica."""
        while self.elapsed < 1:
            await asyncio.sleep(READ_PAUSE_S)
            first, end = self.first_index, self._auditor.next_index
            start = self._chance.randrange(first + (end - first) // 4, end) if end > first else first
            began = time.perf_counter()
            try:
                await self._measured.fetch(start, end, max_bytes=READ_BYTES, isolation="read_uncommitted")
            except IndexOutOfRangeError:
                continue  # retention was faster than the choice
            except DLedgerError as error:
                self._ledger.counts[f"read failed with {error.name}"] += 1
            else:
                self.took_ms["read"].append((time.perf_counter() - began) * 1000)

    # --- producers -------------------------------------------------------------------------------------------

    async def _producer(self, number: int) -> None:
        """A producer that comes, appends a few times and goes; some ask later whether the log remembers it."""
        producer = _Producer(f"importer-{number:07}", once=self._chance.random() < 0.4)
        asks = self._chance.random() < WATCHED_SHARE
        self._auditor.watched[producer.name] = -1
        for _ in range(2 if asks else self._chance.choice((1, 1, 1, 2, 3))):
            await self._append(producer)
            await asyncio.sleep(self._chance.uniform(0, 0.02) * self._load.seconds / 60)
        if not asks or producer.next_sequence < 2:
            del self._auditor.watched[producer.name]
            return
        await self._remember(producer)
        at_ms = self._auditor.watched[producer.name]
        for part in (self._chance.uniform(0.1, 0.95), self._chance.uniform(1.02, 1.3)):
            self._later(at_ms + part * producer.limit_ms, lambda: self._remember(producer))

    async def _append(self, producer: _Producer) -> None:
        numbers, (body,) = self._ledger.rows(1, self._chance.randrange(50, 300))
        began = time.perf_counter()
        first_index = await self._produce(producer, producer.next_sequence, body)
        if first_index is not None:
            self._ledger.kept(numbers, first_index)
            self.took_ms["producer append"].append((time.perf_counter() - began) * 1000)
            producer.bodies.append(body)
            producer.results.append(first_index)

    async def _produce(self, producer: _Producer, sequence: int, body: bytes) -> int | None:
        """Append until the outcome is known; return the index, None if the log does not know the producer."""
        until = time.monotonic() + GIVE_UP_S
        while True:
            try:
                result = await self._client.append(
                    [body], producer_id=producer.name, sequence=sequence, once=producer.once
                )
                return result.first_index
            except ProducerUnknownError:
                await self._judge_unknown(producer.name, producer.limit_ms)
                return None
            except DLedgerError as error:
                if not is_temporary(error) or time.monotonic() > until:
                    self._ledger.violated(f"append {sequence} of {producer.name}: {error}")
                    return None
                self._ledger.counts[f"producer retried after {error.name}"] += 1
                await asyncio.sleep(0.1)

    async def _repeat(self, producer: _Producer, sequence: int) -> bool:
        """Repeat an old append, which must get the old result; return whether the log knows the producer."""
        first_index = await self._produce(producer, sequence, producer.bodies[sequence])
        if first_index not in (None, producer.results[sequence]):
            was = producer.results[sequence]
            self._ledger.violated(f"append {sequence} of {producer.name} was at {was}, its repeat at {first_index}")
        return first_index is not None

    async def _remember(self, producer: _Producer) -> None:
        """Repeat the newest append of a producer that appends no more: the log knows it until it has expired."""
        await self._auditor.reach(producer.results[-1])
        before_ms = self._auditor.log_time_ms
        known = await self._repeat(producer, producer.next_sequence - 1)
        if known:
            self._judge_known(producer.name, producer.limit_ms, before_ms)
        kind = "producers used once" if producer.once else "producers"
        self._ledger.counts[f"{kind}: {'repeats answered' if known else 'expired'}"] += 1

    def _judge_known(self, name: str, limit_ms: int, before_ms: int) -> None:
        """Check an answer that knows an id: it had not expired, or less than a second ago."""
        age_ms = before_ms - self._auditor.watched[name]
        if age_ms > limit_ms + 1000 * self._load.speed:
            self._ledger.violated(f"{name} is known {age_ms} ms of log time after its last entry")

    async def _judge_unknown(self, name: str, limit_ms: int) -> None:
        """Check an answer that knows an id no more: it has expired by the entries up to the answer."""
        await self._auditor.catch_up()
        age_ms = self._auditor.log_time_ms - self._auditor.watched[name]
        if age_ms <= limit_ms:
            self._ledger.violated(f"{name} is unknown {age_ms} ms of log time after its last entry")

    def _stay(self) -> None:
        """Start the writers that live for the whole run."""
        # At most 15 appends, so that the log remembers the first one until the end.
        rarely = min(5.0, self._load.days / 14)
        for number in range(STAYING):
            self._later(0, self._nightly(_Producer(f"nightly-{number}"), 1.0))
            self._later(0, self._nightly(_Producer(f"weekly-{number}"), 5.0))
            self._later(0, self._nightly(_Producer(f"veteran-{number}"), rarely, is_veteran=True))
            self._later(0, self._daily(f"daily-{number}", 0, 1.0))
            self._later(0, self._daily(f"holiday-{number}", 0, 9.0))

    def _nightly(
        self, producer: _Producer, every_days: float, *, is_veteran: bool = False
    ) -> Callable[[], Awaitable[None]]:
        """Append every few days, and before that repeat the append before; a veteran repeats its first one."""
        self._auditor.watched[producer.name] = -1

        async def append() -> None:
            began_ms = self._auditor.log_time_ms
            if producer.next_sequence:
                known = await self._repeat(producer, 0 if is_veteran else producer.next_sequence - 1)
                who = "veterans" if is_veteran else "producers that stay"
                self._ledger.counts[f"{who}: {'repeats answered' if known else 'expired'}"] += 1
            await self._append(producer)
            self._later(began_ms + every_days * DAY_MS, append)

        return append

    # --- queries ---------------------------------------------------------------------------------------------

    async def _query(self, number: int) -> None:
        """A query that comes, writes micro-batches and goes."""
        kind = self._chance.random()
        if kind < 0.65:
            await self._write_once(f"write-{number:06}")
        elif kind < 0.90:
            await self._stream(f"stream-{number:06}")
        elif kind < 0.95:
            await self._abort(f"abort-{number:06}")
        elif kind < 0.97:
            await self._abandon(f"abandon-{number:06}")
        else:
            await self._stranger(f"stranger-{number:06}")

    async def _write_once(self, name: str) -> None:
        """As ``df.write``: one transaction, often asked for again; the log forgets it after a day."""
        asks = self._chance.random() < 2 * WATCHED_SHARE
        self._auditor.watched[name] = -1
        done = await self._commit(TransactionId(name, 0, uuid4().hex), once=True)
        if done is not None and (asks or self._chance.random() < 0.3):
            await self._remember_query(done)
        if done is None or not asks:
            del self._auditor.watched[name]
            return
        at_ms = self._auditor.watched[name]
        for part in (self._chance.uniform(0.1, 0.95), self._chance.uniform(1.02, 1.3)):
            self._later(at_ms + part * ONE_TIME_MS, lambda: self._remember_query(done))

    async def _stream(self, name: str) -> None:
        """A stream that is restarted: the new run replays the newest micro-batch, and the old one is fenced."""
        run, old = uuid4().hex, ""
        batches, restarted = self._chance.randrange(2, 6), self._chance.randrange(1, 3)
        for batch_id in range(batches):
            if batch_id == restarted:
                run, old = uuid4().hex, run
            done = await self._commit(TransactionId(name, batch_id, run))
            if done is None:
                return
            if self._chance.random() < 0.3:
                await self._replay_stream(done)
            await asyncio.sleep(self._chance.uniform(0, 0.005) * self._load.seconds / 60)
        if old:
            await self._refused(TransactionId(name, batches, old), FencedError)

    async def _abort(self, name: str) -> None:
        """A micro-batch that fails, is aborted, and perhaps succeeds in the next run."""
        transaction = TransactionId(name, 0, uuid4().hex)
        numbers, _, _ = await self._attempt(transaction)
        self._ledger.dropped(numbers)
        await self._until_known(lambda: self._client.abort_transaction(transaction), f"abort of {name}")
        state = await self._until_known(lambda: self._client.transaction(transaction), f"state of {name}")
        self._ledger.counts["aborted"] += 1
        if state is not None and state.state != "aborted":
            self._ledger.violated(f"{name} was aborted and is {state.state}")
        await self._refused(transaction, TransactionError)
        if self._chance.random() < 0.5:
            await self._commit(TransactionId(name, 0, uuid4().hex))

    async def _abandon(self, name: str) -> None:
        """A query that dies in a micro-batch: the leader aborts it."""
        transaction = TransactionId(name, 0, uuid4().hex)
        numbers, _, _ = await self._attempt(transaction)
        self._ledger.dropped(numbers)
        self._ledger.counts["abandoned"] += 1
        late_ms = 5000 * self._load.speed

        async def look() -> None:
            other = TransactionId(name, 0, "")  # a request of its own run would renew it
            state = await self._until_known(lambda: self._client.transaction(other), f"state of {name}")
            if state is not None and state.state == "committed":
                self._ledger.violated(f"{name} was abandoned and is committed")
            if state is not None and state.state == "open":  # a new leader counts inactivity from its election
                self._later(self._auditor.log_time_ms + self._load.timeout_ms, look)
                return
            self._ledger.counts["abandoned and looked at"] += 1

        self._later(self._auditor.log_time_ms + self._load.timeout_ms + late_ms, look)

    async def _stranger(self, name: str) -> None:
        """A query with a lost history is refused; an abort of it gives it none, and is final for its run."""
        late = TransactionId(name, self._chance.randrange(1, 50), uuid4().hex)
        await self._refused(late, QueryUnknownError)
        gone, once = TransactionId(name, 0, uuid4().hex), self._chance.random() < 0.5
        await self._until_known(lambda: self._client.abort_transaction(gone, once=once), f"abort of {name}")
        state = await self._until_known(lambda: self._client.transaction(gone), f"state of {name}")
        if state is not None and state.state != "aborted":
            self._ledger.violated(f"{name} was aborted and is {state.state}")
        await self._refused(gone, TransactionError)
        await self._refused(late, QueryUnknownError)

    def _daily(
        self, name: str, batch_id: int, every_days: float, last: Committed | None = None
    ) -> Callable[[], Awaitable[None]]:
        """A stream that is started every few days by a new run, for one micro-batch."""

        async def write() -> None:
            began_ms = self._auditor.log_time_ms
            if last is not None:
                await self._replay_stream(last)
                if batch_id > 1:
                    older = TransactionId(name, batch_id - 2, uuid4().hex)
                    await self._refused(older, FencedError, TransactionError)
            done = await self._commit(TransactionId(name, batch_id, uuid4().hex))
            if done is not None:
                self._later(began_ms + every_days * DAY_MS, self._daily(name, batch_id + 1, every_days, done))

        return write

    async def _attempt(
        self, transaction: TransactionId, *, once: bool = False
    ) -> tuple[range, list[bytes], Part | None]:
        """Append rows as a task does; after a failure as its next attempt does."""
        until = time.monotonic() + GIVE_UP_S
        while True:
            count = self._chance.randrange(1, 5)
            numbers, bodies = self._ledger.rows(count, self._chance.randrange(50, 300))
            try:
                result = await self._client.append_attempt(
                    bodies, transaction=transaction, attempt=uuid4().hex, once=once
                )
            except TransactionError:
                self._ledger.dropped(numbers)
                raise
            except DLedgerError as error:
                self._ledger.dropped(numbers)
                if not is_temporary(error) or time.monotonic() > until:
                    self._ledger.violated(f"attempt for {transaction}: {error}")
                    return numbers, bodies, None
                self._ledger.counts[f"attempt retried after {error.name}"] += 1
                await asyncio.sleep(0.1)
                continue
            return numbers, bodies, Part(result.first_index, result.last_index, result.rows, result.crc)

    async def _commit(self, transaction: TransactionId, *, once: bool = False) -> Committed | None:
        """Write a micro-batch of a few tasks, of which some lose, and commit it."""
        parts: list[Part] = []
        won: list[range] = []
        fingerprints = []
        active_ms = self._auditor.log_time_ms
        try:
            for _ in range(self._chance.choice((1, 1, 2, 3))):
                began_ms = self._auditor.log_time_ms
                numbers, bodies, part = await self._attempt(transaction, once=once)
                active_ms = began_ms
                if part is None or self._chance.random() < 0.1:
                    self._ledger.dropped(numbers)
                    self._ledger.counts["attempts that lost"] += 1
                    continue
                parts.append(part)
                won.append(numbers)
                fingerprints.append(fingerprint_of(bodies))
            state = await self._until_known(
                lambda: self._client.commit_transaction(transaction, parts, once=once), f"commit of {transaction}"
            )
        except TransactionError as error:
            await self._judge_aborted(transaction, active_ms, error)
            state = None
        if state is None:
            for numbers in won:
                self._ledger.dropped(numbers)
            return None
        for numbers, part in zip(won, parts, strict=True):
            self._ledger.kept(numbers, part.first)
        self._ledger.counts["micro-batches committed"] += 1
        rows = sum(part.rows for part in parts)
        return Committed(transaction, parts, rows, fingerprint_sum(fingerprints))

    async def _judge_aborted(self, transaction: TransactionId, active_ms: int, error: TransactionError) -> None:
        """Check the error of a live transaction: it was inactive for longer than the timeout, on a slow machine."""
        await self._auditor.catch_up()
        inactive_ms = self._auditor.log_time_ms - active_ms
        if inactive_ms <= self._load.timeout_ms:
            self._ledger.violated(f"{transaction} after {inactive_ms} ms of log time: {error}")
        self._ledger.counts["micro-batches that were too slow"] += 1

    async def _replay(self, done: Committed) -> bool:
        """Ask for a committed micro-batch as its replay does; return whether the log knows its content."""
        what = f"replay of {done.transaction}"
        state = await self._until_known(lambda: self._client.transaction(done.transaction), what)
        if state is None or state.state == "unknown":
            return False
        if (state.state, state.rows, state.fingerprint) != ("committed", done.rows, done.fingerprint):
            self._ledger.violated(f"{what}: {state}")
        return True

    async def _remember_query(self, done: Committed) -> None:
        """Replay what a query that is used once has written: known for a day, then it is a stranger."""
        name = done.transaction.query_id
        await self._auditor.catch_up()
        before_ms = self._auditor.log_time_ms
        known = await self._replay(done)
        if known:
            self._judge_known(name, ONE_TIME_MS, before_ms)
        else:
            await self._judge_unknown(name, ONE_TIME_MS)
            await self._refused(TransactionId(name, 1, uuid4().hex), QueryUnknownError)
        self._ledger.counts[f"queries used once: {'replays answered' if known else 'expired'}"] += 1

    async def _replay_stream(self, done: Committed) -> None:
        """Replay the newest micro-batch of a stream, which the log remembers for 400 days."""
        if not await self._replay(done):
            self._ledger.violated(f"{done.transaction} is committed and was forgotten")
        self._ledger.counts["streams: replays answered"] += 1

    async def _refused(self, transaction: TransactionId, *expected: type[DLedgerError]) -> None:
        """Try to write a micro-batch that the log must refuse."""
        numbers, bodies = self._ledger.rows(1, 50)
        self._ledger.dropped(numbers)
        while True:
            try:
                await self._client.append_attempt(bodies, transaction=transaction, attempt=uuid4().hex)
            except expected as error:
                self._ledger.counts[f"refused with {error.name}"] += 1
            except DLedgerError as error:
                if is_temporary(error):
                    continue
                self._ledger.violated(f"{transaction} was refused with another error: {error}")
            else:
                self._ledger.violated(f"{transaction} was accepted, not refused with {expected[0].name}")
            return

    async def _until_known(self, call: Callable[[], Awaitable[Any]], what: str) -> Any:
        """Repeat an idempotent call until its outcome is known; return None after a violated guarantee."""
        until = time.monotonic() + GIVE_UP_S
        while True:
            try:
                return await call()
            except TransactionError:
                raise
            except DLedgerError as error:
                if not is_temporary(error) or time.monotonic() > until:
                    self._ledger.violated(f"{what}: {error}")
                    return None
                self._ledger.counts[f"query retried after {error.name}"] += 1
                await asyncio.sleep(0.1)


class _Producer:
    """A producer: its id, and its appends so far."""

    def __init__(self, name: str, *, once: bool = False) -> None:
        self.name = name
        self.once = once
        self.bodies: list[bytes] = []
        self.results: list[int] = []

    @property
    def next_sequence(self) -> int:
        return len(self.bodies)

    @property
    def limit_ms(self) -> int:
        """Log time without an append after which the log forgets it."""
        return ONE_TIME_MS if self.once else LASTING_MS
