"""DLedger's JSON bodies: what Java's classes wrote is understood, what we write has the same content."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger_core import errors
from dledger_core.errors import BadRequestError, DLedgerError, ProtocolError
from dledger_core.rocketmq.remoting.codes import RequestCode, ResponseCode, code_of, error_of, header_error
from dledger_core.rocketmq.remoting.frame import FrameDecoder, RemotingFrame, encode_frame
from dledger_core.rocketmq.remoting.messages import (
    AppendRequest,
    AppendResponse,
    GetRequest,
    GetResponse,
    MetadataRequest,
    MetadataResponse,
    PeerRequest,
    Request,
    Response,
    TransferRequest,
    WireEntry,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from tests.rocketmq.remoting.record_frames import BODY, VERSIONS, recorded

BASE: dict[str, Any] = {"group": "g-1", "remote_id": "n1"}
PEER = BASE | {"local_id": "n0", "leader_id": "n0", "term": 3}
REQUESTS = {
    "metadata": MetadataRequest(**BASE),
    "append": AppendRequest(**BASE, bodies=(BODY,)),
    "append-empty": AppendRequest(**BASE, bodies=(b"",)),
    "append-batch": AppendRequest(**BASE, bodies=(b"one", b"", BODY), is_batch=True),
    "get": GetRequest(**BASE, index=1 << 40),
    "transfer": TransferRequest(**BASE, transfer_id="n1", transferee_id="n2", term=7),
    "vote": PeerRequest(**PEER, kind=RequestCode.VOTE),
    "heart-beat": PeerRequest(**PEER, kind=RequestCode.HEART_BEAT),
    "pull": PeerRequest(**BASE, kind=RequestCode.PULL),
    "push": PeerRequest(**PEER, kind=RequestCode.PUSH),
}
PEERS = {"n0": "localhost:20911", "n1": "localhost:20912"}
REPLIES: dict[str, Response] = {
    "metadata": MetadataResponse(group="g-1", leader_id="n1", peers=PEERS),
    "metadata-no-leader": MetadataResponse(group="g-1", peers=PEERS),
    "append": AppendResponse(group="g-1", leader_id="n1", term=3, index=9, position=900),
    "append-not-leader": AppendResponse(code=404, group="g-1", remote_id="n1", leader_id="n2"),
    "get": GetResponse(group="g-1", entries=(WireEntry(9, 3, 1, 900, BODY),)),
    "get-out-of-range": GetResponse(code=410, group="g-1", remote_id="n1", leader_id="n1"),
    "transfer": Response(term=4),
}


def frame_of(data: bytes) -> RemotingFrame:
    decoder = FrameDecoder()
    decoder.receive_data(data)
    frame = decoder.next_frame()
    assert frame is not None
    return frame


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("header", ["request", "request-binary"])
@pytest.mark.parametrize("name", REQUESTS)
def test_java_requests_decode(version: str, header: str, name: str) -> None:
    frame = frame_of(recorded(version)[f"{header}/{name}"])
    assert decode_request(frame) == REQUESTS[name]
    if name not in ("vote", "heart-beat", "pull", "push"):
        assert encode_request(REQUESTS[name], frame.opaque).body == frame.body


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("header", ["response", "response-binary"])
@pytest.mark.parametrize("name", REPLIES)
def test_java_responses_decode(version: str, header: str, name: str) -> None:
    frame, wanted = frame_of(recorded(version)[f"{header}/{name}"]), REPLIES[name]
    assert decode_response(type(wanted), frame, "n1") == wanted
    assert encode_response(wanted) == frame.body


@pytest.mark.parametrize("version", VERSIONS)
def test_append_without_body_is_bad_request(version: str) -> None:
    with pytest.raises(BadRequestError):
        decode_request(frame_of(recorded(version)["request/append-null"]))


@pytest.mark.parametrize("code", [10, 34])
def test_other_codes_decode_to_none(code: int) -> None:
    assert decode_request(RemotingFrame(code=code, opaque=1, body=b"garbage")) is None


words = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
longs = st.integers(-(1 << 63), (1 << 63) - 1)
base = {
    "group": words,
    "remote_id": words,
    "local_id": st.none() | words,
    "leader_id": st.none() | words,
    "term": longs,
}
bodies = st.binary(max_size=60)
requests: st.SearchStrategy[Request] = st.one_of(
    st.builds(MetadataRequest, **base),
    st.builds(AppendRequest, **base, bodies=st.tuples(bodies)),
    st.builds(AppendRequest, **base, bodies=st.lists(bodies, max_size=4).map(tuple), is_batch=st.just(True)),
    st.builds(GetRequest, **base, index=longs),
    st.builds(
        TransferRequest, **base, transfer_id=words | st.none(), transferee_id=words | st.none(), ledger_index=longs
    ),
    st.builds(PeerRequest, **base, kind=st.sampled_from([RequestCode.VOTE, RequestCode.PULL])),
)
entries = st.builds(WireEntry, longs, longs, longs, longs, bodies, longs, longs, longs)
reply_base = {"code": longs, "group": st.none() | words, "remote_id": st.none() | words, "leader_id": st.none() | words}
responses: st.SearchStrategy[Response] = st.one_of(
    st.builds(Response, **reply_base, term=longs),
    st.builds(MetadataResponse, **reply_base, peers=st.dictionaries(words, words, max_size=3)),
    st.builds(AppendResponse, **reply_base, index=longs, position=longs),
    st.builds(GetResponse, **reply_base, entries=st.lists(entries, max_size=2).map(tuple)),
)


@given(requests)
def test_requests_round_trip(request: Request) -> None:
    assert decode_request(frame_of(encode_frame(encode_request(request, 7)))) == request


@given(responses)
def test_responses_round_trip(response: Response) -> None:
    sent = RemotingFrame(code=1, opaque=7).response(200, encode_response(response))
    assert decode_response(type(response), frame_of(encode_frame(sent)), "n1") == response


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words,
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
NAMES = """group remoteId localId leaderId term code body batchMsgs beginIndex transferId transfereeId entries peers
    index pos takeLeadershipLedgerIndex"""
names = st.sampled_from(NAMES.split())


@given(st.sampled_from(list(RequestCode)), st.dictionaries(names, json_values) | json_values | st.binary(max_size=80))
def test_garbage_body_decodes_or_raises_dledger_error(code: RequestCode, content: Any) -> None:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    with contextlib.suppress(ProtocolError, BadRequestError):
        decode_request(RemotingFrame(code=code, opaque=1, body=body))
    for kind in (Response, MetadataResponse, AppendResponse, GetResponse):
        with contextlib.suppress(ProtocolError):
            decode_response(kind, RemotingFrame(code=200, opaque=1, body=body), "n1")


def append_frame(body: bytes) -> RemotingFrame:
    return RemotingFrame(code=RequestCode.APPEND, opaque=1, body=body)


def numbers(data: bytes) -> str:
    """Bytes as DLedger 0.4.3 writes them: fastjson2 makes signed numbers of them."""
    return str([byte - 256 if byte > 127 else byte for byte in data]).replace(" ", "")


@pytest.mark.parametrize("body", [b"", b"a", bytes(range(256)), bytes(range(256)) * 1024], ids=len)
def test_bytes_as_numbers_decode(body: bytes) -> None:
    request = decode_request(append_frame(f'{{"body":{numbers(body)},"group":"g"}}'.encode()))
    assert request == AppendRequest(group="g", remote_id="", bodies=(body,))
    entry = f'{{"body":{numbers(body)},"bodyCrc":0,"index":7,"magic":1,"pos":99,"size":{len(body) + 48},"term":2}}'
    frame = RemotingFrame(code=200, opaque=1, body=f'{{"code":200,"entries":[{entry}]}}'.encode())
    assert decode_response(GetResponse, frame, "n1").entries == (WireEntry(7, 2, 1, 99, body),)


@pytest.mark.parametrize("body", [b"", b"a", bytes(range(256))], ids=len)
def test_request_with_bytes_as_numbers_decodes(body: bytes) -> None:
    request = AppendRequest(group='"body":"YQ=="', remote_id="n0", bodies=(body,))
    frame = encode_request(request, 7, numbers=True)
    assert f'"body":{numbers(body)}'.encode() in frame.body
    assert decode_request(frame) == request


def test_text_of_numbers_stays_text() -> None:
    request = decode_request(append_frame(rb'{"body":"YQ==","group":"\"body\":[1,2]"}'))
    assert request == AppendRequest(group='"body":[1,2]', remote_id="", bodies=(b"a",))


@pytest.mark.parametrize(
    "body",
    [
        b'{"body":"YQ"}',
        b'{"body":"Y Q=="}',
        b'{"body":"YQ==YQ=="}',
        b'{"body":["YQ=="]}',
        b'{"body":[128]}',
        b'{"body":[-129]}',
        b'{"body":[1,,2]}',
        b'{"body":[1-2]}',
        b'{"body":[1,]}',
        b'{"body":"\\ud800"}',
        b'{"batchMsgs":"YQ=="}',
        b'{"batchMsgs":[1]}',
        b'{"body":"YQ==","term":1.0}',
        b'{"body":"YQ==","term":9223372036854775808}',
        b'{"body":"YQ==","term":NaN}',
        b'{"body":"YQ==","group":7}',
        b"[" * 100_000,
        b"",
    ],
)
def test_wrong_bodies_are_protocol_errors(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_request(append_frame(body))


@pytest.mark.parametrize(
    ("code", "body"),
    [
        (RequestCode.APPEND, b'{"body":[' + b"," * (4 << 20) + b"]}"),
        (RequestCode.APPEND, b'{"batchMsgs":[' + b'"",' * 4_000_000 + b'""]}'),
        (RequestCode.GET, json.dumps({"group": "x" * (64 << 10)}).encode()),
    ],
    ids=["numbers", "parts", "request without entries"],
)
def test_body_above_limit_is_rejected_unparsed(code: RequestCode, body: bytes) -> None:
    frame = RemotingFrame(code=code, opaque=1, body=body)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode_request(frame)
        assert tracemalloc.get_traced_memory()[1] < 100_000 or b"batchMsgs" not in body
    finally:
        tracemalloc.stop()


def test_entry_with_wrong_size_is_rejected() -> None:
    body = json.dumps({"entries": [WireEntry(1, 1, 1, 1, b"abc").to_fields() | {"size": 50}]}).encode()
    with pytest.raises(ProtocolError):
        decode_response(GetResponse, RemotingFrame(code=200, opaque=1, body=body), "n1")


@pytest.mark.parametrize(
    ("code", "kind", "again", "unknown"),
    [
        (404, errors.NotLeaderError, True, False),
        (410, errors.IndexOutOfRangeError, False, False),
        (419, errors.IndexOutOfRangeError, False, False),
        (400, errors.UnknownGroupError, False, False),
        (401, errors.BadRequestError, False, False),
        (403, errors.LeadershipLostError, False, True),
        (501, errors.LeadershipLostError, False, True),
        (502, errors.RequestTimedOutError, False, True),
        (500, errors.RequestTimedOutError, False, True),
        (-1, errors.RequestTimedOutError, False, True),
        (12345, errors.RequestTimedOutError, False, True),
        (503, errors.BusyError, True, False),
        (505, errors.NoLeaderError, True, False),
        (506, errors.TransferringError, True, False),
        (415, errors.DiskFullError, True, False),
    ],
)
def test_response_code_maps_to_error(code: int, kind: type[DLedgerError], again: bool, unknown: bool) -> None:
    error = Response(code=code, leader_id="n2").failure("n1")
    assert type(error) is kind
    assert (error.retriable, error.outcome_unknown) == (again, unknown)
    assert getattr(error, "leader_id", "n2") == "n2"
    assert Response().failure("n1") is None


def test_header_code_maps_to_error() -> None:
    assert isinstance(header_error(2, "[OVERLOAD]", "n1"), errors.BusyError)
    assert isinstance(header_error(3, "no", "n1"), errors.BadRequestError)
    assert header_error(1, None, "n1").outcome_unknown
    with pytest.raises(errors.BusyError):
        decode_response(Response, RemotingFrame(code=2, opaque=1, flag=1, remark="busy"), "n1")


def every_error(kind: type[DLedgerError] = DLedgerError) -> list[type[DLedgerError]]:
    """Of the core: a worker that has tested the connector knows the connector's errors too."""
    below = (each for each in kind.__subclasses__() if each.__module__.startswith("dledger_core."))
    return [kind, *(found for each in below for found in every_error(each))]


@pytest.mark.parametrize("kind", every_error())
def test_every_error_maps_to_java_code(kind: type[DLedgerError]) -> None:
    code = code_of(kind("x"))
    assert code in ResponseCode
    assert code != ResponseCode.SUCCESS
    if "code" in vars(kind) and kind.code in list(ResponseCode) and kind is not DLedgerError:
        back = error_of(code, "n1")
        assert (back.retriable, back.outcome_unknown) == (kind.retriable, kind.outcome_unknown)


@pytest.mark.parametrize(("index", "code"), [(3, 419), (10, 410)])
def test_index_out_of_range_code_names_side(index: int, code: int) -> None:
    values = {"index": index, "first_index": 5, "last_index": 9}
    assert code_of(errors.IndexOutOfRangeError("x", "", "", values)) == code
