"""The queues of a log, counted in one pass, for ``consume_queues.ipynb``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.rocketmq import (
    Damaged,
    Deleted,
    LogDirectory,
    QueueStatistics,
    consumer_lag,
    locate,
    lost_units,
    queue_statistics,
    queues_in_rocksdb,
)

from .facts import Facts, size_text
from .note import Note
from .queue_plots import NO_CONSUMERS
from .sources import Source, open_source
from .table import Table, readable

__all__ = ["Queues", "open_queues"]

_BUCKET_SECONDS: Final = "5"


@dataclass(frozen=True)
class Queues:
    """The queues of a log.

    Attributes:
        name: the directory, or the group.
        summary: lines about the log.
        everything: of all topics.
        statistics: without RocketMQ's own topics.
        lag: messages that wait for consumer groups (``dledger_core.rocketmq.consumer_lag``); None for a group.
        bucket_seconds: width of a time bucket.
        damage: a sentence for each range that could not be read, and for each queue of which the broker lost units.
        on_disk: the broker's consume queues next to the log, in words; None for a native log and a group.
    """

    name: str
    summary: tuple[str, ...]
    everything: QueueStatistics
    statistics: QueueStatistics
    lag: pa.Table | None
    bucket_seconds: float
    damage: tuple[str, ...] = field(default=())
    on_disk: str | None = None

    def facts(self) -> Facts:
        """Return the log and its queues in words; a notebook shows them for the queues too."""
        own, every = self.statistics.queues, self.everything.queues
        facts = {"log": self.name, "contents": "; ".join(self.summary)}
        facts |= {"queues": f"{own.num_rows} of {every.num_rows}", "messages": f"{_sum(own)} of {_sum(every)}"}
        facts["duplicate queue offsets"] = str(pc.sum(every["spare"]).as_py() or 0)
        facts["entries without a message"] = str(self.everything.not_messages)
        facts |= {} if self.on_disk is None else {"consume queues of the broker": self.on_disk}
        return Facts(facts, self.damage)

    def __repr__(self) -> str:
        return repr(self.facts())

    def _repr_html_(self) -> str:
        return self.facts()._repr_html_()

    def table(self) -> Table | Note:
        """Return a row per queue."""
        return _table(self.statistics.queues, "The log has no message of a queue.")

    def skew(self) -> Table | Note:
        """Return a row per topic with several queues, the most uneven first."""
        return _table(self.statistics.skew(), "No topic has more than one queue.")

    def waiting(self, count: int = 20) -> Table | Note:
        """Return a row per consumer group and queue, those with the most waiting messages first."""
        return Note(NO_CONSUMERS) if self.lag is None else _table(self.lag.slice(0, count), NO_CONSUMERS)


def open_queues(
    source: str | Path | None = None, group: str | None = None, *, bucket_seconds: float | None = None
) -> Queues:
    """Count the messages of a log and close it again; print its size before.

    Args:
        source: a broker's directory, a store, a CommitLog, or the peers of a group. None = ``DLEDGER_BROKER``,
            ``DLEDGER_SOURCE`` or ``DLEDGER_PEERS``; without them the store of a real broker, from the tests.
        group: the group of peers. None = ``DLEDGER_GROUP``, or ``default``.
        bucket_seconds: width of a time bucket; None = ``DLEDGER_BUCKET_SECONDS``, or 5.

    Raises:
        DLedgerError: there is no log, or it cannot be read.
    """
    bucket_seconds = bucket_seconds or float(os.environ.get("DLEDGER_BUCKET_SECONDS", _BUCKET_SECONDS))
    with open_source(source or os.environ.get("DLEDGER_BROKER"), group, demo="broker") as opened:
        count = f", {opened.end - opened.first_index:,} indexes" if opened.end else ""
        print(f"{opened.name}: {size_text(opened.nbytes)}{count}")
        damage: list[str] = []
        directory = opened.directory
        batches = _intact(opened, damage)
        found = queue_statistics(batches, bucket_seconds, None if directory is None else directory.broker_end)
        on_disk, lost = (None, []) if directory is None else _on_disk(directory, found.queues)
        return Queues(
            opened.name,
            tuple(directory.summary()) if directory is not None else (opened.kind,),
            found,
            found.of_users(),
            consumer_lag(directory.path, found.queues) if directory is not None else None,
            bucket_seconds,
            tuple(dict.fromkeys([*lost, *damage, *opened.problems()])),
            on_disk,
        )


def _on_disk(directory: LogDirectory, queues: pa.Table) -> tuple[str | None, list[str]]:
    """Return the consume queues next to a log in words, and a sentence for each that lacks units."""
    location = locate(directory.path)
    if queues_in_rocksdb(location.broker / "consumequeue"):
        return "in RocksDB (storeType=defaultRocksDB); rebuild_consume_queue.py --compare checks each unit", []
    lost = lost_units(location.broker, queues)
    if lost is None:
        native = directory.log is not None and directory.log.writer == "dledger-python"
        return None if native else f"there is no consumequeue in {location.broker}", []
    texts = [
        f"the broker's consume queue of {topic} / {queue} ends at {have:,}, the log at {end:,}: "
        f"consumers do not get {end - have:,} messages, unless the topic was deleted"
        for topic, queue, have, end in lost
    ]
    parts = {"--commitlog": location.commitlog, "--store": location.store}
    source = " ".join(f"{name} {shlex.quote(str(path))}" for name, path in parts.items() if path is not None)
    compared = shlex.quote(str(location.broker / "consumequeue"))
    command = f"python jobs/rebuild_consume_queue.py {source} --compare {compared} --table DIR"
    complete = f"{queues.num_rows - len(lost)} of {queues.num_rows} reach the end of the log"
    words = f"{complete}; rebuild_consume_queue.py --compare checks each unit"
    return words, [*texts, *([f"compare each unit: {command}"] if texts else [])]


def _intact(opened: Source, damage: list[str]) -> Iterator[pa.RecordBatch]:
    for each in opened.everything():
        if isinstance(each, Damaged | Deleted):
            damage.append(str(each))
        else:
            yield each


def _sum(queues: pa.Table) -> Any:
    return pc.sum(queues["messages"]).as_py() or 0


def _table(table: pa.Table, otherwise: str) -> Table | Note:
    return readable(table.to_pandas()) if table.num_rows else Note(otherwise)
