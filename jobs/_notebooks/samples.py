"""Real stores for notebooks without a cluster: those of the tests."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from dledger_core import open_store
from dledger_core.record import HEADER_BYTES, segment_name

__all__ = ["damaged_replicas", "sample_broker"]

_TESTDATA: Final = Path(__file__).resolve().parents[2] / "tests" / "rocketmq" / "testdata"
_BROKERS: Final = "rocketmq-rmq5-dledger-3-small"
_FLIPPED_INDEX: Final = 700
_FLIPPED_BYTE: Final = 100
_TRUNCATED_AT: Final = 900


def _unpack(directory: Path, parts: Iterable[str]) -> Path:
    wanted = tuple(f"{_BROKERS}/{part}" for part in parts)
    with tarfile.open(_TESTDATA / f"{_BROKERS}.tar.gz") as archive:
        members = [member for member in archive if member.name.startswith(wanted)]
        if hasattr(tarfile, "data_filter"):  # Python 3.11.0 to 3.11.3 have no filters yet
            archive.extractall(directory, members, filter="data")
        else:
            archive.extractall(directory, members)  # noqa: S202  (an archive of this project)
    return directory / _BROKERS


def sample_broker(directory: Path) -> Path:
    """Unpack the store directory of a RocketMQ 5.3.3 broker in DLedger mode, with the consumers' offsets."""
    return _unpack(directory, ("n0/dledger-n0/", "n0/config/")) / "n0"


def damaged_replicas(directory: Path) -> dict[str, Path]:
    """Unpack the logs of three brokers of a group, and damage two of them as disks do.

    Returns:
        The replicas. On n1 a byte of message 700 is wrong; the log of n2 ends before entry 900.
    """
    group = _unpack(directory, [f"n{number}/dledger-n{number}/" for number in range(3)])
    replicas = {f"n{number}": group / f"n{number}" / f"dledger-n{number}" for number in range(3)}
    with open_store(replicas["n1"]) as reader:
        size = reader.segment_bytes[0]
        flipped, end = (
            reader.read(index, index + 1).column("position")[0].as_py() for index in (_FLIPPED_INDEX, _TRUNCATED_AT)
        )
    at = flipped + HEADER_BYTES + _FLIPPED_BYTE
    path = replicas["n1"] / "data" / segment_name(at - at % size)
    content = bytearray(path.read_bytes())
    content[at % size] ^= 0x04
    path.write_bytes(content)
    for path in sorted((replicas["n2"] / "data").iterdir()):
        keep = min(max(end - int(path.name), 0), size)
        if keep:
            path.write_bytes(path.read_bytes()[:keep] + bytes(size - keep))
        else:
            path.unlink()
    return replicas
