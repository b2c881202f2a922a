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
    UnreachableError,
)
from dledger_core.net.protocol import Type
from dledger_core.record import Columns
from tests.client.fake_group import SHORT_MS, FakeGroup, node_client, run

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
def test_every_kind_of_bodies_is_appended(bodies):
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers) as client:
            group.log.append_bodies(b"earlier")
            result = await client.append(bodies)
            assert (result.first_index, result.last_index, result.term) == (1, 3, 1)
            assert (await client.read(1, 4)).column("body").to_pylist() == BODIES

    run(main())


@pytest.mark.parametrize(
    ("bodies", "complaint"),
    [
        ([], "nothing to append"),
        (b"one", "one body instead of a sequence"),
        ("one", "one body instead of a sequence"),
        ([b"x", "y"], "not bytes"),
        ([b"x", None], "not bytes"),
        (pa.array([b"x", None]), "null at row 1"),
        (pa.array([1]), "cannot be appended"),
        ([b"x", bytes(RECORD_BYTES_MAX - 47)], f"row 1 .*limit={RECORD_BYTES_MAX}"),
        ([bytes(1 << 20)] * 8, f"row 7 .*limit={BATCH_BYTES_MAX}"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_cannot_be_appended_is_refused_before_it_is_sent(bodies, complaint):
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers) as client:
            with pytest.raises(BadRequestError, match=complaint):
                await client.append(bodies)
            assert not group.asked(Type.APPEND)

    run(main())


def test_the_largest_record_is_appended():
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers) as client:
            body = bytes(RECORD_BYTES_MAX - 48)
            await client.append([body])
            assert (await client.get(0)).body == body

    run(main())


def test_a_hint_is_followed_at_once():
    async def main():
        async with FakeGroup("n1") as group, AsyncClient(group.peers) as client:
            await client.append([b"x"])
            group.leader = "n2"
            await client.append([b"y"])
            assert len(group.nodes.n1.asked(Type.APPEND)) == 2
            assert len(group.nodes.n2.asked(Type.APPEND)) == 1
            asked = len(group.asked(Type.METADATA))
            await client.append([b"z"])
            assert len(group.nodes.n2.asked(Type.APPEND)) == 2
            assert len(group.asked(Type.METADATA)) == asked

    run(main())


def test_an_election_is_waited_for():
    async def main():
        async with FakeGroup("n1") as group, AsyncClient(group.peers) as client:
            await client.append([b"x"])
            group.leader = None
            appending = asyncio.ensure_future(client.append([b"y"]))
            await group.until(lambda: len(group.asked(Type.METADATA)) >= 9)
            assert not appending.done()
            group.leader = "n0"
            assert (await appending).first_index == 1

    run(main())


def test_a_dead_leader_is_replaced():
    async def main():
        async with FakeGroup("n1") as group, AsyncClient(group.peers) as client:
            await client.append([b"x"])
            await group.nodes.n1.stop()
            group.leader = "n2"
            group.nodes.n0.names = "n1"  # has not heard of it yet
            appending = asyncio.ensure_future(client.append([b"y"]))
            await asyncio.sleep(0.02)
            group.nodes.n0.names = ...
            assert (await appending).first_index == 1
            await group.nodes.n1.start()
            group.leader = "n1"
            assert (await client.append([b"z"])).first_index == 2

    run(main())


def test_without_a_leader_the_timeout_ends_it():
    async def main():
        async with FakeGroup(None) as group, AsyncClient(group.peers, timeout_ms=SHORT_MS) as client:
            began = time.monotonic()
            with pytest.raises(NoLeaderError) as caught:
                await client.append([b"x"])
            assert not caught.value.outcome_unknown
            assert time.monotonic() - began < 2
            assert not group.asked(Type.APPEND)

    run(main())


def test_nodes_that_point_at_each_other_do_not_spin():
    async def main():
        async with FakeGroup(None) as group, AsyncClient(group.peers, timeout_ms=SHORT_MS) as client:
            group.nodes.n0.names, group.nodes.n1.names, group.nodes.n2.names = "n1", "n2", "n0"
            with pytest.raises(NotLeaderError):
                await client.append([b"x"])
            assert len(group.asked(Type.APPEND)) < SHORT_MS / 5

    run(main())


def test_no_node_runs():
    async def main():
        async with FakeGroup() as group:
            peers = group.peers
        async with AsyncClient(peers, timeout_ms=SHORT_MS) as client:
            with pytest.raises(UnreachableError) as caught:
                await client.append([b"x"])
            for node in group:
                assert f"127.0.0.1:{node.port}" in str(caught.value)

    run(main())


@pytest.mark.parametrize(
    "step", [BusyError("full", "", "", {"retry_after_ms": 5}), ProposalDroppedError("dropped"), NotLeaderError("no")]
)
def test_a_refused_append_is_tried_again(step):
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers) as client:
            group.nodes.n1.script[Type.APPEND] = [step, step, step]
            assert (await client.append([b"x"])).first_index == 0
            assert len(group.nodes.n1.asked(Type.APPEND)) == 4

    run(main())


@pytest.mark.parametrize(
    "step", [FencedError("old"), BadRequestError("bad"), SequenceGapError("gap"), DLedgerError("?")]
)
def test_a_final_error_is_raised_at_once(step):
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers) as client:
            group.nodes.n1.script[Type.APPEND] = [step]
            with pytest.raises(type(step), match=step.what.replace("?", r"\?")):
                await client.append([b"x"])
            assert len(group.asked(Type.APPEND)) == 1

    run(main())


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
def test_an_unknown_outcome_is_raised_at_once_without_a_producer(step, error):
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers) as client:
            await client.append([b"first"])
            group.nodes.n1.script[Type.APPEND] = [step]
            with pytest.raises(error) as caught:
                await client.append([b"x"])
            assert caught.value.outcome_unknown
            assert len(group.asked(Type.APPEND)) == 2

    run(main())


@pytest.mark.parametrize("step", ["drop", "apply and drop", LeadershipLostError("lost"), "ignore"], ids=str)
def test_an_unknown_outcome_is_resolved_with_a_producer(step):
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers, timeout_ms=4000) as client:
            group.nodes.n1.script[Type.APPEND] = [step]
            result = await client.append([b"x"], producer_id="p", sequence=0)
            assert len(group.asked(Type.APPEND)) == 2
            assert group.log.end == 2  # the producer's control entry and one data entry
            assert (result.first_index, result.last_index) == (1, 1)

    run(main())


def test_an_unknown_outcome_stays_unknown_when_time_runs_out():
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers, timeout_ms=SHORT_MS) as client:
            dropped = ProposalDroppedError("dropped")
            group.nodes.n1.script[Type.APPEND] = ["drop", *[dropped] * 1000]
            with pytest.raises(RequestTimedOutError) as caught:
                await client.append([b"x"], producer_id="p", sequence=0)
            assert caught.value.outcome_unknown

    run(main())


def test_a_timeout_leaves_nothing_behind():
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers, timeout_ms=SHORT_MS) as client:
            group.nodes.n1.script[Type.APPEND] = ["ignore"]
            with pytest.raises(RequestTimedOutError, match="no response in time"):
                await client.append([b"x"])
            # A response that is late, or to no request, changes nothing.
            (late,) = group.nodes.n1.asked(Type.APPEND)
            for connection in group.nodes.n1.server.connections:
                for number in (late["r"], 10**6):
                    connection.send({"t": Type.APPEND_OK, "r": number, "first": 0, "last": 0, "term": 1})
            assert (await client.append([b"y"])).first_index == 0

    run(main())


def test_a_cancelled_append_leaves_nothing_behind():
    async def main():
        async with FakeGroup() as group:
            client = node_client(group.peers)
            group.nodes.n1.script[Type.APPEND] = ["ignore"]
            appending = asyncio.ensure_future(client.append_columns(Columns.from_bodies([b"x"])))
            await group.until(lambda: group.asked(Type.APPEND))
            appending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await appending
            assert client.in_flight == 0
            await client.close()

    run(main())


def test_closing_ends_what_is_under_way():
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


def test_an_answer_of_another_size_or_kind_is_a_protocol_error():
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers) as client:
            wrong_count = {"t": Type.APPEND_OK, "first": 0, "last": 5, "term": 1}, []
            wrong_kind = {"t": Type.READ_OK}, []
            group.nodes.n1.script[Type.APPEND] = [lambda *_: wrong_count, lambda *_: wrong_kind]
            for _ in range(2):
                with pytest.raises(ProtocolError):
                    await client.append([b"x"])
            await client.append([b"y"])

    run(main())


# --- coalescing -------------------------------------------------------------------------------------------------------


def test_appends_of_one_moment_share_a_request():
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers) as client:
            results = await asyncio.gather(*(client.append([bytes([i])] * (i % 3 + 1)) for i in range(100)))
            assert len(group.asked(Type.APPEND)) == 1
            batch = await client.read(0, 1000)
            bodies = batch.column("body").to_pylist()
            for i, result in enumerate(results):
                assert result.last_index - result.first_index == i % 3
                assert bodies[result.first_index : result.last_index + 1] == [bytes([i])] * (i % 3 + 1)

    run(main())


def test_a_shared_request_is_bounded():
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers) as client:
            sizes = [300_000] * 10 + [2_000_000, 10]
            results = await asyncio.gather(*(client.append([bytes(size)]) for size in sizes))
            assert sorted(r.first_index for r in results) == list(range(12))
            assert [header["n"] for header in group.asked(Type.APPEND)].count(3) == 3
            for i, size in enumerate(sizes):
                assert len((await client.get(results[i].first_index)).body) == size

    run(main())


def test_producers_do_not_share_a_request():
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers) as client:
            await asyncio.gather(*(client.append([b"x"], producer_id=f"p{i}", sequence=0) for i in range(5)))
            assert len(group.asked(Type.APPEND)) == 5

    run(main())


def test_a_shared_request_that_fails_fails_for_all():
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers) as client:
            group.nodes.n1.script[Type.APPEND] = [LeadershipLostError("lost")]
            results = await asyncio.gather(*(client.append([b"x"]) for _ in range(3)), return_exceptions=True)
            assert [type(r) for r in results] == [LeadershipLostError] * 3
            assert len(group.asked(Type.APPEND)) == 1

    run(main())


def test_one_append_at_fault_does_not_hurt_the_others():
    def refuse_long(node, connection, frame):
        if len(frame.payload) > 1000:
            raise BadRequestError("too large for this server")
        return node.answer(frame)

    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers) as client:
            group.nodes.n1.script[Type.APPEND] = [refuse_long] * 4
            bodies = [b"a", b"b" * 2000, b"c"]
            results = await asyncio.gather(*(client.append([body]) for body in bodies), return_exceptions=True)
            assert isinstance(results[1], BadRequestError)
            assert {results[0].first_index, results[2].first_index} == {0, 1}

    run(main())


def test_a_cancelled_append_does_not_hurt_the_others():
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers) as client:
            tasks = [asyncio.ensure_future(client.append([bytes([i])])) for i in range(3)]
            await asyncio.sleep(0)
            tasks[1].cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(results[1], asyncio.CancelledError)
            assert results[0].first_index != results[2].first_index

    run(main())


# --- producers and transactions ---------------------------------------------------------------------------------------


def test_a_producer_goes_on_where_the_log_says():
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers) as client:
            producer = AsyncProducer(client, "p")
            results = await asyncio.gather(*(producer.append([b"x", bytes([i])]) for i in range(3)))
            assert [r.first_index for r in results] == [1, 4, 7]
            again = AsyncProducer(client, "p")
            await again.append([b"y"])
            assert [header["ps"] for header in group.asked(Type.APPEND)] == [0, 1, 2, 3]
            state = await client.producer("p")
            assert (state.known, state.next_sequence, state.last_range) == (True, 4, (10, 10))

    run(main())


def test_calling_again_completes_an_append_whose_outcome_was_unknown():
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers, timeout_ms=SHORT_MS) as client:
            producer = AsyncProducer(client, "p")
            await producer.append([b"a"])
            group.nodes.n1.script[Type.APPEND] = ["apply and drop", *["ignore"] * 100]
            with pytest.raises(RequestTimedOutError):
                await producer.append([b"b"])
            group.nodes.n1.script.clear()
            result = await producer.append([b"b"])
            assert (result.first_index, group.log.end) == (3, 4)
            assert (await producer.append([b"c"])).first_index == 5

    run(main())


@pytest.mark.parametrize(("step", "expected"), [("apply and drop", [0, 1]), ("drop", [0, 0])])
def test_other_bodies_after_an_unknown_outcome_take_the_right_sequence(step, expected):
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers, timeout_ms=SHORT_MS) as client:
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

    run(main())


def test_a_producer_with_an_old_epoch_is_fenced():
    async def main():
        async with FakeGroup(epoch=3) as group, AsyncClient(group.peers) as client:
            group.log.producers["p"] = {0: (0, 0)}
            with pytest.raises(FencedError):
                await AsyncProducer(client, "p", epoch=2).append([b"x"])
            await AsyncProducer(client, "p", epoch=4).append([b"x"])
            (header,) = group.asked(Type.APPEND)
            assert (header["pe"], header["ps"]) == (4, 0)

    run(main())


def test_a_producer_id_needs_a_sequence():
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers) as client:
            with pytest.raises(BadRequestError, match="sequence"):
                await client.append([b"x"], producer_id="p")

    run(main())


def test_a_transaction_is_attempted_committed_and_aborted():
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers) as client:
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

    run(main())


def test_a_transaction_of_too_many_parts_is_refused_before_it_is_sent():
    async def main():
        async with FakeGroup() as group, AsyncClient(group.peers) as client:
            with pytest.raises(BadRequestError, match="16001 parts"):
                await client.commit_transaction(TransactionId("query", 3, "run"), [Part(1, 2, 2, 0)] * 16_001)
            assert not group.asked(Type.TRANSACTION)

    run(main())
