"""One side of a connection without I/O: bytes come in, its opening and then frames come out.

The side that dialed sends the preface and its hello; the side that listens responds with a hello of its own or with the
error that refuses it. Who may connect, and what a frame means, is decided elsewhere.
"""

from __future__ import annotations

from typing import Final

from dledger_core.checksum import Buffer
from dledger_core.errors import DLedgerError, ProtocolError, error_from_wire, invariant
from dledger_core.net.frame import LARGE_REQUESTS, Frame, FrameDecoder, Payloads, encode_frame
from dledger_core.net.hello import Hello, negotiate
from dledger_core.net.messages import is_plain_append
from dledger_core.net.protocol import (
    CLIENT_CONTAINERS_MAX,
    CLIENT_FRAME_BYTES_MAX,
    CLIENT_HEADER_BYTES_MAX,
    FRAME_BYTES_MAX,
    HELLO_BYTES_MAX,
    PREFACE,
    Type,
)

_TLS_HANDSHAKE: Final = 0x16
_OTHER_PROTOCOL: Final = (0, 1)
APPENDS_BYTES_MAX: Final = 64 << 10
"""More bytes of appends are handled in several parts: a request of its own may be as large."""
Opening = Hello | DLedgerError | bytes
"""The other side's hello; the error by which it refuses this side; or the first bytes of another protocol."""


class Session(FrameDecoder):
    """Preface, hello, frames; a subclass of the decoder, so that a frame costs no further call.

    Call ``next_opening`` until it returns something, ``accept`` a hello, and then only ``next_frame`` and, for the
    requests of a client, ``next_appends``.

    Args:
        hello: this side's hello if it dialed; None = it listens.
        takes_others: a listening side serves another protocol too, whose first byte is 0 or 1 (the length of a frame).

    Attributes:
        version: the protocol version in use; 0 until ``accept``.
        serves_client: whether this side listens, and the other one is a client.
        is_between_nodes: whether both sides are nodes.
    """

    __slots__ = (
        "_awaits_preface",
        "_hello",
        "_takes_others",
        "is_between_nodes",
        "serves_client",
        "version",
    )

    def __init__(self, hello: Hello | None = None, *, takes_others: bool = False) -> None:
        super().__init__(HELLO_BYTES_MAX)
        self._hello = hello
        self._takes_others = takes_others
        self._awaits_preface = hello is None
        self.version = 0
        self.serves_client = False
        self.is_between_nodes = False

    def greeting(self) -> list[Buffer]:
        """Return the first bytes of the side that dialed."""
        return [] if self._hello is None else [PREFACE, *encode_frame(self._hello.to_header())]

    def next_opening(self) -> Opening | None:
        """Return how the other side opens the connection, or None until more bytes arrive.

        Raises:
            ProtocolError: it does not speak this protocol.
        """
        # Bytes of a stranger: nothing is decoded before these are known, and no frame may exceed HELLO_BYTES_MAX
        # (``test_garbage_closes_that_connection_only``).
        if self._awaits_preface:
            if self._takes_others and self.buffered[0] in _OTHER_PROTOCOL:
                return self.take_rest()
            if not self._take_preface():
                return None
        frame = self.next_frame()
        return None if frame is None else self._opening(frame)

    def take_rest(self) -> bytes:
        """Consume and return the bytes received, which are of another protocol."""
        data = bytes(self.buffered)
        self.skip(len(data))
        return data

    def _take_preface(self) -> bool:
        """Whether the preface is complete; refuse another one at its first wrong byte."""
        have = bytes(self.buffered[: len(PREFACE)])
        if have[0] == _TLS_HANDSHAKE:
            raise ProtocolError("the other side speaks TLS, this port does not")
        if have[:4] != PREFACE[: min(len(have), 4)]:
            raise ProtocolError("not the protocol of this port", "", "", {"first_bytes": have.hex()})
        if len(have) < len(PREFACE):
            return False
        if have != PREFACE:
            raise ProtocolError("unknown preface version", "", "", {"version": have[4]})
        self.skip(len(PREFACE))
        self._awaits_preface = False
        return True

    def _opening(self, frame: Frame) -> Opening:
        kind = frame.header["t"]
        if self._hello is None:
            if kind != Type.HELLO:
                raise ProtocolError("the first frame is not a hello", "", "", {"type": kind})
            return Hello.from_header(frame.header)
        if kind == Type.FAILURE:
            fields = frame.header.get("e")
            return error_from_wire(fields if isinstance(fields, dict) else {})
        if kind != Type.HELLO_OK:
            raise ProtocolError("the response to hello is missing", "", "", {"type": kind})
        theirs = Hello.from_header(frame.header)
        negotiate(self._hello, theirs)  # the other side may choose only what this side offered
        return theirs

    def accept(self, theirs: Hello, payloads: Payloads | None = None) -> None:
        """Take frames from now on, within the limits of the other side's role.

        Args:
            theirs: the other side's hello, with the version and the features that were chosen.
            payloads: gets a client's large payloads as they begin.
        """
        invariant(self.version == 0, "a hello is accepted twice", hello=theirs)
        self.version = theirs.versions[0]
        self.serves_client = self._hello is None and theirs.role == "client"
        self.is_between_nodes = theirs.role == "peer" and (self._hello is None or self._hello.role == "peer")
        if self.serves_client:
            self.raise_limit(
                CLIENT_FRAME_BYTES_MAX,
                header_bytes=CLIENT_HEADER_BYTES_MAX,
                large_types=LARGE_REQUESTS,
                payloads=payloads,
                containers_max=CLIENT_CONTAINERS_MAX,
            )
        else:
            self.raise_limit(FRAME_BYTES_MAX, takes_pieces=self.is_between_nodes)

    def next_appends(self, most: int) -> list[Frame]:
        """Return the next frames if they are plain appends to one log; none if the next one is anything else.

        Args:
            most: number of frames; there are fewer if their payloads are more than ``APPENDS_BYTES_MAX``.

        Raises:
            ProtocolError: as ``next_frame``, once the frames before the damaged one were returned.
        """
        frame, found, nbytes = self.next_frame(), list[Frame](), 0
        while frame is not None and is_plain_append(header := frame.header):
            if found and (header["g"] != found[0].header["g"] or header.get("lu") != found[0].header.get("lu")):
                break
            found.append(frame)
            nbytes += len(frame.payload)
            # No large frame is begun: once it is complete, its payload has no charge until it is handled.
            if len(found) >= most or nbytes > APPENDS_BYTES_MAX or not self.has_small_frame:
                return found
            try:
                frame = self.next_frame()
            except ProtocolError:  # raised again by the next call, which finds the same bytes
                return found
        if frame is not None:
            self.put_back(frame)
        return found
