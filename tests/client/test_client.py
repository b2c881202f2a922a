import copy
import pickle
import threading

import pytest

from dledger_core.client import Producer
from dledger_core.config import parse_peers
from dledger_core.connect import AsyncClient, Client
from dledger_core.control import Part, TransactionId
from dledger_core.errors import ConfigError, UnreachableError
from tests.client.fake_group import run, running_group


def worker(client, before):
    """The client's thread; clients of other tests in this process may have threads of the same name."""
    (found,) = {each for each in threading.enumerate() if each.name == f"dledger-client-{client.group}"} - before
    return found


@pytest.fixture
def group():
    """A group whose nodes run on a thread of their own, for the blocking client."""
    with running_group() as made:
        yield made


def test_sync_client_offers_all_operations(group):
    with Client(group.peers) as client:
        assert client.append([b"a", b"b"]).last_index == 1
        assert client.append([b"c"], producer_id="p", sequence=0).first_index == 3
        assert client.get(1).body == b"b"
        assert client.read(0, 10).column("body").to_pylist() == [b"a", b"b", b"c"]
        assert client.fetch(0, 10).next_index == 4
        assert client.records(0, 10).batch.num_rows == 4
        assert next(client.tail(1)).column("index").to_pylist() == [1, 3]
        assert client.offset_for_time(99) == 99
        assert client.metadata().leader_id == "n1"
        assert client.producer("p").next_sequence == 1
        assert client.digest(0, 4, span=4).next_index == 4
        assert client.groups() == {"default": "uuid"}
        assert client.describe("terms").to_pylist() == [{"first_index": 0, "end": 4, "term": 1}]
        transaction = TransactionId("q", 0, "r")
        attempt = client.append_attempt([b"d"], transaction=transaction, attempt="a")
        part = Part(attempt.first_index, attempt.last_index, attempt.rows, attempt.crc)
        assert client.transaction(transaction).state == "open"
        assert client.commit_transaction(transaction, [part]).parts == (part,)
        assert client.abort_transaction(transaction).state == "aborted"
        client.transfer_leadership("n0")
        producer = Producer(client, "p")
        assert producer.append([b"e"]).first_index == 7
        assert (producer.producer_id, producer.epoch) == ("p", 0)
        assert client.peers == parse_peers(group.peers)
        assert client.group == "default"


def test_client_accepts_parsed_peers(group):
    with Client(parse_peers(group.peers)) as client:
        assert client.append([b"a"]).first_index == 0


def test_close_stops_thread_and_is_idempotent(group):
    before = set(threading.enumerate())
    client = Client(group.peers)
    client.append([b"x"])
    thread = worker(client, before)
    client.close()
    client.close()
    assert not thread.is_alive()
    with pytest.raises(ConfigError):
        client.append([b"y"])


def test_unreferenced_client_stops_its_thread(group):
    before = set(threading.enumerate())
    client = Client(group.peers)
    client.append([b"x"])
    thread = worker(client, before)
    del client
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize("make_copy", [pickle.dumps, copy.copy, copy.deepcopy])
def test_client_cannot_be_copied(group, make_copy):
    with Client(group.peers) as client, pytest.raises(ConfigError):
        make_copy(client)
    with pytest.raises(ConfigError):
        make_copy(AsyncClient(group.peers))


def test_async_client_belongs_to_one_loop():
    client = AsyncClient("n0-127.0.0.1:1", timeout_ms=50)

    async def use():
        with pytest.raises(UnreachableError):
            await client.append([b"x"])

    run(use())

    async def use_again():
        with pytest.raises(ConfigError):
            await client.append([b"x"])

    run(use_again())


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
