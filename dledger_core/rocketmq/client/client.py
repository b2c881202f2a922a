"""JavaClient: a live Java DLedger group behind the surface of AsyncClient, as far as Java can serve it."""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

import pyarrow as pa

from dledger_core.client import reading
from dledger_core.client.appending import Bodies, columns_of
from dledger_core.client.async_client import LOOK_AGAIN_S, AsyncClient
from dledger_core.client.protocols import speaks
from dledger_core.client.reading import READ_BYTES, Consistency
from dledger_core.client.results import (
    AppendResult,
    AttemptResult,
    DigestReport,
    Entry,
    LogBounds,
    Metadata,
    PositionFetch,
    ProducerState,
    RoleChange,
    TransactionState,
)
from dledger_core.client.routing.cluster_view import ReadFrom
from dledger_core.client.routing.retry import Deadline, with_retries
from dledger_core.control import Part, TransactionId
from dledger_core.errors import (
    BadRequestError,
    ConfigError,
    DLedgerError,
    IndexOutOfRangeError,
    ProtocolError,
    StoreMismatchError,
    TransferringError,
    UnknownGroupError,
)
from dledger_core.record import Columns, Fetch, Isolation
from dledger_core.rocketmq.client.appending import append_all
from dledger_core.rocketmq.client.bounds import JavaBounds
from dledger_core.rocketmq.client.describing import metadata_of
from dledger_core.rocketmq.client.nodes import JavaNodes
from dledger_core.rocketmq.client.options import JavaOptions
from dledger_core.rocketmq.client.reading import PROBE_MARK, batch_of, read_entries
from dledger_core.rocketmq.remoting.codes import ResponseCode
from dledger_core.rocketmq.remoting.requests import AppendRequest, GetRequest, TransferRequest
from dledger_core.rocketmq.remoting.responses import AppendReply, GetReply, Reply, WireEntry

__all__ = ["JavaClient"]

_T = TypeVar("_T")
_PLACES_MAX: Final = 256
_TERMS_TRIED: Final = 64
_TRANSFER_S: Final = 10.0


@speaks("dledger-java")
class JavaClient(AsyncClient):
    """A client of one Java group, made by ``AsyncClient(..., protocol="dledger-java")``.

    What Java does not have (producers, transactions, digests, append times, more) is refused with a ConfigError.
    Limits: dledger_core/rocketmq/remoting/README.md.
    """

    def _set_up(self, java: JavaOptions) -> None:
        self._java = java
        self._nodes = JavaNodes(self.peers, self.group)
        self._bounds = JavaBounds(self._nodes, self._get, self._append_probe, java)
        self._served: OrderedDict[int, int] = OrderedDict()

    async def close(self) -> None:
        """Closes all connections; calls under way fail. Repeatable."""
        if not self._closed:
            self._closed = True
            await self._nodes.close()

    # --- appending ------------------------------------------------------------------------------------------------

    async def append(
        self, bodies: Bodies, *, producer_id: str | None = None, epoch: int = 0, sequence: int | None = None
    ) -> AppendResult:
        """Appends bodies, each in a request of its own: not all or none, and in their order only one at a time.

        After an error its values say how many were appended. Where other appends came in between, or Java took the
        requests in another order, the result's ``indexes`` tell each body's.

        Raises:
            RequestTimedOutError, LeadershipLostError: the outcome of some is unknown.
        """
        if producer_id is not None:
            self._refuse("producers")
        columns_of(bodies)
        self._check_usable()
        listed = bodies.to_pylist() if isinstance(bodies, (pa.Array, pa.ChunkedArray)) else list(map(bytes, bodies))
        await self._nodes.connect_leader()
        return await append_all(self._append_one, listed, self._java.appends_in_flight)

    async def append_columns(
        self, columns: Columns, *, producer_id: str | None = None, epoch: int = 0, sequence: int | None = None
    ) -> AppendResult:
        """Refused: append bodies."""
        self._refuse("columns")

    async def _append_one(self, body: bytes) -> AppendReply:
        def make(node_id: str) -> AppendRequest:
            return AppendRequest(group=self.group, remote_id=node_id, bodies=(body,))

        return await self._nodes.to_leader(make, AppendReply, timeout_s=self._timeouts.request_s, idempotent=False)

    async def _append_probe(self) -> AppendReply:
        return await self._append_one(PROBE_MARK + uuid.uuid4().hex.encode())

    # --- reading --------------------------------------------------------------------------------------------------

    async def _get(self, index: int) -> WireEntry:
        def make(node_id: str) -> GetRequest:
            return GetRequest(group=self.group, remote_id=node_id, index=index)

        reply = await self._nodes.to_leader(make, GetReply, timeout_s=self._timeouts.request_s, idempotent=True)
        if len(reply.entries) != 1 or reply.entries[0].index != index:
            found = [entry.index for entry in reply.entries]
            raise ProtocolError("an answer to GET holds another entry", "", "", {"index": index, "found": found})
        return reply.entries[0]

    async def _retrying(self, attempt: Callable[[], Awaitable[_T]]) -> _T:
        self._check_usable()
        return await with_retries(attempt, self._timeouts, connected=self._nodes.connected)

    async def bounds(
        self, *, isolation: Isolation = "read_committed", min_end: int = -1, wait_ms: int = 0
    ) -> LogBounds:
        """Return the safe end, which takes the safety lag the first time unless a probe is appended.

        With ``read_uncommitted`` the stored end.
        """
        deadline = Deadline(wait_ms / 1000)
        while True:
            found = await self._retrying(partial(self._bounds_now, isolation))
            if found.end >= min_end or deadline.is_over:
                return found
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _bounds_now(self, isolation: Isolation) -> LogBounds:
        if isolation == "read_uncommitted":
            metadata = await self._metadata()
            leader = next((node for node in metadata.nodes if node.first_index >= 0), None)
            if leader is not None:
                return LogBounds(leader.first_index, leader.last_index + 1, leader.commit_index)
        return await self._bounds.current(self._timeouts.request_s)

    async def fetch(
        self,
        start: int,
        end: int,
        *,
        max_bytes: int = READ_BYTES,
        node: str | None = None,
        consistency: Consistency = "committed",
        isolation: Isolation = "read_committed",
        wait_ms: int = 0,
        min_commit: int = -1,
        min_end: int = -1,
        read_from: ReadFrom = "any",
        spread: int | None = None,
    ) -> Fetch:
        """Reads entries of [start, end) from the leader, below the safe end unless ``isolation`` says otherwise.

        A read that goes on where one before ended looks first whether the entry before still has its term.

        Raises:
            IndexOutOfRangeError: ``start`` is below the log's first index.
            StoreMismatchError: what was read before was not committed and has been replaced.
        """
        del min_commit, read_from, spread  # an index below the safe end is as good as Java can tell
        _check(start, max_bytes, wait_ms, node=node, consistency=consistency)

        async def attempt() -> Fetch:
            found = await self._fetch_safe(start, end, max_bytes, isolation, wait_ms)
            reading.check_progress(found.next_index, start, min(end, min_end))
            return found

        return await self._retrying(attempt)

    async def _fetch_safe(self, start: int, end: int, max_bytes: int, isolation: Isolation, wait_ms: int) -> Fetch:
        await self._check_served(start)
        if isolation == "read_uncommitted":
            return await self._fetch(start, end, max_bytes)
        bounds = self._bounds.known
        if bounds is None or end > bounds.end:
            bounds = await self._bounds.current(self._timeouts.request_s)
        if start >= bounds.end and wait_ms:
            bounds = await self._bounds.wait_beyond(start, wait_ms / 1000, self._timeouts.request_s)
        return await self._fetch(start, min(end, bounds.end), max_bytes, bounds)

    async def _fetch(
        self, start: int, end: int, max_bytes: int, bounds: LogBounds | None = None, *, records: bool = False
    ) -> Fetch:
        entries: list[WireEntry] = []
        if start < end:
            try:
                entries = await read_entries(
                    self._get, start, end, max_bytes=max_bytes, in_flight=self._java.reads_in_flight
                )
            except IndexOutOfRangeError as error:
                if error.values.get("code") == ResponseCode.INDEX_LESS_THAN_LOCAL_BEGIN:
                    raise await self._gone(start) from None
        next_index = start + len(entries)
        if entries:
            self._served[next_index] = entries[-1].term
            while len(self._served) > _PLACES_MAX:
                self._served.popitem(last=False)
        known = bounds or LogBounds(0, next_index, -1)
        return Fetch(batch_of(entries, records=records), next_index, known.commit_index, known.end, known.first_index)

    async def _gone(self, start: int) -> IndexOutOfRangeError:
        look = await self._bounds.look(self._timeouts.request_s)
        values = {"index": start, "first_index": look.first_index, "last_index": look.end - 1}
        return IndexOutOfRangeError(f"index {start} is no longer in the log", f"group {self.group}", "", values)

    async def _check_served(self, start: int) -> None:
        term = self._served.get(start)
        if term is None:
            return
        try:
            found: int | None = (await self._get(start - 1)).term
        except IndexOutOfRangeError as error:
            if error.values.get("code") == ResponseCode.INDEX_LESS_THAN_LOCAL_BEGIN:
                return
            found = None
        if found != term:
            del self._served[start]
            raise StoreMismatchError(
                f"the entry before {start} has changed since it was read: it was not committed and has been replaced",
                f"group {self.group}",
                "read what follows the last entry you trust again; use a longer safety lag, or the commit probe",
                {"index": start - 1, "term": found, "read": term},
            )

    async def records(
        self,
        start: int,
        end: int,
        *,
        node: str | None = None,
        max_bytes: int = READ_BYTES,
        min_commit: int = -1,
        min_end: int = -1,
    ) -> Fetch:
        """Reads everything in [start, end), NOOPs and probes too, without the safety lag, with the column ``magic``."""
        del min_commit, min_end
        _check(start, max_bytes, 0, node=node, consistency="committed")
        return await self._retrying(partial(self._fetch, start, end, max_bytes, records=True))

    async def get(self, index: int) -> Entry:
        """Returns the data entry at ``index``, a probe too.

        Raises:
            IndexOutOfRangeError: it is not safe to serve, no longer held, or no data entry.
        """
        bounds = await self.bounds()
        if bounds.first_index <= index < bounds.end:
            found = batch_of([await self._get(index)], records=True)
            if found.column("magic")[0].as_py() == 1:
                return reading.entry_of(found, 0)
        values = {"index": index, "first_index": bounds.first_index, "last_index": bounds.end - 1}
        what = f"index {index} is not (or not yet safely) in the log, or holds no data entry"
        raise IndexOutOfRangeError(what, f"group {self.group}", "read between first_index and last_index", values)

    # --- the group ------------------------------------------------------------------------------------------------

    async def metadata(self, *, space: bool = False) -> Metadata:
        """Asks every node who leads and looks for the ends of the leader's log; nothing is waited for."""
        del space
        return await self._retrying(self._metadata)

    async def _metadata(self) -> Metadata:
        answers = await self._nodes.ask_all()
        try:
            look = await self._bounds.look(self._timeouts.request_s)
        except DLedgerError:
            look = None
        return metadata_of(self.peers, answers, look)

    async def groups(self) -> dict[str, str | None]:
        """Returns the client's own group if the nodes serve it: a Java node serves one, and tells no other name."""
        try:
            await self._retrying(self._nodes.ask_all)
        except UnknownGroupError:
            return {}
        return {self.group: None}

    async def transfer_leadership(self, node_id: str) -> None:
        """Hands leadership over; Java must be told its term, which is found from the last entry's on.

        Raises:
            TransferringError: the node did not take over.
        """
        self._check_usable()
        self._nodes.check_node(node_id)
        leader = await self._nodes.leader()
        if leader == node_id:
            return
        last = await self._bounds.look(self._timeouts.request_s)
        base: dict[str, Any] = {"group": self.group, "remote_id": leader, "transfer_id": leader}
        for term in range(max(0, last.term), max(0, last.term) + _TERMS_TRIED):
            request = TransferRequest(**base, transferee_id=node_id, term=term)
            try:
                await self._nodes.ask(request, Reply, max(self._timeouts.request_s, _TRANSFER_S))
            except DLedgerError as error:
                if error.values.get("code") != ResponseCode.INCONSISTENT_TERM:
                    raise
            else:
                self._nodes.leader_id = node_id
                self._bounds.forget()
                return
        raise TransferringError("the group's term is not known", f"group {self.group}", "append an entry, try again")

    # --- what Java does not have ----------------------------------------------------------------------------------

    def _refuse(self, what: str) -> NoReturn:
        raise ConfigError(f"a Java group knows no {what}", "protocol", "use a group of this project for that")

    async def append_attempt(self, bodies: Bodies, *, transaction: TransactionId, attempt: str) -> AttemptResult:
        """Refused."""
        self._refuse("transactions")

    async def offset_for_time(self, timestamp: datetime | int, *, min_commit: int = -1) -> int:
        """Refused."""
        self._refuse("append times")

    async def pin(self, name: str, start: int, seconds: float) -> tuple[str, ...]:
        """Refused."""
        self._refuse("pins")

    async def digest(
        self, start: int, end: int, *, span: int, node: str | None = None, min_end: int = -1
    ) -> DigestReport:
        """Refused."""
        self._refuse("digests")

    async def producer(self, producer_id: str) -> ProducerState:
        """Refused."""
        self._refuse("producers")

    async def transaction(self, transaction: TransactionId) -> TransactionState:
        """Refused."""
        self._refuse("transactions")

    async def commit_transaction(
        self, transaction: TransactionId, parts: Sequence[Part], input_id: str = ""
    ) -> TransactionState:
        """Refused."""
        self._refuse("transactions")

    async def abort_transaction(self, transaction: TransactionId) -> TransactionState:
        """Refused."""
        self._refuse("transactions")

    async def wait_for_entries(
        self, seen: Mapping[str, int], *, wait_ms: int, isolation: Isolation = "read_committed"
    ) -> frozenset[str]:
        """Refused."""
        self._refuse("waits for many groups")

    async def fetch_at(
        self,
        position: int,
        *,
        max_bytes: int = READ_BYTES,
        node: str | None = None,
        isolation: Isolation = "read_committed",
    ) -> PositionFetch:
        """Refused."""
        self._refuse("reads by position")

    async def describe(self, table: str, node: str | None = None) -> pa.RecordBatch:
        """Refused."""
        self._refuse("descriptions")

    def role_changes(self) -> AsyncGenerator[RoleChange, None]:
        """Refused."""
        self._refuse("role events")


def _check(start: int, max_bytes: int, wait_ms: int, *, node: str | None, consistency: str) -> None:
    if node is not None or consistency != "committed":
        name = "node" if node is not None else "consistency"
        raise BadRequestError("a Java group is read at its leader, without a proof", name, "leave it out")
    if start < 0 or max_bytes < 1 or wait_ms < 0:
        values = {"start": start, "max_bytes": max_bytes, "wait_ms": wait_ms}
        raise BadRequestError("a read's numbers are out of range", "", "the first index is 0", values)
