"""A store as a RocketMQ broker in DLedger mode writes it, and what its dispatcher makes of the messages."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

PREFILL = (0, 0x7FFFFFFF, 0)
INDEX_BYTES = 32 * 4096


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
        """Return the slot that the unit gets, None if it is left out; a hole stays a hole."""
        if self.end is None:
            self.end = offset
        if offset != 0:
            if offset < self.end:
                return None
            self.end = offset
        slot = self.end
        self.slots[slot] = unit
        self.end = slot + 1
        return slot
