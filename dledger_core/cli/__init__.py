"""The ``dledger`` command, and the parts of it that other commands and the jobs use.

A command is a module that is imported when it is called. Other packages add commands through entry points of the group
``dledger.commands``; each is a click command.
"""

from dledger_core.cli.help import CommandGroup, command, examples, option
from dledger_core.cli.options import (
    ACCESS_HELP,
    Access,
    DurationType,
    access_options,
    asked_peers,
    client_config_option,
    format_option,
    peers_option,
    timeout_option,
)
from dledger_core.cli.output import (
    Format,
    Progress,
    emit,
    interrupt_on_sigterm,
    say,
    say_waiting,
    show_result,
    show_rows,
    stop_requests,
)
from dledger_core.cli.previews import preview
from dledger_core.cli.root import main
from dledger_core.client_config import variable_of
from dledger_core.exit_codes import EXIT_FINDING, EXIT_INCOMPLETE, EXIT_INTERRUPTED, EXIT_OK, EXIT_STORAGE, EXIT_USAGE

__all__ = [
    "ACCESS_HELP",
    "EXIT_FINDING",
    "EXIT_INCOMPLETE",
    "EXIT_INTERRUPTED",
    "EXIT_OK",
    "EXIT_STORAGE",
    "EXIT_USAGE",
    "Access",
    "CommandGroup",
    "DurationType",
    "Format",
    "Progress",
    "access_options",
    "asked_peers",
    "client_config_option",
    "command",
    "emit",
    "examples",
    "format_option",
    "interrupt_on_sigterm",
    "main",
    "option",
    "peers_option",
    "preview",
    "say",
    "say_waiting",
    "show_result",
    "show_rows",
    "stop_requests",
    "timeout_option",
    "variable_of",
]
