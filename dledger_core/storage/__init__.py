"""A replica's files in DLedger's disk format: the commit log, its recovery, and read-only access to any store."""

from dledger_core.storage.check.coverage import Coverage, Remark
from dledger_core.storage.check.verify import Finding, StoreReport
from dledger_core.storage.read.store_reader import StoreReader, open_store
from dledger_core.storage.read.visibility import Until, Visibility
from dledger_core.storage.write.commit_log import CommitLog

__all__ = [
    "CommitLog",
    "Coverage",
    "Finding",
    "Remark",
    "StoreReader",
    "StoreReport",
    "Until",
    "Visibility",
    "open_store",
]
