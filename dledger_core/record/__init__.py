"""Entries as columns, and their records as stored on disk and sent between nodes.

A record is DLedger's (generation B), all integers big-endian, with the fields Java leaves 0 put to use::

    offset  0   4   magic      1 data, 2 control, 3 configuration, -1 BLANK (rest of a segment)
            4   4   size       48 + body length
            8   8   index
           16   8   term
           24   8   position   byte offset of this record in the group's data files
           32   8   flags      bit 48 = last entry of its batch, bit 49 = must be understood,
                               bits 47-0 = append time in ms
           40   4   crc        CRC-32 of the body
           44   4   length     body length
           48   n   body

``Columns`` is what a producer sends (lengths, CRCs, bodies); ``Records`` is a block of encoded records plus their
sizes; ``encode`` makes one from the other and ``to_arrow`` makes the batches for readers. No function here loops over
entries in Python, except ``encode`` for a handful of them, where numpy's fixed cost would be higher.

The module is pure: no I/O, no clock. All functions are thread-safe.
"""

from dledger_core.record.arrow import (
    DESCRIPTIONS,
    Fetch,
    Isolation,
    data_entries,
    description_batch,
    empty_batch,
    key_of,
    to_arrow,
)
from dledger_core.record.columns import Columns, ProposedBatch
from dledger_core.record.encoding import encode
from dledger_core.record.fields import Chosen, MessageFields
from dledger_core.record.layout import (
    BATCH_END,
    FIELD_SCHEMA,
    HEADER,
    HEADER_BYTES,
    INDEX_RECORD,
    INDEX_RECORD_BYTES,
    MAGIC_BLANK,
    MAGIC_CONTROL,
    MAGIC_DATA,
    MAGIC_MEMBERSHIP,
    MUST_UNDERSTAND,
    PREFIX,
    READ_SCHEMA,
    RECORD_SCHEMA,
    Header,
    append_time,
    append_times,
    contiguous,
    ends_batch,
    is_segment_name,
    place,
    segment_name,
    total_and_smallest,
)
from dledger_core.record.ranges import inside, merge_ranges
from dledger_core.record.records import Records, index_records, index_rows, records_of, slices_of

__all__ = [
    "BATCH_END",
    "DESCRIPTIONS",
    "FIELD_SCHEMA",
    "HEADER",
    "HEADER_BYTES",
    "INDEX_RECORD",
    "INDEX_RECORD_BYTES",
    "MAGIC_BLANK",
    "MAGIC_CONTROL",
    "MAGIC_DATA",
    "MAGIC_MEMBERSHIP",
    "MUST_UNDERSTAND",
    "PREFIX",
    "READ_SCHEMA",
    "RECORD_SCHEMA",
    "Chosen",
    "Columns",
    "Fetch",
    "Header",
    "Isolation",
    "MessageFields",
    "ProposedBatch",
    "Records",
    "append_time",
    "append_times",
    "contiguous",
    "data_entries",
    "description_batch",
    "empty_batch",
    "encode",
    "ends_batch",
    "index_records",
    "index_rows",
    "inside",
    "is_segment_name",
    "key_of",
    "merge_ranges",
    "place",
    "records_of",
    "segment_name",
    "slices_of",
    "to_arrow",
    "total_and_smallest",
]
