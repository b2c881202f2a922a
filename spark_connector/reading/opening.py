"""Opens the log of a group by the options of a query: each kind of ``Log`` is made here."""

from __future__ import annotations

from pathlib import Path

from dledger_core.rocketmq import locate
from spark_connector.options import DLedgerOptions
from spark_connector.reading.archived import ArchivedLog
from spark_connector.reading.logs import ClassicLog, JavaLog, Log, ServerLog, StoreLog

__all__ = ["open_log"]


def open_log(
    options: DLedgerOptions, group: str | None = None, *, measuring: bool = False, log: str | None = None
) -> Log:
    """Open the log of ``group``; a store names its group itself. ``measuring`` and ``log``: see ``client_for``."""
    if options.path:
        location = locate(Path(options.path))
        if location.commitlog is not None and location.store is None:
            return ClassicLog(options, location.commitlog)
        return StoreLog(options)
    kind: type[JavaLog | ServerLog] = JavaLog if options.protocol == "dledger-java" else ServerLog
    kind = ArchivedLog if options.archive is not None else kind
    return kind(options, group or options.groups[0], measuring=measuring, log=log)
