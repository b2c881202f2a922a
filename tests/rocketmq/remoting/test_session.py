"""Responses of a node, frame by frame, without sockets, to requests that Java's classes made."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from dledger_core import errors
from dledger_core.errors import ProtocolError
from dledger_core.rocketmq.remoting.codes import RequestCode
from dledger_core.rocketmq.remoting.frame import BINARY, FrameDecoder, RemotingFrame, encode_frame
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
    decode_response,
    encode_request,
)
from dledger_core.rocketmq.remoting.port import RemotingSession
from tests.rocketmq.remoting.fake_nodes import FakeGroup, FakeNode
from tests.rocketmq.remoting.record_frames import BODY, VERSIONS, recorded

PEERS = {"n0": "localhost:1", "n1": "localhost:2", "n2": "localhost:3"}


@pytest.fixture
def group() -> FakeGroup:
    return FakeGroup(PEERS, leader_id="n1")


def exchange(group: FakeGroup, *frames: bytes | RemotingFrame, node: str = "n1") -> list[RemotingFrame]:
    """Returns the answers of one node to frames, all on one connection."""
    session = RemotingSession(FakeNode(node, group))
    data = b"".join(frame if isinstance(frame, bytes) else encode_frame(frame) for frame in frames)

    async def answers() -> bytes:
        return b"".join([await session.respond(frame) for frame in session.receive_data(data)])

    decoder, found = FrameDecoder(), []
    decoder.receive_data(asyncio.run(answers()))
    while (frame := decoder.next_frame()) is not None:
        found.append(frame)
    return found


def ask(group: FakeGroup, request: Request, kind: type[Response], node: str = "n1") -> Any:
    [answer] = exchange(group, encode_request(request, 5), node=node)
    assert (answer.opaque, answer.is_response) == (5, True)
    return decode_response(kind, answer, node)


BASE: dict[str, Any] = {"group": "g-1", "remote_id": "n1"}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("header", ["request", "request-binary"])
def test_java_requests_are_handled(group: FakeGroup, version: str, header: str) -> None:
    frames = recorded(version)
    names = ["metadata", "append", "append-empty", "append-batch", "append-null", "get"]
    found = exchange(group, *(frames[f"{header}/{name}"] for name in names))
    assert {frame.serialize_type for frame in found} == {BINARY if "binary" in header else 0}
    metadata = decode_response(MetadataResponse, found[0], "n1")
    assert (metadata.leader_id, metadata.peers, metadata.group) == ("n1", PEERS, "g-1")
    appends = [decode_response(AppendResponse, frame, "n1") for frame in found[1:5]]
    assert [(response.code, response.index) for response in appends] == [(200, 0), (200, 1), (200, 4), (411, -1)]
    assert (appends[2].position, appends[2].term, appends[2].leader_id) == (group.entries[4].position, 3, "n1")
    assert [entry.body for entry in group.entries] == [BODY, b"", b"one", b"", BODY]
    assert decode_response(GetResponse, found[5], "n1").code == 410


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "extra"), [("vote", {"voteResult": "UNKNOWN"}), ("heart-beat", {}), ("pull", {}), ("push", {})]
)
def test_java_peer_requests_are_rejected(group: FakeGroup, version: str, name: str, extra: dict[str, str]) -> None:
    [frame] = exchange(group, recorded(version)[f"request/{name}"])
    content = json.loads(frame.body)
    assert (frame.code, content["code"], content["leaderId"]) == (200, 303, "n1")
    assert extra.items() <= content.items()
    assert group.entries == []


def test_get_returns_entry_of_store(group: FakeGroup) -> None:
    group.write(b"first")
    control = group.write(b"", magic=2)
    [entry] = ask(group, GetRequest(**BASE, index=1), GetResponse).entries
    assert entry == control


@pytest.mark.parametrize(("nbytes", "large"), [(1000, 0), (300_000, 3)])
def test_large_bodies_are_encoded_off_loop(group: FakeGroup, nbytes: int, large: int) -> None:
    """JSON and base64 of megabytes would keep heartbeats waiting, and a leader would be taken for dead."""
    node = FakeNode("n1", group)
    session = RemotingSession(node)
    requests = [
        AppendRequest(**BASE, bodies=(b"x" * nbytes,)),
        GetRequest(**BASE, index=0),
        GetRequest(**BASE, index=0),
    ]

    async def answers() -> list[bytes]:
        frames = session.receive_data(b"".join(encode_frame(encode_request(one, 1)) for one in requests))
        return [await session.respond(frame) for frame in frames]

    assert [len(answer) > nbytes for answer in asyncio.run(answers())] == [False, True, True]
    assert node.large == large


REQUESTS = [
    MetadataRequest(**BASE),
    AppendRequest(**BASE, bodies=(b"x",)),
    GetRequest(**BASE, index=0),
    TransferRequest(**BASE, transfer_id="n1", transferee_id="n2", term=3),
    PeerRequest(**BASE, kind=RequestCode.HEART_BEAT),
    PeerRequest(**BASE, kind=RequestCode.VOTE),
    PeerRequest(**BASE, kind=RequestCode.PULL),
    PeerRequest(**BASE, kind=RequestCode.PUSH),
    PeerRequest(**BASE, kind=RequestCode.INSTALL_SNAPSHOT),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: f"{type(r).__name__}-{getattr(r, 'kind', '')}")
def test_requests_for_other_node_or_group_are_rejected(group: FakeGroup, request_: Request) -> None:
    assert ask(group, replace(request_, remote_id="n9"), Response).code == 401
    assert ask(group, replace(request_, group="other"), Response).code == 400
    assert ask(group, replace(request_, remote_id="n9", group="other"), Response).code == 401
    assert group.entries == []


@pytest.mark.parametrize(
    ("request_", "codes"), [(REQUESTS[0], (200, 200)), (REQUESTS[1], (404, 404)), (REQUESTS[2], (404, 404))]
)
def test_follower_names_leader(group: FakeGroup, request_: Request, codes: tuple[int, int]) -> None:
    for leader, code in zip(("n1", None), codes, strict=True):
        group.leader_id = leader
        response = ask(group, replace(request_, remote_id="n0"), Response, node="n0")
        assert (response.code, response.leader_id) == (code, leader)
        assert response.remote_id == ("n0" if code == 404 else None)


def test_deleted_and_future_index_have_own_codes(group: FakeGroup) -> None:
    for number in range(5):
        group.write(b"%d" % number)
    group.first = 2
    codes = [ask(group, GetRequest(**BASE, index=index), GetResponse).code for index in (-1, 0, 1, 2, 4, 5, 1 << 62)]
    assert codes == [419, 419, 419, 200, 200, 410, 410]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, 200),
        ({"term": 2}, 407),
        ({"transferee_id": "n9"}, 401),
        ({"transferee_id": None}, 401),
        ({"transfer_id": "n0"}, 411),
        ({"transfer_id": "n0", "transferee_id": "n1"}, 303),
        ({"transfer_id": None}, 411),
    ],
)
def test_transfer(group: FakeGroup, changes: dict[str, Any], code: int) -> None:
    request = TransferRequest(**BASE, transfer_id="n1", transferee_id="n2", term=3)
    response = ask(group, replace(request, **changes), Response)
    assert response.code == code
    assert (group.leader_id, group.term) == (("n2", 4) if code == 200 else ("n1", 3))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.BusyError("x"), 503),
        (errors.NoLeaderError("x"), 404),
        (errors.FencedError("x"), 500),
        (RuntimeError(), 500),
    ],
)
def test_node_error_becomes_code(group: FakeGroup, error: Exception, code: int) -> None:
    group.raises = [error]
    assert ask(group, AppendRequest(**BASE, bodies=(b"x",)), AppendResponse).code == code


def test_rocketmq_requests_are_not_supported(group: FakeGroup) -> None:
    [answer] = exchange(group, RemotingFrame(code=105, opaque=9, body=b"whatever", language="JAVA"))
    assert (answer.code, answer.opaque, answer.remark) == (3, 9, " request type 105 not supported")


def test_oneway_request_and_response_get_no_response(group: FakeGroup) -> None:
    append = encode_request(AppendRequest(**BASE, bodies=(b"x",)), 1)
    assert exchange(group, replace(append, flag=2), replace(append, flag=1)) == []
    assert [entry.body for entry in group.entries] == [b"x"]


def test_wrong_append_is_rejected_and_malformed_one_ends_connection(group: FakeGroup) -> None:
    assert ask(group, AppendRequest(**BASE, bodies=(), is_batch=True), AppendResponse).code == 420
    with pytest.raises(ProtocolError):
        exchange(group, RemotingFrame(code=RequestCode.APPEND, opaque=1, body=b"{"))
