"""Who is told of role changes: callbacks, a command, and clients that wait for the next one.

A leader is told of once an entry of its term is committed: from then on it answers appends. In RocketMQ's words a
leader is the master, everybody else a slave. Whoever is slow is told the newest state, never a queue of old ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Literal

from dledger_core.config import STOP_WITH_STDIN
from dledger_core.errors import ConfigError
from dledger_core.ids import NodeId, Term
from dledger_core.raft import Role
from dledger_core.server.replica.replica import Replica
from dledger_core.server.services.waiting import Progress

__all__ = ["OnRole", "RoleCommand", "RoleEvent", "RoleFeed", "split_command"]

_LOG = logging.getLogger(__name__)

COMMAND_LIMIT_S: Final = 30.0
COMMAND_END_S: Final = 2.0
"""How long a command may take to end after SIGTERM, when the node stops."""
COMMANDS_AT_ONCE: Final = 8
"""Of all groups together: a node that loses its network must not start a process per group at once."""


@dataclass(frozen=True, slots=True)
class RoleEvent:
    """What a node is in a group, from some moment on."""

    group: str
    node_id: NodeId
    role: Role
    term: Term
    leader_id: NodeId | None

    @property
    def broker_role(self) -> Literal["master", "slave"]:
        """The role in RocketMQ's words."""
        return "master" if self.role is Role.LEADER else "slave"

    @property
    def state(self) -> list[str | int | None]:
        """What changes: role, leader and term, as they travel."""
        return [self.role.value, self.leader_id, self.term]


OnRole = Callable[[RoleEvent], None]


class RoleFeed:
    """One group's role on this node; lives on the node's event loop.

    Args:
        replica: the group's replica.
        listeners: called with each change, in a turn of their own; they must not block. What they raise is logged.
    """

    def __init__(self, replica: Replica, listeners: Sequence[OnRole]) -> None:
        self._replica = replica
        self._listeners = listeners
        self._loop = asyncio.get_running_loop()
        self._progress = Progress()
        self._leads_soon = False
        self.current = self._event()
        replica.on_role.append(lambda _: self._look())
        replica.on_commit.append(self._committed)

    def _event(self) -> RoleEvent:
        found = self._replica.soft_state
        return RoleEvent(self._replica.group, self._replica.node_id, found.role, found.term, found.leader_id)

    def _committed(self, _: int) -> None:
        if self._leads_soon:
            self._look()

    def _look(self) -> None:
        self._leads_soon = self._replica.is_leader and not self._replica.leader_ready
        event = self._event()
        if self._leads_soon or event == self.current:
            return
        self.current = event
        self._progress.wake()
        for listener in self._listeners:
            self._loop.call_soon(_tell, listener, event)

    async def wait_change(self, seen: list[str | int | None] | None, timeout_s: float) -> RoleEvent:
        """Returns the newest event: at once if its state is not ``seen``, else when it changes or time is over."""
        deadline = self._loop.time() + timeout_s
        while self.current.state == seen and (left := deadline - self._loop.time()) > 0:
            await self._progress.wait(left)
        return self.current


def _tell(listener: OnRole, event: RoleEvent) -> None:
    try:
        listener(event)
    except Exception:  # noqa: BLE001 - another's mistake must not end the node
        _LOG.exception("a callback for role changes failed at %s", event)


def split_command(text: str) -> tuple[str, ...]:
    """Returns the words of a command line; no shell will see them.

    Raises:
        ConfigError: it cannot be split, is empty, or names no program.
    """
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{text!r} cannot be split into words: {error}", "on-role-change", "quote it well") from None
    if not words:
        raise ConfigError("the command is empty", "on-role-change", "name a program and its arguments")
    if shutil.which(words[0]) is None:
        raise ConfigError(
            f"there is no program {words[0]!r}", "on-role-change", "give its path, and make it executable"
        )
    return words


class RoleCommand:
    """Runs a command for role changes, beside the event loop; an instance is a listener of all groups.

    One at a time per group: what changes meanwhile is told in the next run, and only its newest state. It runs
    without a shell, in a session of its own, with ``DLEDGER_GROUP``, ``DLEDGER_NODE``, ``DLEDGER_ROLE``,
    ``DLEDGER_BROKER_ROLE``, ``DLEDGER_TERM`` and ``DLEDGER_LEADER`` (empty = none) in its environment; what it
    prints goes to stderr.

    Args:
        command: the program and its arguments.
        limit_s: after this long it is killed, with all its children.
    """

    def __init__(self, command: Sequence[str], *, limit_s: float = COMMAND_LIMIT_S) -> None:
        self._command = list(command)
        self._limit_s = limit_s
        self._pool = ThreadPoolExecutor(COMMANDS_AT_ONCE, "role-command")
        self._changed = threading.Condition()
        self._newest: dict[str, RoleEvent] = {}
        self._busy: set[str] = set()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def __call__(self, event: RoleEvent) -> None:
        """Takes note of a change; returns at once."""
        with self._changed:
            if self._closed:
                return
            self._newest[event.group] = event
            if event.group not in self._busy:
                self._busy.add(event.group)
                self._pool.submit(self._work, event.group)

    def close(self) -> None:
        """Runs nothing more and ends what runs; blocks for ``COMMAND_END_S`` at most."""
        with self._changed:
            self._closed = True
            self._signal(signal.SIGTERM)
            self._changed.wait_for(lambda: not self._running, COMMAND_END_S)
            self._signal(signal.SIGKILL)
        self._pool.shutdown(cancel_futures=True)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._running:
            _signal_all(process, number)

    def _work(self, group: str) -> None:
        while (event := self._take(group)) is not None:
            try:
                self._run(event)
            except Exception:  # noqa: BLE001 - the next change must be told all the same
                _LOG.exception("the command for role changes failed at %s", event)

    def _take(self, group: str) -> RoleEvent | None:
        with self._changed:
            event = None if self._closed else self._newest.pop(group, None)
            if event is None:
                self._busy.discard(group)
            return event

    def _run(self, event: RoleEvent) -> None:
        process = subprocess.Popen(
            self._command, env=_environment(event), stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
        )
        with self._changed:
            self._running.add(process)
            if self._closed:
                _signal_all(process, signal.SIGKILL)
        try:
            code = process.wait(self._limit_s)
        except subprocess.TimeoutExpired:
            _signal_all(process, signal.SIGKILL)
            process.wait()
            _LOG.warning("%s was killed after %g s, for group %s", self._command[0], self._limit_s, event.group)
        else:
            level = logging.INFO if code == 0 else logging.WARNING
            told = (event.group, event.role.value, event.term)
            _LOG.log(level, "%s ended with exit code %d for group %s: %s in term %d", self._command[0], code, *told)
        finally:
            with self._changed:
                self._running.discard(process)
                self._changed.notify_all()


def _environment(event: RoleEvent) -> dict[str, str]:
    told = {
        "DLEDGER_GROUP": event.group,
        "DLEDGER_NODE": event.node_id,
        "DLEDGER_ROLE": event.role.value,
        "DLEDGER_BROKER_ROLE": event.broker_role,
        "DLEDGER_TERM": str(event.term),
        "DLEDGER_LEADER": event.leader_id or "",
    }
    inherited = {name: value for name, value in os.environ.items() if name != STOP_WITH_STDIN}
    return inherited | told


def _signal_all(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
