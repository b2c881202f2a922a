"""Spans of appends for OpenTelemetry, if this program has a tracer provider; otherwise nothing is measured.

A client's span covers one call; it travels to the node in the request, and the node's span is its child. Calls that
are joined into one request are one span on the node, a child of the first call; the indexes in the attributes tell
which ranges belong together. OpenTelemetry is optional: a program that has not imported it has no tracer provider.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from dledger_core.errors import DLedgerError

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_API: Final = "opentelemetry.trace"
_SCOPE: Final = "dledger_core"
_TRACEPARENT: Final = "traceparent"
_UNTRACED: Final[AbstractContextManager[None]] = nullcontext()


class AppendSpan:
    """One append of a client, or its request on a node."""

    __slots__ = ("_span",)

    def __init__(self, span: Span) -> None:
        self._span = span

    def proposed(self, first_index: int, last_index: int) -> None:
        """Record that the leader placed the entries in a batch, which it replicates and syncs from now on."""
        self._span.add_event(
            "proposed", {"dledger.batch.first_index": first_index, "dledger.batch.last_index": last_index}
        )

    def committed(self, first_index: int, last_index: int, term: int) -> None:
        """Record the place of the entries."""
        found = {"dledger.first_index": first_index, "dledger.last_index": last_index, "dledger.term": term}
        self._span.set_attributes(found)
        self._span.add_event("committed")

    def failed(self, error: BaseException) -> None:
        """Record an error with its name."""
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("error.type", error.name if isinstance(error, DLedgerError) else type(error).__name__)
        self._span.set_status(StatusCode.ERROR, str(error))

    def end(self) -> None:
        """End it."""
        self._span.end()


def _tracer() -> Tracer | None:
    if _API not in sys.modules:
        return None
    from opentelemetry import trace

    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    return trace.get_tracer(_SCOPE)


def is_traced() -> bool:
    """Whether this program has a tracer provider."""
    return _tracer() is not None


def _attributes(group: str, entries: int) -> dict[str, Any]:
    return {
        "messaging.system": "dledger",
        "messaging.operation.name": "append",
        "messaging.operation.type": "send",
        "messaging.destination.name": group,
        "messaging.batch.message_count": entries,
    }


def append_call(group: str, entries: int, nbytes: int) -> AbstractContextManager[AppendSpan | None]:
    """Return a context in which the span of a client's append is the current one; None without a tracer provider."""
    tracer = _tracer()
    return _UNTRACED if tracer is None else _traced_call(tracer, group, entries, nbytes)


@contextmanager
def _traced_call(tracer: Tracer, group: str, entries: int, nbytes: int) -> Iterator[AppendSpan]:
    from opentelemetry.trace import SpanKind

    attributes = _attributes(group, entries) | {"dledger.bytes": nbytes}
    with tracer.start_as_current_span(
        f"append {group}",
        kind=SpanKind.CLIENT,
        attributes=attributes,
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        call = AppendSpan(span)
        try:
            yield call
        except BaseException as error:
            call.failed(error)
            raise


def current_traceparent() -> str | None:
    """Return the current span as a W3C ``traceparent``; None without one."""
    if _tracer() is None:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get(_TRACEPARENT)


def request_span(traceparent: str | None, node: str, group: str, entries: int) -> AppendSpan | None:
    """Start the span of a request that a node received; None if there is no tracer provider."""
    tracer = _tracer()
    if tracer is None:
        return None
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {} if traceparent is None else {_TRACEPARENT: traceparent}
    parent = TraceContextTextMapPropagator().extract(carrier, Context())
    attributes = _attributes(group, entries) | {"dledger.node": node}
    return AppendSpan(tracer.start_span(f"append {group}", parent, kind=SpanKind.SERVER, attributes=attributes))
