"""Makes writes to stdout whole where Python does not buffer it.

With ``PYTHONUNBUFFERED``, as in many containers, Python's text layer lies upon the bare file and ignores that the
system may take less than it is given: on a disk that fills up, or by a signal, the rest was lost without an error.
"""

from __future__ import annotations

import io
import sys

__all__ = ["write_whole"]


def write_whole() -> None:
    """Puts a buffer, which writes all or raises, below stdout if it has none; every line still leaves at once."""
    bare = getattr(sys.stdout, "buffer", None)
    if isinstance(bare, io.FileIO):
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(bare), encoding=sys.stdout.encoding, errors=sys.stdout.errors, line_buffering=True
        )
