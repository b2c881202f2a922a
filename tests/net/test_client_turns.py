"""Turns of clients: one source has one turn in an iteration of the loop, however many connections it has."""

import asyncio
import itertools

from dledger_core.net.client_turns import RECEIVE_S, TURN_S, ClientTurns


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
    turns, iterations, taken = ClientTurns(), Iterations(), []
    done = asyncio.Event()

    def handle(source, number):
        taken.append((iterations.count, source, number))
        if len(taken) == 12:
            done.set()

    for number in range(10):
        turns.wait("busy", lambda number=number: handle("busy", number))
    for number in range(2):
        turns.wait("other", lambda number=number: handle("other", number))
    await asyncio.wait_for(done.wait(), 10)
    iterations.stop()
    assert [(source, number) for _, source, number in taken] == [
        *itertools.chain(*((("busy", number), ("other", number)) for number in range(2))),
        *(("busy", number) for number in range(2, 10)),
    ]
    assert len({count for count, *_ in taken}) == 12, "one turn an iteration"


async def test_time_of_a_source_counts_for_one_iteration_and_all_its_connections():
    turns = ClientTurns()
    turns.use("busy", TURN_S / 2)
    assert 0 < turns.left_s("busy") <= TURN_S / 2
    turns.use("busy", TURN_S)
    assert turns.left_s("busy") <= 0 < turns.left_s("other")
    await asyncio.sleep(0.001)
    assert turns.left_s("busy") == TURN_S


async def test_source_with_waiting_connections_has_no_time_left():
    turns, called = ClientTurns(), asyncio.Event()
    turns.wait("busy", called.set)
    assert turns.left_s("busy") == 0
    await asyncio.wait_for(called.wait(), 10)
    assert turns.left_s("busy") == TURN_S


async def test_received_bytes_of_many_connections_count_together():
    """Large payloads are no frames until they end, so their bytes count when they arrive."""
    turns = ClientTurns()
    for _ in range(8):
        turns.use("busy", (128 << 10) * RECEIVE_S)
    assert turns.left_s("busy") <= 0 < turns.left_s("other")
