"""The session of a connection: its opening, byte by byte or at once, without sockets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dledger_core.errors import BusyError, DLedgerError, InvariantViolationError, ProtocolError
from dledger_core.net.frame import encode_frame
from dledger_core.net.hello import Hello
from dledger_core.net.protocol import CLIENT_FRAME_BYTES_MAX, FRAME_BYTES_MAX, HELLO_BYTES_MAX, PREFACE, Type
from dledger_core.net.session import Opening, Session

NODE = Hello("peer", "n0", "uuid-0", (1, 1), "127.0.0.1:1")
OTHER_NODE = Hello("peer", "n1", "uuid-1", (1, 1), "127.0.0.1:2")


def joined(buffers: list) -> bytes:
    return b"".join(map(bytes, buffers))


def feed(session: Session, data: bytes) -> None:
    session.get_buffer()[: len(data)] = data
    session.buffer_updated(len(data))


def openings(session: Session, data: bytes, chunk: int) -> Iterator[Opening]:
    for at in range(0, len(data), chunk):
        feed(session, data[at : at + chunk])
        if (found := session.next_opening()) is not None:
            yield found


@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_both_sides_open_by_bytes_alone(chunk: int) -> None:
    dialed, listening = Session(Hello()), Session()
    [theirs] = openings(listening, joined(dialed.greeting()), chunk)
    assert theirs == Hello()
    assert listening.greeting() == []
    response = joined(encode_frame(NODE.to_response()))
    [answer] = openings(dialed, response, chunk)
    assert isinstance(answer, Hello)
    assert answer.node_id == "n0"
    for session, hello in ((listening, theirs), (dialed, answer)):
        session.accept(hello)
        feed(session, joined(encode_frame({"t": 12, "r": 1}, b"body")))
        assert session.next_frame() == ({"t": 12, "r": 1}, b"body")


@pytest.mark.parametrize(
    ("ours", "theirs", "serves_client", "is_between_nodes", "limit"),
    [
        (None, Hello(), True, False, CLIENT_FRAME_BYTES_MAX),
        (None, OTHER_NODE, False, True, FRAME_BYTES_MAX),
        (OTHER_NODE, NODE, False, True, FRAME_BYTES_MAX),
        (Hello(), NODE, False, False, FRAME_BYTES_MAX),
    ],
)
def test_limits_follow_from_both_roles(ours, theirs, serves_client, is_between_nodes, limit) -> None:
    session = Session(ours)
    assert session.max_bytes == HELLO_BYTES_MAX
    session.accept(theirs)
    assert (session.serves_client, session.is_between_nodes) == (serves_client, is_between_nodes)
    assert session.max_bytes == limit


def test_refusal_is_an_opening_and_no_error_of_this_side() -> None:
    session = Session(Hello())
    [found] = openings(session, joined(encode_frame({"t": Type.FAILURE, "e": BusyError("full").to_wire()})), 4096)
    assert isinstance(found, DLedgerError)
    assert found.name == "BUSY"


def test_other_protocol_is_taken_with_all_its_bytes_where_one_is_served() -> None:
    found = list(openings(Session(takes_others=True), b"\0\0\1\2", 4096))
    assert found == [b"\0\0\1\2"]
    with pytest.raises(ProtocolError):
        list(openings(Session(), b"\0\0\1\2", 4096))


@pytest.mark.parametrize("version", [2, 99])
def test_response_with_version_that_was_not_offered_is_refused(version: int) -> None:
    response = NODE.to_response() | {"v": version}
    with pytest.raises(ProtocolError):
        list(openings(Session(Hello()), joined(encode_frame(response)), 4096))


def test_frame_before_hello_is_refused() -> None:
    for session, data in (
        (Session(), PREFACE + joined(encode_frame({"t": 12, "r": 1}))),
        (Session(Hello()), joined(encode_frame({"t": 13, "r": 1}))),
    ):
        with pytest.raises(ProtocolError):
            list(openings(session, data, 4096))


def test_second_hello_breaks_an_invariant() -> None:
    session = Session()
    session.accept(Hello())
    with pytest.raises(InvariantViolationError):
        session.accept(Hello())


def listening(*frames: list) -> Session:
    """Return the session of a node that has received these frames of a client."""
    session = Session()
    session.accept(Hello())
    feed(session, b"".join(map(joined, frames)))
    return session


def append(number: int, payload: bytes = b"payload", **fields: object) -> list:
    return encode_frame({"t": Type.APPEND, "g": "g", "n": 1, "r": number} | fields, payload)


def numbers(session: Session, most: int = 64) -> list[list[int]]:
    """Return the numbers of all requests, those that were returned together in one list."""
    found = []
    while True:
        frames = session.next_appends(most)
        if not frames:
            if (frame := session.next_frame()) is None:
                return found
            frames = [frame]
        found.append([frame.header["r"] for frame in frames])


@pytest.mark.parametrize(
    "other",
    [
        {"g": "another group"},
        {"lu": "another log"},
        {"p": "producer"},
        {"x": {}},
        {"tp": "traced"},
        {"n": 0},
        {"n": "1"},
        {"g": None},
        {"t": Type.READ},
    ],
    ids=repr,
)
def test_plain_appends_to_one_log_are_returned_together(other: dict) -> None:
    session = listening(append(1), append(2), append(3, n=2), append(4, **other), append(5), append(6))
    assert numbers(session) == [[1, 2, 3], [4], [5, 6]]
    assert not session.is_inside_frame


def test_appends_are_returned_in_parts_of_limited_number_and_bytes() -> None:
    assert numbers(listening(*map(append, range(1, 6))), most=2) == [[1, 2], [3, 4], [5]]
    large = [append(number, bytes(40 << 10)) for number in range(1, 4)]
    assert numbers(listening(*large)) == [[1, 2], [3]]


def test_large_append_is_not_begun_before_those_before_it_are_handled() -> None:
    begun = []

    class Payloads:
        def begin(self, header: dict, nbytes: int) -> bool:
            begun.append(nbytes)
            return True

        def end(self) -> None:
            pass

    session = Session()
    session.accept(Hello(), Payloads())
    feed(session, b"".join(map(joined, (append(1), append(2), append(3, bytes(80 << 10))))))
    assert [frame.header["r"] for frame in session.next_appends(64)] == [1, 2]
    assert not begun
    assert [frame.header["r"] for frame in session.next_appends(64)] == [3]
    assert begun == [80 << 10]


def test_frame_that_was_read_ahead_counts_as_begun() -> None:
    session = listening(append(1), encode_frame({"t": Type.READ, "r": 2}))
    assert [frame.header["r"] for frame in session.next_appends(64)] == [1]
    assert session.is_inside_frame
    assert session.next_appends(64) == []
    assert session.next_frame() == ({"t": Type.READ, "r": 2}, b"")
    assert not session.is_inside_frame


def test_appends_before_damaged_frame_are_returned_and_then_it_raises() -> None:
    damaged = bytearray(joined(append(3)))
    damaged[8] ^= 1
    session = listening(append(1), append(2), [damaged])
    assert [frame.header["r"] for frame in session.next_appends(64)] == [1, 2]
    with pytest.raises(ProtocolError):
        session.next_appends(64)
