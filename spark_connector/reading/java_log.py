"""One group's log on Java DLedger nodes, read entry by entry from their leader.

Java tells no commit index: the driver ends a micro-batch where the log was seen to end a while ago, or below a probe
(options ``safetyLag`` and ``commitProbe``); executors read up to there without asking again. At each batch the
tracker compares the last consumed record, as with every log without an identity.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from dledger_core.errors import BehindError, DLedgerError, IndexOutOfRangeError
from spark_connector.errors import OptionError, RetentionError
from spark_connector.options import DLedgerOptions
from spark_connector.reading.logs import Bounds, Chunk, RecordFacts, client_for, facts_of, retrying
from spark_connector.reading.planning import Range

if TYPE_CHECKING:
    from dledger_core import Client

__all__ = ["JavaLog"]

_FIRST_MS: Final = 5_000
"""Before the first answer a short wait: wrong peers should be reported at once."""
_LOOK_S: Final = 0.5
_SILENT_MS: Final = 2_000

_log = logging.getLogger("spark_connector")


class JavaLog:
    """A log on Java nodes."""

    def __init__(self, options: DLedgerOptions, group: str) -> None:
        self.group = group
        self._options = options
        self._reached = False

    @property
    def _client(self) -> Client:
        return client_for(self._options, self.group)

    def bounds(self) -> Bounds:
        """Returns the safe end, which takes the safety lag at first; with read_uncommitted the stored end."""
        options = self._options
        if not self._reached and not options.commit_probe and options.safety_lag_ms > _SILENT_MS:
            lag = options.safety_lag_ms / 1000
            _log.warning("group %s: waiting %g s (safetyLag) to see which end of the log stays", self.group, lag)
        budget = options.fetch_retry_ms if self._reached else min(_FIRST_MS, options.fetch_retry_ms)
        found = retrying(self._bounds, budget)
        self._reached = True
        return found

    def _bounds(self) -> Bounds:
        if self._options.isolation == "read_uncommitted":
            leader = next((node for node in self._client.metadata().nodes if node.first_index >= 0), None)
            if leader is not None:
                return Bounds(leader.first_index, leader.last_index + 1, leader.commit_index, None)
        bounds = self._client.bounds()
        return Bounds(bounds.first_index, bounds.end, bounds.commit_index, None)

    def record(self, index: int) -> RecordFacts:
        """Reads the record at ``index``."""
        read = partial(self._client.records, index, index + 1, max_bytes=1)
        fetched = retrying(read, self._options.fetch_retry_ms, unknown_outcome=True)
        return facts_of(fetched.batch, index, self.group)

    def index_at_time(self, timestamp_ms: int, bounds: Bounds) -> int:
        """Refused: Java writes no append times."""
        raise OptionError(
            "a Java group holds no append times", "startingTimestamp, endingTimestamp", "give indexes instead"
        )

    def wait(self, known: Bounds, timeout_ms: int) -> bool:
        """Looks for another end twice a second."""
        deadline = time.monotonic() + timeout_ms / 1000
        while True:
            left = deadline - time.monotonic()
            time.sleep(max(0.0, min(_LOOK_S, left)))
            try:
                if self._bounds().end != known.end:
                    return True
            except DLedgerError:
                return True
            if left <= _LOOK_S:
                return False

    def pin(self, name: str, start: int, seconds: float) -> None:
        """Does nothing: Java's servers know no pins."""

    def chunk(self, part: Range, start: int, replica: int) -> Chunk:
        """Reads one chunk of what the driver found safe."""
        del replica
        return retrying(partial(self._chunk, part, start), self._options.fetch_retry_ms, unknown_outcome=True)

    def _chunk(self, part: Range, start: int) -> Chunk:
        try:
            found = self._client.fetch(
                start, part.end, max_bytes=self._options.read_bytes(), isolation="read_uncommitted"
            )
        except IndexOutOfRangeError as error:
            first = int(error.values.get("first_index", -1))
            if start < first:
                raise RetentionError.of(part.group, start, first, part.end) from error
            raise
        if found.next_index <= start:
            raise BehindError(f"the leader does not hold index {start}", f"group {part.group!r}", "try again")
        return Chunk(found.batch, found.next_index)
