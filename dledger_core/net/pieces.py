"""Bulk frames of one connection, cut into pieces: small frames overtake a large one instead of waiting for its end.

A frame of more than ``PIECE_BYTES`` leaves as consecutive PIECE frames, the first of which names its size; the decoder
of the other side puts it together (``FrameDecoder.raise_limit``). Only one frame is in pieces at a time.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from dledger_core.checksum import Buffer
from dledger_core.errors import invariant
from dledger_core.net.frame import PIECE_BYTES, encode_frame
from dledger_core.net.protocol import Type

_NEXT: Final = {"t": int(Type.PIECE)}


class BulkQueue:
    """Encoded frames that wait until the connection can send them, in order.

    Attributes:
        nbytes: bytes that wait.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._frames: deque[tuple[int, list[Buffer]]] = deque()
        self._rest: deque[memoryview] = deque()  # of the frame whose first piece has left

    def __bool__(self) -> bool:
        return bool(self._frames or self._rest)

    # Invariant: ``_rest`` is empty unless a frame's first piece has left: the decoder takes one frame in pieces at a
    # time.
    def add(self, frame: list[Buffer]) -> None:
        """Add the buffers of one frame."""
        nbytes = sum(memoryview(buffer).nbytes for buffer in frame)
        self._frames.append((nbytes, frame))
        self.nbytes += nbytes

    def take(self) -> list[Buffer]:
        """Remove and return the next buffers to send: a small frame, or one piece of a large one."""
        if self._rest:
            return encode_frame(_NEXT, *self._cut())
        nbytes, frame = self._frames.popleft()
        if nbytes <= PIECE_BYTES:
            self.nbytes -= nbytes
            return frame
        self._rest.extend(memoryview(buffer).cast("B") for buffer in frame)
        return encode_frame({**_NEXT, "n": nbytes}, *self._cut())

    def _cut(self) -> list[memoryview]:
        """Remove and return the next ``PIECE_BYTES`` of the frame in pieces."""
        parts: list[memoryview] = []
        room = PIECE_BYTES
        while self._rest and room:
            buffer = self._rest.popleft()
            if buffer.nbytes > room:
                self._rest.appendleft(buffer[room:])
                buffer = buffer[:room]
            parts.append(buffer)
            room -= buffer.nbytes
        self.nbytes -= PIECE_BYTES - room
        invariant(self.nbytes >= 0, "more bytes leave than were added", left=self.nbytes)
        return parts
