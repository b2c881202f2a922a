"""RocketMQ's remoting protocol, as a node reads it: frames, bodies, and what a session answers to them."""

from __future__ import annotations

import asyncio
import contextlib

from dledger_core.errors import DLedgerError, ProtocolError
from dledger_core.rocketmq.remoting.frame import FrameDecoder, RemotingFrame, encode_frame
from dledger_core.rocketmq.remoting.messages import (
    AppendResponse,
    GetResponse,
    MetadataResponse,
    Response,
    decode_response,
)
from dledger_core.rocketmq.remoting.port import RemotingSession
from tests.fuzz.finding import expect, memory_below
from tests.rocketmq.remoting.fake_nodes import FakeGroup, FakeNode

PER_BYTE = 160
"""Bytes of memory for a byte that was received: JSON's smallest list becomes an object."""
FIXED_BYTES = 2 << 20
FRAMES_MAX = 64


def _frames(stream: bytes, chunk: int) -> tuple[list[RemotingFrame], bool]:
    """Returns the frames of a stream, and whether it ended in a refusal."""
    decoder, found = FrameDecoder(), []
    try:
        for at in range(0, len(stream), chunk):
            decoder.receive_data(stream[at : at + chunk])
            while (frame := decoder.next_frame()) is not None:
                found.append(frame)
    except ProtocolError:
        return found, True
    expect(decoder.buffered_bytes <= len(stream), "more is held than came")
    return found, False


def _answered(stream: bytes) -> None:
    group = FakeGroup({"n0": "a:1", "n1": "b:2"}, leader_id="n1")
    group.write(b"an entry")
    session = RemotingSession(FakeNode("n1", group))

    async def main() -> None:
        try:
            frames = session.receive_data(stream)
        except ProtocolError:
            return
        for frame in frames[:FRAMES_MAX]:
            try:
                answer = await session.respond(frame)
            except ProtocolError:
                return
            expect(bool(answer) != frame.is_oneway, "a request without its answer", code=frame.code)
            if answer:
                [response], refused = _frames(answer, len(answer))
                expect(
                    response.is_response and response.opaque == frame.opaque and not refused,
                    "an answer to another request",
                )

    asyncio.run(main())


def run_remoting(data: bytes) -> None:
    """Chunks do not change frames; what passes can be encoded again; a session answers or refuses."""
    with memory_below(FIXED_BYTES + PER_BYTE * len(data)):
        frames, refused = _frames(data, max(1, len(data)))
        for chunk in (1, 7):
            expect(_frames(data, chunk) == (frames, refused), "chunks change what is decoded", chunk=chunk)
        for frame in frames:
            for kind in (Response, MetadataResponse, AppendResponse, GetResponse):
                with contextlib.suppress(DLedgerError):
                    decode_response(kind, frame, "n1")
            with contextlib.suppress(ProtocolError, UnicodeEncodeError):  # half a surrogate pair has no UTF-8
                str(frame.remark).encode()
                "".join([*frame.fields, *frame.fields.values(), frame.language]).encode()
                again, _ = _frames(encode_frame(frame), 1 << 20)
                expect(again == [frame], "a frame that changes when it is encoded again", frame=frame)
        _answered(data)
