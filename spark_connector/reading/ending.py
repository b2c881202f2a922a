"""The end that a stream never passes: an index per group, or the first entry appended at a time or later.

Once known such an end never moves: indexes keep their entries, and append times never go back. A trigger that ends by
itself (AvailableNow) ends there; any other goes on without new rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dledger_core import LogBounds
from spark_connector.errors import OptionError
from spark_connector.options import EARLIEST, LATEST, DLedgerOptions

__all__ = ["EndBound"]


class EndBound:
    """The ends that the options give to a stream; a time wins over an index, as with Kafka.

    Raises:
        OptionError: ``endingOffsets`` holds a word: where the log ends now is what the trigger AvailableNow is for.
    """

    def __init__(self, options: DLedgerOptions) -> None:
        spec = options.ending_offsets
        if spec is not None and (not isinstance(spec, Mapping) or {EARLIEST, LATEST} & set(spec.values())):
            raise OptionError(
                "a stream can end only at an index",
                "endingOffsets",
                'give indexes per group like {"default": 1200}, or use endingTimestamp; '
                "to read what is there now use trigger(availableNow=True)",
            )
        self._indexes = dict(spec) if isinstance(spec, Mapping) else {}
        self._times = options.ending_timestamp
        self._found: dict[str, int] = {}

    def ends(self, bounds: Mapping[str, LogBounds], index_at: Callable[[str, int], int]) -> dict[str, int]:
        """Returns how far each group may be read of what is there now.

        Args:
            bounds: what is there.
            index_at: returns the first index of a group that was appended at or after a time, else its end.
        """
        return {group: min(view.end, self._end(group, view, index_at)) for group, view in bounds.items()}

    def _end(self, group: str, view: LogBounds, index_at: Callable[[str, int], int]) -> int:
        when = self._times if isinstance(self._times, int) else (self._times or {}).get(group)
        if when is None:
            return self._indexes.get(group, view.end)
        if group not in self._found:
            index = index_at(group, when)
            if index >= view.end:
                return view.end
            self._found[group] = index
        return self._found[group]
