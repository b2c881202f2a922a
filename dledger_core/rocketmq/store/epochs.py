"""A broker's epochs in controller mode: its file ``epochFileCheckpoint``, and where the logs of two brokers part.

::

    2               number of epochs
    773307083       CRC-32 of the lines below, without its highest bit; 0 = not checked
    7-7000          epoch, and the position in the CommitLog at which it starts
    8-8000

A controller gives each master a higher epoch; a slave copies the epochs with the messages. Before a broker writes the
file it copies the last content to ``.bak``, and neither write is atomic. At its start it takes the copy if the file is
missing, or its count or CRC is wrong, and starts without epochs if the copy fails too; a number that cannot be parsed
stops the start. Source: RocketMQ's ``EpochFileCache`` and ``CheckpointFile``.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

EPOCH_FILE: Final = "epochFileCheckpoint"
_IDENTITY: Final = "brokerIdentity"
_BYTES_MAX: Final = 16 << 20
_CRC_MASK: Final = 0x7FFFFFFF
_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)
_OPEN_END: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch of a log.

    Attributes:
        number: the epoch.
        start: position of its first byte in the CommitLog.
    """

    number: int
    start: int


@dataclass(frozen=True, slots=True)
class EpochFile:
    """The epochs with which a broker starts.

    Attributes:
        path: the file that it uses: the file itself, or its copy.
        epochs: oldest first; empty if neither can be used.
        problems: a sentence for each file that cannot be used, and for epochs that are not in order.
        starts: whether a broker starts with these files.
    """

    path: Path
    epochs: tuple[Epoch, ...]
    problems: tuple[str, ...] = ()
    starts: bool = True


@dataclass(frozen=True, slots=True)
class ConsistentPoint:
    """The position up to which two logs agree by their epochs.

    Attributes:
        epoch: the newest epoch that starts at the same position in both.
        position: end of what they share: the slave truncates its log there.
    """

    epoch: Epoch
    position: int


class _UnreadableError(Exception):
    """A file that a broker does not use; ``fatal`` if it does not start with it."""

    def __init__(self, why: str, *, fatal: bool = False) -> None:
        super().__init__(why)
        self.fatal = fatal


def read_epochs(broker: Path) -> EpochFile | None:
    """Return the epochs of a broker as it would read them at its start; None if it has none: not in controller mode.

    Args:
        broker: the broker's store directory.
    """
    file, copy = broker / EPOCH_FILE, broker / f"{EPOCH_FILE}.bak"
    if not file.is_file() and not copy.is_file():
        return None
    problems: list[str] = []
    for path in (file, copy):
        try:
            epochs = _read(path)
        except _UnreadableError as error:
            problems.append(f"{path.name} {error}")
            if error.fatal:
                return EpochFile(path, (), (*problems, "a broker does not start with it"), starts=False)
            continue
        if epochs:
            return EpochFile(path, epochs, (*problems, *_disorder(path, epochs)))
        problems.append(f"{path.name} {'has no epochs' if path.is_file() else 'is missing'}")
    return EpochFile(file, (), tuple(problems))


def _read(path: Path) -> tuple[Epoch, ...]:
    if not path.is_file():
        return ()
    if path.stat().st_size > _BYTES_MAX:
        raise _UnreadableError(f"has more than {_BYTES_MAX:,} bytes", fatal=True)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise _UnreadableError("is not text") from None
    count, crc = (_number(line) for line in (*lines, "", "")[:2])
    content = lines[2:]
    entries = [parts for line in content if len(parts := line.rstrip("-").split("-")) == len(("epoch", "start"))]
    epochs = tuple(Epoch(_number(number), _number(start)) for number, start in entries)
    if len(epochs) != count:
        raise _UnreadableError(f"has {len(epochs)} epochs and names {count}")
    found = zlib.crc32("".join(f"{line}\n" for line in content).encode()) & _CRC_MASK
    if crc not in (0, found):
        raise _UnreadableError(f"has CRC {found} and names {crc}")
    return epochs


def _number(text: str) -> int:
    if _NUMBER.fullmatch(text) is None:
        raise _UnreadableError("is damaged: a line is not a number" if text else "is cut short", fatal=True)
    return int(text)


def _disorder(path: Path, epochs: tuple[Epoch, ...]) -> list[str]:
    return [
        f"{path.name} is not in order: epoch {after.number} from position {after.start} follows epoch {before.number} "
        f"from {before.start}"
        for before, after in pairwise(epochs)
        if before.number >= after.number or before.start >= after.start
    ]


def epoch_at(epochs: tuple[Epoch, ...], position: int) -> Epoch | None:
    """Return the epoch to which a position of a log belongs; None before the first one."""
    return next((each for each in reversed(epochs) if each.start <= position), None)


def consistent_point(
    local: tuple[Epoch, ...], local_end: int, master: tuple[Epoch, ...], master_end: int
) -> ConsistentPoint | None:
    """Return the point to which a slave truncates its log when it connects to a master, None if there is none.

    Args:
        local: the slave's epochs, oldest first.
        local_end: end of the slave's log.
        master: the master's epochs.
        master_end: end of the master's log.
    """
    starts = {each.number: each.start for each in master}
    ends, master_ends = _ends(local, local_end), _ends(master, master_end)
    for each in reversed(local):
        if starts.get(each.number) == each.start:
            return ConsistentPoint(each, min(ends[each.number], master_ends[each.number]))
    return None


def _ends(epochs: tuple[Epoch, ...], end: int) -> dict[int, int]:
    """Return the end of each epoch; a last one that starts after the end of the log counts as endless, as there."""
    found = {before.number: after.start for before, after in pairwise(epochs)}
    return found | {each.number: end if each.start <= end else _OPEN_END for each in epochs[-1:]}


@dataclass(frozen=True, slots=True)
class BrokerIdentity:
    """The names that a controller knows a broker by.

    Attributes:
        cluster: name of the cluster.
        broker: name of the broker set.
        number: id of the broker in its set, which sync state sets name.
    """

    cluster: str
    broker: str
    number: int


def broker_identity(broker: Path) -> BrokerIdentity | None:
    """Return the identity that a controller gave a broker; None without one."""
    try:
        parts = (broker / _IDENTITY).read_text(encoding="utf-8").strip().split("#")
        return BrokerIdentity(parts[0], parts[1], int(parts[2]))
    except (OSError, ValueError, IndexError):
        return None
