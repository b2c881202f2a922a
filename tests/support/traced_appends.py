"""Appends to a group in this process, first without a tracer provider; prints the spans that were recorded as JSON.

A program of its own, because a tracer provider stays for the life of the process.
"""

import asyncio
import contextlib
import json
import sys
from pathlib import Path

from dledger_core import AsyncClient
from dledger_core.config import format_peers
from dledger_core.control import TransactionId
from dledger_core.errors import SequenceGapError
from tests.support.server_group import ServerGroup, run


async def appends(directory: Path) -> None:
    async with ServerGroup(directory) as group, AsyncClient(format_peers(group.peers)) as client:
        await client.append([b"before"])
        loaded = "opentelemetry" in sys.modules

        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        await client.append([b"the interface alone"])
        exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        trace.set_tracer_provider(provider)
        tracer = trace.get_tracer("the user's")
        with tracer.start_as_current_span("plain"):
            await client.append([b"one", b"two"])
        with tracer.start_as_current_span("joined"):
            await asyncio.gather(client.append([b"a"]), client.append([b"b"]))
        with tracer.start_as_current_span("producer"):
            await client.append([b"p"], producer_id="p", sequence=0)
        with tracer.start_as_current_span("attempt"):
            await client.append_attempt([b"x"], transaction=TransactionId("query", 0, "run"), attempt="a")
        with tracer.start_as_current_span("refused"), contextlib.suppress(SequenceGapError):
            await client.append([b"p"], producer_id="p", sequence=9)
        raw = await group.client()
        await raw.append([b"a client that sends anything"], tp="no traceparent")
        spans = [
            {
                "id": span.context.span_id,
                "parent": None if span.parent is None else span.parent.span_id,
                "trace": span.context.trace_id,
                "name": span.name,
                "kind": span.kind.name,
                "attributes": dict(span.attributes),
                "events": [event.name for event in span.events],
                "status": span.status.status_code.name,
            }
            for span in exporter.get_finished_spans()
        ]
        print(json.dumps({"loaded": loaded, "spans": spans}))  # noqa: T201


run(appends(Path(sys.argv[1])))
