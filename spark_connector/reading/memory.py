"""Memory for buffers of megabytes, as tasks need one after the other."""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache
from typing import Final

__all__ = ["keep_memory"]

_KEPT_BYTES: Final = 32 << 20
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
"""From glibc's malloc.h."""


@cache
def keep_memory() -> None:
    """Lets this process keep what it frees, as far as the C library can be told; any thread may call.

    Else glibc returns buffers of megabytes to the system each time, and the next ones are handed out page by page.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
