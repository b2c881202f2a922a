"""A node that ends itself with SIGKILL: ``python -m tests.support.dying_node FILE NUMBER serve ...``.

It dies right after it has replaced the store's file of this name for the NUMBER-th time.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from dledger_core.cli import main
from dledger_core.storage.files.file_system import OsFiles


def die_after(name: str, number: int) -> None:
    """Make the process end after its ``number``-th replacement of a file ``name``."""
    replace, left = OsFiles.replace, [number]

    def counted(self: OsFiles, path: Path, data: bytes) -> None:
        replace(self, path, data)
        if path.name == name:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    OsFiles.replace = counted  # type: ignore[method-assign]


if __name__ == "__main__":
    die_after(sys.argv[1], int(sys.argv[2]))
    sys.argv = ["dledger", *sys.argv[3:]]
    main()
