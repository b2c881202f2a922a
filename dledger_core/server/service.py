"""What clients may ask a node: one handler for all client connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from dledger_core.config import BATCH_BYTES_MAX, format_peers
from dledger_core.control import Part, TransactionId
from dledger_core.digest import RangeDigest
from dledger_core.errors import BadRequestError, DLedgerError, ProtocolError, TransferringError, UnknownGroupError
from dledger_core.ids import NodeId
from dledger_core.net import codec
from dledger_core.net.codec import int_field, str_field
from dledger_core.net.connection import Connection
from dledger_core.net.frame import Frame
from dledger_core.net.protocol import Type
from dledger_core.record import HEADER_BYTES, Columns
from dledger_core.server.appends import Appended, Appends, ProducerKey
from dledger_core.server.config import ServerConfig
from dledger_core.server.reads import DigestRequest, ReadRequest, Reads
from dledger_core.server.replica import Replica

__all__ = ["ClientService", "Hosted"]

_LOG = logging.getLogger(__name__)

CONNECTION_BYTES_MAX: Final = 64 << 20
PRODUCER_ID_BYTES_MAX: Final = 512


@dataclass(frozen=True, slots=True)
class Hosted:
    """A group on this node with its services."""

    replica: Replica
    appends: Appends
    reads: Reads


class ClientService:
    """Answers clients; lives on the node's event loop.

    A connection whose unanswered appends hold more than 64 MiB is not read from until they are answered, so one
    stuck client takes nothing from the others.
    """

    def __init__(self, config: ServerConfig, hosted: dict[str, Hosted]) -> None:
        self._config = config
        self._hosted = hosted
        self._held: dict[Connection, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._handlers: dict[int, Callable[[Connection, Frame, Hosted], None]] = {
            Type.APPEND: self._append,
            Type.METADATA: self._metadata,
            Type.PRODUCER: self._producer,
            Type.TRANSACTION: self._transaction,
            Type.READ: lambda c, f, h: self._spawn(c, f, self._read(c, f, h)),
            Type.TIME: lambda c, f, h: self._spawn(c, f, self._time(c, f, h)),
            Type.DIGEST: lambda c, f, h: self._spawn(c, f, self._digest(c, f, h)),
            Type.TRANSFER: lambda c, f, h: self._spawn(c, f, self._transfer(c, f, h)),
        }

    async def close(self) -> None:
        """Cancels what is being answered."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- frames ----------------------------------------------------------------------------------------------

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """Takes a request; raises ProtocolError for anything else."""
        kind = frame.header["t"]
        handler = self._handlers.get(kind)
        if handler is None:
            raise ProtocolError("not a request", connection.peer_address, "", {"type": kind})
        int_field(frame.header, "r", 1)
        try:
            group = str_field(frame.header, "g")
            hosted = self._hosted.get(group)
            if hosted is None:
                names = ", ".join(sorted(self._hosted))
                raise UnknownGroupError(
                    f"{self._config.self_id} does not host group {group!r}", "", f"it hosts: {names}", {"group": group}
                )
            handler(connection, frame, hosted)
        except ProtocolError:
            raise
        except DLedgerError as error:
            _fail(connection, frame, error)

    def on_close(self, connection: Connection, error: Exception | None) -> None:
        """Forgets what the connection held."""
        del error
        self._held.pop(connection, None)

    def _spawn(self, connection: Connection, frame: Frame, work: Coroutine[Any, Any, None]) -> None:
        async def answer() -> None:
            try:
                await work
            except DLedgerError as error:
                _fail(connection, frame, error)
            except Exception as error:  # noqa: BLE001 - the asker gets an answer, the log the traceback
                _LOG.exception("request failed: %s", frame.header)
                _fail(connection, frame, DLedgerError(f"internal error: {error!r}"))

        task = asyncio.create_task(answer())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- appends ---------------------------------------------------------------------------------------------

    def _append(self, connection: Connection, frame: Frame, hosted: Hosted) -> None:
        if not hosted.replica.is_leader:
            raise hosted.replica.not_leader()
        columns = codec.parse_columns(frame.payload, int_field(frame.header, "n", 1))
        self._check_bounds(columns, hosted)
        columns.verify()
        nbytes = len(frame.payload)
        self._hold(connection, nbytes)  # before the append: it may be answered within the call
        try:
            self._append_columns(frame.header, columns, hosted, self._reply_later(connection, frame, nbytes))
        except DLedgerError:
            self._release(connection, nbytes)
            raise

    def _append_columns(
        self,
        header: dict[str, Any],
        columns: Columns,
        hosted: Hosted,
        reply: Callable[[Appended | DLedgerError], None],
    ) -> None:
        if header.get("x") is not None:
            transaction = _transaction_id(header)
            hosted.appends.append_attempt(columns, transaction, str_field(header["x"], "a"), reply)
        elif header.get("p") is not None:
            key = ProducerKey(str_field(header, "p"), int_field(header, "pe", 0), int_field(header, "ps", 0))
            if len(key.producer_id.encode()) > PRODUCER_ID_BYTES_MAX:
                raise BadRequestError("the producer id is too long", "", "use at most 512 bytes")
            hosted.appends.append_produced(columns, key, reply)
        else:
            hosted.appends.append(columns, reply)

    def _hold(self, connection: Connection, nbytes: int) -> None:
        held = self._held[connection] = self._held.get(connection, 0) + nbytes
        if held > CONNECTION_BYTES_MAX >= held - nbytes:
            connection.pause_reading()

    def _release(self, connection: Connection, nbytes: int) -> None:
        held = self._held.get(connection)
        if held is None:  # the connection is gone
            return
        self._held[connection] = held - nbytes
        if held > CONNECTION_BYTES_MAX >= held - nbytes:
            connection.resume_reading()

    def _check_bounds(self, columns: Columns, hosted: Hosted) -> None:
        largest, bound = int(columns.lengths.max()) + HEADER_BYTES, hosted.replica.log.config.record_bytes_max
        if columns.record_bytes > BATCH_BYTES_MAX or largest > bound:
            raise BadRequestError(
                "an append is too large",
                "",
                f"a record has at most {bound} bytes, a batch {BATCH_BYTES_MAX}",
                {"record_bytes": largest, "batch_bytes": columns.record_bytes},
            )

    def _reply_later(
        self, connection: Connection, frame: Frame, nbytes: int
    ) -> Callable[[Appended | DLedgerError], None]:
        request = frame.header["r"]

        def reply(outcome: Appended | DLedgerError) -> None:
            self._release(connection, nbytes)
            if isinstance(outcome, DLedgerError):
                connection.send({"t": Type.FAILURE, "r": request, "e": outcome.to_wire()})
            else:
                fields = {"first": outcome.first_index, "last": outcome.last_index, "term": outcome.term}
                connection.send({"t": Type.APPEND_OK, "r": request, **fields})

        return reply

    # --- transactions and producers --------------------------------------------------------------------------

    def _transaction(self, connection: Connection, frame: Frame, hosted: Hosted) -> None:
        header, replica = frame.header, hosted.replica
        transaction, op = _transaction_id(header), str_field(header, "op")
        if not replica.is_leader:
            raise replica.not_leader()

        def reply(outcome: Appended | DLedgerError) -> None:
            if isinstance(outcome, DLedgerError):
                _fail(connection, frame, outcome)
                return
            state, parts = replica.tables.transactions.state(transaction)
            fields = {"state": state, "parts": [list(part) for part in parts], "index": outcome.last_index}
            connection.send({"t": Type.TRANSACTION_OK, "r": header["r"], **fields})

        if op == "commit":
            hosted.appends.commit(transaction, _parts(header), reply)
        elif op == "abort":
            hosted.appends.abort(transaction, reply)
        elif op == "state":
            hosted.appends.when_ready(reply)
        else:
            raise BadRequestError(f"unknown operation {op!r}", "", "use state, commit or abort")

    def _producer(self, connection: Connection, frame: Frame, hosted: Hosted) -> None:
        producer_id = str_field(frame.header, "p")

        def reply(outcome: Appended | DLedgerError) -> None:
            if isinstance(outcome, DLedgerError):
                _fail(connection, frame, outcome)
                return
            entry = hosted.replica.tables.producers.get(producer_id)
            newest = entry.appends[-1] if entry is not None and entry.appends else None
            connection.send(
                {
                    "t": Type.PRODUCER_OK,
                    "r": frame.header["r"],
                    "known": entry is not None,
                    "epoch": entry.epoch if entry is not None else 0,
                    "sequence": entry.next_sequence if entry is not None else 0,
                    "last": [newest.first_index, newest.last_index] if newest is not None else None,
                }
            )

        if not hosted.replica.is_leader:
            raise hosted.replica.not_leader()
        hosted.appends.when_ready(reply)

    # --- reads -----------------------------------------------------------------------------------------------

    def _metadata(self, connection: Connection, frame: Frame, hosted: Hosted) -> None:
        replica = hosted.replica
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
        connection.send(
            {
                "t": Type.METADATA_OK,
                "r": frame.header["r"],
                "leader": status.leader_id,
                "term": status.term,
                "log": replica.log_uuid,
                "self": me,
                "peers": format_peers(self._config.peers),
                "groups": sorted(self._hosted),
                "losers": replica.tables.transactions.losers_count,
            }
        )

    async def _read(self, connection: Connection, frame: Frame, hosted: Hosted) -> None:
        result = await hosted.reads.read(ReadRequest.parse(frame.header))
        fields = {
            "t": Type.READ_OK,
            "r": frame.header["r"],
            "n": result.records.count if result.records is not None else 0,
            "next": result.next_index,
            "commit": result.commit_index,
            "visible": result.visible_end,
            "first": result.first_index,
            "skip": [list(pair) for pair in result.skip],
        }
        payload = codec.records_payload([result.records]) if result.records is not None else []
        await connection.drained()
        connection.send(fields, *payload)

    async def _time(self, connection: Connection, frame: Frame, hosted: Hosted) -> None:
        index = await hosted.reads.index_at_time(int_field(frame.header, "ms", 0))
        connection.send({"t": Type.TIME_OK, "r": frame.header["r"], "index": index})

    async def _digest(self, connection: Connection, frame: Frame, hosted: Hosted) -> None:
        header = frame.header
        request = DigestRequest(
            int_field(header, "start", 0), int_field(header, "end", 0), int_field(header, "span", 1)
        )
        ranges, next_index, damaged = await hosted.reads.digest(request)
        connection.send(
            {
                "t": Type.DIGEST_OK,
                "r": header["r"],
                "ranges": [_digest_row(digest) for digest in ranges],
                "next": next_index,
                "commit": hosted.replica.readable_end - 1,
                "damaged": damaged[:1000],
            }
        )

    async def _transfer(self, connection: Connection, frame: Frame, hosted: Hosted) -> None:
        target, replica = NodeId(str_field(frame.header, "node")), hosted.replica
        if not replica.is_leader:
            raise replica.not_leader()
        if target not in {peer.node_id for peer in self._config.peers}:
            raise BadRequestError(f"{target} is not in the peers string", "node", "name another node")
        if target != self._config.self_id:
            replica.transfer_leadership(target)
        deadline = asyncio.get_running_loop().time() + 3.0
        while replica.soft_state.leader_id != target:
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                raise TransferringError(f"{target} did not take over in time", "", "retry when it has caught up")
            await replica.wait_progress(left)
        connection.send({"t": Type.TRANSFER_OK, "r": frame.header["r"], "leader": target})


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


def _fail(connection: Connection, frame: Frame, error: DLedgerError) -> None:
    connection.send({"t": Type.FAILURE, "r": frame.header["r"], "e": error.to_wire()})
