"""How long the event loop stalls: the lateness of a timer that is due several times a second."""

from __future__ import annotations

import asyncio
from typing import Final

from dledger_core.server.monitoring.measures import Durations

INTERVAL_S: Final = 0.25


class LoopDelays:
    """Measures the running event loop from ``start`` to ``close``.

    Attributes:
        durations: the lateness of each timer.
    """

    def __init__(self) -> None:
        self.durations = Durations()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the timer."""
        loop = asyncio.get_running_loop()
        due = loop.time() + INTERVAL_S

        def fire() -> None:
            self.durations.observe(max(loop.time() - due, 0.0))
            self.start()

        self._timer = loop.call_at(due, fire)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
