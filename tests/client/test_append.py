"""Appends, producers and transactions of a client against scripted nodes."""

import asyncio
import time

import msgpack
import pyarrow as pa
import pytest

from dledger_core.client import AsyncProducer
from dledger_core.client.appends import TOGETHER_ID_BYTES_MAX, TOGETHER_MAX
from dledger_core.config import BATCH_BYTES_MAX, RECORD_BYTES_MAX
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
    SequenceConflictError,
    SequenceGapError,
)
from dledger_core.ids import NUMBER_MAX
from dledger_core.net import messages
from dledger_core.net.protocol import CLIENT_HEADER_BYTES_MAX, Type
from dledger_core.record import Columns
from tests.client.fake_group import SHORT_MS, answering, on_group

BODIES = [b"one", b"", b"three" * 10]
KEY = TransactionId("query", 3, "run")


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
        [bytes(RECORD_BYTES_MAX - 48)],
    ],
    ids=["list", "tuple", "buffers", "binary", "large binary", "chunked", "sliced", "string", "largest"],
)
@on_group()
async def test_append_accepts_every_kind_of_bodies(group, client, bodies):
    group.log.append_bodies(b"earlier")
    result = await client.append(bodies)
    assert (result.first_index, result.last_index, result.term) == (1, len(bodies), 1)
    assert (await client.read(1, 4)).column("body").to_pylist() == (BODIES if len(bodies) == 3 else bodies)


@pytest.mark.parametrize(
    ("bodies", "where", "limit"),
    [
        ("one", "bodies", None),
        ([b"x", "y"], None, None),
        (pa.array([b"x", None]), "row 1", None),
        (pa.array([1]), None, None),
        ([b"x", bytes(RECORD_BYTES_MAX - 47)], "row 1", RECORD_BYTES_MAX),
        ([bytes(1 << 20)] * 8, "row 7", BATCH_BYTES_MAX),
    ],
    ids=["text", "text in list", "null", "numbers", "record", "batch"],
)
@on_group()
async def test_append_rejects_bad_bodies_before_sending(group, client, bodies, where, limit):
    with pytest.raises(BadRequestError) as caught:
        await client.append(bodies)
    assert caught.value.where == where or where is None
    assert caught.value.values.get("limit") == limit
    assert not group.asked(Type.APPEND)


# --- the leader -------------------------------------------------------------------------------------------------------


@on_group()
async def test_append_follows_leader_hint_at_once(group, client):
    await client.append([b"x"])
    group.leader = "n2"
    await client.append([b"y"])
    asked = group.asked_by_node(Type.METADATA)
    await client.append([b"z"])
    assert group.asked_by_node(Type.APPEND) == [0, 2, 2]
    assert group.asked_by_node(Type.METADATA) == asked


@on_group()
async def test_requests_carry_learned_log_uuid(group, client):
    await client.append([b"x"])
    await client.read(0, 1)
    assert {header.get("lu") for header in group.asked(Type.APPEND) + group.asked(Type.READ)} == {"uuid"}


@on_group()
async def test_append_waits_for_election(group, client):
    await client.append([b"x"])
    group.leader = None
    appending = asyncio.ensure_future(client.append([b"y"]))
    await group.until(lambda: len(group.asked(Type.METADATA)) >= 9)
    assert not appending.done()
    group.leader = "n0"
    assert (await appending).first_index == 1


@on_group()
async def test_append_finds_new_leader_after_crash(group, client):
    await client.append([b"x"])
    await group.nodes.n1.stop()
    group.leader = "n2"
    group.nodes.n0.names = "n1"  # does not know it yet
    asked = len(group.asked(Type.METADATA))
    appending = asyncio.ensure_future(client.append([b"y"]))
    await group.until(lambda: len(group.asked(Type.METADATA)) > asked)
    group.nodes.n0.names = ...
    assert (await appending).first_index == 1
    await group.nodes.n1.start()
    group.leader = "n1"
    assert (await client.append([b"z"])).first_index == 2


@pytest.mark.parametrize(("first", "others_s"), [("n0", 0.01), ("n1", 0.01), ("n2", 0.01), ("n0", 0.4)])
@on_group(leader="n2")
async def test_client_follows_leader_of_newest_term(group, client, first, others_s):
    """Whatever node responds first: the deposed leader and a node that did not hear of its successor do not count."""
    responded = asyncio.Event()

    def of_term(term, leader):
        def respond(node, connection, frame):
            header, payload = node.on_metadata({}, b"")
            answer = {"r": frame.header["r"], **header, "term": term, "leader": leader}
            if node.node_id == first:
                connection.send(answer, *payload)
                responded.set()
            else:
                waiting.append(asyncio.ensure_future(send_after(connection, answer, payload)))

        return respond

    async def send_after(connection, answer, payload):
        await responded.wait()
        await asyncio.sleep(others_s)  # the longest: later than an unresponsive node is waited for
        connection.send(answer, *payload)

    waiting = []
    for node, term, leader in (("n0", 1, "n0"), ("n1", 1, "n0"), ("n2", 2, "n2")):
        group.always(Type.METADATA, of_term(term, leader), node)
    await client.append([b"x"])
    assert group.asked_by_node(Type.APPEND) == [0, 0, 1]


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


@on_group(timeout_ms=SHORT_MS)
async def test_append_pauses_if_no_node_names_another_leader(group, client):
    group.always(Type.APPEND, NotLeaderError("x"))
    with pytest.raises(NotLeaderError):
        await client.append([b"x"])
    assert 1 < len(group.asked(Type.APPEND)) < 12


# --- errors -----------------------------------------------------------------------------------------------------------

RETRIABLE = (BusyError("x", "", "", {"retry_after_ms": 5}), ProposalDroppedError("x"), NotLeaderError("x"))
FINAL = (FencedError("x"), BadRequestError("x"), SequenceGapError("x"), DLedgerError("x"))
LOST = LeadershipLostError("x")
PRODUCER = {"producer_id": "p", "sequence": 0}


@pytest.mark.parametrize(
    ("given", "steps", "error", "requests"),
    [
        *(({}, [step] * 3, None, 4) for step in RETRIABLE),
        *(({}, [step], type(step), 1) for step in FINAL),
        *(({}, [step], RequestTimedOutError, 1) for step in ("drop", "apply and drop", RequestTimedOutError("x"))),
        ({}, [LOST], LeadershipLostError, 1),
        *((PRODUCER, [step], None, 2) for step in ("drop", "apply and drop", "ignore", LOST)),
    ],
    ids=lambda value: str(value)[:40],
)
@on_group(timeout_ms=4000, retry_timeout_ms=30_000)
async def test_append_is_retried_only_without_harm(group, client, given, steps, error, requests):
    group.nodes.n1.script[Type.APPEND] = list(steps)
    if error is None:
        result = await client.append([b"x"], **given)
        # One copy in the log, after the control entry of a producer.
        assert (result.first_index, group.log.end) == ((1, 2) if given else (0, 1))
    else:
        with pytest.raises(error) as caught:
            await client.append([b"x"], **given)
        assert type(caught.value) is error
        assert caught.value.outcome_unknown is (error in (RequestTimedOutError, LeadershipLostError))
    assert len(group.asked(Type.APPEND)) == requests


@on_group(timeout_ms=SHORT_MS)
async def test_unknown_outcome_stays_unknown_after_timeout(group, client):
    group.nodes.n1.script[Type.APPEND] = ["drop", *[ProposalDroppedError("dropped")] * 1000]
    with pytest.raises(RequestTimedOutError) as caught:
        await client.append([b"x"], **PRODUCER)
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


@on_group()
async def test_append_response_of_other_size_or_type_is_rejected(group, client):
    wrong_type = {"t": Type.READ_OK}, []
    group.nodes.n1.script[Type.APPEND] = [answering(first=0, last=5, term=1), lambda *_: wrong_type]
    for _ in range(2):
        with pytest.raises(ProtocolError):
            await client.append([b"x"])
    await client.append([b"y"])


# --- coalescing -------------------------------------------------------------------------------------------------------


@on_group()
async def test_concurrent_appends_share_a_request(group, client):
    results = await asyncio.gather(*(client.append([bytes([i])] * (i % 3 + 1)) for i in range(100)))
    assert len(group.asked(Type.APPEND)) == 1
    bodies = (await client.read(0, 1000)).column("body").to_pylist()
    for i, result in enumerate(results):
        assert bodies[result.first_index : result.last_index + 1] == [bytes([i])] * (i % 3 + 1)


@on_group()
async def test_shared_request_has_size_limit(group, client):
    sizes = [300_000] * 10 + [2_000_000, 10]
    results = await asyncio.gather(*(client.append([bytes(size)]) for size in sizes))
    assert sorted(r.first_index for r in results) == list(range(12))
    assert [header["n"] for header in group.asked(Type.APPEND)].count(3) == 3
    for result, size in zip(results, sizes, strict=True):
        assert len((await client.get(result.first_index)).body) == size


@on_group()
async def test_failed_shared_request_fails_all_callers(group, client):
    group.nodes.n1.script[Type.APPEND] = [LOST]
    results = await asyncio.gather(*(client.append([b"x"]) for _ in range(3)), return_exceptions=True)
    assert [type(r) for r in results] == [LeadershipLostError] * 3
    assert len(group.asked(Type.APPEND)) == 1


@pytest.mark.parametrize("fault", [BadRequestError, asyncio.CancelledError])
@on_group()
async def test_bad_or_cancelled_append_does_not_fail_shared_others(group, client, fault):
    def refuse_long(node, connection, frame):
        if len(frame.payload) > 1000:
            raise BadRequestError("too large for this server")
        return node.answer(frame)

    tasks = [asyncio.ensure_future(client.append([body])) for body in (b"a", b"b" * 2000, b"c")]
    if fault is BadRequestError:
        group.always(Type.APPEND, refuse_long)
    else:
        await asyncio.sleep(0)
        tasks[1].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[1], fault)
    assert results[0].first_index != results[2].first_index


# --- producers and transactions ---------------------------------------------------------------------------------------


@on_group()
async def test_producer_continues_at_sequence_in_log(group, client):
    producer = AsyncProducer(client, "p")
    results = await asyncio.gather(*(producer.append([b"x", bytes([i])]) for i in range(3)))
    assert [r.first_index for r in results] == [1, 4, 7]
    await AsyncProducer(client, "p").append([b"y"])
    assert [header["ps"] for header in group.asked(Type.APPEND)] == [0, 1, 2, 3]
    state = await client.producer("p")
    assert (state.known, state.next_sequence, state.last_range) == (True, 4, (10, 10))


async def producers(client, count, name="p{}"):
    """Return producers that know their next number: otherwise each asks for it first, and the responses come apart."""
    found = [AsyncProducer(client, name.format(number)) for number in range(count)]
    for each in found:
        await each.append([b"first"])
    return found


async def append_each(producers, body=b"x"):
    found = await asyncio.gather(*(each.append([body] * 2) for each in producers), return_exceptions=True)
    return [each if isinstance(each, DLedgerError) else each.last_index - each.first_index for each in found]


@pytest.mark.parametrize(
    ("count", "name", "requests"),
    [
        (1, "p{}", 0),
        (2, "p{}", 1),
        (TOGETHER_MAX, "p{}", 1),
        (TOGETHER_MAX + 2, "p{}", 2),
        (10, "p{}" + "x" * 500, 3),
        (10, "p{}" + "é" * 250, 3),
    ],
    ids=["one", "two", "most", "more", "long ids", "long ids in UTF-8"],
)
@on_group()
async def test_appends_of_producers_share_a_request(group, client, count, name, requests):
    several = await producers(client, count, name)
    for rounds in range(2):
        assert await append_each(several) == [1] * count
        assert len(group.asked(Type.PRODUCE)) == requests * (rounds + 1)
    assert len(group.log.producers) == count
    assert all(sorted(done) == [0, 1, 2] for done in group.log.producers.values())


def test_header_of_a_shared_request_fits_with_the_highest_numbers():
    each = {"epochs": [NUMBER_MAX], "sequences": [NUMBER_MAX], "counts": [BATCH_BYTES_MAX], "once": [False]}
    ids = ["é" * (TOGETHER_ID_BYTES_MAX // TOGETHER_MAX // 2)] * TOGETHER_MAX
    fields = {name: value * TOGETHER_MAX for name, value in each.items()}
    request = messages.ProduceRequest(count=BATCH_BYTES_MAX, ids=ids, **fields)
    header = messages.PRODUCE.encode(request, g="g" * 255, lu="u" * 36, r=1 << 40)
    assert len(msgpack.packb(header)) <= CLIENT_HEADER_BYTES_MAX


@on_group()
async def test_append_that_fails_among_others_gets_its_error_alone(group, client):
    def refuse_first(node, _connection, frame):
        header, payload = node.answer(frame)
        return header | {"first": [-1, *header["first"][1:]], "last": [-1, *header["last"][1:]]}, payload

    several = await producers(client, 4)
    group.always(Type.PRODUCE, refuse_first)
    group.always(Type.APPEND, FencedError("a newer epoch of this producer exists"))
    first, *others = await append_each(several)
    assert type(first) is FencedError
    assert others == [1, 1, 1]


@pytest.mark.parametrize("step", ["drop", "apply and drop", NotLeaderError("moved", "", "", {"leader_id": "n1"})])
@on_group()
async def test_shared_request_of_producers_is_repeated_and_each_entry_is_there_once(group, client, step):
    several = await producers(client, 3)
    group.nodes.n1.script[Type.PRODUCE] = [step]
    assert await append_each(several) == [1, 1, 1]
    assert len(group.asked(Type.PRODUCE)) == 2
    assert group.log.end == 6 + 9, "three control entries and six data entries after the first appends"


@on_group()
async def test_leader_of_an_earlier_release_gets_each_append_alone(group):
    for node in group:
        node.features = frozenset()
    async with group.client() as earlier:
        several = await producers(earlier, 3)
        for _ in range(2):
            assert await append_each(several) == [1, 1, 1]
    assert not group.asked(Type.PRODUCE)
    assert len(group.asked(Type.APPEND)) == 9


@on_group(timeout_ms=SHORT_MS)
async def test_cancelled_or_lost_appends_of_producers_end_as_single_ones(group, client):
    several = await producers(client, 3)
    group.always(Type.PRODUCE, "ignore")
    appending = asyncio.ensure_future(several[0].append([b"x"]))
    others = asyncio.ensure_future(append_each(several[1:]))
    await group.until(lambda: group.asked(Type.PRODUCE))
    appending.cancel()
    assert [type(each) for each in await others] == [RequestTimedOutError] * 2
    with pytest.raises(asyncio.CancelledError):
        await appending


@pytest.mark.parametrize(
    "wrong", [{"first": [0]}, {"first": [], "last": [], "term": []}, {"last": [0, 0, 7]}], ids=["fewer", "none", "more"]
)
@on_group()
async def test_response_about_other_appends_is_refused(group, client, wrong):
    def answer(node, _connection, frame):
        header, payload = node.answer(frame)
        return header | wrong, payload

    several = await producers(client, 3)
    group.always(Type.PRODUCE, answer)
    assert [type(each) for each in await append_each(several)] == [ProtocolError] * 3


@pytest.mark.parametrize(
    ("step", "body", "sequences", "found"),
    [
        ("apply and drop", b"a", [0, 0, 1], [b"a", b"c"]),  # the same bodies: a retry
        ("drop", b"a", [0, 0, 1], [b"a", b"c"]),
        ("apply and drop", b"b", [0, 1, 2], [b"a", b"b", b"c"]),  # others: the log has the next sequence
        ("drop", b"b", [0, 0, 1], [b"b", b"c"]),
    ],
)
@on_group(timeout_ms=SHORT_MS)
async def test_producer_continues_after_unknown_append(group, client, step, body, sequences, found):
    producer = AsyncProducer(client, "p")
    group.nodes.n1.script[Type.APPEND] = [step, *["ignore"] * 100]
    with pytest.raises(RequestTimedOutError):
        await producer.append([b"a"])
    group.nodes.n1.script.clear()
    await producer.append([body])
    await producer.append([b"c"])
    asked = [header["ps"] for header in group.asked(Type.APPEND)]
    assert [asked[0], *asked[-2:]] == sequences
    assert (await client.read(0, 100)).column("body").to_pylist() == found


async def cancelled(group, producer, body):
    """Cancel an append that its node has received; return a function that lets the node respond."""
    held = []
    group.nodes.n1.script[Type.APPEND] = [lambda *request: held.append(request)]
    appending = asyncio.ensure_future(producer.append([body]))
    await group.until(lambda: held)
    appending.cancel()
    await asyncio.wait([appending])
    assert appending.cancelled()
    ((node, connection, frame),) = held

    def respond():
        header, payload = node.answer(frame)
        connection.send({"r": frame.header["r"], **header}, *payload)

    return respond


@pytest.mark.parametrize(
    ("body", "sequences", "found"), [(b"b", [0, 1, 2], [b"a", b"b", b"c"]), (b"a", [0, 1], [b"a", b"c"])]
)
@on_group()
async def test_producer_finds_out_outcome_of_cancelled_append(group, client, body, sequences, found):
    producer = AsyncProducer(client, "p")
    respond = await cancelled(group, producer, b"a")
    following = asyncio.ensure_future(producer.append([body]))
    await asyncio.sleep(0.02)
    assert len(group.asked(Type.APPEND)) == 1
    respond()
    await following
    await producer.append([b"c"])
    assert [header["ps"] for header in group.asked(Type.APPEND)] == sequences
    assert (await client.read(0, 100)).column("body").to_pylist() == found


@on_group()
async def test_producer_asks_again_after_sequence_conflict(group, client):
    producer = AsyncProducer(client, "p")
    await producer.append([b"a"])
    group.nodes.n1.script[Type.APPEND] = [SequenceConflictError("other content")]
    with pytest.raises(SequenceConflictError):
        await producer.append([b"b"])
    group.log.producers["p"][1] = (7, 7)  # of another instance
    await producer.append([b"c"])
    assert [header["ps"] for header in group.asked(Type.APPEND)] == [0, 1, 2]


@on_group(timeout_ms=SHORT_MS)
async def test_producer_continues_after_append_that_arrives_late(group, client):
    """The log is asked before the earlier append arrives, so the next one conflicts with it."""
    producer = AsyncProducer(client, "p")
    group.nodes.n1.script[Type.APPEND] = ["ignore"] * 100
    with pytest.raises(RequestTimedOutError):
        await producer.append([b"late"])

    def late(node, connection, frame):
        node.group.log.producers["p"] = {0: (0, 0)}
        raise SequenceConflictError("other content")

    group.nodes.n1.script[Type.APPEND] = [late]
    await producer.append([b"next"])
    assert [header["ps"] for header in group.asked(Type.APPEND)][-2:] == [0, 1]


@on_group(epoch=3)
async def test_producer_with_old_epoch_is_fenced(group, client):
    group.log.producers["p"] = {0: (0, 0)}
    with pytest.raises(FencedError):
        await AsyncProducer(client, "p", epoch=2).append([b"x"])
    await AsyncProducer(client, "p", epoch=4).append([b"x"])
    (header,) = group.asked(Type.APPEND)
    assert (header["pe"], header["ps"]) == (4, 0)


@on_group()
async def test_transaction_attempt_commit_and_abort(group, client):
    group.nodes.n1.script[Type.APPEND] = ["drop"]
    result = await client.append_attempt([b"a", b"b"], transaction=KEY, attempt="uuid")
    assert (result.first_index, result.last_index, result.rows) == (1, 2, 2)
    assert result.crc == column_crc(Columns.from_bodies([b"a", b"b"]).crcs)
    named = {"q": "query", "b": 3, "r": "run"}
    assert group.asked(Type.APPEND)[-1]["x"] == named | {"a": "uuid"}
    await client.append_attempt([b"a"], transaction=KEY, attempt="uuid", once=True, elsewhere=2)
    assert group.asked(Type.APPEND)[-1]["x"] == named | {"a": "uuid", "o": True, "w": 2}
    assert (await client.transaction(KEY)).state == "open"
    parts = [Part(1, 2, 2, result.crc)]
    group.nodes.n1.script[Type.TRANSACTION] = ["drop", NotLeaderError("no")]
    committed = await client.commit_transaction(KEY, parts)
    assert (committed.state, committed.rows, committed.fingerprint) == ("committed", 2, 5)
    assert (await client.abort_transaction(KEY)).state == "aborted"


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.append([b"x"], producer_id="p"),
        lambda client: client.commit_transaction(KEY, [Part(1, 2, 2, 0)] * 16_001),
    ],
    ids=["producer without sequence", "too many parts"],
)
@on_group()
async def test_bad_request_is_rejected_before_sending(group, client, call):
    with pytest.raises(BadRequestError):
        await call(client)
    assert not group.asked(Type.APPEND) + group.asked(Type.TRANSACTION)
