"""Coverage and remarks of the messages of a log: see ``storage.Inspection``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from dledger_core.errors import ConfigError
from dledger_core.rocketmq.message import integrity
from dledger_core.rocketmq.message.columns import BoolArray, IntArray, text_column
from dledger_core.rocketmq.message.records import Located
from dledger_core.rocketmq.store.broker_json import topic_configs
from dledger_core.storage.check.coverage import Coverage, Remark

TIME_BACK: Final = "STORE_TIME_BACK"
NOT_TEXT: Final = "PROPERTIES_NOT_TEXT"
UNKNOWN_TOPIC: Final = "TOPIC_UNKNOWN"


@dataclass(slots=True)
class _Seen:
    count: int = 0
    position: int = -1
    index: int | None = None

    def add(self, count: int, position: int, index: int | None) -> None:
        if not self.count:
            self.position, self.index = position, index
        self.count += count


@dataclass(slots=True)
class MessageInspection:
    """Implements the remarks of ``Inspection``; its subclasses add records.

    Attributes:
        coverage: of the messages so far.
        broker: the broker's store directory, whose ``config/topics.json`` names its topics; None = unknown.
    """

    coverage: Coverage = field(default_factory=Coverage)
    broker: Path | None = None
    _latest_ms: int = 0
    _back_ms: int = 0
    _back: _Seen = field(default_factory=_Seen)
    _not_text: _Seen = field(default_factory=_Seen)
    _topics: dict[str, _Seen] = field(default_factory=dict)

    def _known_topics(self) -> Iterable[str] | None:
        """Return the topics that the broker has; None if its configuration is not there, or unreadable."""
        try:
            return None if self.broker is None else topic_configs(self.broker)
        except ConfigError:
            return None

    def see(self, located: Located, positions: IntArray, indexes: IntArray | None, good: BoolArray) -> None:
        """Add messages in log order.

        Args:
            located: the messages.
            positions: int64, shape (n,): of each row of the column.
            indexes: the same for indexes in a store; None in a CommitLog.
            good: bool, shape (n,): which rows are not damaged.
        """
        at = np.flatnonzero(good[located.rows])
        if not len(at):
            return
        rows = located.rows[at]

        def noted(seen: _Seen, count: int, which: int) -> None:
            row = rows[which]
            seen.add(count, int(positions[row]), None if indexes is None else int(indexes[row]))

        times = located.number("store_timestamp")[at]
        latest = np.maximum.accumulate(np.concatenate([[self._latest_ms], times]))
        self._latest_ms = int(latest[-1])
        steps = latest[:-1] - times
        if len(back := np.flatnonzero(steps > 0)):
            self._back_ms = max(self._back_ms, int(steps.max()))
            noted(self._back, len(back), int(back[0]))
        if len(odd := np.flatnonzero(np.isin(at, integrity.text_rows(located)))):
            noted(self._not_text, len(odd), int(odd[0]))
        topics = text_column(located.data, located.topic[at], located.topic_bytes[at]).dictionary_encode()
        codes = np.asarray(topics.indices)
        counts, firsts = np.bincount(codes), np.unique(codes, return_index=True)[1]
        for topic, count, which in zip(topics.dictionary.to_pylist(), counts.tolist(), firsts.tolist(), strict=True):
            noted(self._topics.setdefault(topic, _Seen()), count, which)

    def remarks(self) -> tuple[Remark, ...]:
        """Return the remarks."""
        found = []
        if self._back.count:
            what = f"store time before that of an earlier message, by up to {self._back_ms} ms"
            found.append((TIME_BACK, self._back, what))
        if self._not_text.count:
            found.append((NOT_TEXT, self._not_text, "properties that are not UTF-8, or end with zero bytes"))
        known = self._known_topics()
        for topic, seen in self._topics.items():
            if known is not None and topic not in known:
                found.append((UNKNOWN_TOPIC, seen, f"topics.json lacks the topic {topic}"))
        return tuple(Remark(kind, seen.count, seen.position, what, seen.index) for kind, seen, what in found)
