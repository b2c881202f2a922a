"""Copies stores of Java DLedger, classic CommitLogs and our own stores into new stores, entry by entry, verified.

A source is only read. A destination is marked as incomplete until every entry was compared with its source; nobody
can open it before, and an interrupted conversion goes on where it stopped.
"""

from dledger_core.rocketmq.convert.plan import ConvertRequest, Report, Step, store_directory
from dledger_core.rocketmq.convert.prefix import OldLog, begin_behind, read_old_log
from dledger_core.rocketmq.convert.run import convert

__all__ = [
    "ConvertRequest",
    "OldLog",
    "Report",
    "Step",
    "begin_behind",
    "convert",
    "read_old_log",
    "store_directory",
]
