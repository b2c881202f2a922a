"""The admin log: changes of a group's members, and, with security on, requests that need the permission admin.

Each is one line of the logger ``dledger_core.server.admin_log`` and one JSON object in ``admin.log`` of the node's
directory. A change of members is recorded on the node that led the group then.

The files have a limited size, so each principal has a daily share of them: without it a principal with admin could
replace the history within a minute. What exceeds the share is counted in the next line of its kind.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from dledger_core.errors import one_line
from dledger_core.net.limits.rates import LineLimit
from dledger_core.raft import Configuration

FILE_NAME: Final = "admin.log"
_DAY_S: Final = 24 * 3600
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminAction:
    """One change of a group's members.

    Attributes:
        group: the group.
        who: address of the client, or ``leader`` for a step that no client asked for.
        command: the command with its arguments.
        before: the configuration before it.
        after: the configuration after it; equal to ``before`` if it was refused.
        outcome: ``committed``, or the error.
    """

    group: str
    who: str
    command: str
    before: Configuration
    after: Configuration
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminLogLimits:
    """How much the admin log may take.

    Attributes:
        file_bytes: size above which a new file is started; ``admin.log`` becomes ``admin.log.1``, that one
            ``admin.log.2``, and so on.
        files: number of files, the current one included, at least 2; the oldest one is deleted.
        daily_bytes: lines of one kind about one principal, at once and per day. All kinds together take more than a
            week to fill the files.
    """

    file_bytes: int = 8 << 20
    files: int = 8
    daily_bytes: int = 256 << 10


LIMITS: Final = AdminLogLimits()


def _fields(configuration: Configuration) -> dict[str, Any]:
    return {
        "voters": sorted(configuration.voters),
        "learners": sorted(configuration.learners),
        "addresses": dict(sorted(configuration.addresses.items())),
    }


class AdminLog:
    """The admin log of a node.

    Args:
        directory: the node's directory.
        limits: of the files.
        now_s: a monotonic clock.
    """

    def __init__(
        self, directory: Path, limits: AdminLogLimits = LIMITS, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = directory / FILE_NAME
        self._limits = limits
        self._now_s = now_s
        self._shares = LineLimit(limits.daily_bytes / _DAY_S, limits.daily_bytes)

    def record(self, action: AdminAction) -> None:
        """Add a change."""
        command, outcome = one_line(action.command), one_line(action.outcome)
        line = {
            "time": datetime.now(UTC).isoformat(),
            "group": action.group,
            "who": action.who,
            "command": command,
            "before": _fields(action.before),
            "after": _fields(action.after),
            "outcome": outcome,
        }
        # Refused changes, which cost nothing, leave no committed one out.
        if self._write(line, "committed" if outcome == "committed" else "refused"):
            _LOG.warning(
                "members: group=%s who=%s command=%s before=%s after=%s outcome=%s",
                action.group,
                action.who,
                command,
                _members(action.before),
                _members(action.after),
                outcome,
            )

    def record_request(self, group: str, who: str, command: str) -> None:
        """Add a request that needs the permission admin; its own response has the outcome.

        Args:
            group: its group.
            who: principal and address of the client.
            command: the request with its arguments; the first word is its kind, and there are few kinds.
        """
        group, command = one_line(group), one_line(command)
        line = {"time": datetime.now(UTC).isoformat(), "group": group, "who": who, "command": command}
        if self._write(line, "requested"):
            _LOG.warning("admin request: group=%s who=%s command=%s", group, who, command)

    def _write(self, line: dict[str, Any], kind: str) -> bool:
        """Add a line, and return whether it is within the principal's share.

        A file that cannot be written is reported, and stops nothing.
        """
        principal, verb = line["who"].rpartition("@")[0], line["command"].partition(" ")[0]
        left_out = self._shares.admit((principal, f"{verb} {kind}"), self._now_s(), len(json.dumps(line)))
        if left_out is None:
            return False
        if left_out:
            line["left_out"] = left_out
        data = json.dumps(line).encode() + b"\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            while not self._append(data):
                pass
        except OSError as error:
            _LOG.error("admin log not written: path=%s error=%s", self._path, error)
        return True

    def _append(self, data: bytes) -> bool:
        """Append to the current file and return True, or start a new one, if this was not done, and return False.

        The nodes of a development cluster share a directory, so the file is locked: none of them renames it while
        another one writes.
        """
        with open(self._path, "ab", opener=_open_private) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(self._path, file.fileno()):
                return False
            size = os.fstat(file.fileno()).st_size
            if size and size + len(data) > self._limits.file_bytes:
                self._rotate()
                return False
            file.write(data)
            return True

    def _rotate(self) -> None:
        older = self._path.with_name(f"{FILE_NAME}.{self._limits.files - 1}")
        for number in range(self._limits.files - 2, 0, -1):
            newer = self._path.with_name(f"{FILE_NAME}.{number}")
            if newer.exists():
                newer.replace(older)
            older = newer
        self._path.replace(older)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _members(configuration: Configuration) -> str:
    learners = [f"{member}(learner)" for member in sorted(configuration.learners)]
    return ",".join([*sorted(configuration.voters), *learners])
