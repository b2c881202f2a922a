"""RocketMQ messages as the body format of a store: which bodies are messages, which are damaged, and their columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dledger_core.record import HEADER_BYTES, MAGIC_DATA, Records
from dledger_core.rocketmq.message.columns import Rows
from dledger_core.rocketmq.message.decode import decode_messages
from dledger_core.rocketmq.message.records import BROKEN_FROM, Located, locate, wrong_bodies

_I64 = npt.NDArray[np.int64]


class MessageBodies:
    """Implements ``storage.BodyFormat``; other bodies pass."""

    def damaged(self, records: Records) -> _I64:
        """Return the rows whose body is a message that is damaged.

        A message is recognized by its magic and its size. It is damaged if the lengths in it do not fit, or if its
        body does not match its CRC.
        """
        located = _located(records)
        bad = located.reasons >= BROKEN_FROM
        bad[located.rows[wrong_bodies(located)]] = True
        return np.flatnonzero(bad & (records.headers["magic"] == MAGIC_DATA))

    def describe(self, records: Records, row: int) -> dict[str, Any]:
        """Return topic and key of a message, as far as they can be read."""
        one = records.slice(row, row + 1)
        found = decode_messages(pa.array([bytes(one.bodies)], pa.binary()), ["topic", "keys"]).to_pylist()[0]
        return {name: value for name, value in (("topic", found["topic"]), ("key", found["keys"])) if value}

    def decode(self, bodies: Any, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Return the messages in a binary column; see ``decode_messages``."""
        return decode_messages(bodies, columns)


def _located(records: Records) -> Located:
    lengths = records.sizes.astype(np.int64) - HEADER_BYTES
    return locate(Rows(np.frombuffer(records.data, np.uint8), records.starts + HEADER_BYTES, lengths, None))


MESSAGES: Final = MessageBodies()
