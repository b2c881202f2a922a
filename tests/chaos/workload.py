"""The clients of a run: producers of three kinds and tailing readers; each call is one record of the history.

A client is one sequential process in Jepsen's sense, with an ``AsyncClient`` and a random source of its own. It retries
a call of unknown outcome only where the log guarantees to recognize the retry.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import numpy as np

from dledger_core import AsyncClient, AttemptResult, Fetch
from dledger_core.client.protocol import END_OF_LOG
from dledger_core.client.routing.retry import is_unknown
from dledger_core.control import Part, TransactionId
from dledger_core.errors import DLedgerError, ProtocolError
from tests.chaos.recorder import Recorder
from tests.support.history import Append, Decision, Operation, Read, hash_of

TIMEOUT_MS: Final = 3000
READ_BYTES: Final = 4 << 20
RESOLVE_S: Final = 90.0
"""After the end of a run, a client gives up to find out an unknown outcome after this long."""


class Workload:
    """All clients of a run, on one event loop; ``failures`` are their unexpected ends."""

    def __init__(self, peers: str, nodes: tuple[str, ...], recorder: Recorder, seed: int) -> None:
        self.peers = peers
        self.recorder = recorder
        self.seed = seed
        self.stopping = asyncio.Event()
        self.failures: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._clients: dict[str, Callable[[_Process], Awaitable[None]]] = {
            **{f"plain-{i}": _plain for i in range(2)},
            "roamer": _roamer(nodes),
            **{f"producer-{i}": _producer for i in range(2)},
            "transactions": _transactions,
            **{f"reader-{i}": _tail for i in range(2)},
            **{f"reader-of-{node}": _tail_of(node) for node in nodes},
            "linearizable": _linearizable,
            "again": _again,
        }

    async def start(self) -> None:
        for name, behave in self._clients.items():
            self._tasks.append(asyncio.create_task(self._run(name, behave), name=name))

    async def _run(self, name: str, behave: Callable[[_Process], Awaitable[None]]) -> None:
        try:
            async with AsyncClient(self.peers, timeout_ms=TIMEOUT_MS) as client:
                await behave(_Process(self, name, client))
        except Exception as error:  # noqa: BLE001 - reported as a violation
            self.failures.append(f"client {name} failed: {error!r}")

    async def stop(self) -> None:
        """Let every client finish its work and find out unknown outcomes where it can."""
        self.stopping.set()
        await asyncio.gather(*self._tasks)

    async def read_all(self, upto: int) -> None:
        """Read the log up to an index, with and without orphaned attempts, from any replica."""
        until = time.monotonic() + RESOLVE_S
        async with AsyncClient(self.peers, timeout_ms=30_000) as client:
            for uncommitted in (False, True):
                process, at = _Process(self, f"final-{uncommitted}", client), 0
                while at <= upto:
                    found = await process.fetch(at, uncommitted=uncommitted, wait_ms=500)
                    at = found.next_index if found is not None else at
                    if time.monotonic() > until:
                        self.failures.append(f"the final read ended at {at}, not at {upto}")
                        return


class _Process:
    """One client: calls, and records each call."""

    def __init__(self, workload: Workload, name: str, client: AsyncClient) -> None:
        self.name = name
        self.client = client
        self.chance = random.Random(f"{workload.seed}/{name}")
        self._workload = workload
        self._made = 0

    @property
    def running(self) -> bool:
        return not self._workload.stopping.is_set()

    async def pause(self, seconds: float) -> None:
        """Wait for about this long, or until the end of the run."""
        seconds *= self.chance.uniform(0.2, 1.8)
        if self.running:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._workload.stopping.wait(), seconds)
        else:
            await asyncio.sleep(seconds)

    def bodies(self) -> list[bytes]:
        """Return a few new bodies, sometimes large ones."""
        made = []
        for _ in range(self.chance.choice((1, 1, 1, 2, 3, 8))):
            self._made += 1
            size = self.chance.choice((0, 20, 100, 100, 400, 3000)) if self.chance.random() < 0.98 else 60_000
            made.append(f"{self.name}:{self._made}:".encode() + self.chance.randbytes(size))
        return made

    async def _record(
        self,
        kind: type[Operation],
        work: Awaitable[Any],
        fields: dict[str, Any],
        of_result: Callable[[Any], dict[str, Any]] = lambda _: {},
    ) -> tuple[Any, Operation]:
        """Await a call and record it; return its result (None if it failed) and the record."""
        start, result, outcome = time.monotonic(), None, {"status": "ok"}
        try:
            result = await work
        except DLedgerError as error:
            # A response that cannot be read says nothing about the outcome.
            unknown = is_unknown(error) or isinstance(error, ProtocolError)
            outcome = {"status": "unknown" if unknown else "fail", "error": error.name}
        end = time.monotonic()
        if result is not None:
            fields |= of_result(result)
        operation = kind(client=self.name, start=start, end=end, **outcome, **fields)
        self._workload.recorder.add(operation)
        return result, operation

    async def append(self, bodies: list[bytes], **producer: Any) -> bool:
        """Append; return whether the outcome is success."""
        key = f"{producer['producer_id']}/{producer['sequence']}" if producer else ""
        fields = {"hashes": tuple(map(hash_of, bodies)), "producer": key}
        _, operation = await self._record(Append, self.client.append(bodies, **producer), fields, _range_of)
        return operation.status == "ok"

    async def attempt(self, transaction: TransactionId, name: str) -> AttemptResult | None:
        bodies = self.bodies()
        # A micro-batch of which no append took effect leaves the query unknown to the log.
        call = self.client.append_attempt(
            bodies, transaction=transaction, attempt=name, elsewhere=transaction.batch_id - 1
        )
        fields = {"hashes": tuple(map(hash_of, bodies)), "attempt": name}
        result, _ = await self._record(Append, call, fields, _range_of)
        return result

    async def decide(self, transaction: TransactionId, parts: list[Part], attempts: tuple[str, ...]) -> bool:
        """Commit, or abort without parts; return whether the end of the transaction is known now."""
        client, name = self.client, f"{transaction.query_id}/{transaction.batch_id}"
        call = client.commit_transaction(transaction, parts) if parts else client.abort_transaction(transaction)
        fields = {"transaction": name, "commit": bool(parts), "attempts": attempts}
        _, operation = await self._record(Decision, call, fields)
        return operation.status == "ok" or operation.error == "TRANSACTION"

    async def fetch(
        self,
        start: int,
        *,
        end: int = END_OF_LOG,
        node: str | None = None,
        linearizable: bool = False,
        uncommitted: bool = False,
        wait_ms: int = 0,
    ) -> Fetch | None:
        """Read; return None if that failed."""

        def rows(found: Fetch) -> dict[str, Any]:
            bodies = found.batch.column("body").to_pylist()
            return {
                "next_index": found.next_index,
                "commit_index": found.commit_index,
                "full": end == END_OF_LOG and sum(map(len, bodies)) + 48 * len(bodies) < READ_BYTES // 2,
                "indexes": found.batch.column("index").to_numpy(),
                "hashes": np.array([hash_of(body) for body in bodies], np.uint64),
            }

        call = self.client.fetch(
            start,
            end,
            max_bytes=READ_BYTES,
            node=node,
            consistency="linearizable" if linearizable else "committed",
            isolation="read_uncommitted" if uncommitted else "read_committed",
            wait_ms=wait_ms,
        )
        fields = {"node": node or "", "linearizable": linearizable, "uncommitted": uncommitted}
        found, _ = await self._record(Read, call, {"from_index": start, **fields}, rows)
        return found


def _range_of(result: Any) -> dict[str, Any]:
    return {"first": result.first_index, "last": result.last_index, "term": result.term}


# --- behaviors --------------------------------------------------------------------------------------------------------


async def _plain(process: _Process) -> None:
    while process.running:
        if not await process.append(process.bodies()):
            await process.pause(0.05)
        await process.pause(0.012)


def _roamer(nodes: tuple[str, ...]) -> Callable[[_Process], Awaitable[None]]:
    """Append, read from one replica after the other, and then from any replica, which must not show less."""

    async def behave(process: _Process) -> None:
        at = 0
        while process.running:
            await process.append(process.bodies())
            if process.chance.random() < 0.5:
                found = await process.fetch(at, node=process.chance.choice(nodes), uncommitted=True)
                at = max(at, found.next_index - 5) if found is not None else at
            await process.fetch(at)
            await process.pause(0.02)

    return behave


async def _producer(process: _Process) -> None:
    """One producer id, sometimes a new one; an append is retried until its outcome is known."""
    number, sequence = 0, 0
    while process.running:
        bodies, until = process.bodies(), time.monotonic() + RESOLVE_S
        key = {"producer_id": f"{process.name}.{number}", "sequence": sequence}
        while not await process.append(bodies, **key):
            await process.pause(0.05)
            if not process.running and time.monotonic() > until:
                return
        if process.chance.random() < 0.1:  # a retry of an append whose success is known
            await process.append(bodies, **key)
        sequence += 1
        if process.chance.random() < 0.005:
            number, sequence = number + 1, 0
        await process.pause(0.012)


async def _transactions(process: _Process) -> None:
    """Transactions of a few attempts, some of them orphaned; most commit."""
    batch = 0
    while process.running:
        transaction = TransactionId(process.name, batch, "run")
        parts: list[Part] = []
        winners: list[str] = []
        for number in range(process.chance.choice((1, 2, 3))):
            name = f"{process.name}/{batch}/{number}"
            result = await process.attempt(transaction, name)
            if result is not None and process.chance.random() < 0.8:
                parts.append(Part(result.first_index, result.last_index, result.rows, result.crc))
                winners.append(name)
        if process.chance.random() < 0.2:
            parts, winners = [], []
        until = time.monotonic() + RESOLVE_S
        while not await process.decide(transaction, parts, tuple(winners)):
            if time.monotonic() > until:
                raise TimeoutError(f"no response says how {transaction} ended")
            await process.pause(0.1)
        batch += 1
        await process.pause(0.1)


async def _tail(process: _Process) -> None:
    """Follow the visible end on any replica."""
    at = 0
    while process.running:
        found = await process.fetch(at, wait_ms=200)
        at = found.next_index if found is not None else at
        await process.pause(0.03)


def _tail_of(node: str) -> Callable[[_Process], Awaitable[None]]:
    """Follow the committed end of one replica, with orphaned attempts."""

    async def behave(process: _Process) -> None:
        at = 0
        while process.running:
            found = await process.fetch(at, node=node, uncommitted=True)
            at = found.next_index if found is not None else at
            await process.pause(0.05 if found is not None else 0.3)

    return behave


async def _linearizable(process: _Process) -> None:
    """Read the newest part of the log repeatedly."""
    at = 0
    while process.running:
        found = await process.fetch(at, linearizable=True, uncommitted=True)
        at = max(0, found.next_index - process.chance.choice((0, 1, 10))) if found is not None else at
        await process.pause(0.03)


async def _again(process: _Process) -> None:
    """Read old parts of the log again."""
    end = 0
    while process.running:
        start = process.chance.randrange(0, end) if end else 0
        found = await process.fetch(start, end=start + 200)
        end = max(end, found.next_index) if found is not None else end
        await process.pause(0.1)
