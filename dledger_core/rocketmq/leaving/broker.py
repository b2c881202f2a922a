"""The broker around the log: its settings, and the parts of its directory that are copied, mapped or left."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from dledger_core.errors import ConfigError
from dledger_core.java_properties import Property
from dledger_core.rocketmq.leaving.rewrite import References
from dledger_core.rocketmq.message.layout import DELAY_LEVELS_MS
from dledger_core.rocketmq.store.broker_conf import broker_properties, whole_number
from dledger_core.rocketmq.store.broker_json import topic_configs
from dledger_core.rocketmq.store.consume_queue import BATCH_UNIT, UNIT_BYTES, queues_in_rocksdb
from dledger_core.rocketmq.store.key_files import KeyFileSize, key_file_size
from dledger_core.storage.files.file_system import Files

_DIGITS: Final = "[0-9]" * 20
_MS: Final = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_BATCH_QUEUE_BYTES: Final = 300_000 * BATCH_UNIT.itemsize
_OUT: Final = re.compile(r"dLeger|enableDLegerCommitLog|preferredLeaderId|storePathDLedgerCommitLog")
_OWN: Final = re.compile(r"brokerId|brokerRole|storePathRootDir|storePathCommitLog")
_NOT_CONVERTED: Final = {
    "compaction": "compacted logs of compaction topics, which a broker compacts again from the CommitLog",
    "consumequeue_ext": "extensions of consume queues; the units have plain tags codes, which all brokers read",
    "tieredstore": "tiered storage",
}


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """Sizes and times with which the broker reads its directory.

    Attributes:
        commit_log_bytes: size of a CommitLog file.
        queue_bytes: size of a consume queue file.
        batch_queue_bytes: size of a consume queue file of a batch topic.
        index: size of an index file.
        delay_levels_ms: ``messageDelayLevel``.
        properties: of the file; empty without one.
    """

    commit_log_bytes: int
    queue_bytes: int
    batch_queue_bytes: int
    index: KeyFileSize
    delay_levels_ms: tuple[int, ...]
    properties: tuple[Property, ...]

    def proposal(self, destination: Path) -> str:
        """Return a ``broker.conf`` without DLedger, with the choices that remain."""
        lines = [
            "# Proposed by 'dledger convert --to commitlog'. Check it, and start the broker with a copy.",
            f"storePathRootDir={destination.absolute()}",
            f"storePathCommitLog={destination.absolute() / 'commitlog'}",
            "",
            "# A master with slaves: brokerId=0 on the master; brokerId=1 ... and brokerRole=SLAVE on each slave.",
            "brokerId=0",
            "brokerRole=ASYNC_MASTER",
            "",
            "# In controller mode instead: remove the two lines above, and add",
            "#enableControllerMode=true",
            "#controllerAddr=HOST:PORT;HOST:PORT;HOST:PORT",
            "",
            "# From the former configuration, without enableDLegerCommitLog and dLeger*:",
        ]
        kept = [each for each in self.properties if not _OUT.match(each.key) and not _OWN.fullmatch(each.key)]
        names = {each.key for each in kept}
        sizes = {
            "mappedFileSizeCommitLog": self.commit_log_bytes,
            "mappedFileSizeConsumeQueue": self.queue_bytes,
            "mapperFileSizeBatchConsumeQueue": self.batch_queue_bytes,
            "maxHashSlotNum": self.index.slots,
            "maxIndexNum": self.index.units,
        }
        lines += [f"{name}={value}" for name, value in sizes.items() if name not in names]
        lines += [f"{each.key}={each.value}" for each in kept]
        return "\n".join(lines) + "\n"


def broker_settings(broker: Path | None, conf: Path | None, data_file_bytes: int) -> BrokerSettings:
    """Return the settings from a broker's configuration, else from the sizes of its files, else RocketMQ's defaults.

    Args:
        broker: its directory; None = unknown.
        conf: its configuration; None = unknown.
        data_file_bytes: size of the source's data files, which is that of CommitLog files.

    Raises:
        ConfigError: the configuration cannot be read, a value is wrong, or the index files have another size.
    """
    properties = broker_properties(conf)
    values = {each.key: each.value.strip() for each in properties}
    if values.get("storeType", "default") != "default":
        raise ConfigError(
            f"storeType = {values['storeType']}: its consume queues are in RocksDB",
            str(conf),
            "set storeType=default in the file: consume queues are written as files",
        )

    found = _size_in(broker, f"consumequeue/*/*/{_DIGITS}") or 6_000_000
    batches = _size_in(broker, f"batchconsumequeue/*/*/{_DIGITS}") or _BATCH_QUEUE_BYTES
    batch_bytes = whole_number(properties, "mapperFileSizeBatchConsumeQueue", batches, conf)
    if batch_bytes < BATCH_UNIT.itemsize:
        what = f"mapperFileSizeBatchConsumeQueue = {batch_bytes} is less than a unit of {BATCH_UNIT.itemsize} bytes"
        raise ConfigError(what, str(conf), "write a multiple of a unit, or remove the line for RocketMQ's default")
    queue_bytes = whole_number(properties, "mappedFileSizeConsumeQueue", found, conf)
    return BrokerSettings(
        whole_number(properties, "mappedFileSizeCommitLog", data_file_bytes, conf),
        -(-queue_bytes // UNIT_BYTES) * UNIT_BYTES,
        batch_bytes,
        key_file_size(conf, broker),
        _levels(values.get("messageDelayLevel"), conf),
        tuple(properties),
    )


def _size_in(broker: Path | None, pattern: str) -> int | None:
    """Return the size of the first of a broker's files; None if there is none."""
    if broker is None:
        return None
    return next((path.stat().st_size for path in broker.glob(pattern) if path.is_file()), None)


def _levels(text: str | None, conf: Path | None) -> tuple[int, ...]:
    if text is None:
        return DELAY_LEVELS_MS
    try:
        return tuple(int(word[:-1]) * _MS[word[-1]] for word in text.split())
    except (ValueError, KeyError):
        raise ConfigError(
            f"messageDelayLevel = {text!r} is not a list of delays", str(conf), "write it as in 1s 5s 1m 2h"
        ) from None


def batch_topics(broker: Path | None) -> frozenset[str]:
    """Return the topics of type BatchCQ."""
    configs = (topic_configs(broker) or {}) if broker is not None else {}
    found = set()
    for topic, config in configs.items():
        attributes = config.get("attributes") or {}
        if "BatchCQ" in (attributes.get("queue.type"), attributes.get("+queue.type")):
            found.add(topic)
    return frozenset(found)


def not_converted(broker: Path | None) -> list[str]:
    """Return a remark for each part of a broker's directory that stays behind."""
    if broker is None:
        return ["the broker's directory is unknown: no config/, no timers and no topics were copied"]
    found = [
        f"not converted: {name}/, {what}"
        for name, what in _NOT_CONVERTED.items()
        if (broker / name).is_dir() and any(each.is_dir() for each in (broker / name).iterdir())
    ]
    if queues_in_rocksdb(broker / "consumequeue"):
        what = "consume queues in RocksDB, which are written as files: start the broker with storeType=default"
        found.append(f"not converted: consumequeue/, {what}")
    return found


def copy_config(broker: Path, target: Path, files: Files) -> int:
    """Copy the broker's ``config`` directory; return the number of files.

    All its positions are queue offsets, which stay.
    """
    return _copy_tree(broker / "config", target, files)


def _copy_tree(source: Path, target: Path, files: Files) -> int:
    if not source.is_dir():
        return 0
    files.mkdir(target)
    count = 0
    for path in sorted(source.iterdir()):
        if path.is_dir():
            count += _copy_tree(path, target / path.name, files)
        elif path.is_file():
            copy_file(path, target / path.name, files)
            count += 1
    files.sync_dir(target)
    return count


def copy_file(source: Path, target: Path, files: Files) -> None:
    """Copy a file durably, without the zeros of a sparse one."""
    with closing(files.open(target, write=True, create=True)) as written, source.open("rb", buffering=0) as opened:
        written.truncate(0)
        written.truncate(source.stat().st_size)
        at = 0
        while chunk := opened.read(1 << 20):
            if any(chunk):
                written.pwritev([chunk], at)
            at += len(chunk)
        written.datasync()


_TIMER_UNIT: Final = np.dtype(
    [
        ("size", ">i4"),
        ("previous", ">i8"),
        ("magic", ">i4"),
        ("written_ms", ">i8"),
        ("delayed_ms", ">i4"),
        ("position", ">i8"),
        ("message_bytes", ">i4"),
        ("topic_hash", ">i4"),
        ("reserved", ">i8"),
    ]
)
_TIMER_MAGIC_MAX: Final = 0xF
_NOWHERE: Final = -1
"""A position at which a broker finds no message: the timer of a deleted message then does nothing, as before."""


def copy_timers(broker: Path, root: Path, suffix: str, references: References, files: Files) -> tuple[int, int]:
    """Copy timer wheel and timer log; the log names messages by physical offset, the wheel only places in the log.

    Args:
        broker: the broker's directory.
        root: the destination.
        suffix: of the names, until everything is complete.
        references: new positions of the messages.
        files: the file system.

    Returns:
        The numbers of timers with a new position, and of those whose message is not in the log.
    """
    for path in sorted(broker.glob("timerwheel*")):
        copy_file(path, root / f"{path.name}{suffix}", files)
    moved = lost = 0
    source, target = broker / "timerlog", root / f"timerlog{suffix}"
    if not source.is_dir():
        return 0, 0
    files.mkdir(target)
    for path in sorted(source.glob(_DIGITS)):
        data = bytearray(path.read_bytes())
        units = np.frombuffer(data, _TIMER_UNIT, len(data) // _TIMER_UNIT.itemsize)
        good = (units["size"] == _TIMER_UNIT.itemsize) & (units["magic"] >= 0) & (units["magic"] <= _TIMER_MAGIC_MAX)
        rows = np.flatnonzero(good)
        found = references.find(units["position"][rows].astype(np.int64))
        units["position"][rows] = np.where(found >= 0, found, _NOWHERE)
        moved, lost = moved + int((found >= 0).sum()), lost + int((found < 0).sum())
        with closing(files.open(target / path.name, write=True, create=True)) as written:
            written.truncate(len(data))
            written.pwritev([data], 0)
            written.datasync()
    files.sync_dir(target)
    return moved, lost


_CHECKPOINT_BYTES: Final = 4096


def write_checkpoint(path: Path, stored_ms: int, end: int, files: Files) -> None:
    """Write the store's checkpoint: all messages are on disk, in their queues and in the index, and confirmed.

    Times of the last message on disk, in the queues, in the index; then what a master has flushed (unknown) and, for
    controller mode, the end up to which replicas confirmed the log.
    """
    fields = np.array([stored_ms, stored_ms, stored_ms, 0, end], ">i8").tobytes()
    files.replace(path, fields.ljust(_CHECKPOINT_BYTES, b"\0"))


def link_file(source: Path, target: Path, copy: Callable[[Path, Path], None]) -> None:
    """Link a file, or copy it: a broker never writes to a full CommitLog file again, so both can share it.

    Of a symbolic link its file is linked: the destination must not depend on directories of the source.
    """
    try:
        target.hardlink_to(source.resolve())
    except OSError:  # a different file system, or one without hard links
        copy(source, target)


def free_bytes(path: Path) -> int:
    """Return the free space of the file system on which ``path`` is, or will be."""
    where = next(each for each in (path, *path.absolute().parents) if each.exists())
    return shutil.disk_usage(where).free
