"""Frames of one connection that TLS has not encrypted yet, in parts.

TLS encrypts all that it gets at once, however little the other side takes: a response of many MiB would hold up the
event loop, and stay in memory as a second copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from dledger_core.checksum import Buffer

PART_BYTES: Final = 256 << 10
"""Bytes that TLS gets at once. Its own buffer stays as large as the most that it ever had to hold."""


class TlsWriteBuffer:
    """Parts of frames in the order in which they leave.

    Attributes:
        nbytes: bytes of all of them.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._parts: deque[memoryview] = deque()

    def __bool__(self) -> bool:
        return bool(self._parts)

    def must_wait(self, buffers: Iterable[Buffer]) -> bool:
        """Whether buffers have to be added here: others wait, or one is larger than a part."""
        # The first condition keeps the order of frames (``test_small_buffers_wait_only_behind_others``).
        return bool(self._parts) or any(memoryview(buffer).nbytes > PART_BYTES for buffer in buffers)

    def add(self, buffers: Iterable[Buffer]) -> None:
        """Add buffers after the others."""
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            self._parts.extend(view[begin : begin + PART_BYTES] for begin in range(0, view.nbytes, PART_BYTES))
            self.nbytes += view.nbytes

    def take(self) -> memoryview:
        """Remove and return the next part."""
        part = self._parts.popleft()
        self.nbytes -= part.nbytes
        return part
