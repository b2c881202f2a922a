"""Opens the log of a group by the options of a query: each kind of ``Log`` is made here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dledger_core import StoreMismatchError
from spark_connector.connections import store_for
from spark_connector.errors import OptionError
from spark_connector.options import DLedgerOptions
from spark_connector.reading.archived import ArchivedLog
from spark_connector.reading.logs import PRECEDING, ClassicLog, JavaLog, Log, ServerLog, StoreLog

__all__ = ["names_of", "open_log"]


def names_of(options: DLedgerOptions) -> Sequence[str]:
    """Return the names of a query's logs, for ``open_log``: a mixed log is two, a CommitLog and a store."""
    if not options.path:
        return options.groups
    from dledger_core.rocketmq import locate  # nodes do not need it

    location = locate(Path(options.path))
    return ["", PRECEDING] if location.store is not None and location.commitlog is not None else [""]


def open_log(
    options: DLedgerOptions, group: str | None = None, *, measuring: bool = False, log: str | None = None
) -> Log:
    """Open the log of ``group``; a store names its group itself. ``measuring`` and ``log``: see ``client_for``."""
    if options.path:
        return _open_directory(options, group or "")
    kind: type[JavaLog | ServerLog] = JavaLog if options.protocol == "dledger-java" else ServerLog
    kind = ArchivedLog if options.archive is not None else kind
    return kind(options, group or options.groups[0], measuring=measuring, log=log)


def _open_directory(options: DLedgerOptions, group: str) -> Log:
    from dledger_core.rocketmq import check_continues, commit_log_files, locate

    location = locate(Path(options.path))
    if location.commitlog is None:
        return StoreLog(options)
    if location.store is None:
        return ClassicLog(options, location.commitlog)
    store = StoreLog(options.model_copy(update={"path": str(location.store)}))
    if not group.endswith(PRECEDING):
        return store
    try:
        check_continues(commit_log_files(location.commitlog), store_for(str(location.store), opaque=True))
    except StoreMismatchError as error:
        raise OptionError(f"path {options.path!r}: {error.what}", "", error.remedy) from None
    return ClassicLog(options, location.commitlog, store)
