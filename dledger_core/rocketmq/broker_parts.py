"""Parts of a broker's directory compared with each other: CommitLog, consume queues, key index, checkpoint.

A broker writes a message to its log first. It then adds it to the consume queue and the key index, and records in
``checkpoint`` up to which store time the log is flushed. So a part that is ahead of the log shows that the log lost its
end, and a message without its queue that the queue was lost.
"""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from dledger_core.errors import ConfigError
from dledger_core.rocketmq.inspection import KeyIndex, LogInspection, key_index
from dledger_core.rocketmq.message.layout import PHYSICAL_OFFSET_DELTA
from dledger_core.rocketmq.store.broker_json import topic_configs
from dledger_core.rocketmq.store.consume_queue import QueueEnd, queue_tails, queues_in_rocksdb

_CHECKPOINT: Final = struct.Struct(">qqqqq")
"""Store times of the newest message in the flushed CommitLog, consume queues and key index; the end of the log that the
master had flushed, and the confirm offset (StoreCheckpoint.java)."""
_CHECKPOINT_BYTES: Final = 4096
_CLOCKS: Final = timedelta(seconds=1)
"""Difference of clocks: messages of an earlier master may have later store times than the last one."""
_MILLIS_END: Final = 1 << 42
_NAMED_MAX: Final = 3
_TOPIC_MAX: Final = 60
_NAME_BYTES_MAX: Final = 255
_QUEUES: Final = "consumequeue"
_BATCH_QUEUES: Final = "batchconsumequeue"
_RESTORE: Final = "restore the newest files of the log from a copy, or take the messages from another broker"

_IN_ROCKSDB: Final = (
    "the consume queues are in RocksDB (storeType=defaultRocksDB) and were not checked; "
    "'python jobs/rebuild_consume_queue.py' checks each unit with --compare, and writes them as files with --files"
)
_MISSING: Final = {
    "lost": "messages are in the log and their consume queues are missing, so consumers do not get them; "
    "'python jobs/rebuild_consume_queue.py' writes them with --files",
    "deleted": "the log has messages of deleted topics, which topics.json does not have",
    "long": "topics have names that are too long for a directory: they have no consume queues on any broker",
    "short": "consume queues end before messages of the log; 'python jobs/rebuild_consume_queue.py' checks each unit "
    "with --compare",
}

_Queue = tuple[str, int]


@dataclass(frozen=True, slots=True)
class PartProblem:
    """A difference between two parts.

    Attributes:
        message: a sentence.
        path: the part that differs.
        position: in the log; None without one.
        is_damage: whether something is lost; otherwise a broker may leave its directory like this.
        count: number of queues.
    """

    message: str
    path: Path
    position: int | None
    is_damage: bool
    count: int = 1

    def __str__(self) -> str:
        return f"{self.message} ({self.path})"


@dataclass(frozen=True, slots=True)
class BrokerParts:
    """The parts next to a log. Read them before the log: a running broker writes the log first.

    Attributes:
        broker: the broker's directory.
        queues: end of each consume queue; None without any.
        keys: the key index; None without one.
        flushed: store time of the newest message that ``checkpoint`` covers; None if unknown.
        rocksdb: whether the consume queues are in RocksDB, and therefore not compared.
    """

    broker: Path
    queues: dict[_Queue, QueueEnd] | None
    keys: KeyIndex | None
    flushed: datetime | None
    rocksdb: bool = False

    def compare(self, inspection: LogInspection) -> list[PartProblem]:
        """Return the differences from the log.

        Args:
            inspection: of the log, with its last entries.
        """
        if not inspection.last or not inspection.messages:
            return []
        last = inspection.last[-1]
        end = last["position"] + (0 if last["index"] is None else PHYSICAL_OFFSET_DELTA)
        until = inspection.until
        if inspection.stored is not None:  # Java records its commit index after a broker has filled the queues
            end, time = inspection.stored
            until = max(filter(None, (until, time)), default=None)
        return [*self._ahead(end, until), *self._queues_of(inspection), *self._empty_files()]

    def without_log(self) -> list[PartProblem]:
        """Return the differences from a log that is missing."""
        found = []
        if self.queues:
            units = sum(queue.slots for queue in self.queues.values())
            what = f"the log is missing, and the consume queues have {units:,} units"
            found.append(PartProblem(f"{what}: {_RESTORE}", self.broker / _QUEUES, None, is_damage=True))
        return found

    def _empty_files(self) -> list[PartProblem]:
        """Return the files with which a broker does not start."""
        found = [queue.empty_file for queue in (self.queues or {}).values() if queue.empty_file is not None]
        if not found:
            return []
        names = _list([str(path.relative_to(self.broker)) for path in sorted(found)])
        what = f"the last file of a consume queue is empty, and brokers may not start with it: move it away: {names}"
        return [PartProblem(what, self.broker / _QUEUES, None, is_damage=True, count=len(found))]

    def _ahead(self, end: int, stored: datetime | None) -> list[PartProblem]:
        """Return the parts that name messages after the last one."""
        found = []
        ahead = {name: queue for name, queue in (self.queues or {}).items() if queue.position > end}
        if ahead:
            newest = max(queue.position for queue in ahead.values())
            what = f"the last message of the log is at position {end}, and {len(ahead)} consume queues have later ones"
            what = f"{what}, up to position {newest}: {_RESTORE}"
            found.append(PartProblem(what, self.broker / _QUEUES, newest, is_damage=True))
        if self.keys is not None and self.keys.position > end:
            what = f"the last message of the log is at position {end}, and the key index has later ones"
            what = f"{what}, up to position {self.keys.position}: {_RESTORE}"
            found.append(PartProblem(what, self.broker / "index", self.keys.position, is_damage=True))
        if self.flushed is not None and stored is not None and stored + _CLOCKS < self.flushed:
            times = f"{_text(stored)}, and the checkpoint covers messages up to {_text(self.flushed)}"
            what = f"the newest message of the log was stored at {times}: {_RESTORE}"
            found.append(PartProblem(what, self.broker / "checkpoint", end, is_damage=True))
        return found

    def _queues_of(self, inspection: LogInspection) -> list[PartProblem]:
        """Return the queues that lack messages; only of messages before the newest unit, a broker indexes the rest."""
        if self.rocksdb:
            return [PartProblem(_IN_ROCKSDB, self.broker / _QUEUES, None, is_damage=False)]
        topics = _topics_of(self.broker)
        queues = self.queues
        if queues is None:
            if topics is None or (self.broker / _QUEUES).exists():  # a log alone
                return []
            queues = {}
        newest = max((queue.position for queue in queues.values()), default=None)
        batch = _names(self.broker / _BATCH_QUEUES)
        missing: dict[str, list[str]] = {kind: [] for kind in _MISSING}
        for (topic, queue_id), (first, last, offset) in sorted(inspection.queued.items()):
            if topic in batch or (newest is not None and first > newest):
                continue
            name, queue = f"{_shortened(topic)}, queue {queue_id}", queues.get((topic, queue_id))
            if queue is not None and newest is not None:
                short = queue.slots <= offset and last <= newest
                missing["short"] += [f"{name} ({queue.slots:,} slots)"] if short else []
            elif len(topic.encode("utf-8", "surrogatepass")) > _NAME_BYTES_MAX:
                missing["long"].append(name)
            else:
                missing["deleted" if topics is not None and topic not in topics else "lost"].append(name)
        path = self.broker / _QUEUES
        return [
            PartProblem(f"{_MISSING[kind]}: {_list(names)}", path, None, is_damage=kind == "lost", count=len(names))
            for kind, names in missing.items()
            if names
        ]


def broker_parts(broker: Path) -> BrokerParts:
    """Read the parts next to a log; those that are missing are None."""
    root = broker / _QUEUES
    rocksdb = queues_in_rocksdb(root)
    queues = queue_tails(root) if root.is_dir() and not rocksdb else None
    keys = key_index(broker / "index") if (broker / "index").is_dir() else None
    return BrokerParts(broker, queues or None, keys, flushed_until(broker / "checkpoint"), rocksdb)


def flushed_until(path: Path) -> datetime | None:
    """Return the store time up to which a broker has flushed its CommitLog; None for other files."""
    fields = _checkpoint(path)
    return None if fields is None else datetime.fromtimestamp(fields[0] / 1000, UTC)


def confirm_offset(path: Path) -> int | None:
    """Return the position up to which a broker in controller mode knew its CommitLog on all replicas in sync.

    Consumers get messages before it only. Without controller mode it is the end of the log at the last start.

    Args:
        path: the broker's ``checkpoint``; None is returned for other files.
    """
    fields = _checkpoint(path)
    return None if fields is None else fields[4]


def _checkpoint(path: Path) -> tuple[int, ...] | None:
    with contextlib.suppress(OSError):
        if path.is_file() and path.stat().st_size >= _CHECKPOINT.size and path.stat().st_size % _CHECKPOINT_BYTES == 0:
            with path.open("rb") as file:
                fields = _CHECKPOINT.unpack(file.read(_CHECKPOINT.size))
            return fields if 0 < fields[0] < _MILLIS_END else None
    return None


def _topics_of(broker: Path) -> dict[str, dict[str, Any]] | None:
    try:
        return topic_configs(broker)
    except ConfigError:
        return None


def _names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} if directory.is_dir() else set()


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED_MAX:,} more" if len(names) > _NAMED_MAX else ""
    return "; ".join(names[:_NAMED_MAX]) + more


def _shortened(topic: str) -> str:
    return topic if len(topic) <= _TOPIC_MAX else f"{topic[: _TOPIC_MAX // 2]}...{topic[-_TOPIC_MAX // 2 :]}"


def _text(time: datetime) -> str:
    return time.isoformat(timespec="milliseconds")
