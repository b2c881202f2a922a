"""One node process: Raft, the log, the network and the clock joined for several groups."""

from dledger_core.server.config import ServerConfig
from dledger_core.server.monitoring.log_lines import JsonFormatter, TextFormatter
from dledger_core.server.monitoring.site import SiteOptions
from dledger_core.server.node import NodeServer, run
from dledger_core.server.services.port import ForeignPort, PortGroup, PortNode
from dledger_core.server.services.reads import LogPrefix, OpenLogPrefix

__all__ = [
    "ForeignPort",
    "JsonFormatter",
    "LogPrefix",
    "NodeServer",
    "OpenLogPrefix",
    "PortGroup",
    "PortNode",
    "ServerConfig",
    "SiteOptions",
    "TextFormatter",
    "run",
]
