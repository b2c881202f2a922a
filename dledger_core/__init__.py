"""A replicated commit log in DLedger's disk format: clients, local clusters and read-only access to stores.

Importing it loads nothing else: each name is imported when it is first used, so a program pays for what it needs alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dledger_core.client import (
        AppendResult,
        AsyncClient,
        AsyncProducer,
        Client,
        Entry,
        Metadata,
        NodeStatus,
        Part,
        PositionFetch,
        Producer,
        ProducerState,
        RoleChange,
        TransactionId,
    )
    from dledger_core.cluster import LocalCluster
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
    "PositionFetch",
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

_PLACES: Final = {
    **dict.fromkeys(("Finding", "StoreReader", "StoreReport", "open_store"), "dledger_core.storage"),
    "LocalCluster": "dledger_core.cluster",
}
"""Where a name lies that is neither an error nor the client's."""


def __getattr__(name: str) -> Any:
    import importlib

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = "dledger_core.errors" if name.endswith("Error") else _PLACES.get(name, "dledger_core.client")
    value = globals()[name] = getattr(importlib.import_module(place), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
