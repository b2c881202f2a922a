"""Columns of messages that a reader chooses, without bodies; a ``MessageFields`` of nodes and clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from dledger_core.rocketmq.message.decode import decode_chunks
from dledger_core.rocketmq.message.layout import MESSAGE_SCHEMA

_ROW: Final = "\0entry"


class MessageColumns:
    """See ``MessageFields``."""

    schema: Final = pa.schema([field for field in MESSAGE_SCHEMA if field.name != "body"])

    def rows(self, entries: pa.RecordBatch, names: Sequence[str], bytes_max: int) -> tuple[pa.RecordBatch, int]:
        """See ``MessageFields``."""
        of_messages = [name for name in names if name not in entries.schema.names]
        numbered = entries.append_column(_ROW, pa.array(np.arange(entries.num_rows)))
        parts: list[pa.RecordBatch] = []
        nbytes = count = 0
        for chunk, found in decode_chunks(numbered, of_messages, opened_bytes_max=bytes_max):
            columns = [(found if name in of_messages else chunk).column(name) for name in names]
            part = pa.RecordBatch.from_arrays(columns, names=list(names))
            nbytes += part.nbytes
            if parts and nbytes > bytes_max:
                break
            parts.append(part)
            count = chunk.column(_ROW)[-1].as_py() + 1
        return parts[0] if len(parts) == 1 else pa.concat_batches(parts), count
