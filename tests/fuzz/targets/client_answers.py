"""A client whose nodes answer anything: it raises documented errors only, and returns no wrong content."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import msgpack
import pyarrow as pa

from dledger_core.client import AsyncLogClient
from dledger_core.errors import DLedgerError
from dledger_core.net.connection import Connection
from dledger_core.net.frame import Frame
from dledger_core.net.protocol import Type
from tests.client.fake_group import FakeGroup, FakeNode, filled, node_client
from tests.fuzz.finding import Finding, expect, memory_below
from tests.fuzz.targets.peers import steps_of

TIMEOUT_MS = 150
BYTES_MAX = 96 << 20
"""A response may have 32 MiB, of three nodes."""
BODIES = {index: b"body %d" % index for index in (1, 2, 3, 4, 6, 7, 8, 9)}


class _Liar:
    """The steps of all nodes, in order; afterwards they answer as nodes do."""

    def __init__(self, data: bytes) -> None:
        self._steps = steps_of(data)
        self.tells_lies = False

    def __call__(self, node: FakeNode, connection: Connection, frame: Frame) -> tuple[dict[str, Any], list[Any]]:
        header, payload = node.answer(frame)
        kind, content = next(self._steps, (0, b""))
        match kind % 6:
            case 1:  # other fields
                header = {**header, **_fields(content)}
            case 2 if any(map(len, payload)):  # other bytes in the payload
                joined = bytearray(b"".join(map(bytes, payload)))
                at = int.from_bytes(content[:2], "big") % len(joined)
                for offset, byte in enumerate(content[2 : 2 + len(joined) - at]):
                    joined[at + offset] ^= byte
                payload = [bytes(joined)]
            case 3:  # another message, as if a node had sent it
                self.tells_lies = True
                header = {"t": frame.header["t"] + 1, **_fields(content)}
                payload = [content[-40:]]
            case 4:  # any bytes on the connection
                connection.send_buffers([content])
                connection.close()
            case 5:
                header, payload = {"t": Type.FAILURE, "e": _fields(content)}, []
        return header, payload


def _fields(content: bytes) -> dict[str, Any]:
    try:
        found = msgpack.unpackb(content, strict_map_key=True)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
        return {}
    return {key: value for key, value in found.items() if isinstance(key, str)} if isinstance(found, dict) else {}


def _check_rows(batch: pa.RecordBatch, liar: _Liar) -> None:
    found = zip(batch.column("index").to_pylist(), batch.column("body").to_pylist(), strict=True)
    previous = -1
    for index, body in found:
        expect(previous < index, "indexes that do not increase", index=index, previous=previous)
        previous = index
        if not liar.tells_lies:
            expect(BODIES.get(index, body) == body, "a body that is not in the log", index=index, body=body)


async def _calls(client: AsyncLogClient, liar: _Liar) -> None:
    async def read() -> None:
        _check_rows(await client.read(0, 10, isolation="read_uncommitted"), liar)

    async def get() -> None:
        found = await client.get(2)
        expect(found.index == 2, "another entry", it=found.index)

    async def append() -> None:
        result = await client.append([b"a", b"b"])
        numbers = result.first_index, result.last_index, result.term
        expect(all(type(number) is int and number >= 0 for number in numbers), "no index", it=numbers)

    async def tail() -> None:
        async for batch in client.tail(1):
            _check_rows(batch, liar)
            return

    calls: list[Callable[[], Coroutine[Any, Any, object]]] = [read, get, append, client.metadata, tail]
    calls += [client.groups, client.members, lambda: client.producer("p"), lambda: client.digest(0, 8, span=4)]
    calls += [lambda: client.describe("terms"), lambda: client.describe("producers")]
    for call in calls:
        try:
            async with asyncio.timeout(20):
                await call()
        except DLedgerError as error:
            expect(bool(str(error)), "an error without a text", it=type(error))
        except TimeoutError:
            raise Finding("a call did not end") from None


async def _converse(data: bytes) -> None:
    liar = _Liar(data)
    async with FakeGroup() as group:
        filled(group)
        group.log.skip = []
        for node, kind in itertools.product(group, Type):
            node.script[kind] = _always(liar)
        async with AsyncLogClient(node_client(group.peers, timeout_ms=TIMEOUT_MS)) as client:
            await _calls(client, liar)


class _always(list):  # noqa: N801 - a script that never ends
    def __init__(self, step: _Liar) -> None:
        super().__init__([step])

    def pop(self, index: int = 0) -> Any:  # type: ignore[override]
        return self[index]


def run_client_answers(data: bytes) -> None:
    """Input: steps, one for each answer: 0 = right, 1 = other fields, 2 = other payload, 3-5 = anything."""
    loop_errors: list[dict[str, Any]] = []
    with memory_below(BYTES_MAX), asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(lambda _, context: loop_errors.append(context))
        runner.run(_converse(data))
    if loop_errors:
        raise Finding(f"an error without a handler: {loop_errors[0]!r:.300}")
