import asyncio
import time

import pyarrow as pa
import pytest

from dledger_core.client import AsyncProducer
from dledger_core.config import BATCH_BYTES_MAX, RECORD_BYTES_MAX
from dledger_core.connect import AsyncClient
from dledger_core.control import Part, TransactionId, column_crc
from dledger_core.errors import (
    BadRequestError,
    BusyError,
    DLedgerError,
    FencedError,
    LeadershipLostError,
    NoLeaderError,
    NotLeaderError,
    ProposalDroppedError,
    ProtocolError,
    RequestTimedOutError,
    SequenceGapError,
)
from dledger_core.net.protocol import Type
from dledger_core.record import Columns
from tests.client.fake_group import SHORT_MS, FakeGroup, on_group, run

BODIES = [b"one", b"", b"three" * 10]


@pytest.mark.parametrize(
    "bodies",
    [
        BODIES,
        tuple(BODIES),
        [bytearray(b"one"), memoryview(b""), b"three" * 10],
        pa.array(BODIES, pa.binary()),
        pa.array(BODIES, pa.large_binary()),
        pa.chunked_array([BODIES[:1], BODIES[1:]], pa.binary()),
        pa.array([b"before", *BODIES, b"after"], pa.binary())[1:4],
        pa.array([b.decode() for b in BODIES], pa.string()),
    ],
    ids=["list", "tuple", "buffers", "binary", "large binary", "chunked", "sliced", "string"],
)
@on_group()
async def test_append_accepts_every_kind_of_bodies(group, client, bodies):
    group.log.append_bodies(b"earlier")
    result = await client.append(bodies)
    assert (result.first_index, result.last_index, result.term) == (1, 3, 1)
    assert (await client.read(1, 4)).column("body").to_pylist() == BODIES


@pytest.mark.parametrize(
    ("bodies", "names"),
    [
        ([], "BAD_REQUEST"),
        (b"one", "BAD_REQUEST"),
        ("one", "BAD_REQUEST"),
        ([b"x", "y"], "BAD_REQUEST"),
        ([b"x", None], "BAD_REQUEST"),
        (pa.array([b"x", None]), "row 1"),
        (pa.array([1]), "BAD_REQUEST"),
        ([b"x", bytes(RECORD_BYTES_MAX - 47)], f"row 1 .*limit={RECORD_BYTES_MAX}"),
        ([bytes(1 << 20)] * 8, f"row 7 .*limit={BATCH_BYTES_MAX}"),
    ],
    ids=lambda value: repr(value)[:30],
)
@on_group()
async def test_append_rejects_bad_bodies_before_sending(group, client, bodies, names):
    with pytest.raises(BadRequestError, match=names):
        await client.append(bodies)
    assert not group.asked(Type.APPEND)


@on_group()
async def test_append_accepts_largest_record(group, client):
    body = bytes(RECORD_BYTES_MAX - 48)
    await client.append([body])
    assert (await client.get(0)).body == body


@on_group(leader="n1")
async def test_append_follows_leader_hint_at_once(group, client):
    await client.append([b"x"])
    group.leader = "n2"
    await client.append([b"y"])
    assert len(group.nodes.n1.asked(Type.APPEND)) == 2
    assert len(group.nodes.n2.asked(Type.APPEND)) == 1
    asked = len(group.asked(Type.METADATA))
    await client.append([b"z"])
    assert len(group.nodes.n2.asked(Type.APPEND)) == 2
    assert len(group.asked(Type.METADATA)) == asked


@on_group(leader="n1")
async def test_append_waits_for_election(group, client):
    await client.append([b"x"])
    group.leader = None
    appending = asyncio.ensure_future(client.append([b"y"]))
    await group.until(lambda: len(group.asked(Type.METADATA)) >= 9)
    assert not appending.done()
    group.leader = "n0"
    assert (await appending).first_index == 1


@on_group(leader="n1")
async def test_append_finds_new_leader_after_crash(group, client):
    await client.append([b"x"])
    await group.nodes.n1.stop()
    group.leader = "n2"
    group.nodes.n0.names = "n1"  # does not know it yet
    appending = asyncio.ensure_future(client.append([b"y"]))
    await asyncio.sleep(0.02)
    group.nodes.n0.names = ...
    assert (await appending).first_index == 1
    await group.nodes.n1.start()
    group.leader = "n1"
    assert (await client.append([b"z"])).first_index == 2


@on_group(leader=None, timeout_ms=SHORT_MS)
async def test_append_times_out_without_leader(group, client):
    began = time.monotonic()
    with pytest.raises(NoLeaderError) as caught:
        await client.append([b"x"])
    assert not caught.value.outcome_unknown
    assert time.monotonic() - began < 2
    assert not group.asked(Type.APPEND)


@on_group(leader=None, timeout_ms=SHORT_MS)
async def test_append_pauses_between_circular_hints(group, client):
    group.nodes.n0.names, group.nodes.n1.names, group.nodes.n2.names = "n1", "n2", "n0"
    with pytest.raises(NotLeaderError):
        await client.append([b"x"])
    assert len(group.asked(Type.APPEND)) < SHORT_MS / 5


@pytest.mark.parametrize(
    "step", [BusyError("full", "", "", {"retry_after_ms": 5}), ProposalDroppedError("dropped"), NotLeaderError("no")]
)
@on_group()
async def test_append_is_retried_after_retriable_error(group, client, step):
    group.nodes.n1.script[Type.APPEND] = [step, step, step]
    assert (await client.append([b"x"])).first_index == 0
    assert len(group.nodes.n1.asked(Type.APPEND)) == 4


@pytest.mark.parametrize(
    "step", [FencedError("old"), BadRequestError("bad"), SequenceGapError("gap"), DLedgerError("?")]
)
@on_group()
async def test_append_raises_final_error_at_once(group, client, step):
    group.nodes.n1.script[Type.APPEND] = [step]
    with pytest.raises(type(step)):
        await client.append([b"x"])
    assert len(group.asked(Type.APPEND)) == 1


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("drop", RequestTimedOutError),
        ("apply and drop", RequestTimedOutError),
        (LeadershipLostError("lost"), LeadershipLostError),
        (RequestTimedOutError("slow"), RequestTimedOutError),
    ],
    ids=str,
)
@on_group()
async def test_plain_append_raises_unknown_outcome_at_once(group, client, step, error):
    await client.append([b"first"])
    group.nodes.n1.script[Type.APPEND] = [step]
    with pytest.raises(error) as caught:
        await client.append([b"x"])
    assert caught.value.outcome_unknown
    assert len(group.asked(Type.APPEND)) == 2


@pytest.mark.parametrize("step", ["drop", "apply and drop", LeadershipLostError("lost"), "ignore"], ids=str)
@on_group(timeout_ms=4000)
async def test_producer_append_resolves_unknown_outcome(group, client, step):
    group.nodes.n1.script[Type.APPEND] = [step]
    result = await client.append([b"x"], producer_id="p", sequence=0)
    assert len(group.asked(Type.APPEND)) == 2
    assert group.log.end == 2  # the producer's control entry and one data entry
    assert (result.first_index, result.last_index) == (1, 1)


@on_group(timeout_ms=SHORT_MS)
async def test_unknown_outcome_stays_unknown_after_timeout(group, client):
    dropped = ProposalDroppedError("dropped")
    group.nodes.n1.script[Type.APPEND] = ["drop", *[dropped] * 1000]
    with pytest.raises(RequestTimedOutError) as caught:
        await client.append([b"x"], producer_id="p", sequence=0)
    assert caught.value.outcome_unknown


@on_group(timeout_ms=SHORT_MS)
async def test_late_response_after_timeout_is_dropped(group, client):
    group.nodes.n1.script[Type.APPEND] = ["ignore"]
    with pytest.raises(RequestTimedOutError):
        await client.append([b"x"])
    # A response that is late, or to no request, changes nothing.
    (late,) = group.nodes.n1.asked(Type.APPEND)
    for connection in group.nodes.n1.server.connections:
        for number in (late["r"], 10**6):
            connection.send({"t": Type.APPEND_OK, "r": number, "first": 0, "last": 0, "term": 1})
    assert (await client.append([b"y"])).first_index == 0


def test_close_cancels_append_in_flight():
    async def main():
        async with FakeGroup() as group:
            client = AsyncClient(group.peers)
            group.nodes.n1.script[Type.APPEND] = ["ignore"] * 2
            appending = asyncio.ensure_future(client.append([b"x"]))
            await group.until(lambda: group.asked(Type.APPEND))
            await client.close()
            with pytest.raises(asyncio.CancelledError):
                await appending

    run(main())


@on_group()
async def test_append_response_of_other_size_or_type_is_rejected(group, client):
    wrong_count = {"t": Type.APPEND_OK, "first": 0, "last": 5, "term": 1}, []
    wrong_kind = {"t": Type.READ_OK}, []
    group.nodes.n1.script[Type.APPEND] = [lambda *_: wrong_count, lambda *_: wrong_kind]
    for _ in range(2):
        with pytest.raises(ProtocolError):
            await client.append([b"x"])
    await client.append([b"y"])


# --- coalescing -------------------------------------------------------------------------------------------------------


@on_group()
async def test_concurrent_appends_share_a_request(group, client):
    results = await asyncio.gather(*(client.append([bytes([i])] * (i % 3 + 1)) for i in range(100)))
    assert len(group.asked(Type.APPEND)) == 1
    batch = await client.read(0, 1000)
    bodies = batch.column("body").to_pylist()
    for i, result in enumerate(results):
        assert result.last_index - result.first_index == i % 3
        assert bodies[result.first_index : result.last_index + 1] == [bytes([i])] * (i % 3 + 1)


@on_group()
async def test_shared_request_has_size_limit(group, client):
    sizes = [300_000] * 10 + [2_000_000, 10]
    results = await asyncio.gather(*(client.append([bytes(size)]) for size in sizes))
    assert sorted(r.first_index for r in results) == list(range(12))
    assert [header["n"] for header in group.asked(Type.APPEND)].count(3) == 3
    for i, size in enumerate(sizes):
        assert len((await client.get(results[i].first_index)).body) == size


@on_group()
async def test_producer_appends_share_no_request(group, client):
    await asyncio.gather(*(client.append([b"x"], producer_id=f"p{i}", sequence=0) for i in range(5)))
    assert len(group.asked(Type.APPEND)) == 5


@on_group()
async def test_failed_shared_request_fails_all_callers(group, client):
    group.nodes.n1.script[Type.APPEND] = [LeadershipLostError("lost")]
    results = await asyncio.gather(*(client.append([b"x"]) for _ in range(3)), return_exceptions=True)
    assert [type(r) for r in results] == [LeadershipLostError] * 3
    assert len(group.asked(Type.APPEND)) == 1


@on_group()
async def test_bad_append_does_not_fail_shared_others(group, client):
    def refuse_long(node, connection, frame):
        if len(frame.payload) > 1000:
            raise BadRequestError("too large for this server")
        return node.answer(frame)

    group.nodes.n1.script[Type.APPEND] = [refuse_long] * 4
    bodies = [b"a", b"b" * 2000, b"c"]
    results = await asyncio.gather(*(client.append([body]) for body in bodies), return_exceptions=True)
    assert isinstance(results[1], BadRequestError)
    assert {results[0].first_index, results[2].first_index} == {0, 1}


@on_group()
async def test_cancelled_append_does_not_cancel_shared_others(group, client):
    tasks = [asyncio.ensure_future(client.append([bytes([i])])) for i in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError)
    assert results[0].first_index != results[2].first_index


# --- producers and transactions ---------------------------------------------------------------------------------------


@on_group()
async def test_producer_continues_at_sequence_in_log(group, client):
    producer = AsyncProducer(client, "p")
    results = await asyncio.gather(*(producer.append([b"x", bytes([i])]) for i in range(3)))
    assert [r.first_index for r in results] == [1, 4, 7]
    again = AsyncProducer(client, "p")
    await again.append([b"y"])
    assert [header["ps"] for header in group.asked(Type.APPEND)] == [0, 1, 2, 3]
    state = await client.producer("p")
    assert (state.known, state.next_sequence, state.last_range) == (True, 4, (10, 10))


@on_group(timeout_ms=SHORT_MS)
async def test_producer_retry_completes_unknown_append(group, client):
    producer = AsyncProducer(client, "p")
    await producer.append([b"a"])
    group.nodes.n1.script[Type.APPEND] = ["apply and drop", *["ignore"] * 100]
    with pytest.raises(RequestTimedOutError):
        await producer.append([b"b"])
    group.nodes.n1.script.clear()
    result = await producer.append([b"b"])
    assert (result.first_index, group.log.end) == (3, 4)
    assert (await producer.append([b"c"])).first_index == 5


@pytest.mark.parametrize(("step", "expected"), [("apply and drop", [0, 1]), ("drop", [0, 0])])
@on_group(timeout_ms=SHORT_MS)
async def test_producer_reads_sequence_after_unknown_append(group, client, step, expected):
    producer = AsyncProducer(client, "p")
    group.nodes.n1.script[Type.APPEND] = [step, *["ignore"] * 100]
    with pytest.raises(RequestTimedOutError):
        await producer.append([b"a"])
    group.nodes.n1.script.clear()
    await producer.append([b"b"])
    sequences = [header["ps"] for header in group.asked(Type.APPEND)]
    assert [sequences[0], sequences[-1]] == expected
    found = (await client.read(0, 100)).column("body").to_pylist()
    assert found == ([b"a", b"b"] if expected[1] else [b"b"])


@on_group(epoch=3)
async def test_producer_with_old_epoch_is_fenced(group, client):
    group.log.producers["p"] = {0: (0, 0)}
    with pytest.raises(FencedError):
        await AsyncProducer(client, "p", epoch=2).append([b"x"])
    await AsyncProducer(client, "p", epoch=4).append([b"x"])
    (header,) = group.asked(Type.APPEND)
    assert (header["pe"], header["ps"]) == (4, 0)


@on_group()
async def test_append_with_producer_id_requires_sequence(group, client):
    with pytest.raises(BadRequestError):
        await client.append([b"x"], producer_id="p")


@on_group()
async def test_transaction_attempt_commit_and_abort(group, client):
    transaction = TransactionId("query", 3, "run")
    group.nodes.n1.script[Type.APPEND] = ["drop"]
    result = await client.append_attempt([b"a", b"b"], transaction=transaction, attempt="uuid")
    assert (result.first_index, result.last_index, result.rows) == (1, 2, 2)
    assert result.crc == column_crc(Columns.from_bodies([b"a", b"b"]).crcs)
    assert group.asked(Type.APPEND)[-1]["x"] == {"q": "query", "b": 3, "r": "run", "a": "uuid"}
    assert (await client.transaction(transaction)).state == "open"
    parts = [Part(1, 2, 2, result.crc)]
    group.nodes.n1.script[Type.TRANSACTION] = ["drop", NotLeaderError("no")]
    committed = await client.commit_transaction(transaction, parts)
    assert (committed.state, committed.parts) == ("committed", tuple(parts))
    assert (await client.abort_transaction(transaction)).state == "aborted"


@on_group()
async def test_commit_rejects_too_many_parts_before_sending(group, client):
    with pytest.raises(BadRequestError, match="16001"):
        await client.commit_transaction(TransactionId("query", 3, "run"), [Part(1, 2, 2, 0)] * 16_001)
    assert not group.asked(Type.TRANSACTION)
