"""Counts the forks that this process is the child of: a client's thread and sockets are its parent's."""

from __future__ import annotations

import os


class Forks:
    """The count; a comparison costs less than asking the system for the process id at each call.

    Attributes:
        count: forks between the first import of this module and this process.
    """

    def __init__(self) -> None:
        self.count = 0
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self.count += 1


FORKS = Forks()
