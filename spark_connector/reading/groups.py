"""Which groups a query reads: those that are named, or those that nodes host and whose names fit a pattern."""

from __future__ import annotations

import time
from collections.abc import Callable

from spark_connector.connections import client_for
from spark_connector.errors import OptionError
from spark_connector.options import DLedgerOptions

__all__ = ["GroupFinder"]


class GroupFinder:
    """Looks for the groups of ``groupsPattern``.

    A group counts only from when its log has an identity: before, nothing was ever appended to it.
    """

    def __init__(self, options: DLedgerOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        self._asked: float | None = None
        self._hosted: tuple[str, ...] = ()

    def find(self) -> list[str]:
        """Asks the nodes and returns the groups that fit now, sorted."""
        options = self._options
        # Every client of these nodes can ask for their groups.
        hosted = client_for(options, options.groups[0], planning=True).groups()
        self._asked = self._clock()
        self._hosted = tuple(hosted)
        return [group for group, log in hosted.items() if log is not None and options.selects(group)]

    def is_due(self) -> bool:
        """Whether ``discoveryInterval`` has passed since the nodes were asked last."""
        return self._asked is None or self._clock() - self._asked >= self._options.discovery_ms / 1000

    def nothing_found(self) -> OptionError:
        """Returns the error for a pattern that fits no group."""
        return OptionError(
            f"no group fits {self._options.groups_pattern!r}",
            "groupsPattern",
            f"the nodes host: {', '.join(self._hosted) or 'none'}; it must match a whole name",
        )
