"""A replicated commit log in DLedger's disk format: clients, local clusters and read-only access to stores.

Importing it loads neither server nor cluster: ``LocalCluster`` is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dledger_core.client import (
    AppendResult,
    AsyncClient,
    AsyncProducer,
    Client,
    Entry,
    Metadata,
    NodeStatus,
    Part,
    Producer,
    ProducerState,
    RoleChange,
    TransactionId,
)
from dledger_core.errors import (
    BadRequestError,
    BehindError,
    BusyError,
    ClientError,
    ConfigError,
    CorruptRecordError,
    DiskFullError,
    DLedgerError,
    FencedError,
    IndexOutOfRangeError,
    LeadershipLostError,
    NoLeaderError,
    NotLeaderError,
    ProducerError,
    ProducerUnknownError,
    RequestTimedOutError,
    SequenceConflictError,
    SequenceGapError,
    StorageError,
    StoreMismatchError,
    TransactionError,
    UnknownGroupError,
    UnreachableError,
)
from dledger_core.storage import Finding, StoreReader, StoreReport, open_store

if TYPE_CHECKING:
    from dledger_core.cluster import LocalCluster

__all__ = [
    "AppendResult",
    "AsyncClient",
    "AsyncProducer",
    "BadRequestError",
    "BehindError",
    "BusyError",
    "Client",
    "ClientError",
    "ConfigError",
    "CorruptRecordError",
    "DLedgerError",
    "DiskFullError",
    "Entry",
    "FencedError",
    "Finding",
    "IndexOutOfRangeError",
    "LeadershipLostError",
    "LocalCluster",
    "Metadata",
    "NoLeaderError",
    "NodeStatus",
    "NotLeaderError",
    "Part",
    "Producer",
    "ProducerError",
    "ProducerState",
    "ProducerUnknownError",
    "RequestTimedOutError",
    "RoleChange",
    "SequenceConflictError",
    "SequenceGapError",
    "StorageError",
    "StoreMismatchError",
    "StoreReader",
    "StoreReport",
    "TransactionError",
    "TransactionId",
    "UnknownGroupError",
    "UnreachableError",
    "open_store",
]


def __getattr__(name: str) -> Any:
    if name == "LocalCluster":
        from dledger_core.cluster import LocalCluster

        return LocalCluster
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
