"""A store as a RocketMQ broker in DLedger mode writes it, and what its dispatcher makes of the messages."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dledger_core.rocketmq import UNIT, encode_messages

PREFILL = (0, 0x7FFFFFFF, 0)
STORED_MS = 1_700_000_000_000
DELAY_LEVELS = "1s 2s 3s 7s"
DELAY_TOPIC = "SCHEDULE_TOPIC_XXXX"
INDEX_BYTES = 32 * 4096


def messages(
    offsets: Iterable[int],
    topic: str = "T",
    queue_ids: int | list[int] = 0,
    *,
    body: bytes = b"x",
    properties: list[dict[str, str]] | None = None,
    **fields: Any,
) -> list[bytes]:
    """Messages with these queue offsets."""
    offsets = list(offsets)
    if properties is not None:
        pairs = [list(each.items()) for each in properties]
        fields["properties"] = pa.array(pairs, pa.map_(pa.string(), pa.string()))
    bodies: list[bytes] = encode_messages(
        topic, queue_ids, [body] * len(offsets), queue_offset=offsets, **fields
    ).to_pylist()
    return bodies


def delayed_messages(levels: list[int]) -> list[bytes]:
    """A message for each delay level, all in queue 0."""
    properties = [{"DELAY": str(level)} for level in levels]
    return messages(range(len(levels)), DELAY_TOPIC, tags="TagA", properties=properties, store_timestamp=STORED_MS)


def write_queue(root: Path, units: list[tuple[int, int, int]], topic: str = "T", size: int = 100) -> None:
    """Write a broker's file of queue 0 with room for ``size`` units."""
    rows = np.zeros(size, UNIT)
    for slot, unit in enumerate(units):
        rows[slot] = unit
    path = root / "consumequeue" / topic / "0" / f"{0:020d}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(rows.tobytes())


def write_broker_store(
    directory: Path, bodies: list[bytes], *, committed: int | None = None, data_bytes: int = 1 << 14
) -> list[int]:
    """Write the store with physical offsets patched into the messages; returns where each message begins.

    ``committed`` is what the store's checkpoint says; None: it has none, as in generation B.
    """
    files, index, places = {0: bytearray()}, bytearray(), []
    base = 0
    for number, body in enumerate(bodies):
        size = 48 + len(body)
        if len(files[base]) + size + 8 > data_bytes:
            left = data_bytes - len(files[base])
            files[base] += struct.pack(">ii", -1, left) + bytes(left - 8)
            base += data_bytes
            files[base] = bytearray()
        at = base + len(files[base])
        header = struct.pack(">iiqqqiiii", 1, size, number, 0, at, 0, 0, 0, len(body))
        patched = body[:28] + struct.pack(">q", at + 48) + body[36:] if len(body) >= 91 else body
        files[base] += header + patched
        index += struct.pack(">iqiqq", 1, at, size, number, 0)
        places.append(at + 48)
    (directory / "data").mkdir(parents=True)
    (directory / "index").mkdir()
    for start, content in files.items():
        (directory / "data" / f"{start:020d}").write_bytes(content.ljust(data_bytes, b"\0"))
    (directory / "index" / f"{0:020d}").write_bytes(index.ljust(INDEX_BYTES, b"\0"))
    (directory / "currterm").write_text("voteLeader=n0\ncurrTerm=0\n")
    if committed is not None:
        (directory / "checkpoint").write_text(f"committedIndex={committed}\nendIndex={len(bodies) - 1}\n")
    return places


def write_commitlog(directory: Path, bodies: list[bytes], *, file_bytes: int = 1 << 16) -> list[int]:
    """Write the one file of a classic CommitLog, which is not full; returns where each message begins."""
    content, places = bytearray(), []
    for body in bodies:
        places.append(len(content))
        content += body[:28] + struct.pack(">q", len(content)) + body[36:]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{0:020d}").write_bytes(content.ljust(file_bytes, b"\0"))
    return places


@dataclass
class BrokersQueue:
    """One consume queue, filled unit by unit as RocketMQ's dispatcher does."""

    slots: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    end: int | None = None

    def put(self, offset: int, unit: tuple[int, int, int]) -> int | None:
        """Return the slot that the unit gets, None if it is left out; units after a hole move up."""
        if self.end is None:
            self.end = offset
        if 0 != offset < self.end:
            return None
        slot = self.end
        self.slots[slot] = unit
        self.end = slot + 1
        return slot
