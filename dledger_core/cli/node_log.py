"""The log of a node on stderr: text or JSON, with a level that SIGUSR1 changes while the node runs."""

from __future__ import annotations

import logging
from typing import Literal

from dledger_core.server import JsonFormatter, TextFormatter

LogFormat = Literal["text", "json"]
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LOG = logging.getLogger(__name__)


class NodeLog:
    """The log of this process.

    Args:
        level: lowest level of the lines, a name of ``logging``.
        log_format: ``text`` or ``json``.
        node_id: this node, for JSON.
    """

    def __init__(self, level: str, log_format: LogFormat, node_id: str) -> None:
        self._level = logging.getLevelNamesMapping()[level.upper()]
        self._handler = logging.StreamHandler()
        self._handler.setFormatter(JsonFormatter(node_id) if log_format == "json" else TextFormatter(_TEXT))

    def start(self) -> None:
        """Write the log from now on."""
        logging.basicConfig(handlers=[self._handler], force=True)
        self._set(self._level)

    def _set(self, level: int) -> None:
        self._handler.setLevel(level)
        # The events of the status page are those from INFO on, whatever the lines are.
        logging.getLogger().setLevel(min(level, logging.INFO))

    def switch_level(self) -> None:
        """Change the level to debug, and back at the next call."""
        is_debug = self._handler.level == logging.DEBUG != self._level
        level = self._level if is_debug else logging.DEBUG
        self._set(min(level, logging.INFO))
        _LOG.info("log level changed: level_now=%s", logging.getLevelName(level).lower())
        self._set(level)
