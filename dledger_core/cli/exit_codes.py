"""Exit codes of the command and of the jobs."""

from typing import Final

__all__ = ["EXIT_FINDING", "EXIT_INCOMPLETE", "EXIT_INTERRUPTED", "EXIT_OK", "EXIT_STORAGE", "EXIT_USAGE"]

EXIT_OK: Final = 0
EXIT_FINDING: Final = 1
EXIT_INCOMPLETE: Final = 2
"""Also: no node answers."""
EXIT_USAGE: Final = 3
"""Also: I/O errors."""
EXIT_STORAGE: Final = 4
"""A storage failure; the store needs verification."""
EXIT_INTERRUPTED: Final = 130
"""Of the command; a job that was stopped is incomplete."""
