"""A replica's files in DLedger's disk format: the commit log, its recovery, and read-only access to any store."""

from dledger_core.storage.commit_log import CommitLog
from dledger_core.storage.reader import StoreReader, open_store
from dledger_core.storage.verify import Finding, StoreReport
from dledger_core.storage.visibility import Until, Visibility

__all__ = ["CommitLog", "Finding", "StoreReader", "StoreReport", "Until", "Visibility", "open_store"]
