"""Messages in the entries of a log: which are damaged, how much of them is covered, and their columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.record import HEADER_BYTES, MAGIC_DATA, READ_SCHEMA, Records
from dledger_core.rocketmq.message import layout
from dledger_core.rocketmq.message.columns import Rows
from dledger_core.rocketmq.message.decode import decode_chunks, decode_messages
from dledger_core.rocketmq.message.inspection import MessageInspection
from dledger_core.rocketmq.message.integrity import COMPRESSION, covered, fault_text, faults
from dledger_core.rocketmq.message.layout import MESSAGE_SCHEMA
from dledger_core.rocketmq.message.records import BROKEN_FROM, Located, locate
from dledger_core.storage.check.coverage import Coverage

_CHUNK_BYTES: Final = 64 << 20
_I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MessageBodies:
    """Implements ``storage.BodyFormat``.

    Attributes:
        expected: whether other bodies are damage; records with a CRC of their own may have any body.
        broker: the broker's store directory, for the names of its topics; None = unknown.
        placed: whether a broker wrote the log, so that a physical offset other than 0 must be the message's position.
    """

    expected: bool = False
    placed: bool = False
    broker: Path | None = None

    def of_log(self, sample: Records) -> MessageBodies:
        """Return the format in which messages are expected if most of these records have one: a broker wrote them.

        Physical offsets are checked if most of them are the positions of their messages.
        """
        located = _located(sample)
        right = located.number("physical_offset") == _offsets(sample, located)
        return replace(self, expected=2 * located.count > sample.count, placed=2 * int(right.sum()) > located.count)

    def damaged(self, records: Records) -> _I64:
        """Return the rows whose body is a message that is damaged, see ``_faults``."""
        return np.flatnonzero(self._faults(records))

    def fault(self, records: Records, row: int) -> str:
        """Return the fault of a damaged message."""
        return fault_text(int(self._faults(records.slice(row, row + 1))[0]))

    def _faults(self, records: Records) -> npt.NDArray[np.uint8]:
        """Return the fault of each record's message, 0 without one.

        A message is recognized by its magic and its size. Where messages are ``expected``, any other body is damage.
        """
        located = _located(records)
        found = located.reasons.copy()
        found[(found < BROKEN_FROM) & (records.verifiable() | (not self.expected))] = 0
        of_messages = faults(located, self.physical_offsets(records, located))
        written = records.verifiable()[located.rows] | (not self.expected)
        of_messages[written & (of_messages == COMPRESSION)] = 0  # by its producer: the decoder reports it
        found[located.rows] = of_messages
        found[records.headers["magic"] != MAGIC_DATA] = 0
        return found

    def physical_offsets(self, records: Records, located: Located) -> _I64 | None:
        """Return the physical offset that each message must have, -1 for any."""
        if not self.placed:
            return None
        return np.where(located.number("physical_offset") != 0, _offsets(records, located), -1)

    def inspection(self) -> StoreInspection:
        """Return an empty ``Inspection``."""
        return StoreInspection(broker=self.broker, bodies=self)

    def describe(self, records: Records, row: int) -> dict[str, Any]:
        """Return topic and key of a message, as far as they can be read."""
        one = records.slice(row, row + 1)
        found = decode_messages(pa.array([bytes(one.bodies)], pa.binary()), ["topic", "keys"]).to_pylist()[0]
        return {name: value for name, value in (("topic", found["topic"]), ("key", found["keys"])) if value}

    def stored_at(self, record: Records) -> datetime | None:
        """Return the store time of one message; None for another body."""
        [row] = decode_messages(pa.array([bytes(record.bodies)], pa.binary()), ["store_timestamp"]).to_pylist()
        found: datetime | None = row["store_timestamp"]
        return found

    @property
    def schema(self) -> pa.Schema:
        """The entry's columns, then those of MESSAGE_SCHEMA."""
        return pa.schema([*(field for field in READ_SCHEMA if field.name != "body"), *MESSAGE_SCHEMA])

    def decode(self, entries: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield entries with the columns of their messages; a body that is not a message stays, with an ``error``."""
        for chunk, found in decode_chunks(entries, MESSAGE_SCHEMA.names, opened_bytes_max=_CHUNK_BYTES):
            columns = {name: chunk.column(name) for name in chunk.schema.names if name != "body"}
            columns |= {name: found.column(name) for name in found.schema.names}
            foreign = pc.is_null(found.column("topic"))
            columns["body"] = pc.if_else(foreign, chunk.column("body"), found.column("body"))
            yield pa.RecordBatch.from_pydict(columns, schema=self.schema)


@dataclass(slots=True)
class StoreInspection(MessageInspection):
    """Implements ``storage.Inspection`` for messages in a store."""

    bodies: MessageBodies = field(default_factory=MessageBodies)

    def add(self, records: Records, positions: _I64, good: npt.NDArray[np.bool_]) -> None:
        """See ``Inspection``."""
        located, sizes = _located(records), records.sizes.astype(np.int64) - HEADER_BYTES
        checksums, compared = np.zeros(records.count, np.int64), np.zeros(records.count, np.int64)
        own = covered(located, self.bodies.physical_offsets(records, located), expected=self.bodies.expected)
        checksums[located.rows], compared[located.rows] = own
        signed = records.verifiable()
        checksums[signed], compared[signed] = sizes[signed], 0
        first, second = int(checksums[good].sum()), int(compared[good].sum())
        self.coverage += Coverage(first, second, int(sizes[good].sum()) - first - second)
        self.see(located, positions, records.headers["index"].astype(np.int64), good)


def _offsets(records: Records, located: Located) -> _I64:
    """Return the physical offset that a broker gives to each message; B's headers have no positions to compare."""
    return records.headers["position"].astype(np.int64)[located.rows] + layout.PHYSICAL_OFFSET_DELTA


def _located(records: Records) -> Located:
    lengths = records.sizes.astype(np.int64) - HEADER_BYTES
    return locate(Rows(np.frombuffer(records.data, np.uint8), records.starts + HEADER_BYTES, lengths, None))


MESSAGES: Final = MessageBodies()
