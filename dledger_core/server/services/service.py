"""What clients may ask a node: one handler for all client connections."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, TypeVar

from dledger_core.config import format_peers
from dledger_core.control import Part, TransactionId
from dledger_core.digest import RangeDigest
from dledger_core.errors import BadRequestError, DLedgerError, ProtocolError, UnknownGroupError
from dledger_core.ids import NodeId
from dledger_core.net import codec
from dledger_core.net.codec import int_field, str_field
from dledger_core.net.connection import Connection
from dledger_core.net.frame import Frame
from dledger_core.net.protocol import Type
from dledger_core.record import Columns
from dledger_core.server.config import ServerConfig
from dledger_core.server.replica.transfer import transfer_leadership
from dledger_core.server.services.appends import Appended, Appends, ProducerKey, Reply
from dledger_core.server.services.budget import Budget
from dledger_core.server.services.flow import ClientFlow
from dledger_core.server.services.new_entries import AwaitRequest, grown_groups
from dledger_core.server.services.reads import READ_BYTES_MAX, DigestRequest, ReadRequest
from dledger_core.server.services.request import GroupRequest, HostedGroup, Request

__all__ = ["ClientService"]

_LOG = logging.getLogger(__name__)

DAMAGED_MAX: Final = 8192
"""Damaged indexes in one answer, well below what a header may hold."""
WATCH_WAIT_MS_MAX: Final = 60_000

_R = TypeVar("_R", bound=Request)


class ClientService:
    """Answers clients; lives on the node's event loop.

    What one connection may keep busy is bounded by its ``ClientFlow``; answers of all connections together by the
    node's ``inflight_bytes_max``, apart from the appends' own, so that readers cannot keep producers out.
    """

    def __init__(
        self, config: ServerConfig, hosted: dict[str, HostedGroup], refuse: Callable[[str], None] = lambda _group: None
    ) -> None:
        self._config = config
        self._refuse = refuse  # raises what is to be said of a group that is not hosted now
        self._hosted = hosted
        self._flows: dict[Connection, ClientFlow] = {}
        self._answers = Budget(config.inflight_bytes_max)
        self._handlers: dict[int, Callable[[GroupRequest], None]] = {
            Type.APPEND: self._append,
            Type.METADATA: self._metadata,
            Type.PRODUCER: self._producer,
            Type.TRANSACTION: self._transaction,
            Type.READ: lambda request: self._start(request, self._read),
            Type.TIME: lambda request: self._start(request, self._time),
            Type.AT: lambda request: self._start(request, self._at),
            Type.DIGEST: lambda request: self._start(request, self._digest),
            Type.TRANSFER: lambda request: self._start(request, self._transfer),
            Type.WATCH: lambda request: self._start(request, self._watch),
            Type.DESCRIBE: lambda request: self._start(request, self._describe),
        }
        self._of_all_groups: dict[int, Callable[[Request], None]] = {
            Type.GROUPS: self._groups,
            Type.AWAIT: lambda request: self._start(request, self._await),
        }

    @property
    def flows(self) -> Mapping[Connection, ClientFlow]:
        """The connections that have asked for something, and what they keep busy."""
        return self._flows

    async def close(self) -> None:
        """Cancels what is being answered."""
        tasks = [task for flow in self._flows.values() for task in flow.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- frames ----------------------------------------------------------------------------------------------

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """Takes a request; raises ProtocolError for anything else."""
        kind = frame.header["t"]
        handler, of_all = self._handlers.get(kind), self._of_all_groups.get(kind)
        int_field(frame.header, "r", 1)
        flow = self._flows.get(connection)
        if flow is None:
            flow = self._flows[connection] = ClientFlow(connection)
        try:
            if handler is not None:
                handler(GroupRequest(connection, flow, frame, self._group(str_field(frame.header, "g"))))
            elif of_all is not None:
                of_all(Request(connection, flow, frame))
            else:
                raise ProtocolError("not a request", connection.peer_address, "", {"type": kind})
        except ProtocolError:
            raise
        except DLedgerError as error:
            Request(connection, flow, frame).refuse(error)
        flow.check_unsent()

    def _group(self, group: str) -> HostedGroup:
        hosted = self._hosted.get(group)
        if hosted is None:
            self._refuse(group)
            names = ", ".join(sorted(self._hosted))
            raise UnknownGroupError(
                f"{self._config.self_id} does not host group {group!r}", "", f"it hosts: {names}", {"group": group}
            )
        return hosted

    def on_close(self, connection: Connection, error: Exception | None) -> None:
        """Ends what is being done for the connection."""
        del error
        flow = self._flows.pop(connection, None)
        if flow is not None:
            flow.close()

    def _start(self, request: _R, work: Callable[[_R], Coroutine[Any, Any, None]]) -> None:
        async def answer() -> None:
            try:
                await work(request)
            except DLedgerError as error:
                request.refuse(error)
            except Exception as error:  # noqa: BLE001 - the asker gets an answer, the log the traceback
                _LOG.exception("request failed: %s", request.frame.header)
                request.refuse(DLedgerError(f"internal error: {error!r}"))

        request.flow.start(answer())

    # --- all groups ------------------------------------------------------------------------------------------

    def _groups(self, request: Request) -> None:
        logs = {group: hosted.replica.log_uuid for group, hosted in self._hosted.items()}
        request.answer(Type.GROUPS_OK, {"logs": logs})

    async def _await(self, request: Request) -> None:
        wanted = AwaitRequest.parse(request.frame.header)
        replicas = {group: self._group(group).replica for group in wanted.seen}
        request.answer(Type.AWAIT_OK, {"grown": await grown_groups(replicas, wanted)})

    # --- appends ---------------------------------------------------------------------------------------------

    def _append(self, request: GroupRequest) -> None:
        header, payload = request.frame.header, request.frame.payload
        if not request.hosted.replica.is_leader:
            raise request.hosted.replica.not_leader()
        columns = codec.parse_columns(payload, int_field(header, "n", 1))
        columns.verify()
        nbytes = len(payload)

        def reply(outcome: Appended | DLedgerError) -> None:
            request.flow.release(nbytes)
            if isinstance(outcome, DLedgerError):
                request.refuse(outcome)
            else:
                fields = {"first": outcome.first_index, "last": outcome.last_index, "term": outcome.term}
                request.answer(Type.APPEND_OK, fields)

        request.flow.hold(nbytes)  # before the append: it may be answered within the call
        try:
            _append_columns(header, columns, request.hosted.appends, reply)
        except DLedgerError:
            request.flow.release(nbytes)
            raise

    # --- transactions and producers --------------------------------------------------------------------------

    def _transaction(self, request: GroupRequest) -> None:
        header, hosted = request.frame.header, request.hosted
        transaction, op = _transaction_id(header), str_field(header, "op")

        def reply(outcome: Appended | DLedgerError) -> None:
            table = hosted.replica.tables.transactions
            if isinstance(outcome, DLedgerError):
                request.refuse(outcome)
                return
            if op == "state" and (error := table.fenced(transaction)) is not None:
                request.refuse(error)
                return
            state, parts = table.state(transaction)
            won = [list(part) for part in parts] if state == "committed" else []  # of an open one there is no bound
            newest, made_of = table.committed_input(transaction)
            fields = {"state": state, "parts": won, "index": outcome.last_index, "newest": newest, "i": made_of}
            request.answer(Type.TRANSACTION_OK, fields)

        if op == "commit":
            made_of = str_field(header, "i") if header.get("i") is not None else ""
            hosted.appends.commit(transaction, _parts(header), reply, made_of)
        elif op == "abort":
            hosted.appends.abort(transaction, reply)
        elif op == "state":
            hosted.appends.when_ready(reply)
        else:
            raise BadRequestError(f"unknown operation {op!r}", "", "use state, commit or abort")

    def _producer(self, request: GroupRequest) -> None:
        producer_id = str_field(request.frame.header, "p")

        def reply(outcome: Appended | DLedgerError) -> None:
            if isinstance(outcome, DLedgerError):
                request.refuse(outcome)
                return
            entry = request.hosted.replica.tables.producers.get(producer_id)
            newest = entry.appends[-1] if entry is not None and entry.appends else None
            fields = {
                "known": entry is not None,
                "epoch": entry.epoch if entry is not None else 0,
                "sequence": entry.next_sequence if entry is not None else 0,
                "last": [newest.first_index, newest.last_index] if newest is not None else None,
            }
            request.answer(Type.PRODUCER_OK, fields)

        request.hosted.appends.when_ready(reply)

    # --- reads -----------------------------------------------------------------------------------------------

    def _metadata(self, request: GroupRequest) -> None:
        if request.frame.header.get("space"):
            self._start(request, self._metadata_with_space)
        else:
            request.answer(Type.METADATA_OK, self._metadata_fields(request))

    async def _metadata_with_space(self, request: GroupRequest) -> None:
        async with request.flow.room():
            orphaned = await request.hosted.reads.orphaned_space()
        request.answer(Type.METADATA_OK, self._metadata_fields(request) | {"orphaned": orphaned})

    def _metadata_fields(self, request: GroupRequest) -> dict[str, Any]:
        replica, header = request.hosted.replica, request.frame.header
        if header.get("pin") is not None:
            replica.pins.ask(header["pin"], int_field(header, "start", 0), _now_ms())
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
        return {
            "leader": status.leader_id,
            "term": status.term,
            "log": replica.log_uuid,
            "self": me,
            "peers": format_peers(self._config.peers),
            "groups": sorted(self._hosted),
            "preferred": list(self._config.preferred(replica.group)),
            "time": replica.log.last_time_ms or None,
            "is_recovering": status.is_recovering,
        }

    async def _read(self, request: GroupRequest) -> None:
        reads, header = request.hosted.reads, request.frame.header
        wanted = ReadRequest.parse(header)
        request.hosted.replica.pins.ask(header.get("pin"), wanted.start, _now_ms())
        asked = await reads.ready(wanted)
        async with request.flow.room():
            result = await reads.read(asked)
            fields = {
                "n": result.records.count if result.records is not None else 0,
                "next": result.next_index,
                "commit": result.commit_index,
                "visible": result.visible_end,
                "first": result.first_index,
                "skip": [list(pair) for pair in result.skip],
            }
            payload = codec.records_payload([result.records]) if result.records is not None else []
            with self._answers.lend(result.records.nbytes if result.records is not None else 0):
                await request.connection.drained()
                request.answer(Type.READ_OK, fields, *payload)

    async def _time(self, request: GroupRequest) -> None:
        header = request.frame.header
        index = await request.hosted.reads.index_at_time(int_field(header, "ms", 0), int_field(header, "min_commit"))
        request.answer(Type.TIME_OK, {"index": index})

    async def _at(self, request: GroupRequest) -> None:
        header = request.frame.header
        position, max_bytes = int_field(header, "position", 0), int_field(header, "max", 1)
        async with request.flow.room():
            found = await request.hosted.positions.at(position, min(max_bytes, READ_BYTES_MAX))
            if isinstance(found, int):
                request.answer(Type.AT_OK, {"index": found})
                return
            fields = {"index": None, "n": found.count, "next": found.next_position}
            with self._answers.lend(len(found.data)):
                await request.connection.drained()
                request.answer(Type.AT_OK, fields, found.sizes.astype("<u4").tobytes(), found.data)

    async def _describe(self, request: GroupRequest) -> None:
        header = request.frame.header
        async with request.flow.room():
            rows, more = await request.hosted.reads.describe(str_field(header, "table"), header.get("after"))
            request.answer(Type.DESCRIBE_OK, {"rows": rows, "more": more})

    async def _digest(self, request: GroupRequest) -> None:
        header, hosted = request.frame.header, request.hosted
        asked = DigestRequest(int_field(header, "start", 0), int_field(header, "end", 0), int_field(header, "span", 1))
        async with request.flow.room():
            ranges, next_index, damaged = await hosted.reads.digest(asked)
        fields = {
            "ranges": [_digest_row(digest) for digest in ranges],
            "next": next_index,
            "commit": hosted.replica.readable_end - 1,
            "damaged": damaged[:DAMAGED_MAX],
            "cut": len(damaged) > DAMAGED_MAX,
        }
        request.answer(Type.DIGEST_OK, fields)

    async def _watch(self, request: GroupRequest) -> None:
        header = request.frame.header
        seen, wait_ms = header.get("seen"), min(int_field(header, "wait", 0), WATCH_WAIT_MS_MAX)
        if seen is not None and not (isinstance(seen, list) and len(seen) == 3):
            raise ProtocolError("field 'seen' is malformed", "header")
        event = await request.hosted.roles.wait_change(seen, wait_ms / 1000)
        role, leader_id, term = event.state
        fields = {"role": role, "leader": leader_id, "term": term, "broker": event.broker_role}
        request.answer(Type.WATCH_OK, fields)

    async def _transfer(self, request: GroupRequest) -> None:
        target = NodeId(str_field(request.frame.header, "node"))
        await transfer_leadership(request.hosted.replica, self._config, target)
        request.answer(Type.TRANSFER_OK, {"leader": target})


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _append_columns(header: dict[str, Any], columns: Columns, appends: Appends, reply: Reply) -> None:
    if header.get("x") is not None:
        appends.append_attempt(columns, _transaction_id(header), str_field(header["x"], "a"), reply)
    elif header.get("p") is not None:
        key = ProducerKey(str_field(header, "p"), int_field(header, "pe", 0), int_field(header, "ps", 0))
        appends.append_produced(columns, key, reply)
    else:
        appends.append(columns, reply)


def _digest_row(digest: RangeDigest) -> list[Any]:
    return [digest.start, digest.end, digest.end - digest.start, digest.nbytes, digest.content, digest.layout]


def _transaction_id(header: dict[str, Any]) -> TransactionId:
    fields = header.get("x")
    if not isinstance(fields, dict):
        raise ProtocolError("field 'x' is not a map", "header")
    return TransactionId(str_field(fields, "q"), int_field(fields, "b"), str_field(fields, "r"))


def _parts(header: dict[str, Any]) -> list[Part]:
    rows = header.get("parts")
    well_formed = isinstance(rows, list) and all(
        isinstance(row, list) and len(row) == 4 and all(type(value) is int for value in row) for row in rows
    )
    if not well_formed:
        raise ProtocolError("field 'parts' is malformed", "header")
    assert isinstance(rows, list)
    return [Part(*row) for row in rows]
