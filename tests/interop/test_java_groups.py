"""Our client and commands against a live group of real Java nodes, of both generations and of the newest version."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from dledger_core import Client
from dledger_core.cli import main
from dledger_core.client import AsyncLogClient, SyncLogClient
from dledger_core.client.routing.retry import Timeouts
from dledger_core.config import parse_peers
from dledger_core.connect import JavaOptions
from dledger_core.errors import (
    BadRequestError,
    DLedgerError,
    IndexOutOfRangeError,
    ProtocolError,
    TransferringError,
    UnknownGroupError,
    UnsupportedError,
)
from dledger_core.rocketmq.client import JavaClient
from tests.interop.java_group import JavaGroup

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SOON = JavaOptions(safety_lag_ms=300)
both_generations = pytest.mark.parametrize("group", ["A", "B"], indirect=True)
all_versions = pytest.mark.parametrize("group", ["A", "B", "newest"], indirect=True)


@pytest.fixture
def group(request: pytest.FixtureRequest) -> JavaGroup:
    """Generation A's group, or that of the generation a test asks for; each reads only what it appended itself."""
    running: JavaGroup = request.getfixturevalue(f"group_{getattr(request, 'param', 'A').lower()}")
    return running


@pytest.fixture
def client(group: JavaGroup) -> Iterator[Client]:
    with group.client(java=SOON) as made:
        yield made


@all_versions
def test_append_is_readable(client: Client) -> None:
    bodies = [b"entry %d" % number * (number % 50) for number in range(300)] + [b"", bytes(range(256))]
    result = client.append(bodies)
    places = result.indexes or range(result.first_index, result.last_index + 1)
    assert sorted(places) == list(range(result.first_index, result.first_index + len(bodies)))
    bounds = client.bounds()
    assert bounds.end == result.last_index + 1
    assert bounds.commit_index == -1
    rows = client.read(result.first_index, bounds.end).to_pylist()
    by_index = {row["index"]: row["body"] for row in rows}
    assert [by_index[place] for place in places] == bodies
    assert {row["timestamp"] for row in rows} == {None}
    assert [b["position"] - a["position"] for a, b in itertools.pairwise(rows)] == [
        len(row["body"]) + 48 for row in rows[:-1]
    ]
    assert client.get(places[0]).body == bodies[0]


def test_appends_keep_order_with_one_in_flight(group: JavaGroup) -> None:
    with group.client(java=JavaOptions(appends_in_flight=1)) as client:
        result = client.append([b"%d" % number for number in range(50)])
        assert result.indexes == ()
        fetched = client.fetch(result.first_index, result.last_index + 1, isolation="read_uncommitted")
    assert fetched.batch.column("body").to_pylist() == [b"%d" % number for number in range(50)]


@pytest.mark.parametrize("group", ["newest"], indirect=True)
def test_large_append_as_numbers_fits_a_frame_or_is_rejected(client: Client) -> None:
    body = bytes(range(256)) * (3 << 12)
    index = client.append([body]).first_index
    assert client.records(index, index + 1).batch.column("body").to_pylist() == [body]
    with pytest.raises(ProtocolError):
        client.append([b"\x80" * (4_194_304 - 48)])
    assert client.append([b"x"]).first_index == index + 1


def test_append_accepts_large_entry_and_rejects_too_large_one(client: Client) -> None:
    body = bytes(4_194_304 - 48)
    index = client.append([body]).first_index
    found = client.records(index, index + 1).batch.to_pylist()
    assert (found[0]["body"] == body, found[0]["magic"]) == (True, 1)
    with pytest.raises(BadRequestError):
        client.append([body + b"x"])


@both_generations
def test_read_rejects_indexes_outside_log(client: Client) -> None:
    end = client.bounds().end
    assert client.fetch(end, end + 5).next_index == end
    with pytest.raises(IndexOutOfRangeError):
        client.get(end + 1000)


def test_new_entries_are_served_once_they_were_seen_long_enough(client: Client) -> None:
    before = client.bounds().end
    client.append([b"fresh"])
    fresh = client.fetch(before, before + 1)
    assert fresh.next_index in (before, before + 1)  # the machine may be slower than the lag
    later = client.fetch(before, before + 1, wait_ms=30_000)
    assert later.batch.column("body").to_pylist() == [b"fresh"]
    assert client.fetch(before, before + 1, isolation="read_uncommitted").next_index == before + 1


def test_tail_follows_new_entries(client: Client) -> None:
    start = client.bounds().end
    tail = client.tail(start)
    client.append([b"first"])
    assert next(tail).column("body").to_pylist() == [b"first"]
    client.append([b"second"])
    assert next(tail).column("body").to_pylist() == [b"second"]


@both_generations
def test_probe_makes_entries_readable_and_is_hidden(group: JavaGroup) -> None:
    options = JavaOptions(safety_lag_ms=3_600_000, commit_probe=True)
    with group.client(java=options) as client:
        first = client.append([b"one"]).first_index
        bounds = client.bounds()
        assert (bounds.end, bounds.commit_index) == (first + 1, first + 1)
        second = client.append([b"two"]).first_index
        assert second == first + 2  # the probe lies in between
        found = client.fetch(first, second + 1, wait_ms=30_000)
        rows = found.batch.to_pylist() + client.fetch(found.next_index, second + 1, wait_ms=30_000).batch.to_pylist()
        assert [(row["index"], row["body"]) for row in rows] == [(first, b"one"), (second, b"two")]
        with group.client(java=options) as other:
            assert other.bounds().end >= second + 1
        grown = [client.bounds().end for _ in range(3)]
        assert len(set(grown)) == 1  # no node answers a probe with a probe
        assert len(client.records(first, second + 10).batch) <= 6


@both_generations
def test_metadata_names_leader_before_and_after_transfer(group: JavaGroup, client: Client) -> None:
    client.append([b"before"])
    metadata = client.metadata()
    assert metadata.leader_id == group.leader()
    assert [node.reachable for node in metadata.nodes] == [True] * 3
    assert sorted(node.role for node in metadata.nodes) == ["follower", "follower", "leader"]
    target = group.follower()
    for left in reversed(range(5)):  # Java's nodes give up soon where the machine is slow
        try:
            client.transfer_leadership(target)
            break
        except TransferringError:
            assert left
    assert group.leader() == target
    result = client.append([b"after"])
    assert result.term > metadata.term
    assert client.metadata().leader_id == target


def test_client_follows_redirect_of_presumed_leader(group: JavaGroup) -> None:
    log = JavaClient(parse_peers(group.peers), "g", Timeouts(10.0), safety_lag_ms=0)
    with SyncLogClient(AsyncLogClient(log)) as client:
        log.nodes.leader_id = group.follower()
        index = client.append([b"redirected"]).first_index
        assert log.nodes.leader_id == group.leader()
        log.nodes.leader_id = group.follower()
        assert client.records(index, index + 1).batch.column("body").to_pylist() == [b"redirected"]


def test_other_group_and_other_ids_are_explicit_errors(group: JavaGroup) -> None:
    with Client(group.peers, "other", protocol="dledger-java") as client:
        with pytest.raises(UnknownGroupError):
            client.append([b"x"])
        assert client.groups() == {}
    leader, other = group.leader(), group.follower()
    swapped = group.peers.replace(f"{leader}-", "x-").replace(f"{other}-", f"{leader}-").replace("x-", f"{other}-")
    with Client(swapped, "g", protocol="dledger-java", timeout_ms=3000) as client, pytest.raises(BadRequestError):
        client.append([b"x"])


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.append([b"x"], producer_id="p", sequence=0),
        lambda client: client.producer("p"),
        lambda client: client.offset_for_time(0),
        lambda client: client.digest(0, 1, span=1),
        lambda client: client.describe("terms"),
        lambda client: client.pin("x", 0, 1),
        lambda client: client.wait_for_entries({"g": 0}, wait_ms=0),
    ],
    ids=["a producer's append", "producer", "time", "digest", "describe", "pin", "wait for growth"],
)
def test_call_without_java_counterpart_is_rejected(client: Client, call: Any) -> None:
    with pytest.raises(UnsupportedError):
        call(client)


def test_linearizable_and_named_node_reads_are_rejected(client: Client) -> None:
    with pytest.raises(BadRequestError):
        client.fetch(0, 1, consistency="linearizable")
    with pytest.raises(BadRequestError):
        client.fetch(0, 1, node="n0")


def run(group: JavaGroup, *arguments: str, text: str | None = None) -> Any:
    command, *rest = arguments
    options = ["--protocol", "dledger-java", "--peers", group.peers, "--group", "g"]
    result = CliRunner().invoke(main, [command, *options, *rest], input=text)
    assert result.exit_code == 0, result.output
    return result


@both_generations
def test_commands(group: JavaGroup) -> None:
    appended = json.loads(run(group, "append", "--in-order", "--format", "json", text="one\ntwo\nthree\n").stdout)
    first = appended["first_index"]
    assert appended["last_index"] == first + 2
    got = run(group, "get", "--safety-lag", "0", str(first + 1), "--format", "json")
    assert json.loads(got.stdout)["body"] == "two"
    tail = run(group, "tail", "--safety-lag", "0.2", "--no-follow", "--from", "-3", "--format", "json")
    assert [json.loads(line)["body"] for line in tail.stdout.splitlines()] == ["one", "two", "three"]
    probed = run(group, "tail", "--commit-probe", "--no-follow", "--from", str(first), "--format", "json")
    assert [json.loads(line)["body"] for line in probed.stdout.splitlines()] == ["one", "two", "three"]
    status = json.loads(run(group, "status", "--format", "json").stdout)
    assert status["leader_id"] == group.leader()
    shown = run(group, "status")
    assert "leader" in shown.stdout
    target = group.follower()
    run(group, "transfer", target)
    assert group.leader() == target


def test_read_reports_wait_for_safety_lag(group: JavaGroup) -> None:
    end = json.loads(run(group, "append", "--format", "json", "x").stdout)["last_index"]
    told = run(group, "get", "--safety-lag", "2.1", str(end))
    assert "waiting 2.1 s" in told.stderr


@pytest.mark.parametrize("group", ["B"], indirect=True)
def test_client_continues_when_leader_stops(group: JavaGroup) -> None:
    """Last of all: generation B's group has two nodes afterwards."""
    with group.client(java=SOON, timeout_ms=60_000) as client:
        bodies = [b"before %d" % number for number in range(20)]
        first = client.append(bodies).first_index
        group.stop(group.leader())
        # An append in flight when a leader stops has an unknown outcome; a later one has not.
        after = client.append([b"after"]).first_index
        assert after >= first + 20
        rows = client.fetch(first, after + 1, isolation="read_uncommitted").batch.column("body").to_pylist()
        assert sorted(rows[:20]) == sorted(bodies)
        assert rows[-1] == b"after"
        metadata = client.metadata()
        assert [node.reachable for node in metadata.nodes].count(True) == 2


def test_probe_serves_only_entries_of_majority(group: JavaGroup) -> None:
    """Last of all: generation A's group has one node afterwards, which leads for some seconds and shows what it has."""
    options = JavaOptions(commit_probe=True)
    with group.client(java=options, timeout_ms=4000) as client:
        before = client.append([b"held by all"]).first_index
        assert client.bounds().end > before
        for _ in range(2):
            group.stop(next(node for node, server in group.servers.items() if not server.getMemberState().isLeader()))
        with pytest.raises(DLedgerError) as caught:
            client.append([b"held by one"])
        assert caught.value.outcome_unknown or caught.value.retriable
        with pytest.raises(DLedgerError):  # no probe is acknowledged
            client.fetch(before + 2, before + 3)
