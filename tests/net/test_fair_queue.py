"""Fair queues: sources of different appetite take turns; one source has one turn in an iteration of the loop."""

import asyncio
import itertools

from hypothesis import given
from hypothesis import strategies as st

from dledger_core.net.limits.fair_queue import ALONE_S, ALONE_TURN_S, RECEIVE_S, TURN_S, Fairness, FairQueue, FairShare
from tests.support.server_group import eventually

ITEMS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 10)), max_size=40)


def test_sources_take_turns_and_keep_their_order():
    queue = FairQueue()
    for source, item in [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 5), ("c", 6)]:
        queue.add(source, item, 10)
    assert queue.take(20) == [1, 4]
    queue.add("b", 7, 10)
    assert queue.take(1) == [5], "at least one"
    assert queue.take(1000) == [2, 7, 6, 3]
    assert (len(queue), queue.nbytes, queue.take(1)) == (0, 0, [])


@given(ITEMS, st.integers(0, 25))
def test_all_items_are_taken_once_within_the_limit(items, bytes_max):
    queue, taken = FairQueue(), []
    for number, (source, nbytes) in enumerate(items):
        queue.add(source, (source, number, nbytes), nbytes)
    while queue:
        found = queue.take(bytes_max)
        assert found
        assert sum(nbytes for *_, nbytes in found[1:]) + found[0][2] <= max(bytes_max, found[0][2])
        taken += found
    assert sorted(number for _, number, _ in taken) == list(range(len(items)))
    for source in range(5):
        own = [number for each, number, _ in taken if each == source]
        assert own == sorted(own)


class Iterations:
    """Counts the iterations of the running loop."""

    def __init__(self):
        self.count = 0
        self._loop = asyncio.get_running_loop()
        self._tick()

    def _tick(self):
        self.count += 1
        self._next = self._loop.call_soon(self._tick)

    def stop(self):
        self._next.cancel()


async def test_many_connections_of_one_source_delay_another_source_by_one_turn():
    fairness, iterations, taken = Fairness(), Iterations(), []
    done = asyncio.Event()

    def handle(source, number):
        taken.append((iterations.count, source, number))
        if len(taken) == 12:
            done.set()

    for number in range(10):
        fairness.wait("busy", lambda number=number: handle("busy", number))
    for number in range(2):
        fairness.wait("other", lambda number=number: handle("other", number))
    await asyncio.wait_for(done.wait(), 10)
    iterations.stop()
    assert [(source, number) for _, source, number in taken] == [
        *itertools.chain(*((("busy", number), ("other", number)) for number in range(2))),
        *(("busy", number) for number in range(2, 10)),
    ]
    assert len({count for count, *_ in taken}) == 12, "one turn an iteration"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


async def test_time_of_a_source_counts_for_one_iteration_and_all_its_connections():
    fairness = Fairness(Clock())
    fairness.use("busy", TURN_S / 2)
    assert 0 < fairness.left_s("busy") <= TURN_S / 2
    fairness.use("busy", TURN_S)
    assert fairness.left_s("busy") <= 0 < fairness.left_s("other")
    await eventually(lambda: fairness.left_s("busy") == TURN_S)


async def test_source_with_waiting_connections_has_no_time_left():
    fairness, called = Fairness(Clock()), asyncio.Event()
    fairness.wait("busy", called.set)
    assert fairness.left_s("busy") == 0
    await asyncio.wait_for(called.wait(), 10)
    assert fairness.left_s("busy") == TURN_S


async def test_received_bytes_of_many_connections_count_together():
    """Large payloads are no frames until they end, so their bytes count when they arrive."""
    fairness = Fairness(Clock())
    for _ in range(8):
        fairness.use("busy", (128 << 10) * RECEIVE_S)
    assert fairness.left_s("busy") <= 0 < fairness.left_s("other")


async def test_appends_of_source_without_time_are_handled_one_by_one():
    fairness, most = Fairness(), []

    def receive(source):
        share = FairShare(fairness, source, lambda: most.append(share.appends_max()), lambda: None)
        for _ in range(3):
            share.handled(together=True)
        share.received(1)
        fairness.use(source, TURN_S)

    for source in ("busy", "busy", "other"):
        receive(source)
    assert most[1] == 1 < min(most[0], most[2])


async def test_few_appends_are_handled_together_after_some_were_not():
    fairness, most = Fairness(), []
    share = FairShare(fairness, "source", lambda: most.append(share.appends_max()), lambda: None)
    for together in (True, True, False, True):
        share.handled(together=together)
        share.received(0)
    assert most == [2, 4, 1, 2]


async def test_turns_are_long_only_while_no_other_source_uses_time():
    clock = Clock()
    fairness = Fairness(clock)
    fairness.use("busy", TURN_S)
    assert fairness.turn_s("busy") == TURN_S
    clock.now += 2 * ALONE_S
    fairness.use("busy", TURN_S)
    assert fairness.turn_s("busy") == ALONE_TURN_S
    assert fairness.turn_s("other") == TURN_S
    fairness.use("other", TURN_S)
    assert fairness.turn_s("busy") == fairness.turn_s("other") == TURN_S
    fairness.use("busy", TURN_S)
    clock.now += 2 * ALONE_S
    assert fairness.turn_s("busy") == ALONE_TURN_S
    assert fairness.turn_s("other") == TURN_S
