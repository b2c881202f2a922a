"""Role changes: callbacks, a command, and clients that wait for the next change.

A leader is reported once an entry of its term is committed: then it accepts appends. In RocketMQ's words a leader is
the master, every other role a slave. A slow subscriber receives only the latest state, never a backlog.
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

from dledger_core.config import LIMITS, STOP_WITH_STDIN, ClientLimits
from dledger_core.errors import ConfigError
from dledger_core.ids import Index, NodeId, Term
from dledger_core.raft import Role, SoftState
from dledger_core.server.replica.change_signal import ChangeSignal
from dledger_core.server.replica.replica import Replica

_LOG = logging.getLogger(__name__)
_END_S: Final = 2.0
"""Time for a command to end after SIGTERM, when the node stops: within the 5 s in which a node ends."""


@dataclass(frozen=True, slots=True)
class RoleEvent:
    """Role, term and leader of a node in a group."""

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
        """Role, leader and term, as in WATCH."""
        return [self.role.value, self.leader_id, self.term]


OnRole = Callable[[RoleEvent], None]


class RoleFeed:
    """One group's role on this node, an observer of its replica; lives on the node's event loop.

    Args:
        replica: the group's replica.
        listeners: called with each change, in an iteration of their own; they must not block. Errors are logged.
    """

    def __init__(self, replica: Replica, listeners: Sequence[OnRole]) -> None:
        self._replica = replica
        self._listeners = listeners
        self._loop = asyncio.get_running_loop()
        self.changes = ChangeSignal()
        self._leads_soon = False
        self.current = self._event()

    def _event(self) -> RoleEvent:
        found = self._replica.soft_state
        return RoleEvent(self._replica.group, self._replica.node_id, found.role, found.term, self._replica.leader_node)

    def committed(self, commit_index: Index) -> None:
        """Report a new leader once it has committed an entry of its term."""
        del commit_index
        if self._leads_soon:
            self._update()

    def role_changed(self, soft_state: SoftState) -> None:
        """Report the change."""
        del soft_state
        self._update()

    def _update(self) -> None:
        self._leads_soon = self._replica.is_leader and not self._replica.leader_ready
        event = self._event()
        if self._leads_soon or event == self.current:
            return
        self.current = event
        self.changes.notify()
        for listener in self._listeners:
            self._loop.call_soon(_call, listener, event)

    async def wait_change(self, seen: list[str | int | None] | None, timeout_s: float) -> RoleEvent:
        """Return the newest event: at once if its state is not ``seen``, else after a change or the timeout."""
        deadline = self._loop.time() + timeout_s
        while self.current.state == seen and (left := deadline - self._loop.time()) > 0:
            await self.changes.wait(left)
        return self.current


def _call(listener: OnRole, event: RoleEvent) -> None:
    try:
        listener(event)
    except Exception:  # noqa: BLE001 - an error in a listener must not end the node
        _LOG.exception("role listener failed: group=%s role=%s", event.group, event.role.value)


def split_command(text: str) -> tuple[str, ...]:
    """Split a command line into words; no shell is involved.

    Raises:
        ConfigError: the text cannot be split, is empty, or its program does not exist.
    """
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(
            f"on-role-change {text!r} cannot be split into words: {error}", "", "correct its quotes"
        ) from None
    if not words:
        raise ConfigError("the command on-role-change is empty", "", "name a program and its arguments")
    if shutil.which(words[0]) is None:
        raise ConfigError(
            f"on-role-change names {words[0]!r}, which is not a program", "", "use its path, and make it executable"
        )
    return words


class RoleCommand:
    """Runs a command for role changes, off the event loop; an instance is a listener of all groups.

    One command runs at a time per group; the next one gets the newest state. It runs without a shell, in a session of
    its own, with ``DLEDGER_GROUP``, ``DLEDGER_NODE``, ``DLEDGER_ROLE``, ``DLEDGER_BROKER_ROLE``, ``DLEDGER_TERM`` and
    ``DLEDGER_LEADER`` (empty = none) in its environment; its output goes to stderr.

    Args:
        command: the program and its arguments.
        limits: the node's limits; a command that exceeds its time is killed with all its children.
    """

    def __init__(self, command: Sequence[str], limits: ClientLimits = LIMITS) -> None:
        self._command = list(command)
        self._limits = limits
        self._pool = ThreadPoolExecutor(limits.role_commands, "role-command")
        self._changed = threading.Condition()
        self._newest: dict[str, RoleEvent] = {}
        self._busy: set[str] = set()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def __call__(self, event: RoleEvent) -> None:
        """Record a change; return at once."""
        with self._changed:
            if self._closed:
                return
            self._newest[event.group] = event
            if event.group not in self._busy:
                self._busy.add(event.group)
                self._pool.submit(self._work, event.group)

    def close(self) -> None:
        """Start no further command and end the running ones; block for at most ``role_command_end_s``."""
        with self._changed:
            self._closed = True
            self._signal(signal.SIGTERM)
            self._changed.wait_for(lambda: not self._running, _END_S)
            self._signal(signal.SIGKILL)
        self._pool.shutdown(cancel_futures=True)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._running:
            _signal_all(process, number)

    def _work(self, group: str) -> None:
        while (event := self._take(group)) is not None:
            try:
                self._run(event)
            except Exception:  # noqa: BLE001 - the next change must be reported anyway
                _LOG.exception("role command failed: group=%s role=%s", event.group, event.role.value)

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
            code = process.wait(self._limits.role_command_s)
        except subprocess.TimeoutExpired:
            _signal_all(process, signal.SIGKILL)
            process.wait()
            _LOG.warning(
                "role command killed: group=%s command=%s seconds=%g",
                event.group,
                self._command[0],
                self._limits.role_command_s,
            )
        else:
            level = logging.INFO if code == 0 else logging.WARNING
            _LOG.log(
                level,
                "role command ended: group=%s role=%s term=%d command=%s exit_code=%d",
                event.group,
                event.role.value,
                event.term,
                self._command[0],
                code,
            )
        finally:
            with self._changed:
                self._running.discard(process)
                self._changed.notify_all()


def _environment(event: RoleEvent) -> dict[str, str]:
    added = {
        "DLEDGER_GROUP": event.group,
        "DLEDGER_NODE": event.node_id,
        "DLEDGER_ROLE": event.role.value,
        "DLEDGER_BROKER_ROLE": event.broker_role,
        "DLEDGER_TERM": str(event.term),
        "DLEDGER_LEADER": event.leader_id or "",
    }
    inherited = {name: value for name, value in os.environ.items() if name != STOP_WITH_STDIN}
    return inherited | added


def _signal_all(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
