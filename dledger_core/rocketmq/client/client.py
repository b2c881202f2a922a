"""JavaClient: the log client of a live Java DLedger group.

Java's protocol has no producers, transactions, digests, append times, pins, positions and role events, so this client
has no such methods. Limits: dledger_core/rocketmq/remoting/README.md.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Final, TypeVar

import pyarrow as pa

from dledger_core.client.appends import columns_of
from dledger_core.client.protocol import (
    AppendResult,
    Bodies,
    Entry,
    LogRange,
    Metadata,
    NodeStatus,
    ReadRequest,
    RecordsRequest,
)
from dledger_core.client.reads import check_numbers, check_progress, entry_of, selected, wire_isolation
from dledger_core.client.routing.outcomes import plain_append
from dledger_core.client.routing.retry import Timeouts, with_retries
from dledger_core.client.signatures import takes
from dledger_core.client.status import bounds_reaching
from dledger_core.config import Peer
from dledger_core.errors import (
    BadRequestError,
    DLedgerError,
    IndexOutOfRangeError,
    ProtocolError,
    StoreMismatchError,
    TransferringError,
    UnknownGroupError,
    UnsupportedError,
)
from dledger_core.record import MAGIC_DATA, Chosen, Fetch, Isolation
from dledger_core.rocketmq.client.log import (
    OBSERVE_S,
    PROBE_PREFIX,
    JavaBounds,
    LogEnd,
    append_all,
    batch_of,
    is_deleted,
    read_entries,
)
from dledger_core.rocketmq.client.nodes import JavaNodes
from dledger_core.rocketmq.message.fields import MessageColumns
from dledger_core.rocketmq.remoting.codes import ResponseCode
from dledger_core.rocketmq.remoting.messages import (
    AppendRequest,
    AppendResponse,
    GetRequest,
    GetResponse,
    MetadataResponse,
    Response,
    TransferRequest,
    WireEntry,
)

_T = TypeVar("_T")
_SERVED_MAX: Final = 256
_TERMS_MAX: Final = 64
_TRANSFER_S: Final = 10.0


class JavaClient:
    """A log client that speaks the protocol ``dledger-java``; methods as in LogClient.

    Args:
        peers: the group's nodes.
        group: the group's name.
        timeouts: limits of requests and calls.
        safety_lag_ms: an end of the log counts as committed once the same leader has kept it for this long.
        commit_probe: instead append a probe entry after new entries, and read up to it once it is acknowledged.
        appends_in_flight: requests of an append in flight; 1 keeps the order of the bodies in the log.
        reads_in_flight: requests of a read in flight.
        observe_s: interval between observations of the log's end.

    Attributes:
        nodes: the connections, and the presumed leader.
    """

    protocol = "dledger-java"

    def __init__(
        self,
        peers: tuple[Peer, ...],
        group: str,
        timeouts: Timeouts,
        *,
        safety_lag_ms: int = 10_000,
        commit_probe: bool = False,
        appends_in_flight: int = 64,
        reads_in_flight: int = 64,
        observe_s: float = OBSERVE_S,
    ) -> None:
        self.peers = peers
        self.group = group
        self._timeouts = timeouts
        self._appends_in_flight = appends_in_flight
        self._reads_in_flight = reads_in_flight
        self.nodes = JavaNodes(peers, group)
        self._bounds = JavaBounds(
            self.nodes,
            self._get,
            self._append_probe,
            safety_lag_ms=safety_lag_ms,
            commit_probe=commit_probe,
            observe_s=observe_s,
        )
        # End index -> term of the last entry, of the newest fetches: a later fetch compares the term.
        self._served: OrderedDict[int, int] = OrderedDict()

    async def close(self) -> None:
        await self.nodes.close()

    # --- appending ------------------------------------------------------------------------------------------------

    async def append(
        self,
        bodies: Bodies,
        *,
        producer_id: str | None = None,
        epoch: int = 0,
        sequence: int | None = None,
        once: bool = False,
    ) -> AppendResult:
        # One request per body: not atomic, and ordered only with one request in flight. An error's values count the
        # appended bodies; the result lists each body's index if other entries are in between.
        if producer_id is not None:
            raise UnsupportedError.of("append with a producer", self.protocol, self.group)
        columns_of(bodies)
        listed = bodies.to_pylist() if isinstance(bodies, (pa.Array, pa.ChunkedArray)) else list(map(bytes, bodies))
        await self.nodes.connect_leader()
        return await append_all(self._append_one, listed, self._appends_in_flight)

    async def _append_one(self, body: bytes) -> AppendResponse:
        def make(node_id: str) -> AppendRequest:
            return AppendRequest(group=self.group, remote_id=node_id, bodies=(body,))

        return await self.nodes.to_leader(
            make,
            AppendResponse,
            timeout_s=self._timeouts.request_s,
            idempotent=False,
            effect=plain_append(self.group, " --protocol dledger-java"),
        )

    async def _append_probe(self) -> AppendResponse:
        return await self._append_one(PROBE_PREFIX + uuid.uuid4().hex.encode())

    # --- reading --------------------------------------------------------------------------------------------------

    async def _get(self, index: int) -> WireEntry:
        def make(node_id: str) -> GetRequest:
            return GetRequest(group=self.group, remote_id=node_id, index=index)

        response = await self.nodes.to_leader(make, GetResponse, timeout_s=self._timeouts.request_s, idempotent=True)
        if len(response.entries) != 1 or response.entries[0].index != index:
            values = {"index": index, "found": [entry.index for entry in response.entries]}
            raise ProtocolError("the response contains another entry than requested", "", "", values)
        return response.entries[0]

    async def _retrying(self, attempt: Callable[[], Awaitable[_T]]) -> _T:
        return await with_retries(attempt, self._timeouts, connected=self.nodes.connected)

    async def bounds(self, *, isolation: Isolation = "read_committed", min_end: int = -1, wait_ms: int = 0) -> LogRange:
        # The safe end; without a probe the first call takes the safety lag. With read_uncommitted the stored end.
        read_bounds = partial(self._retrying, partial(self._bounds_now, isolation))
        return await bounds_reaching(read_bounds, min_end, wait_ms)

    async def _bounds_now(self, isolation: Isolation) -> LogRange:
        if isolation == "read_uncommitted":
            metadata = await self._metadata()
            leader = next((node for node in metadata.nodes if node.first_index >= 0), None)
            if leader is not None:
                return LogRange(leader.first_index, leader.last_index + 1, leader.commit_index)
        return await self._bounds.current(self._timeouts.request_s)

    @takes(ReadRequest)
    async def fetch(self, request: ReadRequest) -> Fetch:
        # The leader serves all reads, up to the safe end unless isolation is read_uncommitted. Java exposes no commit
        # index, and its followers serve no reads: min_commit, read_from and spread have no effect.
        _check(request)

        async def attempt() -> Fetch:
            found = await self._fetch_safe(request)
            check_progress(found.next_index, request.start, min(request.end, request.min_end))
            return found

        return await self._retrying(attempt)

    async def _fetch_safe(self, read: ReadRequest) -> Fetch:
        start, end = read.start, read.end
        await self._check_served(start)
        if read.isolation == "read_uncommitted":
            return await self._fetch(start, end, read.max_bytes, columns=read.columns)
        bounds = self._bounds.known
        if bounds is None or end > bounds.end:
            bounds = await self._bounds.current(self._timeouts.request_s)
        if start >= bounds.end and read.wait_ms:
            bounds = await self._bounds.wait_beyond(start, read.wait_ms / 1000, self._timeouts.request_s)
        return await self._fetch(start, min(end, bounds.end), read.max_bytes, bounds, columns=read.columns)

    async def _fetch(
        self,
        start: int,
        end: int,
        max_bytes: int,
        bounds: LogRange | None = None,
        *,
        records: bool = False,
        columns: Sequence[str] | None = None,
    ) -> Fetch:
        chosen = None if columns is None else Chosen.of(columns, MessageColumns())
        entries: list[WireEntry] = []
        if start < end:
            try:
                entries = await read_entries(
                    self._get, start, end, max_bytes=max_bytes, in_flight=self._reads_in_flight
                )
            except IndexOutOfRangeError as error:
                if is_deleted(error):
                    raise await self._deleted(start) from None
        next_index = start + len(entries)
        known = bounds or LogRange(0, next_index, -1)
        batch = batch_of(entries, records=records, chosen=chosen)
        if chosen is not None:
            batch, next_index = selected(batch, chosen, next_index)
        if entries:
            self._served[next_index] = entries[next_index - start - 1].term
            while len(self._served) > _SERVED_MAX:
                self._served.popitem(last=False)
        return Fetch(batch, next_index, known.commit_index, known.end, known.first_index)

    async def _deleted(self, start: int) -> IndexOutOfRangeError:
        log = await self._bounds.after_deletion(start, self._timeouts.request_s)
        values = {"index": start, "first_index": log.first_index, "last_index": log.end - 1}
        return IndexOutOfRangeError(f"index {start} is no longer in the log", f"group {self.group}", "", values)

    async def _check_served(self, start: int) -> None:
        """Raise StoreMismatchError if the entry before ``start`` was replaced since this client read it."""
        term = self._served.get(start)
        if term is None:
            return
        try:
            found: int | None = (await self._get(start - 1)).term
        except IndexOutOfRangeError as error:
            if is_deleted(error):
                return
            found = None
        if found != term:
            self._served.pop(start, None)  # another read may have found it too
            raise StoreMismatchError(
                f"the entry before {start} has changed since it was read: it was not committed and has been replaced",
                f"group {self.group}",
                "read what follows the last entry you trust again; use a longer safety lag, or the commit probe",
                {"index": start - 1, "term": found, "read": term},
            )

    @takes(RecordsRequest)
    async def records(self, request: RecordsRequest) -> Fetch:
        # No-ops and probes too, and without the safety lag; min_commit and min_end have no effect.
        _check(ReadRequest(**asdict(request)))
        fetch = partial(
            self._fetch, request.start, request.end, request.max_bytes, records=True, columns=request.columns
        )
        return await self._retrying(fetch)

    async def get(self, index: int) -> Entry:
        bounds = await self.bounds()
        if bounds.first_index <= index < bounds.end:
            found = batch_of([await self._get(index)], records=True)
            if found.column("magic")[0].as_py() == MAGIC_DATA:
                return entry_of(found, 0)
            what = f"index {index} is a control entry"
        else:
            what = f"index {index} is not, or not yet safely, in the log"
        values = {"index": index, "first_index": bounds.first_index, "last_index": bounds.end - 1}
        remedy = (
            f"the log has indexes {bounds.first_index} to {bounds.end - 1}" if bounds.end else "the log has no entry"
        )
        raise IndexOutOfRangeError(what, f"group {self.group}", remedy, values)

    # --- the group ------------------------------------------------------------------------------------------------

    async def metadata(self, *, space: bool = False) -> Metadata:
        del space
        return await self._retrying(self._metadata)

    async def _metadata(self) -> Metadata:
        responses = await self.nodes.ask_all()
        try:
            log = await self._bounds.observe(self._timeouts.request_s)
        except DLedgerError:
            log = None
        return _metadata_of(self.peers, responses, log)

    async def groups(self) -> dict[str, str | None]:
        # A Java node serves one group and exposes no other name.
        try:
            await self._retrying(self.nodes.ask_all)
        except UnknownGroupError:
            return {}
        return {self.group: None}

    async def transfer_leadership(self, node_id: str) -> None:
        # The request must name the current term: try the terms from the last entry's on.
        self.nodes.check_node(node_id)
        leader = await self.nodes.leader()
        if leader == node_id:
            return
        last = await self._bounds.observe(self._timeouts.request_s)
        base: dict[str, Any] = {"group": self.group, "remote_id": leader, "transfer_id": leader}
        for term in range(max(0, last.term), max(0, last.term) + _TERMS_MAX):
            request = TransferRequest(**base, transferee_id=node_id, term=term)
            try:
                await self.nodes.ask(request, Response, max(self._timeouts.request_s, _TRANSFER_S))
            except DLedgerError as error:
                if error.values.get("code") != ResponseCode.INCONSISTENT_TERM:
                    raise
            else:
                self.nodes.leader_id = node_id
                self._bounds.forget()
                return
        raise TransferringError("the group's term is not known", f"group {self.group}", "append an entry and retry")


def _check(read: ReadRequest) -> None:
    if read.node is not None or read.consistency != "committed":
        name = "node" if read.node is not None else "consistency"
        what = f"a Java group does not support reads with {name}: its leader serves all reads"
        raise BadRequestError(what, "", f"omit {name}")
    check_numbers(read)
    wire_isolation(read.isolation)  # raises for an unknown one


def _metadata_of(
    peers: tuple[Peer, ...], responses: Mapping[str, MetadataResponse | DLedgerError], log: LogEnd | None
) -> Metadata:
    """Return the leader, the ends of its log and the reachable nodes; Java exposes no more about the others."""
    named = [response.leader_id for response in responses.values() if not isinstance(response, DLedgerError)]
    leader = log.leader_id if log is not None else next((node for node in named if node is not None), None)
    nodes = []
    for peer in peers:
        node, response = str(peer.node_id), responses[str(peer.node_id)]
        if isinstance(response, DLedgerError):
            nodes.append(NodeStatus(node, peer.address))
        elif log is not None and node == log.leader_id:
            ends = (log.first_index, log.end - 1, log.commit_index, log.safe_end)
            nodes.append(NodeStatus(node, peer.address, "leader", *ends, reachable=True))
        else:
            role = "leader" if node == leader else "follower" if response.leader_id is not None else "candidate"
            nodes.append(NodeStatus(node, peer.address, role, reachable=True))
    return Metadata(leader, log.term if log is not None else -1, tuple(nodes))
