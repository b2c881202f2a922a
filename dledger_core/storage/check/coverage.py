"""What ``verify`` reports besides damage: how much of the bodies any check covers, and remarks about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from dledger_core.record import HEADER_BYTES, Records

_I64 = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Coverage:
    """Bytes of the good bodies of a log, without headers of records and index rows.

    Attributes:
        checksum_bytes: a checksum covers them.
        compared_bytes: no checksum covers them, but they must agree with others: sizes, lengths, offsets.
        unchecked_bytes: nothing covers them, so a change of one can go unnoticed.
    """

    checksum_bytes: int = 0
    compared_bytes: int = 0
    unchecked_bytes: int = 0

    def __add__(self, other: Coverage) -> Coverage:
        """Return the sum."""
        return Coverage(
            self.checksum_bytes + other.checksum_bytes,
            self.compared_bytes + other.compared_bytes,
            self.unchecked_bytes + other.unchecked_bytes,
        )


NOTHING: Final = Coverage()


@dataclass(frozen=True, slots=True)
class Remark:
    """Something unusual that is not damage.

    Attributes:
        kind: its kind, constant.
        count: how often it occurs.
        position: of its first occurrence.
        message: human-readable.
        index: of its first occurrence; None in a CommitLog.
    """

    kind: str
    count: int
    position: int
    message: str
    index: int | None = None


class Inspection(Protocol):
    """Collects coverage and remarks of records in log order."""

    @property
    def coverage(self) -> Coverage:
        """Of the records so far."""

    def add(self, records: Records, positions: _I64, good: _Bools) -> None:
        """Add records.

        Args:
            records: good records.
            positions: int64, shape (n,).
            good: bool, shape (n,): those whose bodies are good too.
        """

    def remarks(self) -> tuple[Remark, ...]:
        """Return the remarks about the records so far."""


@dataclass(slots=True)
class OpaqueInspection:
    """Implements ``Inspection`` for bodies of no format: only the CRC of a record covers one."""

    coverage: Coverage = field(default_factory=Coverage)

    def add(self, records: Records, positions: _I64, good: _Bools) -> None:
        """See ``Inspection``."""
        # Java writes no CRC of a record: what covers its bodies, only their format knows.
        sizes, verifiable = records.sizes.astype(np.int64) - HEADER_BYTES, records.verifiable()
        self.coverage += Coverage(int(sizes[verifiable].sum()), 0, int(sizes[~verifiable].sum()))

    def remarks(self) -> tuple[Remark, ...]:
        """See ``Inspection``."""
        return ()
