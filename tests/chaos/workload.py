"""What users do meanwhile: producers of three kinds and tailing readers, each call one record of the history.

A client is one sequential process in Jepsen's sense, with an ``AsyncClient`` and a random source of its own. An
outcome that stays unknown is repeated only where the log promises to recognise the repeat.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import numpy as np

from dledger_core import AsyncClient, AttemptResult, Fetch
from dledger_core.client import END_OF_LOG
from dledger_core.client.routing.retry import is_unknown
from dledger_core.control import Part, TransactionId
from dledger_core.errors import DLedgerError, ProtocolError
from tests.chaos.history import Append, Decision, Read, Recorder, Status, hash_of

TIMEOUT_MS: Final = 3000
READ_BYTES: Final = 4 << 20
RESOLVE_S: Final = 90.0


class Workload:
    """All clients of a run; lives on one event loop.

    Args:
        peers: the peers string of the clients.
        nodes: the nodes' ids.
        recorder: takes the history.
        seed: of all chance in it.
    """

    def __init__(self, peers: str, nodes: tuple[str, ...], recorder: Recorder, seed: int) -> None:
        self.peers = peers
        self.recorder = recorder
        self.seed = seed
        self.stopping = asyncio.Event()
        self.broken: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._clients: list[tuple[str, Callable[[_Process], Awaitable[None]]]] = [
            *((f"plain-{i}", _plain) for i in range(2)),
            ("roamer", _roamer(nodes)),
            *((f"producer-{i}", _producer) for i in range(2)),
            ("transactions", _transactions),
            *((f"reader-{i}", _tail) for i in range(2)),
            *((f"reader-of-{node}", _tail_of(node)) for node in nodes),
            ("linearizable", _linearizable),
            ("again", _again),
        ]

    async def start(self) -> None:
        for name, behave in self._clients:
            self._tasks.append(asyncio.create_task(self._run(name, behave), name=name))

    async def _run(self, name: str, behave: Callable[[_Process], Awaitable[None]]) -> None:
        try:
            async with AsyncClient(self.peers, timeout_ms=TIMEOUT_MS) as client:
                await behave(_Process(self, name, client))
        except Exception as error:  # noqa: BLE001 - told as a violation
            self.broken.append(f"client {name} broke: {error!r}")

    async def stop(self) -> None:
        """Lets every client finish what it began, and find out what is unknown where it can."""
        self.stopping.set()
        await asyncio.gather(*self._tasks)

    async def read_all(self, upto: int) -> None:
        """Reads the whole log up to an index, as visible and with losers, by clients that may choose the replica."""
        until = time.monotonic() + RESOLVE_S
        async with AsyncClient(self.peers, timeout_ms=30_000) as client:
            for uncommitted in (False, True):
                process, at = _Process(self, f"final-{uncommitted}", client), 0
                while at <= upto:
                    found = await process.fetch(at, uncommitted=uncommitted, wait_ms=500)
                    at = found.next_index if found is not None else at
                    if time.monotonic() > until:
                        self.broken.append(f"the final read has come to {at}, not to {upto}")
                        return


class _Process:
    """One client: calls and writes down."""

    def __init__(self, workload: Workload, name: str, client: AsyncClient) -> None:
        self.name = name
        self.client = client
        self.chance = random.Random(f"{workload.seed}/{name}")
        self._workload = workload
        self._made = 0

    @property
    def goes_on(self) -> bool:
        return not self._workload.stopping.is_set()

    async def pause(self, seconds: float) -> None:
        """Waits about so long; the end of the run ends it."""
        seconds *= self.chance.uniform(0.2, 1.8)
        if self.goes_on:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._workload.stopping.wait(), seconds)
        else:
            await asyncio.sleep(seconds)

    def bodies(self) -> list[bytes]:
        """Returns a few new bodies, now and then large ones."""
        made = []
        for _ in range(self.chance.choice((1, 1, 1, 2, 3, 8))):
            self._made += 1
            size = self.chance.choice((0, 20, 100, 100, 400, 3000)) if self.chance.random() < 0.98 else 60_000
            made.append(f"{self.name}:{self._made}:".encode() + self.chance.randbytes(size))
        return made

    async def append(self, bodies: list[bytes], producer_id: str = "", sequence: int = -1) -> Status:
        hashes = tuple(map(hash_of, bodies))
        key = f"{producer_id}/{sequence}" if producer_id else ""
        start = time.monotonic()
        try:
            if producer_id:
                result = await self.client.append(bodies, producer_id=producer_id, sequence=sequence)
            else:
                result = await self.client.append(bodies)
        except DLedgerError as error:
            status, name = _status(error), error.name
            made = Append(
                client=self.name,
                start=start,
                end=time.monotonic(),
                status=status,
                hashes=hashes,
                producer=key,
                error=name,
            )
        else:
            status = "ok"
            made = Append(
                client=self.name,
                start=start,
                end=time.monotonic(),
                status=status,
                hashes=hashes,
                producer=key,
                first=result.first_index,
                last=result.last_index,
                term=result.term,
            )
        self._workload.recorder.add(made)
        return status

    async def attempt(self, transaction: TransactionId, name: str) -> AttemptResult | None:
        bodies = self.bodies()
        hashes = tuple(map(hash_of, bodies))
        start = time.monotonic()
        result, status, error_name = None, "ok", ""
        try:
            result = await self.client.append_attempt(bodies, transaction=transaction, attempt=name)
        except DLedgerError as error:
            status, error_name = _status(error), error.name
        first, last, term = (result.first_index, result.last_index, result.term) if result else (-1, -1, -1)
        self._workload.recorder.add(
            Append(
                client=self.name,
                start=start,
                end=time.monotonic(),
                status=status,
                hashes=hashes,
                attempt=name,
                first=first,
                last=last,
                term=term,
                error=error_name,
            )
        )
        return result

    async def decide(self, transaction: TransactionId, parts: list[Part], attempts: tuple[str, ...]) -> bool:
        """Commits, or aborts if there are no parts; returns whether it is known now how the transaction ended."""
        start = time.monotonic()
        status, name = "ok", ""
        try:
            if parts:
                await self.client.commit_transaction(transaction, parts)
            else:
                await self.client.abort_transaction(transaction)
        except DLedgerError as error:
            status, name = _status(error), error.name
        self._workload.recorder.add(
            Decision(
                client=self.name,
                start=start,
                end=time.monotonic(),
                status=status,
                transaction=f"{transaction.query_id}/{transaction.batch_id}",
                commit=bool(parts),
                attempts=attempts,
                error=name,
            )
        )
        return status == "ok" or name == "TRANSACTION"

    async def fetch(
        self,
        start_index: int,
        *,
        end_index: int = END_OF_LOG,
        node: str | None = None,
        linearizable: bool = False,
        uncommitted: bool = False,
        wait_ms: int = 0,
    ) -> Fetch | None:
        """Reads and writes down; returns None if that failed."""
        start = time.monotonic()
        about = {
            "client": self.name,
            "from_index": start_index,
            "node": node or "",
            "linearizable": linearizable,
            "uncommitted": uncommitted,
        }
        try:
            found = await self.client.fetch(
                start_index,
                end_index,
                max_bytes=READ_BYTES,
                node=node,
                consistency="linearizable" if linearizable else "committed",
                isolation="read_uncommitted" if uncommitted else "read_committed",
                wait_ms=wait_ms,
            )
        except DLedgerError as error:
            failed = Read(start=start, end=time.monotonic(), status=_status(error), error=error.name, **about)
            self._workload.recorder.add(failed)
            return None
        end = time.monotonic()
        bodies = found.batch.column("body").to_pylist()
        self._workload.recorder.add(
            Read(
                start=start,
                end=end,
                status="ok",
                next_index=found.next_index,
                commit_index=found.commit_index,
                full=end_index == END_OF_LOG and sum(map(len, bodies)) + 48 * len(bodies) < READ_BYTES // 2,
                indexes=found.batch.column("index").to_numpy(),
                hashes=np.array([hash_of(body) for body in bodies], np.uint64),
                **about,
            )
        )
        return found


def _status(error: DLedgerError) -> Status:
    # An answer that cannot be read says nothing about what happened.
    return "unknown" if is_unknown(error) or isinstance(error, ProtocolError) else "fail"


# --- behaviours -------------------------------------------------------------------------------------------------------


async def _plain(process: _Process) -> None:
    while process.goes_on:
        if await process.append(process.bodies()) != "ok":
            await process.pause(0.05)
        await process.pause(0.012)


def _roamer(nodes: tuple[str, ...]) -> Callable[[_Process], Awaitable[None]]:
    """Appends, looks at one replica after the other, and then lets any replica answer, which must not show less."""

    async def behave(process: _Process) -> None:
        at = 0
        while process.goes_on:
            await process.append(process.bodies())
            if process.chance.random() < 0.5:
                found = await process.fetch(at, node=process.chance.choice(nodes), uncommitted=True)
                at = max(at, found.next_index - 5) if found is not None else at
            await process.fetch(at)
            await process.pause(0.02)

    return behave


async def _producer(process: _Process) -> None:
    """One producer id, now and then a new one; an append is repeated until its outcome is known."""
    number, sequence = 0, 0
    while process.goes_on:
        bodies, until = process.bodies(), time.monotonic() + RESOLVE_S
        while (await process.append(bodies, f"{process.name}.{number}", sequence)) != "ok":
            await process.pause(0.05)
            if not process.goes_on and time.monotonic() > until:
                return
        if process.chance.random() < 0.1:  # a repeat of what is known to be there
            await process.append(bodies, f"{process.name}.{number}", sequence)
        sequence += 1
        if process.chance.random() < 0.005:
            number, sequence = number + 1, 0
        await process.pause(0.012)


async def _transactions(process: _Process) -> None:
    """Transactions of a few attempts, of which some lose; most commit."""
    batch = 0
    while process.goes_on:
        transaction = TransactionId(process.name, batch, "run")
        batch += 1
        parts: list[Part] = []
        winners: list[str] = []
        for number in range(process.chance.choice((1, 2, 3))):
            name = f"{process.name}/{batch - 1}/{number}"
            result = await process.attempt(transaction, name)
            if result is not None and process.chance.random() < 0.8:
                parts.append(Part(result.first_index, result.last_index, result.rows, result.crc))
                winners.append(name)
        if process.chance.random() < 0.2:
            parts, winners = [], []
        until = time.monotonic() + RESOLVE_S
        while not await process.decide(transaction, parts, tuple(winners)) and time.monotonic() < until:
            await process.pause(0.1)
        await process.pause(0.1)


async def _tail(process: _Process) -> None:
    """Follows the visible end; any replica answers."""
    at = 0
    while process.goes_on:
        found = await process.fetch(at, wait_ms=200)
        at = found.next_index if found is not None else at
        await process.pause(0.03)


def _tail_of(node: str) -> Callable[[_Process], Awaitable[None]]:
    """Follows the end of what one replica knows as committed, losers included."""

    async def behave(process: _Process) -> None:
        at = 0
        while process.goes_on:
            found = await process.fetch(at, node=node, uncommitted=True)
            at = found.next_index if found is not None else at
            await process.pause(0.05 if found is not None else 0.3)

    return behave


async def _linearizable(process: _Process) -> None:
    """Reads the newest part of the log again and again."""
    at = 0
    while process.goes_on:
        found = await process.fetch(at, linearizable=True, uncommitted=True)
        at = max(0, found.next_index - process.chance.choice((0, 1, 10))) if found is not None else at
        await process.pause(0.03)


async def _again(process: _Process) -> None:
    """Reads old parts of the log again."""
    end = 0
    while process.goes_on:
        start = process.chance.randrange(0, end) if end else 0
        found = await process.fetch(start, end_index=start + 200)
        end = max(end, found.next_index) if found is not None else end
        await process.pause(0.1)
