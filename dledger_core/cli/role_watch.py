"""Role changes of several groups in one stream."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Self

from dledger_core.client import RoleChange
from dledger_core.connect import Client
from dledger_core.errors import DLedgerError

_Change = tuple[str, RoleChange]


class RoleWatch:
    """Follows the roles in several groups; a context manager that closes the groups' clients.

    Args:
        open_client: returns a client of a group.
        groups: their names.
    """

    def __init__(self, open_client: Callable[[str], Client], groups: Sequence[str]) -> None:
        self._open_client = open_client
        self._groups = groups
        self._clients: list[Client] = []
        self._found: queue.Queue[_Change | DLedgerError] = queue.Queue()

    def __enter__(self) -> Self:
        for group in self._groups:
            client = self._open_client(group)
            self._clients.append(client)
            threading.Thread(target=self._follow, args=(group, client), name=f"watch-{group}", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for client in self._clients:
            client.close()

    def _follow(self, group: str, client: Client) -> None:
        try:
            for change in client.role_changes():
                self._found.put((group, change))
        except CancelledError:
            pass  # the watch is closed: a closed client cancels the calls of other threads
        except DLedgerError as error:
            self._found.put(error)

    def next(self, timeout_s: float | None = None) -> _Change | None:
        """Return (group, change): first the role of each node in each group, then every change.

        Args:
            timeout_s: return None without a change in this time; None = wait without end.

        Raises:
            DLedgerError: a group cannot be followed.
        """
        try:
            found = self._found.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(found, DLedgerError):
            raise found
        return found

    def __iter__(self) -> Iterator[_Change]:
        while (found := self.next()) is not None:
            yield found
