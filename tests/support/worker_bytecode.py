"""Adds bytecode to the zips from which Python workers import PySpark: ``python -m tests.support.worker_bytecode``.

Spark puts its ``pyspark.zip`` and Py4J's before all else on a worker's path, and they hold sources alone, so each of
the hundreds of workers, planners and daemons of a test run would compile them anew: half a second each. The bytecode is
what pip made of the same sources when it installed them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import zipfile
from pathlib import Path

import pyspark

PACKAGE = Path(pyspark.__file__).parent
ZIPS = PACKAGE / "python" / "lib"
_FLAGS_AND_HASH = (1).to_bytes(4, "little") + bytes(8)
"""A header that says: no need to look at the source."""
_HEADER_BYTES = 16


def bytecode_of(name: str, source: bytes) -> bytes | None:
    """Returns bytecode for a source of the zip; None if what is installed differs from it or was not compiled."""
    installed = PACKAGE.parent / name
    cached = Path(importlib.util.cache_from_source(str(installed)))
    if not cached.is_file() or installed.read_bytes() != source:
        return None
    compiled = cached.read_bytes()
    return compiled[:4] + _FLAGS_AND_HASH + compiled[_HEADER_BYTES:]


def add_bytecode(path: Path) -> None:
    """Adds bytecode beside the sources of a zip; one that has some is left as it is."""
    with zipfile.ZipFile(path) as old:
        names = old.namelist()
        if any(name.endswith(".pyc") for name in names):
            return
        sources = {name: old.read(name) for name in names if name.endswith(".py")}
    found = {f"{name}c": bytecode_of(name, source) for name, source in sources.items()}
    made = path.with_name(f"{path.name}.{os.getpid()}")
    shutil.copyfile(path, made)
    with zipfile.ZipFile(made, "a", zipfile.ZIP_STORED) as new:
        for name, compiled in found.items():
            if compiled is not None:
                new.writestr(name, compiled)
    made.replace(path)


if __name__ == "__main__":
    for found in ZIPS.glob("*.zip"):
        add_bytecode(found)
