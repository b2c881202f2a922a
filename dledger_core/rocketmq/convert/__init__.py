"""Convert stores of Java DLedger, classic CommitLogs and native stores into new stores, and verify every entry.

A source is only read. A destination is marked as incomplete until every entry was compared with its source. It cannot
be opened before, and an interrupted conversion resumes at its last saved state.
"""

from dledger_core.rocketmq.convert.plan import ConvertRequest, Report, Step, store_directory
from dledger_core.rocketmq.convert.prefix import CheckedCommitLog, read_commitlog, start_store_after
from dledger_core.rocketmq.convert.run import convert

__all__ = [
    "CheckedCommitLog",
    "ConvertRequest",
    "Report",
    "Step",
    "convert",
    "read_commitlog",
    "start_store_after",
    "store_directory",
]
