"""Frames as bytes, without I/O; ``protocol`` describes them.

The decoder provides the memory that the socket reads into (``get_buffer``), so that one read receives many small frames
and a large payload is received directly into memory of its own. A delivered payload belongs to the receiver: the
decoder never overwrites it.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import msgpack
import numpy as np

from dledger_core.checksum import Buffer, crc32
from dledger_core.errors import ProtocolError, in_words, invariant
from dledger_core.net.protocol import FRAME_BYTES_MAX, HEADER_BYTES_MAX, Type

LARGE_PAYLOAD_BYTES: Final = 64 << 10
"""A payload above this is received into its own memory."""
PIECE_BYTES: Final = 64 << 10
"""Limit on the payload of a PIECE."""
RECEIVE_BYTES: Final = 128 << 10
"""Size of the receive buffer for everything else."""
ARRAY_LENGTH_MAX: Final = 16_384
"""Limit on an array or map in a header: msgpack allocates the claimed length before it reads an element."""


LARGE_REQUESTS: Final = frozenset({Type.APPEND, Type.TRANSACTION, Type.AWAIT})
LARGE_TYPES: Final = LARGE_REQUESTS | {Type.READ_OK, Type.AT_OK, Type.APPEND_ENTRIES, Type.INSTALL_SNAPSHOT}
"""Messages whose payload may be large; for a large payload that any other one claims no memory is taken."""


class Payloads(Protocol):
    """Decides about the large payloads of one connection; at most one is arriving at any time."""

    def begin(self, header: dict[str, Any], nbytes: int) -> bool:
        """Whether to take memory for a payload whose header has arrived; False skips the frame."""

    def end(self) -> None:
        """The payload is complete, and its frame is delivered next."""


_PREFIX = struct.Struct(">III")
_PREFIX_BYTES = _PREFIX.size
_AFTER_LENGTH_BYTES = 8
_SMALL_PAYLOAD_BYTES = 4096
_BEGINNING_BYTES = 4096
_UNSKIPPED_BYTES = 512
"""A longer header is skipped before it is unpacked: skipping builds no objects, and finds nested arrays that each claim
more elements than follow. Unpacking would allocate memory for all of them."""
_EMPTY = memoryview(b"")
_pack = msgpack.Packer(use_bin_type=True, buf_size=64 << 10).pack


class Frame(NamedTuple):
    """One message: its header (``t`` is its number) and its raw payload."""

    header: dict[str, Any]
    payload: memoryview


def encode_frame(header: dict[str, Any], *payload: Buffer) -> list[Buffer]:
    """Return the buffers of one frame, in order, the payload's own ones unchanged.

    Raises:
        ProtocolError: the header or the frame exceeds its limit, or msgpack cannot encode a value of the header.
    """
    try:
        packed = _pack(header)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"a header cannot be packed: {error}", "header") from None
    payload_bytes = 0
    for part in payload:
        payload_bytes += part.nbytes if isinstance(part, memoryview) else len(part)
    length = _AFTER_LENGTH_BYTES + len(packed) + payload_bytes
    if len(packed) > HEADER_BYTES_MAX or length > FRAME_BYTES_MAX:
        values = {"header_bytes": len(packed), "bytes": length, "limit": FRAME_BYTES_MAX}
        raise ProtocolError("a frame to send is too large", "", "send less at once", values)
    head = _PREFIX.pack(length, len(packed), crc32(packed)) + packed
    if payload_bytes <= _SMALL_PAYLOAD_BYTES:
        return [b"".join((head, *payload)) if payload else head]
    return [head, *payload]


def _receive_buffer(nbytes: int) -> memoryview:
    """Return memory that takes no pages before bytes arrive: thousands of connections may be idle."""
    return np.empty(nbytes, np.uint8).data


def _unpack_header(packed: Buffer, containers_max: int | None) -> dict[str, Any]:
    size = len(packed)
    hook = None if containers_max is None or size <= containers_max else _counting(containers_max)
    try:
        if size > _UNSKIPPED_BYTES:
            unpacker = msgpack.Unpacker(max_buffer_size=size)
            unpacker.feed(packed)
            unpacker.skip()
        header = msgpack.unpackb(
            packed,
            raw=False,
            strict_map_key=True,
            max_str_len=size,
            max_bin_len=size,
            max_array_len=min(size, ARRAY_LENGTH_MAX),
            max_map_len=min(size, ARRAY_LENGTH_MAX),
            max_ext_len=0,
            list_hook=hook,
            object_hook=hook,
        )
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a header is not msgpack: {error}", "frame") from None
    if not isinstance(header, dict) or type(header.get("t")) is not int:
        raise ProtocolError("a header is not a map with a message number", "frame")
    return header


def _counting(containers_max: int) -> Callable[[Any], Any]:
    """Return the hook that counts the lists and maps of one header."""
    numbers = itertools.count(1)

    def count(found: Any) -> Any:
        if next(numbers) > containers_max:
            raise ValueError("it has too many lists and maps")
        return found

    return count


class FrameDecoder:
    """Turns received bytes into frames; checks every length before it allocates memory for it.

    Read into ``get_buffer()``, call ``buffer_updated``, then ``next_frame`` until it returns None. After a
    ProtocolError the decoder cannot be used again.

    Args:
        max_bytes: limit on a frame's length field.
    """

    __slots__ = (
        "_begin",
        "_containers_max",
        "_cut_filled",
        "_cut_frame",
        "_end",
        "_filled",
        "_header",
        "_header_bytes_max",
        "_large",
        "_large_types",
        "_payloads",
        "_put_back",
        "_skipping",
        "_takes_pieces",
        "_view",
        "max_bytes",
    )

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._header_bytes_max = HEADER_BYTES_MAX
        self._containers_max: int | None = None
        self._large_types = LARGE_TYPES
        self._payloads: Payloads | None = None
        self._view = _receive_buffer(min(RECEIVE_BYTES, max_bytes + _PREFIX_BYTES))
        self._begin = 0  # of the bytes not yet consumed
        self._end = 0
        self._large: memoryview | None = None
        self._filled = 0
        self._header: dict[str, Any] = {}
        self._put_back: Frame | None = None
        self._skipping = 0  # bytes of a refused payload that are still to come
        self._takes_pieces = False
        self._cut_frame: memoryview | None = None  # the memory of a frame that arrives in pieces
        self._cut_filled = 0

    @property
    def is_inside_frame(self) -> bool:
        """Whether a frame has begun and not ended, or was put back."""
        return (
            self._begin < self._end
            or self._large is not None
            or self._cut_frame is not None
            or self._skipping > 0
            or self._put_back is not None
        )

    @property
    def buffered(self) -> memoryview:
        """The bytes received and not yet consumed, without those of an incomplete large payload."""
        return self._view[self._begin : self._end]

    def skip(self, count: int) -> None:
        """Consume ``count`` buffered bytes that do not belong to a frame (the preface)."""
        self._begin += count

    def get_buffer(self) -> memoryview:
        """Return memory, at least one byte, for the next bytes from the socket."""
        if self._large is not None:
            return self._large[self._filled :]
        if self._skipping:
            return self._view[: self._skipping]
        if self._begin == self._end:
            self._begin = self._end = 0
        if self._end == len(self._view):
            self._make_room(self._end - self._begin + 1)
        if self._cut_frame is not None:  # the next piece is received into its frame, all but its beginning
            return self._view[self._end : self._end + _BEGINNING_BYTES]
        return self._view[self._end :]

    def buffer_updated(self, count: int) -> None:
        """Record ``count`` bytes written to the memory that ``get_buffer`` returned."""
        if self._large is not None:
            self._filled += count
        elif self._skipping:
            self._skipping -= count
        else:
            self._end += count

    def end(self) -> None:
        """Give back the charge of a payload that has not arrived completely; no more bytes come."""
        if self._payloads is not None:
            self._payloads.end()
            self._payloads = None

    def raise_limit(
        self,
        max_bytes: int,
        *,
        header_bytes: int = HEADER_BYTES_MAX,
        large_types: frozenset[Type] = LARGE_TYPES,
        payloads: Payloads | None = None,
        takes_pieces: bool = False,
        containers_max: int | None = None,
    ) -> None:
        """Set a higher limit from the next frame on, and allocate memory to receive many frames at once.

        Args:
            max_bytes: limit on a frame's length field.
            header_bytes: limit on a header.
            large_types: messages whose payload may be large.
            payloads: decides about each large payload; None = all are received.
            takes_pieces: put frames that arrive in pieces together.
            containers_max: limit on the lists and maps in a header; None = only its bytes limit them.
        """
        self._containers_max = containers_max
        self.max_bytes, self._header_bytes_max = max_bytes, header_bytes
        self._large_types, self._payloads, self._takes_pieces = large_types, payloads, takes_pieces
        self._make_room(min(RECEIVE_BYTES, max_bytes + _PREFIX_BYTES))

    def _make_room(self, needed: int) -> None:
        """Move the buffered bytes to the front, of a larger buffer if ``needed`` bytes do not fit this one."""
        kept = self._end - self._begin
        invariant(0 <= kept <= len(self._view), "bytes outside the receive buffer", begin=self._begin, end=self._end)
        view = self._view
        if needed > len(view):
            target = min(RECEIVE_BYTES, self.max_bytes + _PREFIX_BYTES)
            view = _receive_buffer(max(needed, target))
            view[:kept] = self._view[self._begin : self._end]
        elif self._begin:
            view[:kept] = bytes(view[self._begin : self._end])
        self._view, self._begin, self._end = view, 0, kept

    def next_frame(self) -> Frame | None:
        """Return the next complete frame, or None until more bytes arrive.

        Raises:
            ProtocolError: a limit is exceeded, or the header is damaged.
        """
        frame, self._put_back = self._put_back or self._next_received(), None
        while self._takes_pieces and frame is not None and frame.header["t"] == Type.PIECE:
            frame = self._add_piece(len(frame.payload)) or self._next_received()
        return frame

    @property
    def has_small_frame(self) -> bool:
        """Whether a frame without a large payload is complete: ``next_frame`` returns it, or raises for it."""
        have = self._end - self._begin
        if have < _PREFIX_BYTES or self._large is not None or self._skipping:
            return False
        length, _, _ = _PREFIX.unpack_from(self._view, self._begin)
        return bool(4 + length <= have and length <= LARGE_PAYLOAD_BYTES)

    def put_back(self, frame: Frame) -> None:
        """Let ``next_frame`` return a frame again, the one that it returned last."""
        self._put_back = frame

    def _next_received(self) -> Frame | None:
        if self._large is not None:
            return self._next_large(self._large)
        if self._skipping:
            return None
        begin, have = self._begin, self._end - self._begin
        if have < _PREFIX_BYTES:
            self._ensure(_PREFIX_BYTES)
            return None
        # Lengths first, then the CRC, then the content: nothing is allocated or decoded by a number that is not checked
        # yet (the fuzz targets ``frame`` and ``connection`` limit the memory).
        length, header_bytes, header_crc = _PREFIX.unpack_from(self._view, begin)
        payload_bytes = length - _AFTER_LENGTH_BYTES - header_bytes
        if length > self.max_bytes or not 0 < header_bytes <= self._header_bytes_max or payload_bytes < 0:
            values = {"length": length, "header_bytes": header_bytes, "limit": self.max_bytes}
            raise ProtocolError("a frame's lengths exceed the limits", "frame", "", values)
        body = _PREFIX_BYTES + header_bytes
        large = payload_bytes > LARGE_PAYLOAD_BYTES
        needed = body if large or self._takes_pieces else body + payload_bytes
        if have < needed:
            self._ensure(needed)
            return None
        packed = self._view[begin + _PREFIX_BYTES : begin + body]
        if crc32(packed) != header_crc:
            raise ProtocolError("a header does not match its CRC", "frame")
        header = _unpack_header(packed, self._containers_max)
        if self._takes_pieces and header["t"] == Type.PIECE:
            return self._start_large(header, begin + body, self._room_for_piece(header, payload_bytes))
        if large:
            return self._begin_large(header, begin + body, payload_bytes)
        needed = body + payload_bytes
        if have < needed:  # between nodes: the header was complete, and might have been that of a piece
            self._ensure(needed)
            return None
        self._begin = begin + needed
        if not payload_bytes:
            return Frame(header, _EMPTY)
        # A copy, because the receive buffer is used again.
        return Frame(header, memoryview(bytes(self._view[begin + body : begin + needed])))

    def _room_for_piece(self, header: dict[str, Any], nbytes: int) -> memoryview:
        """Return the memory for the next piece: a part of that of its frame."""
        cut = self._cut_frame
        if cut is None:
            total = header.get("n")
            if type(total) is not int or not PIECE_BYTES < total <= self.max_bytes:
                values = {"bytes": in_words(total)[:80], "limit": self.max_bytes}
                raise ProtocolError("the first piece of a frame names no size within the limits", "frame", "", values)
            cut = self._cut_frame = np.empty(total, np.uint8).data
            self._cut_filled = 0
        if not 0 < nbytes <= min(PIECE_BYTES, len(cut) - self._cut_filled):
            raise ProtocolError("a piece does not fit its frame", "frame", "", {"bytes": nbytes, "size": len(cut)})
        return cut[self._cut_filled : self._cut_filled + nbytes]

    def _add_piece(self, nbytes: int) -> Frame | None:
        """Record that a piece is complete; return its frame if that is complete too."""
        cut = self._cut_frame
        assert cut is not None  # ``_room_for_piece`` has made it
        self._cut_filled += nbytes
        if self._cut_filled < len(cut):
            return None
        self._cut_frame = None
        return self._frame_of(cut)

    def _frame_of(self, data: memoryview) -> Frame:
        """Return the large frame that pieces make up."""
        # Checked like a frame that arrives at once, or pieces would be a way around its limits
        # (``test_malformed_pieces_are_refused``).
        length, header_bytes, header_crc = _PREFIX.unpack_from(data)
        body = _PREFIX_BYTES + header_bytes
        if length != len(data) - 4 or not 0 < header_bytes <= self._header_bytes_max or body > len(data):
            values = {"length": length, "header_bytes": header_bytes, "bytes": len(data)}
            raise ProtocolError("the lengths of a frame in pieces do not add up", "frame", "", values)
        packed = data[_PREFIX_BYTES:body]
        if crc32(packed) != header_crc:
            raise ProtocolError("a header does not match its CRC", "frame")
        header = _unpack_header(packed, self._containers_max)
        if header["t"] not in self._large_types:
            raise ProtocolError("a message of this type has no pieces", "frame", "", {"type": header["t"]})
        return Frame(header, data[body:])

    def _ensure(self, needed: int) -> None:
        if self._begin + needed > len(self._view):
            self._make_room(needed)

    def _begin_large(self, header: dict[str, Any], begin: int, payload_bytes: int) -> Frame | None:
        if header["t"] not in self._large_types:
            values = {"type": header["t"], "bytes": payload_bytes}
            raise ProtocolError("a message of this type has no large payload", "frame", "", values)
        if self._payloads is not None and not self._payloads.begin(header, payload_bytes):
            here = min(self._end - begin, payload_bytes)
            self._begin, self._skipping = begin + here, payload_bytes - here
            return self._next_received()
        # numpy does not zero the memory; it is delivered only when every byte of it was received.
        return self._start_large(header, begin, np.empty(payload_bytes, np.uint8).data)

    def _start_large(self, header: dict[str, Any], begin: int, large: memoryview) -> Frame | None:
        here = min(self._end - begin, len(large))
        large[:here] = self._view[begin : begin + here]
        self._begin = begin + here
        self._header, self._large, self._filled = header, large, here
        return self._next_large(large)

    def _next_large(self, large: memoryview) -> Frame | None:
        if self._filled < len(large):
            return None
        if self._payloads is not None:
            self._payloads.end()
        frame = Frame(self._header, large)
        self._header, self._large, self._filled = {}, None, 0
        return frame
