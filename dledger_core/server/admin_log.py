"""The admin log: changes of a group's members, and, with security on, requests that need the permission admin.

Each is one line of the logger ``dledger_core.server.admin_log`` and one JSON object in ``admin.log`` of the node's
directory. A change of members is recorded on the node that led the group then.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from dledger_core.errors import one_line
from dledger_core.raft import Configuration

FILE_NAME: Final = "admin.log"
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
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME

    def record(self, action: AdminAction) -> None:
        """Add a change."""
        _LOG.warning(
            "members: group=%s who=%s command=%s before=%s after=%s outcome=%s",
            action.group,
            action.who,
            one_line(action.command),
            _members(action.before),
            _members(action.after),
            one_line(action.outcome),
        )
        line = {
            "time": datetime.now(UTC).isoformat(),
            "group": action.group,
            "who": action.who,
            "command": action.command,
            "before": _fields(action.before),
            "after": _fields(action.after),
            "outcome": action.outcome,
        }
        self._write(line)

    def record_request(self, group: str, who: str, command: str) -> None:
        """Add a request that needs the permission admin; its own response has the outcome."""
        _LOG.warning("admin request: group=%s who=%s command=%s", one_line(group), who, one_line(command))
        time = datetime.now(UTC).isoformat()
        self._write({"time": time, "group": group, "who": who, "command": one_line(command)})

    def _write(self, line: dict[str, Any]) -> None:
        """Add a line. A file that cannot be written is reported, and stops nothing."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(self._path, "a", encoding="utf-8", opener=_open_private) as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            _LOG.error("admin log not written: path=%s error=%s", self._path, error)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _members(configuration: Configuration) -> str:
    learners = [f"{member}(learner)" for member in sorted(configuration.learners)]
    return ",".join([*sorted(configuration.voters), *learners])
