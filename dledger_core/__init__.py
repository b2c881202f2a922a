"""A replicated commit log in DLedger's disk format: clients, local clusters and read-only access to stores.

The public names are imported when they are first used, so importing the package is quick and loads no server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from dledger_core.client import AsyncClient, AsyncProducer, Client, Producer
    from dledger_core.cluster import LocalCluster
    from dledger_core.errors import DLedgerError
    from dledger_core.storage import StoreReader, open_store

__all__ = [
    "AsyncClient",
    "AsyncProducer",
    "Client",
    "DLedgerError",
    "LocalCluster",
    "Producer",
    "StoreReader",
    "open_store",
]

_HOMES: Final = {
    "AsyncClient": "dledger_core.client",
    "AsyncProducer": "dledger_core.client",
    "Client": "dledger_core.client",
    "DLedgerError": "dledger_core.errors",
    "LocalCluster": "dledger_core.cluster",
    "Producer": "dledger_core.client",
    "StoreReader": "dledger_core.storage",
    "open_store": "dledger_core.storage",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
