"""Requests and golden stores that the tests of conversions share."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dledger_core.rocketmq.convert import ConvertRequest, Report, convert
from dledger_core.storage import open_store
from tests.support.archives import unpack

TESTDATA = Path(__file__).parents[2] / "storage" / "testdata"
PEERS = "n0-127.0.0.1:1;n1-127.0.0.1:2;n2-127.0.0.1:3"
GOLDEN = tuple(
    f"dledger-{version}-{name}"
    for version in ("0.3.1.2", "0.4.0")
    for name in ("single", "three", "diverged", "rejoined")
)
STORES = tuple(
    (name, node) for name in GOLDEN for node in (("n0", "n1", "n2") if name.endswith(("three", "diverged")) else ("",))
)


def unpacked(name: str, directory: Path) -> Path:
    """The archive's folder."""
    with tarfile.open(TESTDATA / f"{name}.tar.gz") as archive:
        unpack(archive, directory)
    return directory / name


def store_of(folder: Path, node: str) -> tuple[Path, str]:
    """A node's store in an archive's folder, and the node; any if ``node`` is empty."""
    path = next(p for p in sorted(folder.glob("dledger-*")) if p.name.removeprefix("dledger-") in (node or p.name[8:],))
    return path, path.name.removeprefix("dledger-")


def manifest(folder: Path, node: str) -> list[tuple[int, int, int, str]]:
    """(index, term, magic, SHA-256 of the body) of every entry, as Java itself read them."""
    with gzip.open(folder / "manifest.jsonl.gz") as file:
        lines = [line for line in map(json.loads, file) if line["n"] == node]
    return [(line["i"], line["t"], line["m"], line["h"]) for line in lines]


def rows_of(store: Path) -> list[dict[str, Any]]:
    """All entries of a store without damage."""
    with open_store(store) as reader:
        assert reader.verify().findings == ()
        if reader.last_index < reader.first_index:
            return []
        return reader.read(reader.first_index, reader.last_index + 1, max_bytes=1 << 30).to_pylist()


def entries(store: Path) -> list[tuple[int, int, int, str]]:
    """The entries of a store without damage, as in ``manifest``."""
    return [(r["index"], r["term"], r["magic"], hashlib.sha256(r["body"]).hexdigest()) for r in rows_of(store)]


def request(source: Path, destination: Path, **changes: Any) -> ConvertRequest:
    given = {"group": "g", "self_id": "n0", "peers": PEERS} | changes
    return ConvertRequest(source=source, destination=destination, **given)


def converted(source: Path, destination: Path, **changes: Any) -> Report:
    return convert(request(source, destination, **changes))


def snapshot(directory: Path) -> dict[str, tuple[int, int, str] | None]:
    """Length, time of change and content of every file below a folder; None for a folder."""
    found: dict[str, tuple[int, int, str] | None] = {}
    for path in sorted(directory.rglob("*")):
        stat = os.stat(path)
        described = (
            (stat.st_size, stat.st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest()) if path.is_file() else None
        )
        found[str(path.relative_to(directory))] = described
    return found


def files_of(store: Path) -> dict[str, bytes]:
    """Data and index files of a store."""
    return {f"{p.parent.name}/{p.name}": p.read_bytes() for sub in ("data", "index") for p in (store / sub).iterdir()}


_BROKER = (
    "import fcntl, sys; f = open(sys.argv[1], 'w+b'); fcntl.lockf(f, fcntl.LOCK_EX, 1); print(flush=True); input()"
)


@contextlib.contextmanager
def running_broker(directory: Path) -> Iterator[None]:
    """Lock the first byte of the file ``lock``, as a broker does while it runs (Java's FileChannel.tryLock)."""
    command = [sys.executable, "-c", _BROKER, str(directory / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as broker:
        assert broker.stdout is not None
        broker.stdout.readline()
        yield
        broker.communicate(b"\n")
