"""A reader that derives from the log's entries which ids must be known, by the documented rules and nothing else.

It is the model that a run is compared with: it shares no code with the tables of the nodes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, NamedTuple, TypeVar

from benchmarks.endurance.ledger import Ledger
from dledger_core import AsyncClient
from dledger_core.client.protocol import END_OF_LOG
from dledger_core.control import unpack
from dledger_core.errors import DLedgerError, IndexOutOfRangeError

T = TypeVar("T")

DAY_MS: Final = 86_400_000
LASTING_MS: Final = 7 * DAY_MS
ONE_TIME_MS: Final = DAY_MS
CONTROL: Final = 2
"""Magic number of control entries."""
PAUSE_S: Final = 0.05


class Known(NamedTuple):
    """The newest activity of an id: log time, sequence or newest micro-batch (-1 = none), indexes of the append."""

    at_ms: int
    number: int
    first_index: int = -1
    last_index: int = -1


class Ids:
    """Ids of one kind, least recently active first; they expire after ``limit_ms`` of log time."""

    def __init__(self, limit_ms: int) -> None:
        self.limit_ms = limit_ms
        self.known: OrderedDict[str, Known] = OrderedDict()

    def touch(self, name: str, known: Known) -> None:
        self.known[name] = known
        self.known.move_to_end(name)

    def expire(self, log_time_ms: int) -> list[tuple[str, Known]]:
        """Remove and return the ids that have expired."""
        found = []
        while self.known and log_time_ms - next(iter(self.known.values())).at_ms > self.limit_ms:
            found.append(self.known.popitem(last=False))
        return found


class Auditor:
    """Follows every committed entry, and what ``read_committed`` shows. ``log_time_ms`` is the newest one read.

    Args:
        client: reads with it.
        ledger: gets the rows that are visible.
    """

    def __init__(self, client: AsyncClient, ledger: Ledger) -> None:
        self._client = client
        self._ledger = ledger
        self.next_index = 0
        self.visible_index = 0
        self.log_time_ms = 0
        self.producers = Ids(LASTING_MS)
        self.producers_once = Ids(ONE_TIME_MS)
        self.queries = Ids(LASTING_MS)
        self.queries_once = Ids(ONE_TIME_MS)
        self.dormant: dict[str, Known] = {}
        self.watched: dict[str, int] = {}
        """Log time of the newest entry of each id that a writer watches, -1 before the first."""
        self._news = asyncio.Event()

    # --- reading ---------------------------------------------------------------------------------------------

    async def follow_all(self) -> None:
        """Read every committed entry, until cancelled."""
        async for found in self._follow("auditor", lambda: self._client.records(self.next_index, END_OF_LOG)):
            batch = found.batch
            magic = batch.column("magic").to_pylist()
            rows = zip(batch.column("index").to_pylist(), magic, batch.column("body"), strict=True)
            for index, kind, body in rows:
                if kind == CONTROL:
                    self.apply(index, unpack(body.as_py()))
            self.next_index = found.next_index
            self._tell()
            if not batch.num_rows:
                await asyncio.sleep(PAUSE_S)

    async def follow_visible(self) -> None:
        """Read what is visible, until cancelled."""
        async for found in self._follow(
            "reader", lambda: self._client.fetch(self.visible_index, END_OF_LOG, wait_ms=1000)
        ):
            batch = found.batch
            for index, body in zip(batch.column("index").to_pylist(), batch.column("body").to_pylist(), strict=True):
                self._ledger.saw(index, body)
            self.visible_index = found.next_index
            self._tell()

    async def _follow(self, who: str, read: Callable[[], Awaitable[T]]) -> AsyncIterator[T]:
        """Yield one read after the other; end, with a violation, once retention has deleted what is next."""
        while True:
            try:
                found = await read()
            except IndexOutOfRangeError as error:
                self._ledger.violated(f"the {who} fell behind retention: {error}")
                return
            except DLedgerError as error:
                self._ledger.counts[f"{who} retried after {error.name}"] += 1
                await asyncio.sleep(PAUSE_S)
                continue
            yield found

    def _tell(self) -> None:
        """Wake the waiting callers."""
        self._news.set()
        self._news = asyncio.Event()

    async def reach(self, index: int) -> None:
        """Wait until the entry at ``index`` was read."""
        while self.next_index <= index:
            await self._news.wait()

    async def reach_visible(self) -> None:
        """Wait until all entries that were read are visible."""
        while self.visible_index < self.next_index:
            await self._news.wait()

    async def catch_up(self) -> None:
        """Wait until all that is committed by now was read."""
        while True:
            try:
                end = (await self._client.bounds(isolation="read_uncommitted")).end
                break
            except DLedgerError:
                await asyncio.sleep(PAUSE_S)
        await self.reach(end - 1)

    # --- the rules -------------------------------------------------------------------------------------------

    def apply(self, index: int, fields: dict[str, Any]) -> None:
        """Apply one committed control entry."""
        self.log_time_ms = max(self.log_time_ms, fields.get("t", 0))
        kind = fields.get("k")
        if kind == "producer":
            ids = self.producers_once if fields.get("o") else self.producers
            ids.touch(fields["p"], Known(self.log_time_ms, fields["s"], index + 1, index + fields["n"]))
            self._watch(fields["p"])
        elif kind in ("attempt", "commit", "abort"):
            self._apply_transaction(kind, fields)
        for ids in (self.producers, self.producers_once, self.queries_once):
            ids.expire(self.log_time_ms)
        for name, known in self.queries.expire(self.log_time_ms):
            if known.number >= 0:
                self.dormant[name] = known

    def _apply_transaction(self, kind: str, fields: dict[str, Any]) -> None:
        name = fields["q"]
        known = self.queries.known.get(name) or self.queries_once.known.get(name) or self.dormant.get(name)
        newest = -1 if known is None else known.number
        if (kind == "abort" and known is None) or (kind != "attempt" and newest >= fields["b"]):
            return  # of an unknown query, or the micro-batch is committed already
        once = name in self.queries_once.known or (known is None and bool(fields.get("o")))
        self.dormant.pop(name, None)
        ids = self.queries_once if once else self.queries
        ids.touch(name, Known(self.log_time_ms, fields["b"] if kind == "commit" else newest))
        self._watch(name)

    def _watch(self, name: str) -> None:
        if name in self.watched:
            self.watched[name] = self.log_time_ms

    def counts(self) -> dict[str, int]:
        """Return the rows that the nodes' tables must have, by the names that ``metadata`` gives them."""
        producers, once = len(self.producers.known), len(self.producers_once.known)
        queries, queries_once = len(self.queries.known), len(self.queries_once.known)
        return {
            "producers": producers + once,
            "producers used once": once,
            "queries": queries + queries_once + len(self.dormant),
            "queries used once": queries_once,
        }
