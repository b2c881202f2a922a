"""``dledger recover --lost`` on real nodes whose stores are damaged in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from dledger_core import AsyncClient, Client, LocalCluster
from dledger_core.client.recovery import LostMajority, recover_lost
from dledger_core.errors import RecoveryRefusedError
from dledger_core.ids import NodeId
from dledger_core.record import INDEX_RECORD, INDEX_RECORD_BYTES
from dledger_core.recovery import Recovered
from dledger_core.server import store_requests
from dledger_core.server.group_state import GroupState
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.meta_files import mark_needs_verification
from dledger_core.storage.files.quarantine import mark_quarantined, quarantine_reason
from tests.server.bootstrap.test_lost_majority import (
    Interrupted,
    append,
    bodies,
    client_of,
    leaderless,
    settled,
    stop_after,
    wipe,
)
from tests.support.damage import flip
from tests.support.server_group import ServerGroup, eventually, run
from tests.support.soon import soon

LOST = frozenset({NodeId("n0"), NodeId("n1")})
SURVIVORS = ("n2", "n3")
Damage = Callable[[ServerGroup, str], None]


def layout(group: ServerGroup, node: str) -> Layout:
    return Layout(group.config(node).store_path("default"))


def damage(group: ServerGroup, node: str, body: bytes) -> None:
    damage_store(layout(group, node), body)


def damage_store(store: Layout, body: bytes) -> None:
    """Flip a byte of an entry's body."""
    for path in sorted(store.data.iterdir()):
        if (at := path.read_bytes().find(body)) >= 0:
            flip(path, at)
            return
    raise AssertionError(body)


@contextlib.asynccontextmanager
async def survivors(
    directory: Path,
    damaged: dict[str, tuple[bytes, ...]],
    also: Damage = lambda group, node: None,
    *,
    while_running: bool = False,
) -> AsyncIterator[tuple[ServerGroup, AsyncClient, list[bytes]]]:
    """Four nodes with the same entries, of which two have lost their disks and the others some records."""
    async with ServerGroup(directory, 4, groups=("default", "other")) as group, client_of(group) as client:
        await group.leader()
        acknowledged = await append(client, 30)
        for node in SURVIVORS:
            await settled(group, node)
        for node in ("n0", "n1", "n2", "n3"):
            await group.stop(node)
        for node in ("n0", "n1"):
            wipe(group, node)
        for node in SURVIVORS:
            if while_running:
                await group.start(node)
            for body in damaged.get(node, ()):
                damage(group, node, body)
            also(group, node)
            if not while_running:
                await group.start(node)
        yield group, client, acknowledged


def hosted(group: ServerGroup) -> list[str]:
    return [node for node in SURVIVORS if "default" in group.nodes[node].hosted]


async def recover(group: ServerGroup, **options: bool) -> LostMajority:
    return await recover_lost(group.peers, "default", LOST, 20.0, **options)


def holes(found: LostMajority) -> dict[str, list[list[str]]]:
    """Return which survivors may fill the holes of each one."""
    rows = found.preview["survivors"]
    return {row["node"]: [hole["filled_by"] for hole in row["holes"]] for row in rows}


def verify_first(group: ServerGroup, node: str) -> None:
    mark_needs_verification(OsFiles(), layout(group, node), "Input/output error")


def quarantine_one(group: ServerGroup, node: str) -> None:
    if node == "n2":
        mark_quarantined(OsFiles(), layout(group, node), "an invariant is broken")


@pytest.mark.parametrize(
    ("also", "state"),
    [
        (lambda group, node: None, GroupState.HOSTED),
        (lambda group, node: None, GroupState.REPAIRING),
        (verify_first, GroupState.REPAIRING),
        (quarantine_one, GroupState.QUARANTINED),
    ],
    ids=["serve", "wait for repair", "wait for verification", "quarantined"],
)
def test_two_survivors_fill_each_other_and_lose_nothing(tmp_path: Path, also: Damage, state: GroupState) -> None:
    async def work() -> None:
        damaged = {"n2": (b"entry 5", b"entry 6"), "n3": (b"entry 9", b"entry 20")}
        running = state is GroupState.HOSTED
        async with survivors(tmp_path, damaged, also, while_running=running) as (group, client, acknowledged):
            assert group.nodes["n2"].groups["default"].state is state
            await leaderless(group, *hosted(group))
            planned = await recover(group, dry_run=True)
            expected = {"n2": [["n3"]], "n3": [["n2"], ["n2"]]}
            found = holes(planned)
            # An open store repairs itself meanwhile: what it shows is left of it.
            assert (
                all(len(found[node]) <= len(each) for node, each in expected.items()) if running else found == expected
            )
            assert isinstance((await recover(group)).action, Recovered)
            assert await bodies(client) == acknowledged
            await append(client, 1)
            await eventually(lambda: len(group.hosted("n2").replica.raft.configuration.voters) == 2)
            assert quarantine_reason(OsFiles(), layout(group, "n2")) is None

    run(work())


def damage_end(group: ServerGroup, node: str) -> None:
    """Flip a bit of the last byte that was written."""
    path = max(layout(group, node).data.iterdir())
    flip(path, len(path.read_bytes().rstrip(b"\0")) - 1)


@pytest.mark.parametrize(
    ("damaged", "also", "may_lack_entries"),
    [
        ((b"entry 5",), lambda group, node: None, False),
        ((), damage_end, True),
        ((), quarantine_one, True),
    ],
    ids=["in the middle", "at the end", "quarantined"],
)
def test_only_damaged_end_or_quarantine_may_lack_entries(
    tmp_path: Path, damaged: tuple[bytes, ...], also: Damage, may_lack_entries: bool
) -> None:
    async def work() -> None:
        async with survivors(tmp_path, dict.fromkeys(SURVIVORS, damaged), also) as (group, _, _):
            before = content(group, "n2")
            found = await store_requests.recover(group.nodes["n2"].groups["default"], "ask", None, None)
            assert found.end is not None
            assert found.end.is_recovering is may_lack_entries
            assert found.end.last_index >= 30
            assert content(group, "n2") == before, "nothing behind damage is overwritten"

    run(work())


def test_unfilled_hole_is_shown_and_ends_log_only_on_demand(tmp_path: Path) -> None:
    async def work() -> None:
        damaged = dict.fromkeys(SURVIVORS, (b"entry 12",))
        async with survivors(tmp_path, damaged) as (group, _, acknowledged):
            await leaderless(group, *hosted(group))
            assert holes(await recover(group, dry_run=True)) == {"n2": [[]], "n3": [[]]}
            before = {node: content(group, node) for node in SURVIVORS}
            with pytest.raises(RecoveryRefusedError) as refused:
                await recover(group)
            assert "dledger recover --lost n0,n1 --accept-loss" in refused.value.remedy
            assert {node: content(group, node) for node in SURVIVORS} == before
            assert isinstance((await recover(group, accepts_loss=True)).action, Recovered)
            async with client_of(group) as another:  # the first one has seen entries that the log lacks now
                assert await bodies(another) == acknowledged[:12]
                await append(another, 1)
            kept = [path for node in SURVIVORS for path in layout(group, node).meta.glob("behind-*.log")]
            assert kept
            assert all(b"entry 13" in path.read_bytes() and b"entry 29" in path.read_bytes() for path in kept)

    run(work())


def content(group: ServerGroup, node: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(layout(group, node).data.iterdir())]


@pytest.mark.parametrize("restart", [False, True], ids=["", "restarted"])
@pytest.mark.parametrize("accepts_loss", [False, True], ids=["filled", "cut"])
def test_recovery_with_holes_interrupted_after_any_message_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restart: bool, accepts_loss: bool
) -> None:
    async def work() -> None:
        damaged = {"n2": (b"entry 5",), "n3": (b"entry 5",) if accepts_loss else (b"entry 9",)}
        async with survivors(tmp_path, damaged) as (group, _, acknowledged):
            await leaderless(group, *hosted(group))
            for left in range(8):
                stop_after(monkeypatch, left)
                with contextlib.suppress(Interrupted):
                    await recover(group, accepts_loss=accepts_loss)
                monkeypatch.undo()
                if restart:
                    for node in SURVIVORS:
                        await group.stop(node)
                        await group.start(node)
            assert isinstance((await recover(group)).action, Recovered)
            async with client_of(group) as another:
                assert await bodies(another) == acknowledged[: 5 if accepts_loss else None]
                await append(another, 1)

    run(work())


def contradict(group: ServerGroup, node: str, begin: int, end: int) -> None:
    """Give index rows [begin, end) of a store a term that their records do not have."""
    path = min(layout(group, node).index.iterdir())
    with path.open("r+b") as file:
        rows = np.frombuffer(file.read(end * INDEX_RECORD_BYTES), INDEX_RECORD).copy()
        rows["term"][begin:] += 1
        file.seek(0)
        file.write(rows.tobytes())


@pytest.mark.parametrize(
    "damaging",
    [
        lambda group, node: contradict(group, node, 1, 30),
        lambda group, node: contradict(group, node, 30, 31),
        lambda group, node: damage(group, node, b"entry 29"),
    ],
    ids=["terms in the middle", "last term", "last body"],
)
def test_open_store_that_is_damaged_answers_and_is_recovered(tmp_path: Path, damaging: Damage) -> None:
    async def work() -> None:
        def also(group: ServerGroup, node: str) -> None:
            if node == "n2":
                damaging(group, node)

        async with survivors(tmp_path, {}, also, while_running=True) as (group, client, acknowledged):
            await leaderless(group, *SURVIVORS)
            assert group.hosted("n2").replica.raft.last_index == 30
            assert isinstance((await recover(group)).action, Recovered)
            assert await bodies(client) == acknowledged
            await append(client, 1)

    run(work())


def test_two_recoveries_at_once_fill_holes(tmp_path: Path) -> None:
    async def work() -> None:
        async with survivors(tmp_path, {"n2": (b"entry 5",), "n3": (b"entry 9",)}) as (group, client, acknowledged):
            await leaderless(group, *hosted(group))
            done = await asyncio.gather(*(recover(group) for _ in range(2)))
            assert {type(each.action) for each in done} == {Recovered}
            assert await bodies(client) == acknowledged

    run(work())


def dledger(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dledger_core.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.integration
def test_command_shows_unfilled_hole_and_refuses_until_loss_is_accepted(tmp_path: Path) -> None:
    with LocalCluster(4, tmp_path) as cluster:
        acknowledged = [b"entry %d" % number for number in range(30)]
        with Client(cluster.peers) as client:
            client.append(acknowledged)
            soon(lambda: min(node.commit_index for node in client.metadata().nodes) >= 30)
        for node in SURVIVORS:
            cluster.stop(node)  # a kill may leave a checkpoint from before the entries: then damage is a torn tail
        for node in ("n0", "n1"):
            cluster.kill(node)
            shutil.rmtree(cluster.store_path(node))
        for node in SURVIVORS:
            damage_store(Layout(cluster.store_path(node)), b"entry 12")
            mark_needs_verification(OsFiles(), Layout(cluster.store_path(node)), "Input/output error")
            cluster.restart(node)
        command = ["recover", "--peers", cluster.peers, "--lost", "n0,n1"]

        def shown() -> object:
            look = dledger(*command, "--dry-run", "--format", "json")
            return json.loads(look.stdout) if look.returncode == 1 else None

        found = soon(shown)
        assert [len(row["holes"]) for row in found["survivors"]] == [1, 1]
        refused = dledger(*command, "--yes")
        assert refused.returncode not in (0, 1)
        assert "dledger recover --lost n0,n1 --accept-loss" in refused.stderr
        cluster.kill("n2")
        cluster.restart("n2")
        soon(shown)
        done = dledger(*command, "--accept-loss", "--yes")
        assert done.returncode == 0, done.stderr
        with Client(cluster.peers) as client:
            kept = client.read(0, 1 << 20).column("body").to_pylist()
            assert kept == acknowledged[: len(kept)]
            client.append([b"after"])
        files = [path for node in SURVIVORS for path in Layout(cluster.store_path(node)).meta.glob("behind-*.log")]
        assert all(b"entry 29" in path.read_bytes() for path in files)
        assert files
