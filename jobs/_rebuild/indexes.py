"""RocketMQ's index files of the log in a directory: written by the driver in one pass, and compared with a broker's."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dledger_core import open_store
from dledger_core.rocketmq import LogDirectory, Span, compare_key_files, rebuild_key_files

from .files import INDEX_DIRECTORY

if TYPE_CHECKING:
    from .plan import RebuildPlan

__all__ = ["write_indexes"]

_ALL: Final = (0, (1 << 63) - 1)


def write_indexes(plan: RebuildPlan) -> dict[str, Any]:
    """Write the index files of a plan, compare them if the plan does; return fields of the JSON summary."""
    assert plan.indexes is not None
    assert plan.index_size is not None
    [indexes] = plan.ranges.values()
    path = plan.source.get("path")
    with ExitStack() as stack:
        store = None if path is None else stack.enter_context(open_store(path))
        shown = None if store is None else store.shown(until=plan.until)
        log = LogDirectory(Path(path or plan.classic[0].path), store, plan.classic, opaque=True)
        written = rebuild_key_files(log, Span(_ALL, indexes), shown, Path(plan.indexes), plan.index_size)
        begin = plan.classic[0].position if plan.classic else None
        if begin is None and store is not None and indexes[0] < indexes[1]:
            begin = int(store.position_of(indexes[0]))
    found: dict[str, Any] = {"indexes": written.summary()}
    if plan.compared is not None and plan.log_end is not None and begin is not None:
        near = Path(plan.compared)
        broker = (near if (near / INDEX_DIRECTORY).is_dir() else near.parent) / INDEX_DIRECTORY
        read = begin, plan.log_end.read
        compared = compare_key_files(
            Path(written.directory), broker, plan.index_size, read, now=plan.log_end.now, unread=written.unread
        )
        found["compare_indexes"] = compared.summary()
    return found
