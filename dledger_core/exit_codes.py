"""Exit codes of every command and job; each class of error names its own (``DLedgerError.exit_code``)."""

from __future__ import annotations

from typing import Final

EXIT_OK: Final = 0
"""The command did what it says, and found nothing wrong."""
EXIT_FINDING: Final = 1
"""A finding: damage, a missing node, replicas that differ."""
EXIT_INCOMPLETE: Final = 2
"""The result is incomplete, a job was stopped, or no node could serve the request; the same command may succeed."""
EXIT_USAGE: Final = 3
"""Wrong usage, or an I/O error."""
EXIT_STORAGE: Final = 4
"""A storage failure; the store needs verification."""
EXIT_INTERRUPTED: Final = 130
"""A signal ended the command."""
