"""The client service: one handler for all client connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from dledger_core.checksum import Buffer
from dledger_core.config import format_peers, is_node_id, parse_peer, parse_peers
from dledger_core.continuation import chain_rows
from dledger_core.control import TransactionId
from dledger_core.errors import (
    BadRequestError,
    ConfigError,
    DLedgerError,
    ProtocolError,
    QuotaExceededError,
    RecoveryRefusedError,
    UnknownGroupError,
    UnreachableError,
    in_words,
    one_line,
)
from dledger_core.founding import LogConstants
from dledger_core.ids import NodeId, node_of, store_of
from dledger_core.net import codec, messages
from dledger_core.net.connection import Connection
from dledger_core.net.fields import Table, int_field, str_field
from dledger_core.net.frame import Frame
from dledger_core.net.limits.budget import Budget
from dledger_core.net.limits.client_flow import ClientFlow, Share
from dledger_core.net.limits.quotas import Quota, Quotas
from dledger_core.net.limits.rates import BurstFilter
from dledger_core.net.protocol import Type
from dledger_core.record import Columns
from dledger_core.server.config import ServerConfig
from dledger_core.server.group import Group, GroupState, HostedGroup, hosted_logs
from dledger_core.server.replica.members import Members
from dledger_core.server.services.appends import AppendedRange, Appends, ProducerKey, Reply
from dledger_core.server.services.membership import MembersReport
from dledger_core.server.services.reads import grown_groups
from dledger_core.server.services.row_quotas import WriterQuotas
from dledger_core.tracing import AppendSpan, request_span

_LOG = logging.getLogger(__name__)
_LOG.addFilter(BurstFilter())
M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a client and the way back to it."""

    connection: Connection
    flow: ClientFlow
    frame: Frame

    @property
    def routing(self) -> dict[str, Any]:
        """The keys of the response that all messages share."""
        return {"r": self.frame.header["r"]}

    def respond(self, table: Table[M], response: M, *payload: Buffer) -> None:
        """Send the response; one that does not fit a frame becomes an error."""
        try:
            self.connection.send(table.encode(response, **self.routing), *payload)
        except ProtocolError as error:
            self.refuse(error)

    def refuse(self, error: DLedgerError) -> None:
        """Send an error, and count it."""
        self.flow.refused[error.name] += 1
        self.connection.send({"t": Type.FAILURE, "r": self.frame.header["r"], "e": error.to_wire()})


@dataclass(frozen=True, slots=True)
class GroupRequest(Request):
    """A request about one group that this node hosts."""

    group: Group
    hosted: HostedGroup

    @property
    def routing(self) -> dict[str, Any]:
        """Those keys, with the time since a contact with a leader, and the index of the configuration in force."""
        index = self.group.members.index
        shared = {"r": self.frame.header["r"], "hl": self.group.leader_contact_ms}
        return shared | ({"cv": index} if index >= 0 else {})


class ClientService:
    """Serves clients; lives on the node's event loop.

    ``ClientFlow`` limits each connection. The node's ``inflight_bytes_max`` limits the responses of all connections
    together, separately from the appends' own limit, so that readers cannot keep producers out.

    Attributes:
        refused: number of requests that were answered with an error, by the error's name.
    """

    def __init__(
        self, config: ServerConfig, members: Members, groups: Mapping[str, Group], node_uuid: Callable[[], str]
    ) -> None:
        self._config = config
        self._node_uuid = node_uuid
        self._limits = config.limits
        self._members = members
        self._groups = groups
        self._flows: dict[Connection, ClientFlow] = {}
        self._responses = Budget(config.inflight_bytes_max, config.limits.retry_after_ms)
        self._is_draining = False
        self._digests = asyncio.Semaphore(config.limits.digests_at_once)
        # A response is charged when its size is known: few are read at once, so that few are not charged.
        self._reading = asyncio.Semaphore(config.limits.digests_at_once + 1)
        self.quotas = Quotas(config.limits)
        self._writers = WriterQuotas(config.limits, self.quotas.refused)
        self.refused: Counter[str] = Counter()
        self.commit_history: Callable[[str], list[int] | None] = lambda _: None
        """Returns recent durations of a group's commits on this node; a second port sets it."""

    @property
    def is_draining(self) -> bool:
        """Whether the node is stopping."""
        return self._is_draining

    @property
    def response_bytes(self) -> int:
        """Bytes of responses in memory."""
        return self._responses.taken_bytes

    @property
    def flows(self) -> Mapping[Connection, ClientFlow]:
        """The flow control of each connection that has sent a request."""
        return self._flows

    def drain(self) -> None:
        """Refuse the requests that wait, and later ones that could: another node serves them."""
        self._is_draining = True
        for flow in self._flows.values():
            flow.close()

    async def close(self) -> None:
        """Cancel requests in progress."""
        tasks = [task for flow in self._flows.values() for task in flow.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stopping(self) -> UnreachableError:
        return UnreachableError(f"{self._config.self_id} is stopping", "", "ask another node")

    # --- frames ----------------------------------------------------------------------------------------------

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """Serve a request; raise ProtocolError for any other message."""
        header = frame.header
        int_field(header, "r", 1)
        flow = self._flows.get(connection)
        if flow is None:
            tenant = self.quotas.tenant(connection.principal)
            flow = self._flows[connection] = ClientFlow(connection, self._limits, tenant, self.refused)
        try:
            self._dispatch(connection, flow, frame)
        except ProtocolError:
            raise
        except DLedgerError as error:
            Request(connection, flow, frame).refuse(error)
        flow.check_unsent()

    def _dispatch(self, connection: Connection, flow: ClientFlow, frame: Frame) -> None:
        kind = frame.header["t"]
        if (found := _AT_ONCE.get(kind)) is not None:
            table, handle = found
            handle(self, self._group_request(connection, flow, frame), table.decode(frame.header))
        elif (started := _IN_TASKS.get(kind)) is not None:
            table, work = started
            request = self._group_request(connection, flow, frame)
            self._start(request, work, self, request, table.decode(frame.header))
        elif kind == Type.GROUPS:
            waiting = sorted(name for name, group in self._groups.items() if group.state is GroupState.WAITING)
            response = messages.GroupsResponse(logs=hosted_logs(self._groups), waiting=waiting or None)
            Request(connection, flow, frame).respond(messages.GROUPS_OK, response)
        elif kind == Type.ALIVE:
            Request(connection, flow, frame).respond(messages.ALIVE_OK, messages.AliveResponse())
        elif kind == Type.FOUND:
            founding_request = Request(connection, flow, frame)
            group = self._group(str_field(frame.header, "g"))
            message = messages.FOUND.decode(frame.header)
            self._start(founding_request, self._found, founding_request, group, message)
        elif kind == Type.ADMIT:
            admission_request = Request(connection, flow, frame)
            group = self._group(str_field(frame.header, "g"))
            admit = messages.ADMIT.decode(frame.header)
            self._start(admission_request, self._admit, admission_request, group, admit)
        elif kind == Type.CONTINUE:
            survivor_request = Request(connection, flow, frame)
            group = self._group(str_field(frame.header, "g"))
            step = messages.CONTINUE.decode(frame.header)
            self._start(survivor_request, self._continue, survivor_request, group, step)
        elif kind == Type.RECOVER:
            # Versions up to 0.2.0 gave votes back by it. Their command must not believe that it worked.
            raise RecoveryRefusedError(
                "votes are not given back", "", "run dledger recover of this version; --lost names nodes that are lost"
            )
        elif kind == Type.AWAIT:
            node_request = Request(connection, flow, frame)
            self._start(node_request, self._await, node_request, messages.AWAIT.decode(frame.header))
        else:
            raise ProtocolError("not a request", connection.peer_address, "", {"type": kind})

    def _group_request(self, connection: Connection, flow: ClientFlow, frame: Frame) -> GroupRequest:
        group = self._group(str_field(frame.header, "g"))
        if (wanted := frame.header.get("lu")) is not None:
            group.check_log(wanted)
        return GroupRequest(connection, flow, frame, group, group.services())

    def _group(self, name: str) -> Group:
        group = self._groups.get(name)
        if group is None:
            names = ", ".join(sorted(self._groups))
            raise UnknownGroupError(
                f"{self._config.self_id} does not host group {name!r}", "", f"use one of: {names}", {"group": name}
            )
        return group

    def on_close(self, connection: Connection, error: Exception | None) -> None:
        """Cancel the connection's requests."""
        del error
        flow = self._flows.pop(connection, None)
        if flow is not None:
            flow.close()

    def _start(self, request: Request, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        if self._is_draining and request.frame.header["t"] in _WITHOUT_EFFECT:
            raise self._stopping()
        request.flow.start(self._respond(request, work, arguments), _share_of(request.frame.header))

    async def _respond(
        self, request: Request, work: Callable[..., Coroutine[Any, Any, None]], arguments: tuple[Any, ...]
    ) -> None:
        try:
            await work(*arguments)
        except asyncio.CancelledError:
            # A change that is cancelled may have taken effect: it gets no response, so its outcome is unknown.
            if request.frame.header["t"] in _WITHOUT_EFFECT:
                request.refuse(self._stopping())
            raise
        except DLedgerError as error:
            request.refuse(error)
        except Exception as error:  # noqa: BLE001 - the client gets a response, the log the traceback
            _LOG.exception("request failed: header=%s", one_line(in_words(request.frame.header)))
            request.refuse(DLedgerError(f"internal error: {type(error).__name__}: {error}"))

    async def _await(self, request: Request, message: messages.AwaitRequest) -> None:
        seen = codec.parse_seen(request.frame.payload, message.count, self._limits.await_groups)
        watched = {}
        for name, log in seen.items():
            group = self._group(name)
            if log.log_uuid is not None:
                group.check_log(log.log_uuid)
            watched[group.services().reads.growth] = log.end
        grown = await grown_groups(watched, message, self._limits)
        request.respond(messages.AWAIT_OK, messages.AwaitResponse(grown=grown))

    # --- appends ---------------------------------------------------------------------------------------------

    def _append(self, request: GroupRequest, message: messages.AppendRequest) -> None:
        span = request_span(message.traceparent, self._config.self_id, request.group.name, message.count)
        try:
            self._append_in(span, request, message)
        except DLedgerError as error:
            if span is not None:
                span.failed(error)
                span.end()
            raise

    def _append_in(self, span: AppendSpan | None, request: GroupRequest, message: messages.AppendRequest) -> None:
        payload, hosted = request.frame.payload, request.hosted
        if not hosted.replica.is_leader:
            raise hosted.replica.not_leader()
        columns = codec.parse_columns(payload, message.count)
        columns.verify()
        nbytes = len(payload)
        tenant, replica = request.flow.tenant, hosted.replica
        settle = self._writers.admit(tenant, request.group.name, message, lambda: replica.tables)

        def end() -> None:
            settle()
            request.flow.release(nbytes)

        def reply(outcome: AppendedRange | DLedgerError) -> None:
            end()
            if isinstance(outcome, DLedgerError):
                request.refuse(outcome)
            else:
                response = messages.AppendResponse(
                    first=outcome.first_index, last=outcome.last_index, term=outcome.term
                )
                request.respond(messages.APPEND_OK, response)

        try:
            request.flow.hold(nbytes)  # before the append: its reply may be called within the call
        except DLedgerError:
            settle()
            raise
        try:
            _append_columns(message, columns, hosted.appends, _traced(span, reply), request.connection, span)
        except DLedgerError:
            end()
            raise

    # --- transactions and producers --------------------------------------------------------------------------

    def _transaction(self, request: GroupRequest, message: messages.TransactionRequest) -> None:
        hosted, transaction = request.hosted, _transaction_id(message.transaction)

        def reply(outcome: AppendedRange | DLedgerError) -> None:
            table = hosted.replica.tables.transactions
            if isinstance(outcome, DLedgerError):
                request.refuse(outcome)
                return
            if message.operation == "state":
                if (error := table.fenced(transaction)) is not None:
                    request.refuse(error)
                    return
                hosted.appends.renew(transaction)
            found = hosted.appends.named(transaction) or transaction
            committed = table.committed(found)
            response = messages.TransactionResponse(
                state=table.state(found),
                rows=committed.rows if committed is not None else 0,
                fingerprint=committed.fingerprint if committed is not None else 0,
                index=outcome.last_index,
                newest=table.newest(found.query_id),
            )
            request.respond(messages.TRANSACTION_OK, response)

        if message.operation == "commit":
            if message.count is None:
                raise BadRequestError("a commit has no field 'n'", "", "send the parts of the committed attempts")
            parts = codec.parse_parts(request.frame.payload, message.count)
            hosted.appends.commit(transaction, parts, reply, **_introduction(message.transaction))
        elif message.operation == "abort":
            self._abort(request, message.transaction, reply)
        else:
            hosted.appends.when_ready(reply)

    def _abort(self, request: GroupRequest, named: dict[str, Any], reply: Reply) -> None:
        transaction, replica = _transaction_id(named), request.hosted.replica
        settle = self._writers.admit_abort(request.flow.tenant, request.group.name, transaction, lambda: replica.tables)

        def settled(outcome: AppendedRange | DLedgerError) -> None:
            settle()
            reply(outcome)

        request.hosted.appends.abort(transaction, settled, once=named.get("o", False))

    def _producer(self, request: GroupRequest, message: messages.ProducerRequest) -> None:
        def reply(outcome: AppendedRange | DLedgerError) -> None:
            if isinstance(outcome, DLedgerError):
                request.refuse(outcome)
                return
            entry = request.hosted.replica.tables.producers.get(message.producer_id)
            newest = entry.appends[-1] if entry is not None else None
            response = messages.ProducerResponse(
                known=entry is not None,
                epoch=entry.epoch if entry is not None else 0,
                sequence=entry.next_sequence if entry is not None else 0,
                last=[newest.first_index, newest.last_index] if newest is not None else None,
            )
            request.respond(messages.PRODUCER_OK, response)

        if message.operation == "expire":
            _LOG.info(
                "expiring producer: group=%s producer_id=%s peer=%s",
                request.group.name,
                one_line(message.producer_id),
                request.connection.who,
            )
            request.hosted.appends.expire_producer(message.producer_id, reply)
        else:
            request.hosted.appends.when_ready(reply)

    # --- reads -----------------------------------------------------------------------------------------------

    def _pin(self, request: GroupRequest, message: messages.MetadataRequest | messages.ReadRequest) -> None:
        replica = request.hosted.replica
        try:
            replica.pins.set(message.pin, message.start, replica.pin_time_ms, request.connection.principal)
        except QuotaExceededError:
            self.quotas.refused[Quota.PINS] += 1
            raise

    def _metadata(self, request: GroupRequest, message: messages.MetadataRequest) -> None:
        if message.space:
            self._start(request, self._metadata_with_space, request, message)
        else:
            request.respond(messages.METADATA_OK, self._metadata_of(request, message, None))

    async def _metadata_with_space(self, request: GroupRequest, message: messages.MetadataRequest) -> None:
        async with request.flow.large_response():
            orphaned = await request.hosted.reads.orphaned_space()
        request.respond(messages.METADATA_OK, self._metadata_of(request, message, orphaned))

    def _metadata_of(
        self, request: GroupRequest, message: messages.MetadataRequest, orphaned: list[int] | None
    ) -> messages.MetadataResponse:
        self._pin(request, message)
        replica = request.hosted.replica
        status = replica.raft.status()
        me = [
            self._config.self_id,
            status.role.value,
            status.term,
            replica.log.first_index(),
            replica.log.last_index(),
            replica.readable_end - 1,
            replica.visible_end,
            replica.log.data_bytes,
        ]
        return messages.MetadataResponse(
            leader=replica.leader_node,
            term=status.term,
            log=replica.log_uuid,
            chain=chain_rows(replica.chain) or None,
            follows=None if message.seen is None else replica.follows(*message.seen),
            node=me,
            peers=format_peers(self._members.peers),
            members=[[m.node_id, m.store_uuid, m.address, m.role] for m in request.group.members.members],
            configuration=request.group.members.index,
            groups=sorted(hosted_logs(self._groups)),
            preferred=list(self._config.preferred(replica.group)),
            time=replica.log.last_time_ms or None,
            is_recovering=status.is_recovering,
            is_disk_full=replica.space.is_full,
            acknowledges=replica.space.accepts_entries,
            disk=[replica.space.free_bytes, replica.space.total_bytes],
            orphaned=orphaned,
            tables=[list(row) for row in replica.tables.usage(self._limits)],
        )

    async def _read(self, request: GroupRequest, message: messages.ReadRequest) -> None:
        reads = request.hosted.reads
        self._pin(request, message)
        await reads.ready(message)
        async with request.flow.large_response():
            with contextlib.ExitStack() as charged:
                async with self._reading:
                    result = await reads.read(message)
                    records = result.records
                    nbytes = records.nbytes if records is not None else 0
                    self._charge(charged, request, nbytes)
                response = messages.ReadResponse(
                    count=records.count if records is not None else 0,
                    next_index=result.next_index,
                    commit_index=result.commit_index,
                    visible_end=result.visible_end,
                    first_index=result.first_index,
                    skip=[list(pair) for pair in result.skip],
                )
                payload = codec.records_payload([records]) if records is not None else []
                await request.connection.drained()
                request.respond(messages.READ_OK, response, *payload)
                del result, records, payload  # the connection has what it needs of them
                await request.connection.drained()  # the bytes are charged until the socket took them

    def _charge(self, charged: contextlib.ExitStack, request: GroupRequest, nbytes: int) -> None:
        """Charge a response to the node and the principal, until the stack is closed."""
        charged.enter_context(self._responses.lend(nbytes))
        charged.enter_context(request.flow.lend_response(nbytes))

    async def _time(self, request: GroupRequest, message: messages.TimeRequest) -> None:
        index = await request.hosted.reads.index_at_time(message.time_ms, message.min_commit)
        request.respond(messages.TIME_OK, messages.TimeResponse(index=index))

    async def _at(self, request: GroupRequest, message: messages.AtRequest) -> None:
        async with request.flow.large_response():
            max_bytes = min(message.max_bytes, self._limits.read_bytes)
            with contextlib.ExitStack() as charged:
                async with self._reading:
                    found = await request.hosted.positions.at(message.position, max_bytes)
                    if not isinstance(found, int):
                        self._charge(charged, request, len(found.data))
                if isinstance(found, int):
                    request.respond(messages.AT_OK, messages.AtResponse(index=found))
                    return
                response = messages.AtResponse(index=None, count=found.count, next_position=found.next_position)
                await request.connection.drained()
                request.respond(messages.AT_OK, response, found.sizes.astype("<u4").tobytes(), found.data)
                await request.connection.drained()

    async def _describe(self, request: GroupRequest, message: messages.DescribeRequest) -> None:
        async with request.flow.large_response():
            rows, after = await request.hosted.reads.describe(message.table, message.after)
            response = messages.DescribeResponse(rows=rows, more=after is not None, after=after)
            request.respond(messages.DESCRIBE_OK, response)

    async def _digest(self, request: GroupRequest, message: messages.DigestRequest) -> None:
        async with request.flow.large_response(), self._digests:
            ranges, next_index, damaged = await request.hosted.reads.digest(message)
        response = messages.DigestResponse(
            ranges=[[d.start, d.end, d.end - d.start, d.nbytes, d.content, d.layout] for d in ranges],
            next_index=next_index,
            commit_index=request.hosted.replica.readable_end - 1,
            damaged=damaged[: self._limits.damaged_named],
            cut=len(damaged) > self._limits.damaged_named,
        )
        request.respond(messages.DIGEST_OK, response)

    # --- founding --------------------------------------------------------------------------------------------

    async def _found(self, request: Request, group: Group, message: messages.FoundRequest) -> None:
        record = codec.parse_record(request.frame.payload) if message.operation == "take" else None
        answer = await group.found(message.operation, message.record_id, record)
        response = messages.FoundResponse(answer=answer.to_fields(), node_uuid=self._node_uuid())
        request.respond(messages.FOUND_OK, response)

    async def _admit(self, request: Request, group: Group, message: messages.AdmitRequest) -> None:
        try:
            constants = LogConstants(**message.constants)
        except (TypeError, ConfigError) as error:
            raise BadRequestError(f"malformed constants of a log: {error}", "", "send those of the log") from None
        answer = await group.admit(message.node, message.log, constants)
        response = messages.AdmitResponse(store=answer.identity.store or "", node_uuid=self._node_uuid())
        request.respond(messages.ADMIT_OK, response)

    async def _continue(self, request: Request, group: Group, message: messages.ContinueRequest) -> None:
        if message.operation == "read":
            await self._read_given_up(request, group, message)
            return
        record = codec.parse_continuation_record(request.frame.payload) if message.operation == "take" else None
        survivors = parse_peers(message.peers) if message.peers else ()
        answer = await group.recover(message.operation, message.log, record, start=message.start, survivors=survivors)
        payload = codec.continuation_payload(answer)
        request.respond(messages.CONTINUE_OK, messages.ContinueResponse(), payload)

    async def _backup(self, request: GroupRequest, message: messages.BackupRequest) -> None:
        backups = request.hosted.backups
        async with request.flow.large_response():
            if message.operation == "start":
                await request.hosted.reads.ready(messages.ReadRequest(start=0, end=0, min_commit=message.min_commit))
                payload = await backups.start(message.name, request.connection.principal)
            elif message.operation == "tables":
                payload = backups.chunk(message.name, message.offset)
            else:
                backups.end(message.name, request.connection.principal)
                payload = b""
            with contextlib.ExitStack() as charged:
                self._charge(charged, request, len(payload))
                request.respond(messages.BACKUP_OK, messages.BackupResponse(), payload)
                await request.connection.drained()

    async def _read_given_up(self, request: Request, group: Group, message: messages.ContinueRequest) -> None:
        records, commit_index = await group.read_given_up(message.log, message.start, message.end)
        response = messages.ReadResponse(
            count=records.count,
            next_index=message.start + records.count,
            commit_index=commit_index,
            visible_end=message.start,
            first_index=message.start,
            skip=[],
        )
        request.respond(messages.READ_OK, response, *codec.records_payload([records]))

    # --- leadership ------------------------------------------------------------------------------------------

    async def _watch(self, request: GroupRequest, message: messages.WatchRequest) -> None:
        wait_s = min(message.wait_ms, self._limits.watch_wait_ms) / 1000
        event = await request.hosted.roles.wait_change(message.seen, wait_s)
        response = messages.WatchResponse(
            role=event.role.value, leader=event.leader_id, term=event.term, broker=event.broker_role
        )
        request.respond(messages.WATCH_OK, response)

    async def _member(self, request: GroupRequest, message: messages.MemberRequest) -> None:
        membership, who = request.hosted.membership, request.connection.who
        if message.operation == "list":
            response = member_response(membership.report())
            if message.measures:
                response = replace(response, commits=self.commit_history(request.group.name))
            request.respond(messages.MEMBER_OK, response)
            return
        node, address = _node_of(message), _address_of(message)
        if message.operation == "add":
            if address is None:
                raise BadRequestError("the address of the node is missing", "address", "name HOST:PORT")
            report = await membership.add(node, address, learner=message.learner, who=who)
        elif message.operation == "replace":
            report = await membership.replace(node, address, who=who)
        elif message.operation == "promote":
            report = await membership.promote(node, who=who)
        else:
            report = await membership.remove(node, who=who)
        request.respond(messages.MEMBER_OK, member_response(report))

    async def _transfer(self, request: GroupRequest, message: messages.TransferRequest) -> None:
        await request.group.transfer_leadership(NodeId(message.node), self._limits.transfer_s)
        request.respond(messages.TRANSFER_OK, messages.TransferResponse(leader=message.node))


_AtOnce = Callable[[ClientService, GroupRequest, Any], None]
_InTask = Callable[[ClientService, GroupRequest, Any], Coroutine[Any, Any, None]]
_AT_ONCE: Final[dict[int, tuple[Table[Any], _AtOnce]]] = {
    Type.APPEND: (messages.APPEND, ClientService._append),
    Type.METADATA: (messages.METADATA, ClientService._metadata),
    Type.PRODUCER: (messages.PRODUCER, ClientService._producer),
    Type.TRANSACTION: (messages.TRANSACTION, ClientService._transaction),
}
"""Requests that are served, or queued, within the call that received them."""
_IN_TASKS: Final[dict[int, tuple[Table[Any], _InTask]]] = {
    Type.READ: (messages.READ, ClientService._read),
    Type.TIME: (messages.TIME, ClientService._time),
    Type.AT: (messages.AT, ClientService._at),
    Type.DIGEST: (messages.DIGEST, ClientService._digest),
    Type.TRANSFER: (messages.TRANSFER, ClientService._transfer),
    Type.MEMBER: (messages.MEMBER, ClientService._member),
    Type.WATCH: (messages.WATCH, ClientService._watch),
    Type.DESCRIBE: (messages.DESCRIBE, ClientService._describe),
    Type.BACKUP: (messages.BACKUP, ClientService._backup),
}
"""Requests with a task of their own, because they wait for the disk or for a change."""
_WITHOUT_EFFECT: Final = frozenset(
    {Type.READ, Type.TIME, Type.AT, Type.DIGEST, Type.WATCH, Type.DESCRIBE, Type.AWAIT, Type.METADATA, Type.BACKUP}
)
"""Those of them that change nothing, so that a node that stops can refuse them."""

_AWAIT_GROUPS_MIN: Final = 8
"""An AWAIT counts as this many groups at least: the request itself takes as much memory."""


def _share_of(header: Mapping[str, Any]) -> Share | None:
    """Return the quota of a request that waits or works for long, and how much of it."""
    kind = header["t"]
    if kind == Type.READ and header.get("cons") == "linearizable":
        return Quota.LINEARIZABLE_READS, 1
    if kind == Type.READ and header.get("wait"):
        return Quota.LONG_POLLS, 1
    if kind == Type.AWAIT:
        return Quota.AWAITED_GROUPS, max(_AWAIT_GROUPS_MIN, int_field(header, "n", 1))
    return {Type.WATCH: (Quota.WATCHES, 1), Type.DIGEST: (Quota.DIGESTS, 1)}.get(kind)


def _traced(span: AppendSpan | None, reply: Reply) -> Reply:
    """Return a reply that also ends the span."""
    if span is None:
        return reply

    def traced(outcome: AppendedRange | DLedgerError) -> None:
        if isinstance(outcome, DLedgerError):
            span.failed(outcome)
        else:
            span.committed(outcome.first_index, outcome.last_index, outcome.term)
        try:
            reply(outcome)
        finally:
            span.end()

    return traced


def _append_columns(
    message: messages.AppendRequest,
    columns: Columns,
    appends: Appends,
    reply: Reply,
    source: Connection,
    span: AppendSpan | None,
) -> None:
    if message.transaction is not None:
        if "a" not in message.transaction:
            raise BadRequestError("an append's transaction has no attempt", "", "send 'a' in field 'x'")
        transaction, attempt = _transaction_id(message.transaction), message.transaction["a"]
        appends.append_attempt(columns, transaction, attempt, reply, span=span, **_introduction(message.transaction))
    elif message.producer_id is not None:
        if message.epoch is None or message.sequence is None:
            raise BadRequestError("a producer's append has no epoch or sequence", "", "send 'pe' and 'ps'")
        key = ProducerKey(message.producer_id, message.epoch, message.sequence)
        appends.append_produced(columns, key, reply, once=message.once, source=source, span=span)
    else:
        appends.append(columns, reply, source=source, span=span)


def _node_of(message: messages.MemberRequest) -> NodeId:
    if message.node is None or not is_node_id(message.node):
        raise BadRequestError(f"{message.node!r} is not a node id", "node", "name the node")
    return NodeId(message.node)


def _address_of(message: messages.MemberRequest) -> str | None:
    """Return the address in its normal form, or None; raise ConfigError."""
    return None if message.address is None else parse_peer(f"{message.node}-{message.address}").address


def member_response(report: MembersReport) -> messages.MemberResponse:
    """Return the members as the leader reports them to clients."""
    return messages.MemberResponse(
        configuration=report.index,
        is_change_pending=report.is_change_pending,
        members=[
            [
                node_of(each.member),
                store_of(each.member),
                each.address,
                "voter" if each.is_voter else "learner",
                each.promote,
                "" if each.replaces is None else store_of(each.replaces),
                each.is_active,
                each.match_index,
                each.lag_entries,
                each.lag_bytes,
                -1 if each.left_ms is None else each.left_ms,
            ]
            for each in report.members
        ],
        voters_before=[node_of(voter) for voter in report.voters_before],
        warning=report.warning,
        conditions=[[node_of(each.member), name] for each in report.members for name in each.conditions] or None,
    )


def _transaction_id(fields: dict[str, Any]) -> TransactionId:
    return TransactionId(fields["q"], fields["b"], fields["r"])


def _introduction(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that introduce a query to a log that does not know it."""
    return {"once": fields.get("o", False), "elsewhere": fields.get("w", -1)}
