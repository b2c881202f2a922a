"""Role changes for listeners, for a command and for clients that WATCH."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from dledger_core.client.routing.channel import ConnectionLostError
from dledger_core.config import Limits
from dledger_core.errors import ConfigError
from dledger_core.ids import NodeId, Term
from dledger_core.net.protocol import Type
from dledger_core.raft import Role
from dledger_core.server.services.role_events import RoleCommand, RoleEvent, split_command
from tests.support.server_group import RawClient, ServerGroup, eventually
from tests.support.soon import soon


def event(term, role=Role.FOLLOWER, group="g", leader="n1"):
    return RoleEvent(group, NodeId("n0"), role, Term(term), NodeId(leader) if leader else None)


# --- the callback -------------------------------------------------------------------------------------------------


async def test_listener_gets_every_change_and_leader_once_it_serves(tmp_path):
    reported = []

    def on_role(each):
        can_serve = each.role is Role.LEADER and cluster.hosted(each.node_id).replica.leader_ready
        reported.append((each, can_serve))

    async with ServerGroup(tmp_path, on_role=on_role) as cluster:
        first = await cluster.leader()
        await eventually(lambda: [e for e, _ in reported if e.node_id == first and e.role is Role.LEADER])
        await cluster.stop(first)
        second = await cluster.leader()
        await eventually(lambda: [e for e, _ in reported if e.leader_id == second and e.broker_role == "slave"])
    assert {first, second} <= {each.node_id for each, _ in reported if each.role is Role.LEADER}
    for each, can_serve in reported:
        assert (each.broker_role, can_serve) == (("master", True) if each.role is Role.LEADER else ("slave", False))
    for node in ("n0", "n1", "n2"):
        events = [each for each, _ in reported if each.node_id == node]
        assert all(a != b for a, b in pairwise(events)), "a change is a change"
        assert [each.term for each in events] == sorted(each.term for each in events)


async def test_listener_that_raises_does_not_stop_node(tmp_path, caplog):
    def mistaken(each):
        raise ZeroDivisionError("broken on purpose")

    async with ServerGroup(tmp_path, on_role=mistaken) as cluster:
        assert (await (await cluster.client()).append([b"x"]))[0] == 1
    assert "broken on purpose" in caplog.text


# --- WATCH --------------------------------------------------------------------------------------


async def test_watch_returns_at_next_change(tmp_path):
    async with ServerGroup(tmp_path) as cluster:
        leader = await cluster.leader()
        target = next(node for node in cluster.nodes if node != leader)
        client = RawClient(await cluster.channel(target))
        await eventually(lambda: cluster.hosted(target).roles.current.leader_id == leader)
        now = (await client.ask(Type.WATCH, wait=0)).header
        assert (now["role"], now["broker"], now["leader"]) == ("follower", "slave", leader)
        seen = [now["role"], now["leader"], now["term"]]
        assert (await client.ask(Type.WATCH, wait=60_000, seen=["follower", None, 0])).header["term"] == now["term"]
        still = (await client.ask(Type.WATCH, wait=20, seen=seen)).header
        unlike = {"r": 0, "hl": 0}  # number of the request, ms since the leader was heard
        assert still | unlike == now | unlike, "the wait timed out"
        waiting = asyncio.ensure_future(client.ask(Type.WATCH, wait=60_000, seen=seen))
        await RawClient(await cluster.channel(leader)).ask(Type.TRANSFER, node=target)
        changed = (await waiting).header
        while changed["role"] != "leader":
            seen = [changed["role"], changed["leader"], changed["term"]]
            changed = (await client.ask(Type.WATCH, wait=60_000, seen=seen)).header
        assert (changed["broker"], changed["leader"]) == ("master", target)
        assert changed["term"] > now["term"]


async def test_watch_ends_when_client_disconnects(tmp_path):
    async with ServerGroup(tmp_path, nodes=1) as cluster:
        await cluster.leader()
        feed = cluster.hosted("n0").roles
        channel = await cluster.channel("n0")
        asking = RawClient(channel).ask(Type.WATCH, wait=60_000, seen=feed.current.state)
        waiting = asyncio.ensure_future(asking)
        await eventually(lambda: len(feed.changes) == 1)
        await channel.close()
        with pytest.raises(ConnectionLostError):
            await waiting
        await eventually(lambda: len(feed.changes) == 0)


# --- the command --------------------------------------------------------------------------------------------------

TELL = "printf '%s %s %s %s %s %s\\n' $DLEDGER_GROUP $DLEDGER_NODE $DLEDGER_ROLE $DLEDGER_BROKER_ROLE $DLEDGER_TERM "
TELL += '"[$DLEDGER_LEADER]" >>told; '


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Create commands that run in ``tmp_path``; all are closed at the end."""
    monkeypatch.chdir(tmp_path)
    commands = []

    def start(*words, **limits):
        commands.append(RoleCommand(words, Limits(**limits)))
        return commands[-1]

    yield start
    for command in commands:
        command.close()


def reported(path=Path("told")):
    return path.read_text().splitlines() if path.exists() else []


def test_command_gets_change_in_its_environment(started, monkeypatch):
    monkeypatch.setenv("DLEDGER_STOP_WITH_STDIN", "1")
    command = started("sh", "-c", TELL + "env | grep -c STOP_WITH_STDIN >>told; wc -c >>told")
    command(event(7, Role.LEADER, leader="n0"))
    soon(lambda: len(reported()) == 3)
    assert reported() == ["g n0 leader master 7 [n0]", "0", "0"], "and it gets no input"
    command(event(8, Role.PRE_CANDIDATE, leader=None))
    soon(lambda: len(reported()) == 6)
    assert reported()[3] == "g n0 pre-candidate slave 8 []"


def test_command_runs_without_shell(started, tmp_path):
    command = started("touch", "$(touch hacked)", "a;b", "*", "`touch hacked`")
    command(event(1))
    soon(lambda: len(list(tmp_path.iterdir())) == 4)
    assert {path.name for path in tmp_path.iterdir()} == {"$(touch hacked)", "a;b", "*", "`touch hacked`"}


def test_slow_command_runs_again_for_newest_state_only(started):
    command = started("sh", "-c", TELL + "while ! [ -e go ]; do sleep 0.01; done; echo end >>told")
    command(event(0))
    soon(lambda: len(reported()) == 1)
    for term in range(1, 1000):
        command(event(term))
    command(event(5, group="other"))
    soon(lambda: any(line.startswith("other") for line in reported()))  # one group does not wait for another
    assert [line for line in reported() if line.startswith("g ")] == ["g n0 follower slave 0 [n1]"]
    Path("go").touch()
    soon(lambda: reported().count("end") == 3)
    assert [line.split()[4] for line in reported() if line.startswith("g ")] == ["0", "999"]


def test_commands_of_all_groups_are_limited_in_number(started):
    command = started("sh", "-c", "echo x >>begun; while ! [ -e go ]; do sleep 0.01; done; " + TELL, role_commands=3)
    for group in range(10):
        command(event(1, group=f"g{group}"))
    soon(lambda: len(reported(Path("begun"))) == 3)
    Path("go").touch()
    soon(lambda: len(reported()) == 10)
    assert {line.split()[0] for line in reported()} == {f"g{group}" for group in range(10)}


@pytest.mark.slow
def test_command_that_hangs_is_killed_with_its_children(started, caplog):
    waits = "[ $DLEDGER_TERM = 2 ] || { sleep 600 & echo $! >child; wait; }"
    command = started("sh", "-c", TELL + waits, role_command_s=3)
    for term in (1, 2):
        command(event(term))
        soon(lambda term=term: len(reported()) == term)
    soon(lambda: not alive(int(Path("child").read_text())))
    assert "role command killed" in caplog.text


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


@pytest.mark.slow
def test_close_ends_running_commands_and_starts_no_more(started):
    command = started("sh", "-c", "trap '' TERM; " + TELL + "sleep 600 & echo $! >child; wait; wait")
    command(event(1))
    soon(lambda: Path("child").exists() and Path("child").read_text().strip())
    command(event(2))
    command.close()
    soon(lambda: not alive(int(Path("child").read_text())))
    command(event(3))
    command.close()
    assert len(reported()) == 1


def test_command_exit_code_is_logged(started, caplog):
    caplog.set_level(logging.INFO)
    command = started("sh", "-c", "exit $DLEDGER_TERM")
    for term, level in ((0, "INFO"), (3, "WARNING")):
        command(event(term))
        soon(lambda term=term: f"role=follower term={term} " in caplog.text)
        assert [r.levelname for r in caplog.records if f"term={term} " in r.getMessage()] == [level]


def test_missing_program_is_logged_and_next_change_runs(started, tmp_path, caplog):
    program = tmp_path / "program"
    shutil.copy("/bin/true", program)
    command = started(str(program))
    program.unlink()
    command(event(1))
    soon(lambda: "role command failed" in caplog.text)
    program.write_text(f"#!/bin/sh\n{TELL}")
    program.chmod(0o755)
    command(event(2))
    soon(reported)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("true", ("true",)),
        ("sh -c 'echo \"$DLEDGER_ROLE\"'", ("sh", "-c", 'echo "$DLEDGER_ROLE"')),
        ("  true  a\\ b ", ("true", "a b")),
        (f"{sys.executable} -m x", (sys.executable, "-m", "x")),
        ("true; rm -rf /", None),
        ("true 'x", None),
        ("", None),
        ("   ", None),
        ("/nowhere/program x", None),
        (__file__, None),
    ],
)
def test_split_command_returns_words_or_rejects(text, words):
    if words is not None:
        assert split_command(text) == words
    else:
        with pytest.raises(ConfigError):
            split_command(text)


async def test_node_runs_command_and_ends_it_on_close(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ("sh", "-c", TELL + "echo $$ >pid; exec sleep 600")
    async with ServerGroup(tmp_path, nodes=1, role_command=command) as cluster:
        await eventually(reported)
        assert (await (await cluster.client()).append([b"x"]))[0] == 1
    soon(lambda: not alive(int(Path("pid").read_text())))
    assert len(reported()) == 1
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL, "a library leaves signals alone"
