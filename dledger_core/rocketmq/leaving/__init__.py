"""Out of DLedger mode: from a stopped store to a directory in which RocketMQ starts as master or in controller mode.

A source is only read. The destination's directories get their names only when everything is written, and an
interrupted run continues at its last saved state.
"""

from dledger_core.rocketmq.leaving.plan import CommittedEntry, LeaveReport, LeaveRequest
from dledger_core.rocketmq.leaving.run import group_of_log, leave

__all__ = ["CommittedEntry", "LeaveReport", "LeaveRequest", "group_of_log", "leave"]
