"""The ``dledger`` command, and what other commands and the jobs share with it.

Each command is a module that is loaded when it is called. Other packages add commands by entry points of the group
``dledger.commands``, each a click command.
"""

from dledger_core.cli.entry_sources import open_dump
from dledger_core.cli.exit_codes import (
    EXIT_FINDING,
    EXIT_INCOMPLETE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_STORAGE,
    EXIT_USAGE,
)
from dledger_core.cli.options import (
    DurationType,
    announce_wait,
    connect,
    connection_options,
    examples,
    format_option,
    is_java,
    peers_option,
    timeout_option,
)
from dledger_core.cli.output import Format, emit, show_facts, show_rows
from dledger_core.cli.progress import Progress, say
from dledger_core.cli.root import main
from dledger_core.cli.stopping import interrupt_on_sigterm, stop_requests

__all__ = [
    "EXIT_FINDING",
    "EXIT_INCOMPLETE",
    "EXIT_INTERRUPTED",
    "EXIT_OK",
    "EXIT_STORAGE",
    "EXIT_USAGE",
    "DurationType",
    "Format",
    "Progress",
    "announce_wait",
    "connect",
    "connection_options",
    "emit",
    "examples",
    "format_option",
    "interrupt_on_sigterm",
    "is_java",
    "main",
    "open_dump",
    "peers_option",
    "say",
    "show_facts",
    "show_rows",
    "stop_requests",
    "timeout_option",
]
