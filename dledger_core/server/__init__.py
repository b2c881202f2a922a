"""Where Raft, the log, the network and the clock meet: one node process with several groups."""

from dledger_core.server.config import ServerConfig
from dledger_core.server.node import NodeServer, run

__all__ = ["NodeServer", "ServerConfig", "run"]
