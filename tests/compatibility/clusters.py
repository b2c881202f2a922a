"""Stores of a release: how each cluster is made, and what every later version must find in it.

``make`` fills a cluster and returns after its nodes have stopped. ``facts_of`` reads the files of a stopped cluster,
``answers_of`` asks its nodes; both return values for JSON, which ``make.py`` records next to the archive.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dledger_core import Client, LocalCluster, Part, Producer, TransactionId, open_store
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.identity import load_identity
from dledger_core.storage.files.layout import Layout, load_log_meta
from dledger_core.storage.files.members_file import members_file
from dledger_core.storage.files.meta_files import checkpoint_file, hard_state_file
from tests.cli.command import run
from tests.support.soon import soon

OPTIONS: dict[str, Any] = {"data_segment_bytes": 64 << 10, "index_segment_bytes": 32 << 10, "preallocate_bytes": 0}
OPEN, COMMITTED, ABORTED = (TransactionId("orders-to-log", batch, "run") for batch in (2, 0, 1))
ONCE = TransactionId("one-write", 0, "run")
TRANSACTIONS = {"open": OPEN, "committed": COMMITTED, "aborted": ABORTED, "used once": ONCE}
STREAM, USED_ONCE = "stream", "nightly"
STREAM_APPENDS = 20
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class KeptCluster:
    """A cluster whose stores are kept.

    Attributes:
        make: fills the directory of a cluster.
        nodes: number of its nodes.
        options: options of its nodes.
        has_tables: whether its log has producers and transactions.
    """

    make: Callable[[Path, KeptCluster], None]
    nodes: int = 3
    options: tuple[tuple[str, Any], ...] = ()
    has_tables: bool = False

    def start(self, directory: Path, **more: Any) -> LocalCluster:
        """Return the cluster; the caller enters it."""
        return LocalCluster(self.nodes, directory, **OPTIONS | dict(self.options) | more)


# --- make -------------------------------------------------------------------------------------------------------------


def _plain_entries(client: Client, *, large: int = 12) -> None:
    client.append([b"", b"x", "größer als ASCII".encode()])
    client.append([b"row-%03d" % number for number in range(40)])
    for number in range(large):  # several data files
        client.append([bytes([number]) * 15_000])


def _make_native(directory: Path, kept: KeptCluster) -> None:
    with kept.start(directory) as cluster, Client(cluster.peers) as client:
        _plain_entries(client)
        stream = Producer(client, STREAM)
        for number in range(STREAM_APPENDS):
            stream.append([b"stream-%02d" % number] * 3)
        Producer(client, "fenced").append([b"old"])
        Producer(client, "fenced", epoch=1).append([b"new"])
        Producer(client, USED_ONCE, once=True).append([b"nightly"])
        client.transfer_leadership(next(node for node in cluster.node_ids if node != cluster.leader()))
        _transact(client, COMMITTED)
        _transact(client, ONCE, once=True)
        client.append_attempt([b"aborted"], transaction=ABORTED, attempt="attempt-a")
        client.abort_transaction(ABORTED)
        client.append_attempt([b"open-1", b"open-2"], transaction=OPEN, attempt="attempt-o")
        client.append([b"after the open transaction"])
        _equal(client)


def _transact(client: Client, key: TransactionId, *, once: bool = False) -> None:
    client.append_attempt([b"orphaned attempt"], transaction=key, attempt="attempt-1", once=once)
    parts = []
    for part in range(2):
        bodies = [f"{key.query_id}-{part}-{row}".encode() for row in range(3)]
        done = client.append_attempt(bodies, transaction=key, attempt=f"attempt-2-{part}", once=once)
        parts.append(Part(done.first_index, done.last_index, done.rows, done.crc))
    client.commit_transaction(key, parts, once=once)


def _make_profile_a(directory: Path, kept: KeptCluster) -> None:
    with kept.start(directory) as cluster, Client(cluster.peers) as client:
        _plain_entries(client)
        client.transfer_leadership(next(node for node in cluster.node_ids if node != cluster.leader()))
        client.append([b"of another term"])
        _equal(client)


def _make_trimmed(directory: Path, kept: KeptCluster) -> None:
    """Make a log without its first entries; one follower got it as a snapshot."""
    with kept.start(directory) as cluster, Client(cluster.peers) as client:
        Producer(client, STREAM).append([b"in a deleted file"])
        _transact(client, COMMITTED)
        follower = next(node for node in cluster.node_ids if node != cluster.leader())
        cluster.stop(follower)
        _plain_entries(client, large=40)
        soon(lambda: client.bounds().first_index > 60)
        cluster.restart(follower)
        _equal(client)


def _make_replacing(directory: Path, kept: KeptCluster) -> None:
    """Make a group in the middle of the replacement of an emptied node: its new store is a learner."""
    with kept.start(directory) as cluster, Client(cluster.peers) as client:
        _plain_entries(client)
        victim = next(node for node in cluster.node_ids if node != cluster.leader())
        cluster.kill(victim)
        shutil.rmtree(cluster.store_path(victim))
        cluster.restart(victim)
        soon(lambda: f"member replace {victim}" in _node(client, victim).reason)
        client.replace_member(victim)
        cluster.kill(victim)  # it counts as caught up after an election timeout at the earliest
        assert any(member.replaces for member in client.members().members), "the node was killed too late: try again"


def _node(client: Client, node_id: str) -> Any:
    return next(node for node in client.metadata().nodes if node.node_id == node_id)


def _equal(client: Client) -> None:
    """Wait until all nodes have everything, committed."""

    def is_equal() -> bool:
        nodes = client.metadata().nodes
        return len({(node.last_index, node.commit_index, node.last_index) for node in nodes}) == 1

    soon(is_equal)


CLUSTERS: dict[str, KeptCluster] = {
    "native": KeptCluster(_make_native, has_tables=True),
    "profile-a": KeptCluster(_make_profile_a, options=(("profile", "A"),)),
    "trimmed": KeptCluster(_make_trimmed, options=(("retain_bytes", 200_000), ("delete_when", "any")), has_tables=True),
    "replacing": KeptCluster(_make_replacing),
}


# --- read -------------------------------------------------------------------------------------------------------------


def facts_of(directory: Path) -> dict[str, Any]:
    """Return the entries and the state in the files of each store."""
    return {path.name: _store(path) for path in sorted(directory.glob("*/dledger-*")) if (path / "data").is_dir()}


def _store(path: Path) -> dict[str, Any]:
    files, layout = OsFiles(), Layout(path)
    meta, identity = load_log_meta(files, layout.log_meta), load_identity(files, layout)
    assert meta is not None
    store, found = open_store(path), list[Any]()
    start = store.first_index
    while start <= store.last_index:
        batch = store.read(start, store.last_index + 1)
        found += batch.to_pylist()
        start = batch["index"][-1].as_py() + 1
    report = store.verify()
    facts = {
        "first_index": store.first_index,
        "last_index": store.last_index,
        "entries": len(found),
        "hash": hashlib.sha256("\n".join(map(repr, found)).encode()).hexdigest(),
        "findings": [str(finding) for finding in report.findings],
        "log_uuid": meta.log_uuid,
        "profile": meta.profile,
        "store_uuid": identity.store,
        "currterm": layout.currterm.read_text(),
    }
    for name, ab_file in (
        ("hard_state", hard_state_file(layout.hard_state)),
        ("checkpoint", checkpoint_file(layout.checkpoint)),
    ):
        content = ab_file.load(files)
        facts[name] = {"value": asdict(content.value), "equal": content.equal}
    members = members_file(layout).load(files)
    facts["members"] = [[entry.index, entry.term, entry.body.hex()] for entry in members.value.entries]
    return facts


def answers_of(client: Client, kept: KeptCluster, end: int) -> dict[str, Any]:
    """Return the nodes' answers about the entries before ``end``, and about the writers of the log."""
    answers: dict[str, Any] = {"reads": {}}
    first = client.bounds().first_index
    voters = [member.node_id for member in client.members().members if member.role == "voter"]
    for isolation in ("read_committed", "read_uncommitted"):
        found = [_read(client, first, end, node, isolation) for node in voters]
        assert found == [found[0]] * len(voters)
        answers["reads"][isolation] = found[0]
    if kept.has_tables:
        answers["producers"] = {name: asdict(client.producer(name)) for name in (STREAM, "fenced", USED_ONCE, "none")}
        answers["transactions"] = {name: _transaction(client, key) for name, key in TRANSACTIONS.items()}
        leader = soon(lambda: client.metadata().leader_id)
        tables = {name: client.describe(name, leader).to_pylist() for name in ("producers", "transactions")}
        answers["tables"] = {name: [_plain(row) for row in rows] for name, rows in tables.items()}
    terms = [_plain(row) for row in client.describe("terms").to_pylist()]
    answers["terms"] = [row for row in terms if row["first_index"] < end]
    return answers


def _read(client: Client, start: int, end: int, node: str, isolation: Any) -> dict[str, Any]:
    rows = list[Any]()
    while start < end:
        found = client.fetch(start, end, node=node, isolation=isolation, max_bytes=READ_BYTES, min_commit=end - 1)
        rows += found.batch.to_pylist()
        if found.next_index == start:
            break
        start = found.next_index
    return {"rows": len(rows), "end": start, "hash": hashlib.sha256("\n".join(map(repr, rows)).encode()).hexdigest()}


def _transaction(client: Client, key: TransactionId) -> dict[str, Any]:
    found = asdict(client.transaction(key))
    del found["index"]
    return found


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    shown = {name: value if isinstance(value, int | str | None) else str(value) for name, value in row.items()}
    return {name: value for name, value in shown.items() if name != "inactive_ms"}


def members_of(client: Client) -> list[list[Any]]:
    """Return node, store, role and the store that it replaces, of each member."""
    return [[m.node_id, m.store_uuid, m.role, m.replaces] for m in client.members().members]


_COMMANDS = {
    "status": ("status",),
    "member list": ("member", "list"),
    "producer list": ("producer", "list"),
    "transaction list": ("transaction", "list"),
    "get": ("get", "first"),
    "tail": ("tail", "--from", "first", "--no-follow"),
    "append": ("append", "a body"),
}
_OF_STORES = {"verify": ("verify",), "dump": ("dump",), "look": ("look",)}


def json_fields(cluster: LocalCluster) -> dict[str, list[str]]:
    """Return the fields that commands print with --format json, nested ones with a dot."""
    found = {}
    for name, arguments in _COMMANDS.items():
        found[name] = _printed(*arguments, "--peers", cluster.peers)
    for name, arguments in _OF_STORES.items():
        found[name] = _printed(*arguments, cluster.store_path("n0"))
    return found


def _printed(*arguments: object) -> list[str]:
    fields: set[str] = set()
    for line in run(*arguments, "--format", "json", code=None).stdout.splitlines():
        _collect(json.loads(line), "", fields)
    return sorted(fields)


def _collect(value: Any, prefix: str, fields: set[str]) -> None:
    if isinstance(value, list):
        for each in value:
            _collect(each, prefix, fields)
    elif isinstance(value, dict):
        for key, each in value.items():
            fields.add(f"{prefix}{key}")
            _collect(each, f"{prefix}{key}.", fields)
