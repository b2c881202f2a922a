"""Role changes of several groups in one stream."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence

from dledger_core.client import RoleChange
from dledger_core.connect import Client
from dledger_core.errors import DLedgerError


def role_changes(open_client: Callable[[str], Client], groups: Sequence[str]) -> Iterator[tuple[str, RoleChange]]:
    """Yield (group, change): the role of each node in each group, then every change, without end.

    Args:
        open_client: returns a client of a group.
        groups: their names.
    """
    changes: queue.Queue[tuple[str, RoleChange]] = queue.Queue()

    def follow(group: str) -> None:
        with contextlib.suppress(DLedgerError), open_client(group) as client:
            for change in client.role_changes():
                changes.put((group, change))

    for group in groups:
        threading.Thread(target=follow, args=(group,), name=f"watch-{group}", daemon=True).start()
    while True:
        yield changes.get()
