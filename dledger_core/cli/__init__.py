"""The ``dledger`` command: one module per family of commands, loaded when it is asked for."""

from dledger_core.cli.root import main

__all__ = ["main"]
