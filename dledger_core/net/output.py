"""Bytes that one connection has to send, in four queues: this turn's, the transport's, parts for TLS, bulk frames.

Frames leave in order, except bulk frames: all others overtake them. The frames of one turn of the event loop are passed
to the transport together, because each write is a system call: 64 acknowledgements cost one. A node passes the first
ones of a turn on at once: what waits for them, a follower for entries or a client for its response, gets them a turn
earlier, and before the disk thread takes the interpreter lock.
"""

from __future__ import annotations

import asyncio
from typing import Final

from dledger_core.checksum import Buffer
from dledger_core.net.frame import PIECE_BYTES
from dledger_core.net.limits.tls_write_buffer import TlsWriteBuffer
from dledger_core.net.pieces import BulkQueue

_JOINED_BYTES_MAX: Final = 64 << 10
"""Up to this many bytes, one copy costs less than a system call with many buffers."""
_TURN_BYTES_MAX: Final = 256 << 10
"""More bytes leave at once: the network is the limit then, and not the system calls."""
_TURN_BUFFERS_MAX: Final = 64
"""More requests leave at once, so that the node handles them while the client encodes its others."""


class Output:
    """The queues; ``pause_writing`` and ``resume_writing`` come from the transport.

    Args:
        transport: takes the bytes.
        has_tls: whether it encrypts them.

    Attributes:
        is_prompt: whether the first frames of a turn leave at once.
    """

    def __init__(self, transport: asyncio.Transport, *, has_tls: bool) -> None:
        self._transport = transport
        self._tls_buffer = TlsWriteBuffer() if has_tls else None
        self._bulk = BulkQueue()
        self.is_prompt = False
        self._is_in_turn = False
        self._turn: list[Buffer] = []
        self._turn_bytes = 0
        self._call_soon = asyncio.get_running_loop().call_soon
        self._is_full = False
        self._writable: asyncio.Future[None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the kernel has not taken yet."""
        waiting = 0 if self._tls_buffer is None else self._tls_buffer.nbytes
        return self._transport.get_write_buffer_size() + self._turn_bytes + self._bulk.nbytes + waiting

    def write(self, buffers: list[Buffer]) -> None:
        """Queue encoded frames; those of one turn leave at its end, or once they are many bytes."""
        self._turn += buffers
        for buffer in buffers:
            self._turn_bytes += buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)
        is_first = not self._is_in_turn
        if is_first:
            self._is_in_turn = True
            self._call_soon(self._end_turn)
        is_long = self._turn_bytes > _TURN_BYTES_MAX or len(self._turn) >= _TURN_BUFFERS_MAX
        if is_long or (is_first and self.is_prompt):
            self.flush()

    def _end_turn(self) -> None:
        self._is_in_turn = False
        self.flush()

    def flush(self) -> None:
        """Pass the frames of this turn on now."""
        buffers, nbytes, self._turn, self._turn_bytes = self._turn, self._turn_bytes, [], 0
        if not buffers or self._transport.is_closing():  # ended early, or nothing more is sent
            return
        if len(buffers) > 1 and nbytes <= _JOINED_BYTES_MAX:
            buffers = [b"".join(buffers)]
        if self._tls_buffer is not None and self._tls_buffer.must_wait(buffers):
            self._tls_buffer.add(buffers)
            self._encrypt(self._tls_buffer)
        elif len(buffers) == 1:
            self._transport.write(buffers[0])
        else:
            self._transport.writelines(buffers)

    def _encrypt(self, tls_buffer: TlsWriteBuffer) -> None:
        """Pass parts to TLS until it has much that the other side has not taken."""
        while tls_buffer and not self._is_full:
            self._transport.write(tls_buffer.take())

    def write_bulk(self, buffers: list[Buffer]) -> None:
        """Queue one encoded frame that may be large."""
        self._bulk.add(buffers)
        self._write_bulk()

    def _write_bulk(self) -> None:
        # Only while the transport is short: nothing overtakes what it has got, and a heartbeat that waits
        # for 30 MiB is late (``test_small_frame_overtakes_bulk_that_the_network_has_not_taken``).
        while self._bulk and self._writable is None:
            self.write(self._bulk.take())
            if self._turn_bytes >= PIECE_BYTES:
                self.flush()  # the transport says now whether it is still short

    def pause_writing(self) -> None:
        """Record that the transport's queue is long."""
        self._is_full = True
        if self._writable is None:
            self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """Continue, because the transport's queue is short again."""
        self._is_full = False
        if self._tls_buffer:
            self._encrypt(self._tls_buffer)
        if self._is_full:
            return
        if self._writable is not None:
            self._writable.set_result(None)
            self._writable = None
        self._write_bulk()

    async def drained(self) -> None:
        """Wait while the transport's queue is long."""
        if self._writable is not None:
            await asyncio.shield(self._writable)

    def close(self) -> None:
        """Pass everything to the transport, except bulk frames: they are dropped."""
        self.flush()
        self._bulk = BulkQueue()
        while self._tls_buffer:
            self._transport.write(self._tls_buffer.take())

    def clear(self) -> None:
        """Drop everything; nothing waits any longer."""
        self._turn, self._turn_bytes = [], 0
        self._bulk, self._tls_buffer = BulkQueue(), None
        self.resume_writing()
