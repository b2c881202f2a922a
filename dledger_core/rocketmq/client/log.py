"""A Java group's log, one entry per request: appends, reads, and the end, which Java does not expose.

The end is found by requesting entries (INDEX_OUT_OF_RANGE = after the end). It counts as safe once it was observed some
time ago, one leader has led in one term since then, and the entry before it still has its term: by Raft's log matching,
all entries before it are unchanged, too. That does not prove a commit: see dledger_core/rocketmq/remoting/README.md.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import pyarrow as pa

from dledger_core.checksum import crc32
from dledger_core.client.protocol import AppendResult, LogRange
from dledger_core.errors import DLedgerError, IndexOutOfRangeError, NoLeaderError, ProtocolError
from dledger_core.record import HEADER_BYTES, MAGIC_DATA, READ_SCHEMA, RECORD_SCHEMA, Chosen
from dledger_core.rocketmq.client.nodes import JavaNodes
from dledger_core.rocketmq.remoting.codes import ResponseCode
from dledger_core.rocketmq.remoting.messages import AppendResponse, WireEntry

AppendOne: TypeAlias = Callable[[bytes], Awaitable[AppendResponse]]
Get: TypeAlias = Callable[[int], Awaitable[WireEntry]]
PROBE_PREFIX: Final = b"dledger-commit-probe \xd6\x1f\x8c\x03\x9a\xe4\x42\x57\x00 "
"""First bytes of a probe entry's body; reads skip such entries."""
_GUESSED_BYTES: Final = 1024
_IN_FLIGHT_BYTES: Final = 16 << 20


@dataclass(slots=True)
class _Results:
    """Index and term of each acknowledged body, and the failures that stopped the rest."""

    indexes: list[int]
    terms: list[int]
    failures: list[DLedgerError] = field(default_factory=list)


async def append_all(append_one: AppendOne, bodies: Sequence[bytes], in_flight: int) -> AppendResult:
    """Append bodies with ``in_flight`` requests at once; 1 keeps their order.

    After a failure no further request is sent and those in flight are awaited. The error's values count the
    acknowledged bodies: ``appended`` out of ``bodies``, indexes ``first_index`` to ``last_index``.

    Raises:
        DLedgerError: the first failure, of those with an unknown outcome if there is one.
    """
    done = _Results([-1] * len(bodies), [-1] * len(bodies))
    rows = iter(range(len(bodies)))
    workers = min(in_flight, len(bodies))
    await asyncio.gather(*(_work(append_one, bodies, rows, done) for _ in range(workers)))
    if done.failures:
        # Another failure may be certain; the appends as a whole have an unknown outcome once one has.
        failure = next((error for error in done.failures if error.outcome_unknown), done.failures[0])
        raise _with_count(failure, [index for index in done.indexes if index >= 0], len(bodies))
    first, last = min(done.indexes), max(done.indexes)
    plain = done.indexes == list(range(first, last + 1))
    return AppendResult(first, last, max(done.terms), () if plain else tuple(done.indexes))


async def _work(append_one: AppendOne, bodies: Sequence[bytes], rows: Iterator[int], done: _Results) -> None:
    for row in rows:
        if done.failures:
            return
        try:
            response = await append_one(bodies[row])
        except DLedgerError as error:
            done.failures.append(error)
            return
        done.indexes[row], done.terms[row] = response.index, response.term


def _with_count(error: DLedgerError, done: Sequence[int], bodies: int) -> DLedgerError:
    values = error.values | {"appended": len(done), "bodies": bodies}
    if done:
        values |= {"first_index": min(done), "last_index": max(done)}
    return type(error)(error.what, error.where, error.remedy, values)


def is_probe(body: bytes) -> bool:
    """Whether an entry was appended only to learn the commit index."""
    return body.startswith(PROBE_PREFIX)


async def read_entries(get: Get, start: int, end: int, *, max_bytes: int, in_flight: int) -> list[WireEntry]:
    """Read entries from ``start`` on: at least one if there is any, and at most ``max_bytes`` of records.

    Stops without an error at the end of the log. The largest entry so far limits the number of requests in flight.

    Raises:
        IndexOutOfRangeError: the entry at ``start`` is deleted.
        ProtocolError: terms decrease: the log was rewritten during the read.
    """
    found: list[WireEntry] = []
    nbytes, largest, following = 0, _GUESSED_BYTES, start
    window: deque[asyncio.Task[WireEntry]] = deque()
    try:
        while True:
            wanted = min(in_flight, max(1, (max_bytes - nbytes) // largest), max(1, _IN_FLIGHT_BYTES // largest))
            while following < end and len(window) < wanted:
                window.append(asyncio.ensure_future(get(following)))
                following += 1
            if not window:
                return found
            try:
                entry = await window.popleft()
            except IndexOutOfRangeError:
                if found:
                    return found
                raise
            if found and entry.term < found[-1].term:
                values = {"index": entry.index, "term": entry.term, "before": found[-1].term}
                raise ProtocolError("terms decrease: the log was rewritten during the read", "", "read again", values)
            size = HEADER_BYTES + len(entry.body)
            if found and nbytes + size > max_bytes:  # Java does not say how large it is before it is read
                return found
            found.append(entry)
            nbytes, largest = nbytes + size, max(largest, size)
            if nbytes >= max_bytes:
                return found
    finally:
        for task in window:
            task.cancel()
        await asyncio.gather(*window, return_exceptions=True)


def batch_of(entries: Sequence[WireEntry], *, records: bool, chosen: Chosen | None = None) -> pa.RecordBatch:
    """Return entries as rows: data entries without probes, or with ``records`` all of them and their magic.

    Args:
        entries: the entries.
        records: whether all of them are wanted.
        chosen: other columns; None = all.
    """
    rows = entries if records else [e for e in entries if e.magic == MAGIC_DATA and not is_probe(e.body)]
    schema = chosen.stored if chosen is not None else RECORD_SCHEMA if records else READ_SCHEMA
    columns = {
        "index": [entry.index for entry in rows],
        "term": [entry.term for entry in rows],
        "position": [entry.position for entry in rows],
        "timestamp": [None] * len(rows),  # Java does not write append times
        "body": [entry.body for entry in rows],
        "magic": [entry.magic for entry in rows],
        "length": [len(entry.body) for entry in rows],
        "crc": [crc32(entry.body) for entry in rows] if "crc" in schema.names else [],
    }
    return pa.RecordBatch.from_arrays([pa.array(columns[f.name], f.type) for f in schema], schema=schema)


Probe: TypeAlias = Callable[[int], Awaitable[int | None]]
"""Returns the term of the entry at an index, None if the log does not contain it."""

OBSERVE_S: Final = 0.5
"""Interval between observations: Java logs a stack trace for each request after the log's end."""
FIRST_S: Final = 10.0
"""Interval between searches for the log's first index."""
_PROBES_SKIPPED_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class EndObservation:
    """An observed end of the log: time, end (exclusive) and term of the last entry."""

    at: float
    end: int
    term: int


class SafeEndTracker:
    """Selects the newest observed end that is old enough; without I/O and without a clock of its own.

    Args:
        lag_s: the required age.

    Attributes:
        safe_end: entries before it may be served; -1 until an end was old enough.
    """

    def __init__(self, lag_s: float) -> None:
        self._lag_s = lag_s
        self._leader: tuple[str, int] | None = None
        self._observations: deque[EndObservation] = deque()
        self.safe_end = -1

    def saw(self, leader_id: str, observation: EndObservation) -> None:
        """Record an observed end; another leader or term, or a lower end, restarts the clock."""
        leader = (leader_id, observation.term)
        if leader != self._leader or (self._observations and observation.end < self._observations[-1].end):
            self._observations.clear()
            self._leader = leader
        if not self._observations or observation.end > self._observations[-1].end:
            self._observations.append(observation)
        self.safe_end = min(self.safe_end, observation.end)  # the log was truncated

    def due(self, now: float) -> EndObservation | None:
        """Return the newest observation that is old enough and beyond the safe end."""
        found = None
        for observation in self._observations:
            if observation.at + self._lag_s <= now and observation.end > self.safe_end:
                found = observation
        return found

    def confirm(self, observation: EndObservation, term: int | None) -> None:
        """Make a due end safe if the entry before it still has its term; otherwise restart the clock."""
        if observation.end and term != observation.term:
            self._observations.clear()
            return
        self.safe_end = max(self.safe_end, observation.end)
        while self._observations and self._observations[0].end < observation.end:
            self._observations.popleft()

    def proved(self, end: int) -> None:
        """Record that a majority has all entries before ``end``."""
        self.safe_end = max(self.safe_end, end)


async def last_end(probe: Probe, guess: int, first: int) -> tuple[int, int]:
    """Find the end of the log.

    Args:
        probe: requests an entry.
        guess: the end of the log before; requested first.
        first: an index that is not after the end.

    Returns:
        The end and the term of the entry before it, -1 if there is none.
    """
    low, low_term, step = guess, -1, 1
    high: int | None = None
    while high is None:  # in steps that double
        term = await probe(low + step - 1)
        if term is None:
            high = low + step - 1
        else:
            low, low_term, step = low + step, term, step * 2
    low, low_term = await _bisect(probe, low, low_term, high)
    if low > guess or low <= first:
        return low, low_term
    term = await probe(low - 1)
    if term is not None:
        return low, term
    return await _bisect(probe, first, -1, low - 1)  # the log was truncated since the last observation


async def _bisect(probe: Probe, low: int, low_term: int, high: int) -> tuple[int, int]:
    """Find the end in [low, high]: no entry is at ``high``, and the last entry before ``low`` has ``low_term``."""
    while low < high:
        middle = (low + high) // 2
        term = await probe(middle)
        if term is None:
            high = middle
        else:
            low, low_term = middle + 1, term
    return low, low_term


async def first_index(is_deleted: Callable[[int], Awaitable[bool]], guess: int, end: int) -> int:
    """Find the first index that retention has not deleted; request ``guess``, the first index before, first."""
    if guess >= end or not await is_deleted(guess):
        return min(guess, end)
    low, high = guess + 1, end
    while low < high:
        middle = (low + high) // 2
        if await is_deleted(middle):
            low = middle + 1
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class LogEnd:
    """The state of the log at one observation.

    Attributes:
        leader_id: the leader.
        first_index: first stored index.
        end: end (exclusive) of the stored entries, committed or not.
        term: term of the last entry, -1 without one.
        safe_end: entries before it may be served; -1 = not known yet.
        commit_index: highest index that a majority is known to have, -1 without a probe.
    """

    leader_id: str
    first_index: int
    end: int
    term: int
    safe_end: int
    commit_index: int


class JavaBounds:
    """The ends of one client's log. Belongs to one event loop.

    Args:
        nodes: the group.
        get: reads one entry.
        append_probe: appends a probe entry.
        safety_lag_ms: required age of an end.
        commit_probe: append probes instead of waiting.
    """

    def __init__(
        self,
        nodes: JavaNodes,
        get: Get,
        append_probe: Callable[[], Awaitable[AppendResponse]],
        *,
        safety_lag_ms: int,
        commit_probe: bool,
        observe_s: float = OBSERVE_S,
    ) -> None:
        self._nodes = nodes
        self._get = get
        self._append_probe = append_probe
        self._lag_s = safety_lag_ms / 1000
        self._commit_probe = commit_probe
        self._observe_s = observe_s
        self._tracker = SafeEndTracker(self._lag_s)
        self._lock = asyncio.Lock()
        self._end = 0
        self._first = 0
        self._first_at = float("-inf")
        self._probed_end = -1
        self._commit_index = -1
        self._last: tuple[float, LogEnd] | None = None

    async def observe(self, timeout_s: float) -> LogEnd:
        """Observe the log, unless the last observation is recent; append a probe if so configured.

        Raises:
            DLedgerError: no leader responds.
        """
        loop = asyncio.get_running_loop()
        async with self._lock:
            if self._last is None or loop.time() - self._last[0] >= self._observe_s:
                try:
                    seen = await asyncio.wait_for(self._observe(loop), 2 * timeout_s)
                except TimeoutError:
                    raise NoLeaderError("the log's end was not found in time", f"group {self._nodes.group}") from None
                self._last = loop.time(), seen
            return self._last[1]

    @property
    def known(self) -> LogRange | None:
        """The readable range at the last observation, None before."""
        if self._last is None or self._last[1].safe_end < 0:
            return None
        seen = self._last[1]
        return LogRange(min(seen.first_index, seen.safe_end), seen.safe_end, seen.commit_index)

    def forget(self) -> None:
        """Forget the last observation."""
        self._last = None

    async def after_deletion(self, index: int, timeout_s: float) -> LogEnd:
        """Observe the log, from whose beginning retention has deleted an entry."""
        if self._first <= index:
            self._first_at = float("-inf")
            self.forget()
        return await self.observe(timeout_s)

    async def _observe(self, loop: asyncio.AbstractEventLoop) -> LogEnd:
        while True:
            leader = await self._nodes.leader()
            end, term = await last_end(self._term_at, self._end, self._first)
            if loop.time() - self._first_at >= FIRST_S:
                self._first = await first_index(self._is_deleted, min(self._first, end), end)
                self._first_at = loop.time()
            if leader == self._nodes.leader_id:
                break
        self._end = end
        self._tracker.saw(leader, EndObservation(loop.time(), end, term))
        if self._commit_probe:
            await self._probe(end)
        elif (due := self._tracker.due(loop.time())) is not None:
            self._tracker.confirm(due, await self._term_at(due.end - 1) if due.end else -1)
        return LogEnd(leader, self._first, self._end, term, self._tracker.safe_end, self._commit_index)

    async def _term_at(self, index: int) -> int | None:
        """Return the term of an entry; -1 if retention has deleted it, None after the log's end."""
        try:
            return (await self._get(index)).term
        except IndexOutOfRangeError as error:
            return -1 if is_deleted(error) else None

    async def _is_deleted(self, index: int) -> bool:
        return await self._term_at(index) == -1

    async def _probe(self, end: int) -> None:
        """Append a probe if there are new entries to serve; probes of other readers do not count."""
        if self._commit_index >= 0 and await self._only_probes(self._probed_end, end):
            return
        response = await self._append_probe()
        self._commit_index = max(self._commit_index, response.index)
        self._tracker.proved(response.index)
        self._probed_end = self._end = response.index + 1

    async def _only_probes(self, start: int, end: int) -> bool:
        if end - start > _PROBES_SKIPPED_MAX:
            return False
        for index in range(start, end):
            entry = await self._get(index)
            if entry.magic == MAGIC_DATA and not is_probe(entry.body):
                return False
        return True

    async def current(self, timeout_s: float) -> LogRange:
        """Observe the log until a safe end is known.

        Raises:
            NoLeaderError: leaders change too often for an end to become old enough.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + 3 * self._lag_s + timeout_s
        while True:
            await self.observe(timeout_s)
            if (found := self.known) is not None:
                return found
            if loop.time() >= deadline:
                remedy = "wait until it has one leader, or shorten the safety lag"
                raise NoLeaderError("no end of the log was safe in time", f"group {self._nodes.group}", remedy)
            await self._pause(deadline)

    async def wait_beyond(self, start: int, seconds: float, timeout_s: float) -> LogRange:
        """Observe the log until the safe end is beyond ``start``, for at most ``seconds``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while True:
            bounds = await self.current(timeout_s)
            if bounds.end > start or loop.time() >= deadline:
                return bounds
            await self._pause(deadline)

    async def _pause(self, deadline: float) -> None:
        """Wait until the next observation is due."""
        await asyncio.sleep(max(0.0, min(self._observe_s, deadline - asyncio.get_running_loop().time())))


def is_deleted(error: IndexOutOfRangeError) -> bool:
    """Whether a node reported that retention has deleted the entry."""
    return error.values.get("code") == ResponseCode.INDEX_LESS_THAN_LOCAL_BEGIN
