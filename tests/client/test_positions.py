"""Reads by position against scripted nodes: valid and wrong responses."""

from __future__ import annotations

import numpy as np
import pytest

from dledger_core.errors import (
    BadRequestError,
    CorruptRecordError,
    IndexOutOfRangeError,
    ProtocolError,
)
from dledger_core.net.protocol import Type
from tests.client.fake_group import FakeFormat, on_group

SIZES = (200, 90, 300)
OLD = [FakeFormat.message(at, bytes(size - 12)) for at, size in zip((0, 200, 290), SIZES, strict=True)]
ENDS = np.cumsum([len(data) for data in OLD]).tolist()


def answer(payload=None, **fields):
    """A step that answers AT; by default with the first messages of a CommitLog."""
    if payload is None:
        payload = np.array([len(data) for data in OLD], "<u4").tobytes() + b"".join(OLD)
    header = {"t": Type.AT_OK, "index": None, "n": len(OLD), "next": ENDS[-1]} | fields
    return lambda node, connection, frame: (header, [payload])


@on_group()
async def test_prefix_messages_have_position_and_body_only(group, client):
    group.nodes.n0.script[Type.AT] = [answer()]
    found = await client.fetch_at(0, node="n0")
    assert (found.next_position, found.next_index) == (ENDS[-1], None)
    assert found.batch.to_pylist() == [
        {"index": None, "term": None, "position": at, "timestamp": None, "body": data}
        for at, data in zip([0, *ENDS], OLD, strict=False)
    ]
    assert group.asked(Type.READ) == []


FLIPPED = OLD[0][:100] + bytes([OLD[0][100] ^ 1]) + OLD[0][101:]
WRONG = {
    "no messages": answer(n=0),
    "one more": answer(n=4),
    "no number": answer(n=None),
    "before the position": answer(next=ENDS[-1] - 1),
    "nowhere": answer(next=None),
    "no index": answer(index="1"),
    "nothing": answer(b""),
    "of another place": answer(next=ENDS[-1] + 1),
    "damaged": answer(np.array([len(FLIPPED)], "<u4").tobytes() + FLIPPED, n=1, next=ENDS[0]),
}


@pytest.mark.parametrize("name", WRONG)
@on_group()
async def test_wrong_position_response_fails_over(group, client, name):
    step = WRONG[name]
    error = CorruptRecordError if name in ("of another place", "damaged") else ProtocolError
    group.nodes.n0.script[Type.AT] = [step]
    with pytest.raises(error):
        await client.read_at(0, node="n0")
    for node in group:
        node.script[Type.AT] = [answer() if node.node_id == "n2" else step] * 3
    assert (await client.read_at(0)).column("body").to_pylist() == OLD


@on_group()
async def test_fetch_at_continues_after_lagging_replica(group, client):
    group.log.append_bodies(*(bytes([number]) * 100 for number in range(50)))
    place = 148 * 40
    for node in group:
        node.script[Type.AT] = [answer(b"", index=3, n=0)] * 2
    found = await client.fetch_at(place + 60, max_bytes=1000)
    assert found.batch.column("index")[0].as_py() == 40
    assert found.next_index > 40
    assert (await client.read_at(place + 148)).column("index")[0].as_py() == 41
    assert (await client.fetch_at(148 * 50)).batch.num_rows == 0


@on_group()
async def test_fetch_at_asks_leader_after_lagging_follower(group, client):
    group.log.append_bodies(*(bytes([number]) * 100 for number in range(50)))

    def nothing_yet(node, connection, frame):
        if frame.header.get("cons") == "linearizable":
            return node.answer(frame)
        next_index = max(30, frame.header["start"])
        end = {"n": 0, "next": next_index, "commit": 29, "visible": 30, "first": 0, "skip": []}
        return {"t": Type.READ_OK} | end, []

    for node in group:
        node.script[Type.READ] = [nothing_yet] * 9
        if node.node_id != group.leader:
            node.script[Type.AT] = [answer(b"", index=30, n=0)] * 9
    for _ in range(4):
        found = await client.fetch_at(148 * 40)
        assert (found.batch.column("index")[0].as_py(), found.next_index) == (40, 50)
    followers = [node.node_id for node in group if node.node_id != group.leader]
    assert (await client.fetch_at(148 * 40, node=followers[0])).batch.num_rows == 0


@on_group()
async def test_fetch_at_deleted_position_is_out_of_range(group, client):
    for node in group:
        node.script[Type.AT] = [IndexOutOfRangeError("deleted")]
    with pytest.raises(IndexOutOfRangeError):
        await client.read_at(7)


@pytest.mark.parametrize(("position", "max_bytes"), [(-1, 1), (0, 0)])
@on_group()
async def test_fetch_at_rejects_bad_numbers_before_sending(group, client, position, max_bytes):
    with pytest.raises(BadRequestError):
        await client.read_at(position, max_bytes=max_bytes)
    assert group.asked(Type.AT) == []
