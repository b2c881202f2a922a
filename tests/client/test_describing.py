import asyncio

import pytest

from dledger_core.errors import BadRequestError, DLedgerError, ProtocolError, UnreachableError
from dledger_core.net.protocol import Type
from tests.client.fake_group import on_group


def answering(**fields):
    return lambda node, connection, frame: ({"t": frame.header["t"] + 1, **fields}, [])


@on_group()
async def test_groups_merges_nodes_and_prefers_known_uuid(group, client):
    group.nodes.n0.script[Type.GROUPS] = [answering(logs={"b": "u", "a": None})]
    group.nodes.n1.script[Type.GROUPS] = [answering(logs={"b": None, "c": "w"})]
    await group.nodes.n2.stop()
    assert list((await client.groups()).items()) == [("a", None), ("b", "u"), ("c", "w")]
    await group.nodes.n0.stop()
    await group.nodes.n1.stop()
    with pytest.raises(UnreachableError):
        await client.groups()


@on_group()
async def test_describe_continues_after_last_key(group, client):
    pages = [
        ([["a", "producer", 1, None, 2, 0, 1, 5]], True),
        ([["b", "query", None, "r", 2, 2, 3, None]], False),
    ]
    group.nodes.n0.script[Type.DESCRIBE] = [answering(rows=rows, more=more) for rows, more in pages]
    found = (await client.describe("producers", "n0")).to_pylist()
    assert [row["producer_id"] for row in found] == ["a", "b"]
    assert [header["after"] for header in group.asked(Type.DESCRIBE)] == [None, ["a", "producer"]]
    with pytest.raises(BadRequestError):
        await client.describe("groups")


@pytest.mark.parametrize(
    "fields",
    [
        {"rows": [[1, 2]], "more": False},
        {"rows": [["x", 2, 3]], "more": False},
        {"rows": [1], "more": False},
        {"rows": [], "more": True},
        {"rows": None, "more": False},
        {"rows": [], "more": 1},
    ],
)
@on_group()
async def test_malformed_description_is_rejected(group, client, fields):
    group.nodes.n0.script[Type.DESCRIBE] = [answering(**fields)]
    with pytest.raises(ProtocolError):
        await client.describe("terms", "n0")
    group.nodes.n0.script[Type.GROUPS] = [answering(logs={"a": 1})]
    with pytest.raises(ProtocolError):
        await client.groups()


@pytest.mark.slow
@on_group()
async def test_unresponsive_node_delays_metadata_once(group, client):
    loop, group.nodes.n2.script[Type.METADATA] = asyncio.get_running_loop(), ["ignore"] * 9
    took = []
    for _ in range(4):
        began = loop.time()
        assert [node.reachable for node in (await client.metadata()).nodes] == [True, True, False]
        took.append(loop.time() - began)
    assert took[0] >= 1.0
    assert min(took[1:]) < 0.9
    group.nodes.n2.script[Type.METADATA] = []
    assert [node.reachable for node in (await client.metadata()).nodes] == [True, True, True]


@on_group()
async def test_unresponsive_nodes_get_full_timeout_without_others(group, client):
    for node in group:
        node.script[Type.METADATA] = ["ignore"]
    with pytest.raises(DLedgerError):
        await client.metadata()
    for node in group:
        node.script[Type.METADATA] = ["ignore"]  # the request with the short timeout
    assert all(node.reachable for node in (await client.metadata()).nodes)
