"""What a client asks about producers and transactions: questions to the leader, each repeatable."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from dledger_core.client.describing import producer_of, transaction_map, transaction_of
from dledger_core.client.results import ProducerState, TransactionState
from dledger_core.control import Part, TransactionId, check_parts
from dledger_core.net.frame import Frame
from dledger_core.net.protocol import Type

__all__ = ["TransactionCalls"]


class TransactionCalls(ABC):
    """The part of ``AsyncClient`` that is about producers and transactions."""

    @abstractmethod
    async def _ask_leader(self, request: dict[str, Any]) -> Frame: ...

    async def producer(self, producer_id: str) -> ProducerState:
        """Returns what the log knows of a producer."""
        return producer_of(await self._ask_leader({"t": Type.PRODUCER, "p": producer_id}))

    async def transaction(self, transaction: TransactionId) -> TransactionState:
        """Returns the state of a transaction."""
        return await self._transaction("state", transaction)

    async def commit_transaction(
        self, transaction: TransactionId, parts: Sequence[Part], input_id: str = ""
    ) -> TransactionState:
        """Commits a transaction: makes the named ranges visible. Repeatable; ``input_id`` says what it was made of.

        Raises:
            TransactionError: aborted, or committed with other parts.
            FencedError: a newer run of the query exists.
            BadRequestError: too many parts (above 16,000).
        """
        check_parts(parts)
        return await self._transaction("commit", transaction, parts=[[*map(int, p)] for p in parts], i=input_id or None)

    async def abort_transaction(self, transaction: TransactionId) -> TransactionState:
        """Aborts a transaction: its entries stay invisible. Repeatable."""
        return await self._transaction("abort", transaction)

    async def _transaction(self, op: str, key: TransactionId, **fields: Any) -> TransactionState:
        fields |= {"t": Type.TRANSACTION, "op": op, "x": transaction_map(key)}
        return transaction_of(await self._ask_leader(fields))
