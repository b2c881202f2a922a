"""A store that lost the end of its log but not its tables: producers of lost entries, with real nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from dledger_core.client import Producer
from dledger_core.client.recovery import recover_lost
from dledger_core.cluster import LocalCluster
from dledger_core.config import Peer, format_peers, parse_peers
from dledger_core.connect import Client
from dledger_core.errors import SequenceGapError, UnreachableError
from dledger_core.ids import NodeId
from dledger_core.recovery import Recovered
from dledger_core.storage.files.ab_file import copies
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.table_store import read_sqlite
from dledger_core.storage.tables.tables import LogTables
from tests.support.soon import soon

OPTIONS = {"data_segment_bytes": 1 << 18, "index_segment_bytes": 1 << 15, "preallocate_bytes": 0}
pytestmark = pytest.mark.integration


def lose_end(store: Path, body: bytes) -> None:
    """Take the checkpoint, and the log from the record with ``body`` on; hard state and tables stay."""
    for path in copies(Layout(store).checkpoint):
        path.unlink()
    for path in sorted((store / "data").iterdir()):
        data = path.read_bytes()
        if (at := data.find(body)) >= 0:
            path.write_bytes(data[: at - 48] + bytes(len(data) - at + 48))


def applied(store: Path) -> int:
    rows = read_sqlite(Layout(store).tables)
    return -1 if rows is None else LogTables.from_rows(rows).applied_index


def recovered(peers: Sequence[Peer], *lost: str) -> bool:
    """Continue the log; False while the survivors still start."""
    try:
        found = asyncio.run(recover_lost(peers, "default", frozenset(map(NodeId, lost)), 5.0))
    except UnreachableError:
        return False
    return isinstance(found.action, Recovered)


def test_survivor_with_tables_of_lost_entries_serves_producers_of_new_log(tmp_path: Path) -> None:
    survivors, others = ("n1", "n2"), ("n0", "n3", "n4")
    with LocalCluster(5, tmp_path, **OPTIONS) as cluster:
        peers = parse_peers(cluster.peers)
        with Client(cluster.peers) as client:
            producer = Producer(client, "old")
            kept = [producer.append([b"old %d" % number]).first_index for number in range(5)]
            soon(lambda: len({node.commit_index for node in client.metadata().nodes}) == 1)
            cluster.kill("n1")
            lost = [producer.append([b"old %d" % number]).first_index for number in range(5, 20)]
        soon(lambda: applied(cluster.store_path("n2")) > lost[-2])
        for node in (*others, "n2"):
            cluster.kill(node)
        lose_end(cluster.store_path("n2"), b"old 3")
        for node in survivors:
            cluster.restart(node)
        soon(lambda: recovered(peers, *others), every_s=0.5)
        with Client(format_peers([peer for peer in peers if peer.node_id in survivors])) as client:
            soon(lambda: sum(member.role == "voter" for member in client.members().members) == 2)
            new = Producer(client, "new")
            places = [new.append([b"new %d" % number]).first_index for number in range(4)]
            assert kept[-1] < places[0] < lost[-1], "at indexes of lost entries"
            client.append([b"filler"] * 40)
            client.transfer_leadership("n2")
            for number, place in enumerate(places):
                again = client.append([b"new %d" % number], producer_id="new", epoch=0, sequence=number)
                assert again.first_index == place, "a repeat is not appended again"
            with pytest.raises(SequenceGapError):
                client.append([b"old 20"], producer_id="old", epoch=0, sequence=20)
            assert client.append([b"again"], producer_id="old", epoch=0, sequence=5).first_index > places[-1]
            bodies = client.read(0, 1 << 20).column("body").to_pylist()
            assert [bodies.count(b"new %d" % number) for number in range(4)] == [1] * 4
