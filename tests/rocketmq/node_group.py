"""Nodes with the RocketMQ part, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dledger_core.rocketmq.message.fields import MessageColumns
from dledger_core.rocketmq.remoting.port import remoting_port
from dledger_core.rocketmq.store.commitlog_prefix import open_log_prefix
from tests.support.server_group import ServerGroup

PARTS: dict[str, Any] = {
    "foreign_port": remoting_port,
    "open_log_prefix": open_log_prefix,
    "messages": MessageColumns(),
}
"""The RocketMQ parts of a node."""


def rocketmq_group(directory: Path, nodes: int = 3, **options: Any) -> ServerGroup:
    """A group whose nodes also speak Java's protocol, decode messages and serve a commitlog prefix."""
    return ServerGroup(directory, nodes, **(PARTS | options))
