"""A client in tasks, threads and processes: no work leaks, no call hangs, wrong use is rejected."""

from __future__ import annotations

import asyncio
import copy
import inspect
import multiprocessing
import os
import pickle
import signal
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from dledger_core import errors
from dledger_core.client import AsyncLogClient, AsyncProducer, Producer, SyncLogClient, sync_client
from dledger_core.client.sync_client import LoopThread
from dledger_core.config import parse_peers
from dledger_core.connect import AsyncClient, Client
from dledger_core.control import TransactionId
from dledger_core.errors import ConfigError, RequestTimedOutError, UnreachableError
from dledger_core.net.protocol import Type
from tests.client.fake_group import SHORT_MS, node_client, on_group, running_group
from tests.support.server_group import eventually
from tests.support.soon import soon

KEY = TransactionId("query", 0, "run")
CALLS = {
    "append": lambda client: client.append([b"x"]),
    "append of much": lambda client: client.append([b"x" * (1 << 20)]),
    "append by a producer": lambda client: client.append([b"x"], producer_id="p", sequence=0),
    "Producer.append": lambda client: AsyncProducer(client, "p").append([b"x"]),
    "append_attempt": lambda client: client.append_attempt([b"x"], transaction=KEY, attempt="a"),
    "commit_transaction": lambda client: client.commit_transaction(KEY, []),
    "transaction": lambda client: client.transaction(KEY),
    "read": lambda client: client.read(0, 10),
    "a long poll": lambda client: client.fetch(0, 10, wait_ms=5_000),
    "a linearizable read": lambda client: client.read(0, 10, consistency="linearizable"),
    "a read of one node": lambda client: client.read(0, 10, node="n2"),
    "get": lambda client: client.get(3),
    "records": lambda client: client.records(0, 10),
    "offset_for_time": lambda client: client.offset_for_time(1),
    "split_points": lambda client: client.split_points(0, 10, [5]),
    "digest": lambda client: client.digest(0, 8, span=8),
    "producer": lambda client: client.producer("p"),
    "metadata": lambda client: client.metadata(),
    "transfer_leadership": lambda client: client.transfer_leadership("n0"),
    "members": lambda client: client.members(),
    "add_member": lambda client: client.add_member("n3", "127.0.0.1:1"),
    "tail": lambda client: anext(client.tail(0)),
    "role_changes": lambda client: anext(client.role_changes()),
}


def hang(group, *kinds):
    """Make the nodes ignore requests of these kinds, or of all."""
    for kind in kinds or Type:
        group.always(kind, "ignore")


def tasks():
    """Names of the tasks other than the test, its servers and its connections."""
    names = [task.get_coro().__qualname__ for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    return sorted(name for name in names if not name.startswith(("Server.", "Connection.", "_serve")))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["leader known", "leader unknown"])
@pytest.mark.parametrize("name", CALLS)
@on_group(timeout_ms=600000)
async def test_cancelled_call_leaves_no_work(group, client, log, name, how):
    if how == "leader known":
        await client.append([b"first"])
    before = len(group.asked(Type.METADATA))
    hang(group)
    idle = tasks()
    asked = [len(node.requests) for node in group]
    calling = asyncio.ensure_future(CALLS[name](client))
    await group.until(lambda: [len(node.requests) for node in group] != asked)
    await asyncio.sleep(0)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    # Other callers may wait for the leader too, so that query continues; it takes at most a second.
    await eventually(lambda: log.in_flight == 0 and tasks() == idle)
    assert len(group.asked(Type.METADATA)) - before <= 3
    for node in group:
        node.script.clear()
    assert (await client.append([b"the client still works"])).term == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("a long poll", "tail", "role_changes")])
@on_group(timeout_ms=SHORT_MS)
async def test_timed_out_call_leaves_no_work(group, client, log, name):
    await client.append([b"first"])
    hang(group)
    idle = tasks()
    with pytest.raises(errors.DLedgerError):
        await CALLS[name](client)
    await eventually(lambda: log.in_flight == 0 and tasks() == idle)


@on_group(timeout_ms=600000)
async def test_shared_append_is_cancelled_with_last_caller(group, client, log):
    await client.append([b"first"])
    hang(group, Type.APPEND)
    appending = [asyncio.ensure_future(client.append([bytes([i])])) for i in range(3)]
    await group.until(lambda: len(group.asked(Type.APPEND)) == 2)
    for call in appending[:2]:
        call.cancel()
    await asyncio.wait(appending[:2])
    assert log.in_flight == 2, "one request of one batch: a caller still waits"
    appending[2].cancel()
    await asyncio.gather(*appending, return_exceptions=True)
    await eventually(lambda: log.in_flight == 0)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"peers": "n0"}, "n0"),
        ({"peers": ()}, "peers"),
        ({"group": "a/b"}, "a/b"),
        ({"protocol": "http"}, "http"),
        ({"timeout_ms": 0}, "timeout_ms"),
        ({"retry_timeout_ms": 0}, "retry_timeout_ms"),
        ({"connect_timeout_ms": -1}, "connect_timeout_ms"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_client_rejects_wrong_settings(kind, arguments, name):
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match=name):
        kind(**({"peers": "n0-127.0.0.1:1"} | arguments))
    assert set(threading.enumerate()) <= before


def test_async_client_belongs_to_one_loop():
    client = AsyncClient("n0-127.0.0.1:1", timeout_ms=50)

    async def use():
        await client.append([b"x"])

    for error in (UnreachableError, ConfigError):
        with pytest.raises(error):
            asyncio.run(use())


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def group():
    """A group whose nodes run on a thread of their own."""
    with running_group() as made:
        yield made


@pytest.mark.slow
def test_many_threads_share_one_client(group):
    threads, rounds = 16, 25
    begin = threading.Barrier(threads)

    def hammer(client, number):
        producer, found = Producer(client, f"p{number}", epoch=0), []
        assert (producer.producer_id, producer.epoch) == (f"p{number}", 0)
        begin.wait()
        for step in range(rounds):
            body = f"{number}/{step}".encode()
            plain, produced = client.append([body, body]), producer.append([body])
            assert plain.last_index == plain.first_index + 1
            found += [(plain.first_index, body), (plain.last_index, body), (produced.last_index, body)]
            assert client.get(plain.first_index).body == body
            assert client.read(plain.first_index, plain.last_index + 1).column("body").to_pylist() == [body, body]
            assert client.producer(f"p{number}").next_sequence == step + 1
            assert client.metadata().leader_id == "n1"
        return found

    log = node_client(group.peers, timeout_ms=60_000)
    with SyncLogClient(AsyncLogClient(log)) as client, ThreadPoolExecutor(threads) as pool:
        found = [pair for part in pool.map(lambda n: hammer(client, n), range(threads)) for pair in part]
        assert log.in_flight == 0
    indexes = [index for index, _ in found]
    assert len(indexes) == len(set(indexes)) == threads * rounds * 3, "every append has its own indexes"


def test_close_ends_calls_of_all_threads(group):
    client = Client(group.peers)
    begun = threading.Semaphore(0)

    def hammer():
        while True:
            begun.release()
            client.append([b"x"])

    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(hammer) for _ in range(8)]
        for _ in range(40):
            begun.acquire()
        client.close()
        ended = [call.exception(30) for call in calls]
    assert {type(error) for error in ended} <= {ConfigError, CancelledError, asyncio.CancelledError}, ended


def test_sync_client_has_every_call_of_the_async_one():
    def calls(kind):
        members = inspect.getmembers(kind, inspect.isfunction)
        return {name: inspect.signature(member).parameters for name, member in members if not name.startswith("_")}

    ours, theirs = calls(SyncLogClient), calls(AsyncLogClient)
    assert theirs.keys() - ours.keys() == {"append_columns"}  # for programs that prepare appends in the event loop
    assert [name for name in theirs.keys() & ours.keys() if ours[name] != theirs[name]] == []


def test_errors_stay_in_their_thread(group):
    with Client(group.peers, timeout_ms=SHORT_MS) as client, ThreadPoolExecutor(4) as pool:
        client.append([b"first"])
        group.always(Type.PRODUCER, "ignore")
        slow = [pool.submit(client.producer, "p") for _ in range(2)]
        assert [pool.submit(client.append, [b"x"]).result(20).term for _ in range(10)] == [1] * 10
        assert [type(call.exception(20)) for call in slow] == [RequestTimedOutError] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "call", [lambda c: c.append([b"x"]), lambda c: next(c.role_changes())], ids=["append", "watch"]
)
def test_interrupted_call_leaves_no_work(group, call):
    kinds = (Type.APPEND, Type.WATCH)
    hang(group, *kinds)

    def interrupt(*_):
        raise KeyboardInterrupt

    def when_asked():
        soon(lambda: any(group.asked(kind) for kind in kinds))
        os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        log = node_client(group.peers, timeout_ms=600_000)
        with SyncLogClient(AsyncLogClient(log)) as client:
            interrupting = threading.Thread(target=when_asked)
            interrupting.start()
            with pytest.raises(KeyboardInterrupt):
                call(client)
            interrupting.join()
            soon(lambda: not log.in_flight)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("how", ["closed", "unreferenced"])
def test_client_stops_its_thread(group, how):
    before = set(threading.enumerate())
    client = Client(parse_peers(group.peers))
    client.append([b"x"])
    # Clients of other tests in this process may have threads of the same name.
    (thread,) = {each for each in threading.enumerate() if each.name == "dledger-client-default"} - before
    if how == "closed":
        client.close()
        assert not thread.is_alive()
    del client
    thread.join(5)
    assert not thread.is_alive()


async def nothing():
    pass


def test_loop_thread_abandons_loop_that_does_not_stop(monkeypatch, caplog):
    free = threading.Event()

    class Stuck(asyncio.SelectorEventLoop):
        """A loop whose ``close`` waits, as uvloop's was seen to do."""

        def close(self):
            free.wait(60)
            super().close()

    monkeypatch.setattr(sync_client.uvloop, "new_event_loop", Stuck)
    before, began = set(threading.enumerate()), time.monotonic()
    thread = LoopThread("stuck", end_s=0.05)
    thread.close(nothing)
    assert time.monotonic() - began < 30
    assert "thread=stuck" in caplog.text
    late = nothing()
    assert thread.submit(late) is None
    late.close()
    free.set()
    for left in set(threading.enumerate()) - before:
        left.join(60)


def test_loop_thread_runs_last_work_and_cancels_other(caplog):
    ran = []

    async def last():
        ran.append(threading.current_thread().name)

    thread = LoopThread("ends")
    waiting = thread.submit(asyncio.Event().wait())
    thread.close(last)
    thread.close(last)
    assert ran == ["ends"]
    assert waiting.cancelled()
    assert "ends" not in {each.name for each in threading.enumerate()}
    assert caplog.text == ""


# --- processes --------------------------------------------------------------------------------------------------------


def _use(client, peers, pipe):
    """Use the parent's client in a child, then a client of its own."""
    seen = []
    for call in (lambda: client.append([b"x"]), lambda: next(client.tail(0)), lambda: Producer(client, "p").append([])):
        try:
            call()
        except errors.DLedgerError as error:
            seen.append((type(error), "fork" in str(error)))
    client.close()
    with Client(peers) as own:
        pipe.send([*seen, own.append([b"of the child"]).term])


@pytest.mark.slow
def test_forked_child_needs_its_own_client(group):
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    with Client(group.peers) as client, ours, theirs:
        first = client.append([b"before"]).first_index
        child = fork.Process(target=_use, args=(client, group.peers, theirs))
        child.start()  # it ends like any process, finalizers and all
        assert ours.poll(30)
        *refused, term = ours.recv()
        child.join(120)
        assert child.exitcode == 0
        assert refused[:2] == [(ConfigError, True)] * 2
        assert (len(refused), term) == (3, 1)
        assert client.append([b"after"]).first_index == first + 2, "the parent's client is as before"


@pytest.mark.parametrize("make_copy", [pickle.dumps, copy.copy, copy.deepcopy])
def test_clients_and_producers_cannot_be_copied(group, make_copy):
    with Client(group.peers) as client:
        for holder in (client, client.in_loop, Producer(client, "p"), AsyncProducer(client.in_loop, "p")):
            if make_copy is not copy.copy or holder in (client, client.in_loop):
                with pytest.raises(ConfigError):
                    make_copy(holder)


def test_results_and_errors_can_be_pickled(group):
    with Client(group.peers) as client:
        found = client.append([b"x"])
        for value in (found, client.get(found.first_index), client.metadata(), client.producer("p")):
            assert pickle.loads(pickle.dumps(value)) == value
    for name in errors.__all__:
        kind = getattr(errors, name)
        if isinstance(kind, type) and issubclass(kind, errors.DLedgerError):
            error = kind("what", "where", "remedy", {"index": 5})
            again = pickle.loads(pickle.dumps(error))
            assert (type(again), str(again), again.values) == (kind, str(error), error.values)
