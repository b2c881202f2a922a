"""Requests that append to a group's log, or ask about what its writers appended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from dledger_core.checksum import Buffer
from dledger_core.control import TransactionId
from dledger_core.errors import BadRequestError, DLedgerError, one_line
from dledger_core.ids import Index
from dledger_core.net import codec, messages
from dledger_core.net.frame import Frame, encode_frame
from dledger_core.net.limits.rates import BurstFilter
from dledger_core.record import Columns
from dledger_core.server.services.appends import AppendedRange, Reply
from dledger_core.server.services.producers_in_flight import ProducerKey
from dledger_core.server.services.requests.calls import LogCall
from dledger_core.tracing import AppendSpan, request_span

_LOG = logging.getLogger(__name__)
_LOG.addFilter(BurstFilter())


_FAILED: Final = (-1, -1, -1)


class _AppendReply:
    """The reply to appends that the log takes as one; their requests take of their client's shares until then.

    Args:
        call: the first request.
        frames: all of them, in the order of their entries.
        span: of the request, if appends are traced.
        settle_row: ends the additions of the request to the tables.
    """

    __slots__ = ("_call", "_frames", "_nbytes", "_settle_row", "_span")

    def __init__(
        self, call: LogCall, frames: Sequence[Frame], span: AppendSpan | None, settle_row: Callable[[], None]
    ) -> None:
        self._call = call
        self._frames = frames
        self._span = span
        self._settle_row = settle_row
        self._nbytes = sum([len(frame.payload) for frame in frames])
        try:
            call.flow.hold(self._nbytes)
        except DLedgerError:
            settle_row()
            raise

    def end(self) -> None:
        """Give the shares back."""
        self._settle_row()
        self._call.flow.release(self._nbytes)

    def __call__(self, outcome: AppendedRange | DLedgerError) -> None:
        self.end()
        if isinstance(outcome, DLedgerError):
            _end_failed(self._span, outcome)
            self._call.refuse(outcome, self._frames)
            return
        first, last, term = outcome.first_index, outcome.last_index, outcome.term
        if self._span is not None:
            self._span.committed(first, last, term)
            self._span.end()
        header = messages.APPEND_OK.encode(
            messages.AppendResponse(first=first, last=last, term=term), **self._call.routing
        )
        buffers: list[Buffer] = []
        for frame in self._frames:
            header["r"], header["first"] = frame.header["r"], first
            first = Index(first + frame.header["n"])
            header["last"] = first - 1
            buffers += encode_frame(header)
        self._call.connection.send_buffers(buffers)


def _end_failed(span: AppendSpan | None, error: DLedgerError) -> None:
    if span is not None:
        span.failed(error)
        span.end()


def append_plain(call: LogCall, frames: Sequence[Frame]) -> None:
    """Append the entries of plain requests to one log as one column; raise, without effect, if anything is wrong."""
    _append(call, frames, None, None)


def append(call: LogCall, message: messages.AppendRequest) -> None:
    """Append the entries of a request with more fields than a plain one, or of a traced one."""
    span = request_span(message.traceparent, call.node.config.self_id, call.group.name, message.count)
    try:
        _append(call, [call.frame], message, span)
    except DLedgerError as error:
        _end_failed(span, error)
        raise


def _append(
    call: LogCall, frames: Sequence[Frame], message: messages.AppendRequest | None, span: AppendSpan | None
) -> None:
    replica, settle_row = call.hosted.replica, _nothing
    if not replica.is_leader:
        raise replica.not_leader()
    columns = codec.parse_appends(frames)
    columns.verify()
    if message is not None:
        settle_row = call.node.writers.admit(call.flow.tenant, call.group.name, message, lambda: replica.tables)
    reply = _AppendReply(call, frames, span, settle_row)  # before the append: it may be called within the call
    try:
        _append_columns(call, message, columns, reply, span)
    except DLedgerError:
        reply.end()
        raise


class _ProduceReply:
    """The reply to the appends of several producers, sent once each of them has its outcome.

    Args:
        call: the request.
        count: number of appends.
    """

    __slots__ = ("_call", "_nbytes", "_outcomes", "_waiting")

    def __init__(self, call: LogCall, count: int) -> None:
        self._call = call
        self._nbytes = len(call.frame.payload)
        self._outcomes: list[AppendedRange | None] = [None] * count
        self._waiting = count
        call.flow.hold(self._nbytes)

    def settle(self, place: int, settle_row: Callable[[], None], outcome: AppendedRange | DLedgerError) -> None:
        """Record the outcome of one append, and respond after the last one."""
        settle_row()
        if not isinstance(outcome, DLedgerError):
            self._outcomes[place] = outcome
        self._waiting -= 1
        if self._waiting:
            return
        self._call.flow.release(self._nbytes)
        rows = [(each.first_index, each.last_index, each.term) if each else _FAILED for each in self._outcomes]
        firsts, lasts, terms = map(list, zip(*rows, strict=True))
        self._call.respond(messages.PRODUCE_OK, messages.ProduceResponse(firsts=firsts, lasts=lasts, terms=terms))


def produce(call: LogCall, message: messages.ProduceRequest) -> None:
    """Append for several producers, each as if it had come alone: one that is refused does not change the others."""
    hosted, replica, source = call.hosted, call.hosted.replica, call.connection
    if not replica.is_leader:
        raise replica.not_leader()
    columns = codec.parse_columns(call.frame.payload, message.count)
    columns.verify()
    if sum(message.counts) != message.count:
        raise BadRequestError("the appends have another number of entries than the request", "", "send n = sum of ns")
    if len({len(each) for each in (message.counts, message.ids, message.epochs, message.sequences, message.once)}) > 1:
        raise BadRequestError("the fields of the appends differ in length", "", "send one value of each append")
    reply = _ProduceReply(call, len(message.counts))
    appends = zip(message.ids, message.epochs, message.sequences, message.once, strict=True)
    parts = zip(columns.split(message.counts), appends, strict=True)
    for place, (part, (producer_id, epoch, sequence, once)) in enumerate(parts):
        settle_row: Callable[[], None] = _nothing
        try:
            writers = call.node.writers
            settle_row = writers.admit_producer(
                call.flow.tenant, call.group.name, producer_id, lambda: hosted.replica.tables
            )
            key, settle = ProducerKey(producer_id, epoch, sequence), partial(reply.settle, place, settle_row)
            hosted.appends.append_produced(part, key, settle, once=once, source=source)
        except DLedgerError as error:
            reply.settle(place, settle_row, error)


def _nothing() -> None:
    pass


def _append_columns(
    call: LogCall, message: messages.AppendRequest | None, columns: Columns, reply: Reply, span: AppendSpan | None
) -> None:
    hosted, source = call.hosted, call.connection
    if message is None:
        hosted.appends.append(columns, reply, source=source)
    elif message.transaction is not None:
        named = message.transaction
        if "a" not in named:
            raise BadRequestError("an append's transaction has no attempt", "", "send 'a' in field 'x'")
        hosted.transactions.append_attempt(
            columns, _transaction_id(named), named["a"], reply, span=span, **_introduction(named)
        )
    elif message.producer_id is not None:
        if message.epoch is None or message.sequence is None:
            raise BadRequestError("a producer's append has no epoch or sequence", "", "send 'pe' and 'ps'")
        key = ProducerKey(message.producer_id, message.epoch, message.sequence)
        hosted.appends.append_produced(columns, key, reply, once=message.once, source=source, span=span)
    else:
        hosted.appends.append(columns, reply, source=source, span=span)


def transaction(call: LogCall, message: messages.TransactionRequest) -> None:
    """Tell the state of a transaction, commit it or abort it."""
    hosted, transaction = call.hosted, _transaction_id(message.transaction)

    def reply(outcome: AppendedRange | DLedgerError) -> None:
        table = hosted.replica.tables.transactions
        if isinstance(outcome, DLedgerError):
            call.refuse(outcome)
            return
        if message.operation == "state":
            if (error := table.fenced(transaction)) is not None:
                call.refuse(error)
                return
            hosted.transactions.renew(transaction)
        found = hosted.transactions.named(transaction) or transaction
        committed = table.committed(found)
        response = messages.TransactionResponse(
            state=table.state(found),
            rows=committed.rows if committed is not None else 0,
            fingerprint=committed.fingerprint if committed is not None else 0,
            index=outcome.last_index,
            newest=table.newest(found.query_id),
        )
        call.respond(messages.TRANSACTION_OK, response)

    if message.operation == "commit":
        if message.count is None:
            raise BadRequestError("a commit has no field 'n'", "", "send the parts of the committed attempts")
        parts = codec.parse_parts(call.frame.payload, message.count)
        hosted.transactions.commit(transaction, parts, reply, **_introduction(message.transaction))
    elif message.operation == "abort":
        _abort(call, message.transaction, reply)
    else:
        hosted.appends.when_ready(reply)


def _abort(call: LogCall, named: dict[str, Any], reply: Reply) -> None:
    transaction, replica = _transaction_id(named), call.hosted.replica
    settle = call.node.writers.admit_abort(call.flow.tenant, call.group.name, transaction, lambda: replica.tables)

    def settled(outcome: AppendedRange | DLedgerError) -> None:
        settle()
        reply(outcome)

    call.hosted.transactions.abort(transaction, settled, once=named.get("o", False))


def producer(call: LogCall, message: messages.ProducerRequest) -> None:
    """Tell the state of a producer, or expire it."""

    def reply(outcome: AppendedRange | DLedgerError) -> None:
        if isinstance(outcome, DLedgerError):
            call.refuse(outcome)
            return
        entry = call.hosted.replica.tables.producers.get(message.producer_id)
        newest = entry.appends[-1] if entry is not None else None
        response = messages.ProducerResponse(
            known=entry is not None,
            epoch=entry.epoch if entry is not None else 0,
            sequence=entry.next_sequence if entry is not None else 0,
            last=[newest.first_index, newest.last_index] if newest is not None else None,
        )
        call.respond(messages.PRODUCER_OK, response)

    if message.operation == "expire":
        _LOG.info(
            "expiring producer: group=%s producer_id=%s peer=%s",
            call.group.name,
            one_line(message.producer_id),
            call.connection.who,
        )
        call.hosted.appends.expire_producer(message.producer_id, reply)
    else:
        call.hosted.appends.when_ready(reply)


def _transaction_id(fields: dict[str, Any]) -> TransactionId:
    return TransactionId(fields["q"], fields["b"], fields["r"])


def _introduction(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that introduce a query to a log that does not know it."""
    return {"once": fields.get("o", False), "elsewhere": fields.get("w", -1)}
