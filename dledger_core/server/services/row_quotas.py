"""Quotas on the rows of a group's tables: producers and open transactions that each principal has added.

The tables are a function of the log, and the log does not name principals. So the leader remembers which rows it has
admitted for whom: in memory, with security only. A new leader starts without any, and counts the rows that it admits
itself; the limits of the tables hold in any case. A row counts until it has left the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Hashable
from functools import partial
from itertools import islice
from typing import Any, Final, Generic, TypeVar

from dledger_core.config import Limits
from dledger_core.control import TransactionId
from dledger_core.net import messages
from dledger_core.net.limits.quotas import Quota, Tenant, exceeded
from dledger_core.storage.tables.tables import LogTables

Row = TypeVar("Row", bound=Hashable)

_CHECKED_MAX: Final = 1000
"""Rows that are checked per request of a principal at its limit, so that refusing many requests stays cheap."""


class RowQuota(Generic[Row]):
    """The rows of one kind that each principal has added to each group.

    Args:
        quota: the quota.
        limit: rows of one principal in one group.
        refused: counts refusals by quota.
        remedy: what the principal may do about it.
        retry_after_ms: pause that the error asks for.
    """

    def __init__(self, quota: Quota, limit: int, refused: Counter[Quota], remedy: str, retry_after_ms: int) -> None:
        self._quota = quota
        self._limit = limit
        self._refused = refused
        self._remedy = remedy
        self._retry_after_ms = retry_after_ms
        self._rows: dict[tuple[str, str], dict[Row, int]] = {}
        """By principal and group: each row, and how many of its requests are in progress."""

    def taken(self, principal: str, group: str) -> int:
        """Return the number of rows that count, those that have left the table unnoticed included."""
        return len(self._rows.get((principal, group), ()))

    def take(self, principal: str, group: str, row: Row, table: Container[Row]) -> Callable[[Container[Row]], None]:
        """Count a row that a request is about to add.

        Args:
            principal: the one that asks.
            group: its group.
            row: the row.
            table: the rows of the table now.

        Returns:
            A function to call with the rows of the table once the request has its response.

        Raises:
            QuotaExceededError: the row is new, and the principal has too many.
        """
        rows = self._rows.setdefault((principal, group), {})
        if row not in rows:
            if row in table:
                return _nothing
            if len(rows) >= self._limit:
                self._forget_absent(rows, table)
            if len(rows) >= self._limit:
                self._refused[self._quota] += 1
                taken = f"{len(rows)} {self._quota.words} in group {group}"
                raise exceeded(self._quota, principal, taken, self._limit, self._remedy, self._retry_after_ms)
        rows[row] = rows.get(row, 0) + 1
        return partial(_settle, rows, row)

    def _forget_absent(self, rows: dict[Row, int], table: Container[Row]) -> None:
        """Check the rows that were not checked for longest, and forget those that the table has no longer."""
        for row in list(islice(rows, _CHECKED_MAX)):
            in_progress = rows.pop(row)
            if in_progress or row in table:
                rows[row] = in_progress


def _settle(rows: dict[Any, int], row: Hashable, table: Container[Any]) -> None:
    rows[row] -= 1
    if not rows[row] and row not in table:  # it was refused
        del rows[row]


def _nothing(table: Container[Any]) -> None:
    del table


class WriterQuotas:
    """Quotas on what the appends of principals add to the tables of the groups that this node leads.

    Args:
        limits: the node's limits.
        refused: counts refusals by quota.
    """

    def __init__(self, limits: Limits, refused: Counter[Quota]) -> None:
        self.producers: RowQuota[str] = RowQuota(
            Quota.PRODUCERS,
            limits.principal_producers,
            refused,
            "reuse producer ids, or remove unused ones: 'dledger producer expire'",
            limits.retry_after_ms,
        )
        self.transactions: RowQuota[tuple[str, int]] = RowQuota(
            Quota.OPEN_TRANSACTIONS,
            limits.principal_open_transactions,
            refused,
            "commit or abort transactions before others are opened",
            limits.retry_after_ms,
        )
        self.aborted: RowQuota[str] = RowQuota(
            Quota.OPEN_TRANSACTIONS,
            limits.principal_open_transactions,
            refused,
            "the leader aborts the transaction once it is inactive for too long",
            limits.retry_after_ms,
        )

    def admit(
        self, tenant: Tenant | None, group: str, message: messages.AppendRequest, tables: Callable[[], LogTables]
    ) -> Callable[[], None]:
        """Count what an append adds; without a principal nothing counts.

        Args:
            tenant: the principal's share of the node.
            group: the group.
            message: the append.
            tables: returns the group's tables, which a snapshot install replaces.

        Returns:
            A function to call once the append has its response.

        Raises:
            QuotaExceededError: the principal has added too many.
        """
        if tenant is None:
            return _no_row
        if message.transaction is not None:
            place = message.transaction["q"], message.transaction["b"]
            settle_place = self.transactions.take(tenant.name, group, place, tables().transactions.open)
            return lambda: settle_place(tables().transactions.open)
        if message.producer_id is not None:
            return self.admit_producer(tenant, group, message.producer_id, tables)
        return _no_row

    def admit_producer(
        self, tenant: Tenant | None, group: str, producer_id: str, tables: Callable[[], LogTables]
    ) -> Callable[[], None]:
        """Count a producer whose append is about to be admitted; otherwise as ``admit``."""
        if tenant is None:
            return _no_row
        settle_id = self.producers.take(tenant.name, group, producer_id, tables().producers)
        return lambda: settle_id(tables().producers)

    def admit_abort(
        self, tenant: Tenant | None, group: str, transaction: TransactionId, tables: Callable[[], LogTables]
    ) -> Callable[[], None]:
        """Count a query that an abort makes known; it counts until it expires. Otherwise as ``admit``."""
        query_id = transaction.query_id
        if tenant is None or not transaction.run_id or not query_id or tables().transactions.knows(query_id):
            return _no_row
        settle = self.aborted.take(tenant.name, group, query_id, tables().transactions.only_aborted)
        return lambda: settle(tables().transactions.only_aborted)


def _no_row() -> None:
    pass
