"""Requests that append to a group's log, or ask about what its writers appended."""

from __future__ import annotations

import logging
from typing import Any

from dledger_core.control import TransactionId
from dledger_core.errors import BadRequestError, DLedgerError, one_line
from dledger_core.net import codec, messages
from dledger_core.net.connection import Connection
from dledger_core.net.limits.rates import BurstFilter
from dledger_core.record import Columns
from dledger_core.server.services.appends import AppendedRange, Appends, ProducerKey, Reply
from dledger_core.server.services.requests.calls import LogCall
from dledger_core.tracing import AppendSpan, request_span

_LOG = logging.getLogger(__name__)
_LOG.addFilter(BurstFilter())


def append(call: LogCall, message: messages.AppendRequest) -> None:
    """Append entries."""
    span = request_span(message.traceparent, call.node.config.self_id, call.group.name, message.count)
    try:
        _append_in(span, call, message)
    except DLedgerError as error:
        if span is not None:
            span.failed(error)
            span.end()
        raise


def _append_in(span: AppendSpan | None, call: LogCall, message: messages.AppendRequest) -> None:
    payload, hosted = call.frame.payload, call.hosted
    if not hosted.replica.is_leader:
        raise hosted.replica.not_leader()
    columns = codec.parse_columns(payload, message.count)
    columns.verify()
    nbytes = len(payload)
    tenant, replica = call.flow.tenant, hosted.replica
    settle = call.node.writers.admit(tenant, call.group.name, message, lambda: replica.tables)

    def end() -> None:
        settle()
        call.flow.release(nbytes)

    def reply(outcome: AppendedRange | DLedgerError) -> None:
        end()
        if isinstance(outcome, DLedgerError):
            call.refuse(outcome)
        else:
            response = messages.AppendResponse(first=outcome.first_index, last=outcome.last_index, term=outcome.term)
            call.respond(messages.APPEND_OK, response)

    try:
        call.flow.hold(nbytes)  # before the append: its reply may be called within the call
    except DLedgerError:
        settle()
        raise
    try:
        _append_columns(message, columns, hosted.appends, _traced(span, reply), call.connection, span)
    except DLedgerError:
        end()
        raise


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
        call.respond(messages.TRANSACTION_OK, response)

    if message.operation == "commit":
        if message.count is None:
            raise BadRequestError("a commit has no field 'n'", "", "send the parts of the committed attempts")
        parts = codec.parse_parts(call.frame.payload, message.count)
        hosted.appends.commit(transaction, parts, reply, **_introduction(message.transaction))
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

    call.hosted.appends.abort(transaction, settled, once=named.get("o", False))


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
