"""Stores written by a real Apache RocketMQ 5.3.3, with the oracle its own classes made; see testdata/README.md."""

from __future__ import annotations

import gzip
import json
import struct
import tarfile
from functools import lru_cache
from pathlib import Path

from tests.support.archives import unpack

TESTDATA = Path(__file__).parent / "testdata"
THREE = "rocketmq-rmq5-dledger-3-small"
MIXED = "rocketmq-rmq5-mixed-small"
REUSED = "rocketmq-rmq5-dledger-1-reused-small"
NAMES = (THREE, MIXED, REUSED)
RUNNING_CLASSIC = "rmq5-running-classic"
"""Files of an idle running broker without DLedger; the next CommitLog file is there already, and empty."""

ROCKSDB = "rmq5-rocksdb"
"""A stopped broker with storeType=defaultRocksDB: topics orders and payments, and a multi-dispatch queue."""


def members(name: str, under: str) -> dict[str, bytes]:
    """Files of the archive whose path contains ``under``, by path inside the archive, sorted."""
    found = {}
    with tarfile.open(TESTDATA / f"{name}.tar.gz") as archive:
        for member in archive:
            if member.isfile() and under in member.name:
                found[member.name.removeprefix(name + "/")] = archive.extractfile(member).read()
    return dict(sorted(found.items()))


@lru_cache(maxsize=8)
def oracle(name: str) -> list[dict]:
    (content,) = members(name, "/oracle.jsonl.gz").values()
    return [json.loads(line) for line in gzip.decompress(content).splitlines()]


def units(name: str) -> list[dict]:
    return [line for line in oracle(name) if line["kind"] == "unit"]


@lru_cache(maxsize=8)
def messages(name: str, node: str = "n0") -> dict[int, bytes]:
    """Every message record of the store, by physical offset, in log order."""
    found = {}
    for path, data in members(name, f"/{node}/commitlog/").items():
        found.update(_classic(int(path.rpartition("/")[2]), data))
    for path, data in members(name, f"/{node}/dledger-{node}/data/").items():
        found.update(_entries(int(path.rpartition("/")[2]), data))
    return found


def _classic(base: int, data: bytes) -> dict[int, bytes]:
    found, at = {}, 0
    while at + 8 <= len(data):
        size, magic = struct.unpack_from(">ii", data, at)
        if magic not in {-626843481, -626843477}:
            break
        found[base + at] = data[at : at + size]
        at += size
    return found


def _entries(base: int, data: bytes) -> dict[int, bytes]:
    found, at = {}, 0
    while at + 48 <= len(data):
        magic, size = struct.unpack_from(">ii", data, at)
        if magic != 1:
            break
        found[base + at + 48] = data[at + 48 : at + size]
        at += size
    return found


def extract(name: str, under: str, directory: Path) -> Path:
    """Unpacks the part of an archive below ``under`` (holes stay holes); returns its folder."""
    with tarfile.open(TESTDATA / f"{name}.tar.gz") as archive:
        wanted = [m for m in archive if m.name.startswith(f"{name}/{under}/")]
        unpack(archive, directory, wanted)
    return directory / name / under


def extract_broker(name: str, directory: Path) -> Path:
    """Unpacks an archive without an oracle; returns its broker's directory."""
    with tarfile.open(TESTDATA / f"rocketmq-{name}.tar.xz") as archive:
        unpack(archive, directory)
    return directory / name / "n0"
