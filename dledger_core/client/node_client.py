"""NodeClient: the log client of a group of DLedger for Python nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dledger_core.checksum import Buffer
from dledger_core.client.appends import (
    COALESCED_BYTES_MAX,
    TOGETHER_ID_BYTES_MAX,
    TOGETHER_MAX,
    Append,
    AppendBatcher,
    columns_of,
)
from dledger_core.client.archive import ArchiveRequests
from dledger_core.client.members import GroupMembers, members_of
from dledger_core.client.protocol import (
    AppendResult,
    AttemptResult,
    Bodies,
    LogRange,
    Metadata,
    ProducerState,
    RoleChange,
    TransactionState,
)
from dledger_core.client.reads import PrefixFormat, Reader
from dledger_core.client.routing.cluster_view import ClusterView
from dledger_core.client.routing.known_log import Described, described_by
from dledger_core.client.routing.node_health import NODE_HEALTH, NodeHealth
from dledger_core.client.routing.node_queries import Enough, everyone, majority, newest_leader
from dledger_core.client.routing.requests import Requests
from dledger_core.client.routing.retry import Timeouts, with_retries
from dledger_core.client.status import (
    RoleWatches,
    bounds_of,
    bounds_reaching,
    groups_of,
    metadata_of,
    producer_of,
    transaction_map,
    transaction_of,
)
from dledger_core.config import Peer
from dledger_core.control import Part, TransactionId, check_parts, column_crc
from dledger_core.errors import BadRequestError, BusyError, DLedgerError, ProtocolError
from dledger_core.net import messages
from dledger_core.net.codec import columns_payload, parts_payload
from dledger_core.net.credentials import PLAINTEXT, Credentials
from dledger_core.net.frame import Frame
from dledger_core.net.hello import PRODUCE
from dledger_core.record import Columns, Isolation, MessageFields
from dledger_core.tracing import append_call, current_traceparent


class NodeClient:
    """A log client that speaks the protocol ``dledger``; methods as in LogClient and OptionalOperations.

    It has many methods because each operation of a log is one, and they are short: they encode, send and decode.

    Args:
        peers: the group's nodes.
        group: the group's name.
        timeouts: limits of requests and calls.
        prefix: checks messages of a commitlog prefix; without it ``fetch_at`` does not read them.
        message_fields: decodes messages; without it ``fetch`` has no columns of them.
        log_uuid: the log; None = the one that is found first.
        credentials: TLS files and token.
        health: of the nodes; by default as this process has seen it.
    """

    protocol = "dledger"

    def __init__(
        self,
        peers: tuple[Peer, ...],
        group: str,
        timeouts: Timeouts,
        *,
        prefix: PrefixFormat | None = None,
        message_fields: MessageFields | None = None,
        log_uuid: str | None = None,
        credentials: Credentials = PLAINTEXT,
        health: NodeHealth = NODE_HEALTH,
    ) -> None:
        self.group = group
        self._timeouts = timeouts
        self._view = ClusterView(peers, group, log_uuid, credentials, health)
        self._log = self._view.log
        self._requests = Requests(self._view, timeouts)
        reads = Reader(self._log, self._requests, timeouts, prefix, message_fields)
        self.fetch, self.records, self.get, self.fetch_at = reads.fetch, reads.records, reads.get, reads.fetch_at
        self.offset_for_time, self.wait_for_entries = reads.offset_for_time, reads.wait_for_entries
        self.split_points = reads.split_points
        self.digest, self.describe = reads.digest, reads.describe
        archive = ArchiveRequests(group, self._requests)
        self.archivable_ranges, self.archived_ranges = archive.archivable_ranges, archive.archived_ranges
        self.prove_archived, self.end_archive = archive.prove_archived, archive.end_archive
        self._plain_header = messages.APPEND.encode(messages.AppendRequest(count=1), g=group)
        self._plain = AppendBatcher(self._send_plain)
        self._produced = AppendBatcher(self._send_produced, TOGETHER_MAX, TOGETHER_ID_BYTES_MAX)
        self._watches = RoleWatches(self._view)

    @property
    def peers(self) -> tuple[Peer, ...]:
        return tuple(self._view.pool.peers.values())

    @property
    def log_uuid(self) -> str | None:
        return self._log.log_uuid

    @property
    def in_flight(self) -> int:
        """Work in progress: requests without a response, joined appends and role watches."""
        return self._view.pool.in_flight + self._plain.requests + self._produced.requests + self._watches.running

    async def close(self) -> None:
        await asyncio.gather(self._plain.close(), self._produced.close())
        await self._watches.close()
        await self._view.close()

    # --- appends and transactions -------------------------------------------------------------------------------------

    async def append(
        self,
        bodies: Bodies,
        *,
        producer_id: str | None = None,
        epoch: int = 0,
        sequence: int | None = None,
        once: bool = False,
    ) -> AppendResult:
        columns = columns_of(bodies)
        with append_call(self.group, columns.count, columns.record_bytes) as span:
            if producer_id is None and columns.record_bytes < COALESCED_BYTES_MAX:
                result = await self._plain.append(columns)
            else:
                result = await self.append_columns(
                    columns, producer_id=producer_id, epoch=epoch, sequence=sequence, once=once
                )
            if span is not None:
                span.committed(result.first_index, result.last_index, result.term)
            return result

    async def append_columns(
        self,
        columns: Columns,
        *,
        producer_id: str | None = None,
        epoch: int = 0,
        sequence: int | None = None,
        once: bool = False,
    ) -> AppendResult:
        if producer_id is None:
            return await self._append(None, columns, idempotent=False)
        if sequence is None:
            raise BadRequestError("a producer id without a sequence", "sequence", "pass it, or use Producer")
        request = messages.AppendRequest(
            count=columns.count, producer_id=producer_id, epoch=epoch, sequence=sequence, once=once
        )
        if columns.record_bytes >= COALESCED_BYTES_MAX or current_traceparent() is not None:
            return await self._append(request, columns, idempotent=True)  # of a trace: with a span of its own
        return await self._produced.append(columns, request)

    async def _send_plain(self, appends: Sequence[Append]) -> Sequence[AppendResult]:
        columns = Columns.join([append.columns for append in appends])
        result = await self._append(None, columns, idempotent=False)
        found, first = [], result.first_index
        for append in appends:
            end = first + append.columns.count
            found.append(AppendResult(first, end - 1, result.term))
            first = end
        return found

    async def _send_produced(self, appends: Sequence[Append]) -> Sequence[AppendResult | None]:
        requests = [append.request for append in appends if append.request is not None]
        if len(appends) == 1:
            return [await self._append(requests[0], appends[0].columns, idempotent=True)]
        columns = Columns.join([append.columns for append in appends])
        request = messages.ProduceRequest(
            count=columns.count,
            counts=[each.count for each in requests],
            ids=[str(each.producer_id) for each in requests],
            epochs=[each.epoch or 0 for each in requests],
            sequences=[each.sequence or 0 for each in requests],
            once=[each.once for each in requests],
        )
        header, payload = messages.PRODUCE.encode(request, g=self.group), columns_payload(columns)
        frame = await self._requests.to_leader(header, *payload, idempotent=True, feature=PRODUCE)
        response = messages.PRODUCE_OK.decode(frame.header)
        try:
            rows = list(zip(response.firsts, response.lasts, response.terms, requests, strict=True))
        except ValueError:
            rows = []
        if not rows or any(first >= 0 and last - first + 1 != each.count for first, last, _, each in rows):
            raise ProtocolError("the response covers other appends than sent", "", "", {"sent": len(appends)})
        found = [None if first < 0 else AppendResult(first, last, term) for first, last, term, _ in rows]
        for result in found:
            if result is not None:
                self._log.saw_commit(result.last_index)
                self._log.saw_entry(result.last_index, result.term)
        return found

    async def append_attempt(
        self, bodies: Bodies, *, transaction: TransactionId, attempt: str, once: bool = False, elsewhere: int = -1
    ) -> AttemptResult:
        columns = columns_of(bodies)
        part = {**transaction_map(transaction, once=once, elsewhere=elsewhere), "a": attempt}
        request = messages.AppendRequest(count=columns.count, transaction=part)
        with append_call(self.group, columns.count, columns.record_bytes) as span:
            # Idempotent: if a first copy took effect, the commit does not list it, so it is orphaned.
            result = await self._append(request, columns, idempotent=True)
            if span is not None:
                span.committed(result.first_index, result.last_index, result.term)
        return AttemptResult(
            result.first_index, result.last_index, result.term, columns.count, column_crc(columns.crcs)
        )

    async def _append(
        self, request: messages.AppendRequest | None, columns: Columns, *, idempotent: bool
    ) -> AppendResult:
        """Send an append and return its place; None as request = a plain one."""
        traceparent, count = current_traceparent(), columns.count
        if request is None and traceparent is None:
            header = {**self._plain_header, "n": count}
        else:
            request = replace(request or messages.AppendRequest(count=count), traceparent=traceparent)
            header = messages.APPEND.encode(request, g=self.group)
        frame = await self._requests.to_leader(header, *columns_payload(columns), idempotent=idempotent)
        found = messages.APPEND_OK.read(frame.header)
        first, last, term = found["first"], found["last"], found["term"]
        if last - first + 1 != count:
            values = {"first": first, "last": last, "sent": count}
            raise ProtocolError("the response covers a different number of entries than sent", "", "", values)
        self._log.saw_commit(last)
        self._log.saw_entry(last, term)
        return AppendResult(first, last, term)

    async def producer(self, producer_id: str) -> ProducerState:
        request = messages.ProducerRequest(producer_id=producer_id)
        return producer_of(await self._to_leader(messages.PRODUCER.encode(request, g=self.group)))

    async def expire_producer(self, producer_id: str) -> ProducerState:
        request = messages.ProducerRequest(producer_id=producer_id, operation="expire")
        return producer_of(await self._to_leader(messages.PRODUCER.encode(request, g=self.group)))

    async def transaction(self, transaction: TransactionId) -> TransactionState:
        return await self._transaction("state", transaction_map(transaction))

    async def commit_transaction(
        self, transaction: TransactionId, parts: Sequence[Part], *, once: bool = False, elsewhere: int = -1
    ) -> TransactionState:
        check_parts(parts)
        named = transaction_map(transaction, once=once, elsewhere=elsewhere)
        return await self._transaction("commit", named, *parts_payload(parts), count=len(parts))

    async def abort_transaction(self, transaction: TransactionId, *, once: bool = False) -> TransactionState:
        return await self._transaction("abort", transaction_map(transaction, once=once))

    async def _transaction(
        self, op: str, named: dict[str, Any], *payload: Buffer, count: int | None = None
    ) -> TransactionState:
        request = messages.TransactionRequest(operation=op, transaction=named, count=count)
        return transaction_of(await self._to_leader(messages.TRANSACTION.encode(request, g=self.group), *payload))

    async def _to_leader(self, request: dict[str, Any], *payload: Buffer) -> Frame:
        """Send an idempotent request to the leader."""
        return await self._requests.to_leader(request, *payload, idempotent=True)

    # --- the group ----------------------------------------------------------------------------------------------------

    async def pin(self, name: str, start: int, seconds: float) -> tuple[str, ...]:
        request = messages.MetadataRequest(pin=[name, int(seconds * 1000)], start=int(start))
        header = messages.METADATA.encode(request, g=self.group)
        responses = await self._view.ask_all(self._log.header_for(header))
        refused = next((error for error in responses.values() if isinstance(error, BusyError)), None)
        if refused is not None:
            raise refused
        return tuple(sorted(node for node, response in responses.items() if isinstance(response, Frame)))

    async def _ask_all(self, request: Mapping[str, Any], enough: Enough) -> Mapping[str, Frame | DLedgerError]:
        """Ask every node, in parallel and for at most a second each; retry if no node responds."""
        connected = self._view.pool.connected
        return await with_retries(lambda: self._view.ask_all(request, enough), self._timeouts, connected=connected)

    async def _described(self, request: Mapping[str, Any], enough: Enough) -> Described:
        described = described_by(await self._ask_all(request, enough))
        ours = await self._log.learn(described)
        # Where no node has the log now, the caller receives the one that is there, with its uuid.
        return ours if any(isinstance(each, messages.MetadataResponse) for each in ours.values()) else described

    async def metadata(self, *, space: bool = False) -> Metadata:
        return await self._metadata(self._log.metadata_request(space=space), everyone)

    async def _metadata(self, request: Mapping[str, Any], enough: Enough) -> Metadata:
        described = await self._described(request, enough)
        if not described.keys() >= self._view.pool.peers.keys():
            described = await self._described(request, enough)  # of the members too that the first responses named
        found = metadata_of(self.peers, described)
        if found.leader_id is not None:
            self._log.leader_is(found.leader_id)
        return found

    async def bounds(self, *, isolation: Isolation = "read_committed", min_end: int = -1, wait_ms: int = 0) -> LogRange:
        async def read_bounds() -> LogRange:
            return bounds_of(await self._metadata(self._log.metadata_request(), newest_leader), isolation)

        return await bounds_reaching(read_bounds, min_end, wait_ms)

    async def groups(self) -> dict[str, str | None]:
        responses = await self._ask_all(messages.GROUPS.encode(messages.GroupsRequest()), majority)
        return groups_of(responses, self.group, self.log_uuid)

    def role_changes(self) -> AsyncGenerator[RoleChange, None]:
        return self._watches.changes()

    async def members(self) -> GroupMembers:
        return await self._member(messages.MemberRequest(operation="list"), idempotent=True)

    async def add_member(self, node_id: str, address: str, *, learner: bool = False) -> GroupMembers:
        return await self._member(
            messages.MemberRequest(operation="add", node=node_id, address=address, learner=learner)
        )

    async def remove_member(self, node_id: str) -> GroupMembers:
        return await self._member(messages.MemberRequest(operation="remove", node=node_id))

    async def promote_member(self, node_id: str) -> GroupMembers:
        return await self._member(messages.MemberRequest(operation="promote", node=node_id))

    async def replace_member(self, node_id: str, address: str | None = None) -> GroupMembers:
        return await self._member(messages.MemberRequest(operation="replace", node=node_id, address=address))

    async def _member(self, request: messages.MemberRequest, *, idempotent: bool = False) -> GroupMembers:
        header = messages.MEMBER.encode(request, g=self.group)
        frame = await self._requests.to_leader(header, idempotent=idempotent)
        return members_of(messages.MEMBER_OK.decode(frame.header))

    async def transfer_leadership(self, node_id: str) -> None:
        await self._view.leader.check_node(node_id, self._timeouts.request_s)
        request = messages.TRANSFER.encode(messages.TransferRequest(node=node_id), g=self.group)
        frame = await self._to_leader(request)
        self._log.leader_is(messages.TRANSFER_OK.decode(frame.header).leader)
