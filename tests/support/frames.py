"""Frames from bytes, received as a socket would deliver them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dledger_core.checksum import Buffer
from dledger_core.net.frame import Frame, FrameDecoder
from dledger_core.net.protocol import FRAME_BYTES_MAX


def receive(decoder: FrameDecoder, data: Buffer, chunk_bytes: int = 1 << 24) -> Iterator[Frame]:
    """Write ``data`` to the decoder's memory, at most ``chunk_bytes`` at a time; yield each complete frame."""
    rest = memoryview(data)
    while rest:
        room = decoder.get_buffer()
        assert len(room), "the receive buffer is empty"
        taken = min(chunk_bytes, len(room), len(rest))
        room[:taken] = rest[:taken]
        rest = rest[taken:]
        decoder.buffer_updated(taken)
        while (frame := decoder.next_frame()) is not None:
            yield frame


def frames_of(buffers: Iterable[Buffer]) -> list[Frame]:
    """Return the frames that these buffers contain completely."""
    decoder = FrameDecoder(FRAME_BYTES_MAX)
    frames = list(receive(decoder, b"".join(buffers)))
    assert not decoder.buffered
    return frames
