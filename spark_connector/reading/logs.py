"""One group's log as the connector sees it: here from servers, in ``store_log`` from a store directory without servers.

Both kinds answer the same few questions: where does the log begin and end, which record lies before an index, and
the entries of a range in chunks. Clients are kept per process, so executors reuse their connections between tasks.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from dledger_core import EntryCheck, check_of
from dledger_core.client import JavaOptions, record_at
from dledger_core.config import parse_peers
from dledger_core.errors import (
    BehindError,
    CorruptRecordError,
    DLedgerError,
    IndexOutOfRangeError,
    ProtocolError,
    RequestTimedOutError,
    UnknownGroupError,
    UnreachableError,
)
from spark_connector.errors import RetentionError
from spark_connector.options import DLedgerOptions
from spark_connector.reading.planning import Range

if TYPE_CHECKING:
    import pyarrow as pa

    from dledger_core import Client, Fetch
    from spark_connector.reading.local_stores import LocalStores

__all__ = [
    "Bounds",
    "Chunk",
    "Log",
    "RecordFacts",
    "ServerLog",
    "bounds_reaching",
    "client_for",
    "facts_of",
    "is_late_enough",
    "open_log",
    "retrying",
]

_T = TypeVar("_T")
_RETRY_PAUSE_S: Final = 0.1
_LAG_MS: Final = 1_000
"""How long a replica may wait until it has what is asked."""
_FIRST_ROUND_S: Final = 2.0
"""How long a replica may take while others were not asked yet: one that hangs shall not cost its whole timeout."""
_FAILED_WAIT_S: Final = 0.5
"""How long a wait that fails lasts at least, so that servers which are down are not asked all the time."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_ANOTHER_MAY_SERVE: Final = (CorruptRecordError, IndexOutOfRangeError, ProtocolError, UnknownGroupError)

_clients: dict[tuple[Any, ...], Client] = {}


@dataclass(frozen=True, slots=True)
class Bounds:
    """What can be read of a log now.

    Attributes:
        first: first stored index.
        end: index behind the last readable entry, as the isolation says.
        commit: commit index of the replica that said so; -1 for a store.
        log: uuid of the log, None if it has none.
    """

    first: int
    end: int
    commit: int
    log: str | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Data entries of a range and the index to go on from."""

    batch: pa.RecordBatch
    next_index: int


@dataclass(frozen=True, slots=True)
class RecordFacts:
    """What identifies a stored record, and its place [position, end_position) in the log."""

    mark: EntryCheck
    position: int
    end_position: int
    timestamp: datetime | None


class Log(Protocol):
    """One group's log."""

    group: str

    def bounds(self) -> Bounds:
        """Returns where the log begins and ends now."""

    def record(self, index: int) -> RecordFacts:
        """Returns what identifies the stored record at ``index``, and where it lies."""

    def index_at_time(self, timestamp_ms: int, bounds: Bounds) -> int:
        """Returns the first readable index appended at or after a time, the end of ``bounds`` if there is none."""

    def wait(self, known: Bounds, timeout_ms: int) -> bool:
        """Waits up to ``timeout_ms`` for the log to grow; returns whether it may differ from what is known."""

    def pin(self, name: str, start: int, seconds: float) -> None:
        """Keeps entries from ``start`` on out of retention for a reader; 0 s gives it up. Nothing where none runs."""

    def chunk(self, part: Range, start: int, replica: int) -> Chunk:
        """Returns entries from ``start`` on, some at least if there are any, up to the range's end.

        Args:
            part: the range being read.
            start: where to go on.
            replica: a number that spreads tasks over the replicas.

        Raises:
            RetentionError: no replica holds ``start`` any more.
        """


def client_for(options: DLedgerOptions, group: str) -> Client:
    """Returns this process's client for the group; made once and kept."""
    from dledger_core import Client

    java = JavaOptions(safety_lag_ms=options.safety_lag_ms, commit_probe=options.commit_probe)
    key = (os.getpid(), options.peers, group, options.fetch_timeout_ms, options.protocol, java)
    if key not in _clients:
        _clients[key] = Client(
            options.peers,
            group,
            timeout_ms=options.fetch_timeout_ms,
            protocol=options.protocol,
            java=java,
        )
    return _clients[key]


def retrying(call: Callable[[], _T], budget_ms: int, *, unknown_outcome: bool = False) -> _T:
    """Calls ``call`` until it succeeds, the error is final or the time is used up.

    Args:
        call: what to do; the client has its own short retries.
        budget_ms: no new try is made after this.
        unknown_outcome: try again also where the failed call may have taken effect.
    """
    deadline = time.monotonic() + budget_ms / 1000
    while True:
        try:
            return call()
        except DLedgerError as error:
            again = error.retriable or (unknown_outcome and error.outcome_unknown)
            if not again or time.monotonic() >= deadline:
                raise
        time.sleep(_RETRY_PAUSE_S)


def open_log(options: DLedgerOptions, group: str | None = None) -> Log:
    """Opens the log of ``group`` as the options say; a store names its group itself."""
    if options.path:
        from spark_connector.reading.store_log import StoreLog

        return StoreLog(options)
    if options.protocol == "dledger-java":
        from spark_connector.reading.java_log import JavaLog

        return JavaLog(options, group or options.groups[0])
    return ServerLog(options, group or options.groups[0])


class ServerLog:
    """A log on servers."""

    def __init__(self, options: DLedgerOptions, group: str) -> None:
        self.group = group
        self._options = options
        self._reached = False
        self._serving: str | None = None
        self._local: LocalStores | None = None
        if options.local_stores:
            from spark_connector.reading.local_stores import LocalStores

            self._local = LocalStores(options, group)

    @property
    def _client(self) -> Client:
        return client_for(self._options, self.group)

    def bounds(self) -> Bounds:
        """Returns the widest view among the replicas that answer."""
        # Before the first success a short wait: wrong peers should be reported at once, not after a minute.
        budget = self._options.fetch_retry_ms if self._reached else min(5_000, self._options.fetch_retry_ms)
        found = retrying(self._bounds, budget)
        self._reached = True
        return found

    def _bounds(self) -> Bounds:
        metadata = self._client.metadata()
        nodes = [node for node in metadata.nodes if node.reachable]
        if not nodes:
            raise UnreachableError(f"no replica of group {self.group!r} answers", self._options.peers, "start it")
        if self._options.isolation == "read_committed":
            end, commit = max((node.visible_end, node.commit_index) for node in nodes)
        else:
            commit = max(node.commit_index for node in nodes)
            end = commit + 1
        first = min(node.first_index for node in nodes)
        return Bounds(first=max(0, first), end=max(end, 0), commit=commit, log=metadata.log_uuid)

    def record(self, index: int) -> RecordFacts:
        """Reads the record at ``index`` from any replica."""
        read = partial(self._client.records, index, index + 1, max_bytes=1, min_commit=index)
        fetched = retrying(read, self._options.fetch_retry_ms, unknown_outcome=True)
        return facts_of(fetched.batch, index, self.group)

    def index_at_time(self, timestamp_ms: int, bounds: Bounds) -> int:
        """Asks any replica, and again if that one knew less of the log than ``bounds`` says."""
        ask = partial(self._client.offset_for_time, timestamp_ms)
        deadline = time.monotonic() + self._options.fetch_retry_ms / 1000
        while True:
            index = max(retrying(ask, self._options.fetch_retry_ms, unknown_outcome=True), bounds.first)
            if index >= bounds.end or is_late_enough(self.record(index).timestamp, timestamp_ms):
                return min(index, bounds.end)
            if time.monotonic() >= deadline:
                raise BehindError(f"no replica knows the log up to {bounds.end}", f"group {self.group!r}", "try again")
            time.sleep(_RETRY_PAUSE_S)

    def wait(self, known: Bounds, timeout_ms: int) -> bool:
        """Waits at one server for the next entry: one request, unless that server fails."""
        return self.wait_any({self.group: known}, timeout_ms)

    def wait_any(self, known: Mapping[str, Bounds], timeout_ms: int) -> bool:
        """As ``wait`` for many groups of these servers: still one request."""
        deadline = time.monotonic() + timeout_ms / 1000
        seen = {group: bounds.end for group, bounds in known.items()}
        try:
            return bool(self._client.wait_growth(seen, wait_ms=timeout_ms, isolation=self._options.isolation))
        except DLedgerError:
            time.sleep(max(0.0, min(_FAILED_WAIT_S, deadline - time.monotonic())))
            return True

    def pin(self, name: str, start: int, seconds: float) -> None:
        """Asks every node; one that is down deletes nothing."""
        self._client.pin(name, start, seconds)

    def chunk(self, part: Range, start: int, replica: int) -> Chunk:
        """Reads one chunk: from a store on this machine, or from one replica after the other until the time is up."""
        if self._local is not None:
            found = self._local.chunk(part, start)
            if found is not None:
                return found
        order = _ReplicaOrder(self._options, self._client, replica, self._serving)
        deadline = time.monotonic() + self._options.fetch_retry_ms / 1000
        hopeful = False
        patience_s = min(_FIRST_ROUND_S, self._options.fetch_timeout_ms / 1000)
        while True:
            node = order.next()
            try:
                fetched = self._fetch(part, start, node, patience_s)
                if fetched.next_index > start:
                    self._serving = node
                    return Chunk(fetched.batch, fetched.next_index)
                error: DLedgerError = BehindError(f"{node} does not reach index {start} yet")
            except DLedgerError as failure:
                error = failure
            passing = error.retriable or error.outcome_unknown
            if not (passing or isinstance(error, _ANOTHER_MAY_SERVE)):
                raise error
            hopeful = hopeful or passing
            if order.all_tried:
                first = int(error.values.get("first_index", -1))
                if start < first and not hopeful:
                    raise RetentionError.of(part.group, start, first, part.end) from error
                if not hopeful or time.monotonic() >= deadline:
                    raise error
                hopeful, patience_s = False, self._options.fetch_timeout_ms / 1000
                time.sleep(_RETRY_PAUSE_S)

    def _fetch(self, part: Range, start: int, node: str, patience_s: float) -> Fetch:
        work = self._client.in_loop.fetch(
            start,
            part.end,
            max_bytes=self._options.read_bytes(),
            node=node,
            isolation=self._options.isolation,
            wait_ms=_LAG_MS,
            min_commit=part.min_commit,
        )
        return self._client.call(_within(work, patience_s + _LAG_MS / 1000, node))


async def _within(work: Coroutine[Any, Any, _T], seconds: float, node: str) -> _T:
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError:
        raise RequestTimedOutError("no answer in time", node, "", {"seconds": seconds}) from None


class _ReplicaOrder:
    """In which order a task asks the replicas: the preferred ones first, then the others, again and again."""

    def __init__(self, options: DLedgerOptions, client: Client, replica: int, serving: str | None) -> None:
        self._read_from = options.read_from
        self._peers = [str(peer.node_id) for peer in parse_peers(options.peers)]
        self._client = client
        self._replica = replica
        # The replica that served the chunk before comes first: one that hangs costs its timeout only once.
        self._queue: list[str] = [] if serving is None else [serving]
        self._first_round_due = serving is not None

    @property
    def all_tried(self) -> bool:
        """Whether each replica of this round was asked."""
        return not self._queue and not self._first_round_due

    def next(self) -> str:
        if not self._queue:
            self._queue = self._round()
            self._first_round_due = False
        return self._queue.pop(0)

    def _round(self) -> list[str]:
        if self._read_from.startswith("node:"):
            return [self._read_from.removeprefix("node:")]
        turn = self._replica % len(self._peers)
        order: list[str] = [*self._peers[turn:], *self._peers[:turn]]
        if self._read_from == "any":
            return order
        try:
            leader = self._client.metadata().leader_id
        except DLedgerError:
            leader = None  # asking the replicas in turn will tell
        order.sort(key=lambda node: (node == leader) != (self._read_from == "leader"))
        return order


def bounds_reaching(log: Log, index: int, wait_s: float) -> Bounds:
    """Waits for a view that reaches ``index``: after an election replicas may know less for a while."""
    deadline = time.monotonic() + wait_s
    bounds = log.bounds()
    while bounds.end < index and time.monotonic() < deadline:
        time.sleep(_RETRY_PAUSE_S)
        bounds = log.bounds()
    return bounds


def facts_of(batch: pa.RecordBatch, index: int, group: str) -> RecordFacts:
    """Returns the facts of the record at ``index`` in a batch of records."""
    row = record_at(batch, index, f"group {group!r}")
    mark = EntryCheck(row["term"], check_of(index, row["term"], row["position"], row["body"]))
    return RecordFacts(mark, row["position"], row["end_position"], row["timestamp"])


def is_late_enough(timestamp: datetime | None, timestamp_ms: int) -> bool:
    """Whether an append time is at or after a time."""
    return timestamp is not None and timestamp >= _EPOCH + timedelta(milliseconds=timestamp_ms)
