"""More appends than the leader answers: what waits in the client, what fails, and that what failed was not sent."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from dledger_core.client import AsyncLogClient, AsyncProducer, SyncLogClient
from dledger_core.client.routing import send_window
from dledger_core.client.routing.send_window import REQUEST_BYTES, SendWindow
from dledger_core.errors import LeadershipLostError, OverloadedError, RequestTimedOutError, UnreachableError
from dledger_core.net.protocol import Type
from dledger_core.record import Columns
from tests.client.fake_group import SHORT_MS, node_client, on_group, running_group
from tests.client.test_silence import HOUR_MS

LARGE = 1000
IN_WINDOW = 3


@pytest.fixture(autouse=True)
def _small_window(monkeypatch):
    for name in ("WINDOW_BYTES", "WINDOW_BYTES_MIN"):
        monkeypatch.setattr(send_window, name, IN_WINDOW * (LARGE + 16 + REQUEST_BYTES))


def large(number):
    return Columns.from_bodies([bytes([number]) * LARGE])


async def full(group, client, count=IN_WINDOW, more=()):
    """Freeze the leader and fill the window; return the appends that are sent, and those that wait, also ``more``.

    All begin at once, so that those that wait fail before those that are sent, however slow the machine is.
    """
    await client.append([b"first"])
    leader = next(node for node in group if node.node_id == group.leader)
    leader.frozen = True
    tasks = [asyncio.ensure_future(client.append_columns(large(number))) for number in range(count)]
    tasks += [asyncio.ensure_future(each) for each in more]
    await group.until(lambda: len(leader.held) == IN_WINDOW)
    return tasks[:IN_WINDOW], tasks[IN_WINDOW:]


@on_group(timeout_ms=SHORT_MS)
async def test_appends_beyond_window_wait_and_fail_unsent(group, client):
    sent, waiting = await full(group, client, IN_WINDOW + 2)
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert type(outcome) is OverloadedError
        assert (outcome.retriable, outcome.outcome_unknown) == (True, False)
    for outcome in await asyncio.gather(*sent, return_exceptions=True):
        assert type(outcome) is RequestTimedOutError
    group.nodes.n1.thaw()
    await client.append([b"last"])
    assert group.log.end == 1 + IN_WINDOW + 1


@on_group()
async def test_waiting_appends_are_sent_in_order_as_responses_arrive(group, client):
    sent, waiting = await full(group, client, 3 * IN_WINDOW)
    group.nodes.n1.thaw()
    results = await asyncio.gather(*sent, *waiting)
    assert [result.first_index for result in results] == list(range(1, 1 + 3 * IN_WINDOW))
    bodies = (await client.read(1, group.log.end)).column("body").to_pylist()
    assert [body[0] for body in bodies] == list(range(3 * IN_WINDOW))


@on_group(timeout_ms=HOUR_MS)
async def test_cancelled_append_leaves_its_place_to_the_next(group, client):
    sent, waiting = await full(group, client, IN_WINDOW + 2)
    waiting[0].cancel()
    sent[0].cancel()
    await group.until(lambda: len(group.nodes.n1.held) == IN_WINDOW + 1)
    group.nodes.n1.thaw()
    await asyncio.gather(*sent[1:], waiting[1])
    assert group.log.end == 1 + IN_WINDOW + 1


@on_group(timeout_ms=SHORT_MS)
async def test_joined_appends_that_wait_fail_together_and_can_be_repeated(group, client):
    sent, waiting = await full(group, client, more=[client.append([b"small"]) for _ in range(3)])
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [OverloadedError] * 3
    group.nodes.n1.thaw()
    await asyncio.gather(*sent, return_exceptions=True)
    await asyncio.gather(*(client.append([b"small"]) for _ in range(3)))
    assert group.log.end == 1 + IN_WINDOW + 3


@on_group(timeout_ms=2 * SHORT_MS)
async def test_producer_keeps_its_sequence_after_overload(group, client):
    producer = AsyncProducer(client, "p")
    await producer.append([b"a"])
    sent, [waiting] = await full(group, client, more=[producer.append([b"b"])])
    with pytest.raises(OverloadedError):
        await waiting
    group.nodes.n1.thaw()
    await asyncio.gather(*sent, return_exceptions=True)
    await producer.append([b"c"])
    await producer.append([b"d"])
    assert [header["ps"] for header in group.asked(Type.APPEND) if header["p"] == "p"] == [0, 1, 2]


@on_group(timeout_ms=HOUR_MS)
async def test_waiting_appends_follow_new_leader_while_sent_ones_wait(group, client):
    sent, waiting = await full(group, client, IN_WINDOW + 1)
    group.leader = "n2"
    await asyncio.gather(*waiting)
    assert len(group.nodes.n2.asked(Type.APPEND)) == 1
    assert not any(task.done() for task in sent)
    for task in sent:
        task.cancel()


@on_group(timeout_ms=SHORT_MS)
async def test_unknown_outcome_stays_unknown_if_repeat_finds_no_room(group, client):
    await client.append([b"first"])
    others = []

    def lose(node, connection, frame):
        node.frozen = True
        others.extend(asyncio.ensure_future(client.append_columns(large(number))) for number in range(IN_WINDOW))
        raise LeadershipLostError("lost")

    group.nodes.n1.script[Type.APPEND] = [lose]
    with pytest.raises(LeadershipLostError) as caught:
        await client.append_columns(large(0), producer_id="p", sequence=0)
    assert caught.value.outcome_unknown
    assert len([header for header in group.asked(Type.APPEND) if header["p"] == "p"]) == 1
    await asyncio.gather(*others, return_exceptions=True)


def test_blocking_appends_of_many_threads_wait_for_each_other():
    with (
        running_group() as group,
        SyncLogClient(AsyncLogClient(node_client(group.peers))) as client,
        ThreadPoolExecutor(4 * IN_WINDOW) as threads,
    ):
        results = list(threads.map(client.append, [[bytes(LARGE)]] * 40))
    assert sorted(result.first_index for result in results) == list(range(40))


async def test_window_gives_back_what_was_taken_by_a_turn_that_was_cancelled_meanwhile():
    window = SendWindow("node")
    sent = await window.enter(send_window.WINDOW_BYTES, 60)
    waiting = asyncio.ensure_future(window.enter(send_window.WINDOW_BYTES, 60))
    await asyncio.sleep(0)
    window.leave(sent, 60, committed=True)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await window.enter(send_window.WINDOW_BYTES, 0)


async def test_append_above_the_window_is_sent_alone():
    window = SendWindow("node")
    await window.enter(2 * send_window.WINDOW_BYTES, 0)
    with pytest.raises(OverloadedError):
        await window.enter(1, 0)
    waiting = asyncio.ensure_future(window.enter(1, 60))
    await asyncio.sleep(0)
    window.abandon()
    with pytest.raises(UnreachableError):
        await waiting


async def test_slow_responses_lower_the_bound_and_fast_ones_raise_it(monkeypatch):
    monkeypatch.setattr(send_window, "WINDOW_BYTES_MIN", 1)
    window, large = SendWindow("node"), send_window.WINDOW_BYTES

    async def respond(nbytes, took_s, *, committed=True):
        sent = await window.enter(nbytes, 0)
        window.leave((*sent[:2], sent[2] - took_s), 8.0, committed=committed)

    async def fits(nbytes):
        one = await window.enter(1, 0)
        try:
            other = await window.enter(nbytes - 1, 0)
        except OverloadedError:
            return False
        else:
            window.leave(other, 1e9, committed=False)
            return True
        finally:
            window.leave(one, 1e9, committed=False)

    assert await fits(large)
    await respond(large, 10.0, committed=False)  # ten times the eighth of the timeout
    assert await fits(large // 11)
    assert not await fits(large // 9)
    await respond(large // 100, 0.5)  # says nothing about more than is allowed already
    assert not await fits(large // 9)
    await respond(large // 100, 0.0, committed=False)  # nor does a refusal
    assert not await fits(large // 9)
    await respond(large // 11, 0.01)
    assert await fits(large)
