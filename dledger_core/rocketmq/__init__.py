"""RocketMQ: message records as Arrow columns, consume queue units, brokers' directories and CommitLogs.

``decode_messages`` and ``encode_messages`` convert batches, ``decode_chunks`` limits their size;
``consume_queue_columns`` reads only the fields that a consume queue needs. ``locate`` says what a directory contains,
``end_of`` where the log of a store ends, ``ClassicCommitLog`` reads a classic CommitLog.
"""

from dledger_core.rocketmq.broker_parts import BrokerParts, PartProblem, broker_parts, flushed_until
from dledger_core.rocketmq.inspection import end_problems, sample_positions, sample_ranges
from dledger_core.rocketmq.key_rebuild import rebuild_key_files
from dledger_core.rocketmq.message.decode import (
    Selected,
    consume_queue_columns,
    decode_chunks,
    decode_messages,
    expanded_messages,
    expanded_queue_columns,
    rows_of_messages,
    select_entries,
)
from dledger_core.rocketmq.message.encode import encode_messages
from dledger_core.rocketmq.message.layout import (
    CONSUME_QUEUE_SCHEMA,
    DELAY_LEVELS_MS,
    MESSAGE_SCHEMA,
    PHYSICAL_OFFSET_DELTA,
    QUEUE_FIELDS_SCHEMA,
    SCHEDULE_TOPIC,
    in_queue,
)
from dledger_core.rocketmq.message.properties import java_hash, tags_code
from dledger_core.rocketmq.message.records import field_at
from dledger_core.rocketmq.store.broker_conf import BrokerConf, read_broker_conf
from dledger_core.rocketmq.store.broker_json import consumer_offsets, topic_configs
from dledger_core.rocketmq.store.commit_log import ClassicCommitLog, CommitLogFile, FileStop, commit_log_files
from dledger_core.rocketmq.store.commit_log_view import CommitLogView
from dledger_core.rocketmq.store.consume_queue import (
    PREFILL,
    UNIT,
    UNIT_BYTES,
    QueueStatistics,
    broker_end_of,
    consumer_lag,
    decode_units,
    encode_units,
    lost_units,
    queue_ends,
    queue_statistics,
    queues_in_rocksdb,
)
from dledger_core.rocketmq.store.consume_queue_ext import ext_tags_codes
from dledger_core.rocketmq.store.directory import (
    COMMITLOG_ONLY,
    Damaged,
    Deleted,
    LogDirectory,
    Span,
    check_continues,
    open_log_directory,
)
from dledger_core.rocketmq.store.dispatch import NAMED_AGAIN, with_further_units
from dledger_core.rocketmq.store.key_comparison import compare_key_files
from dledger_core.rocketmq.store.key_files import KeyFileSize, key_file_size
from dledger_core.rocketmq.store.location import COMMITLOG_DIRECTORY, Location, Skipped, locate, log_around
from dledger_core.rocketmq.store.log_end import CommitLogEnd, end_of
from dledger_core.rocketmq.store.queue_slots import STAYS, Move, moves_of, replay
from dledger_core.rocketmq.store.rocksdb_queues import RocksDBQueues, require_rocksdb

__all__ = [
    "COMMITLOG_DIRECTORY",
    "COMMITLOG_ONLY",
    "CONSUME_QUEUE_SCHEMA",
    "DELAY_LEVELS_MS",
    "MESSAGE_SCHEMA",
    "NAMED_AGAIN",
    "PHYSICAL_OFFSET_DELTA",
    "PREFILL",
    "QUEUE_FIELDS_SCHEMA",
    "SCHEDULE_TOPIC",
    "STAYS",
    "UNIT",
    "UNIT_BYTES",
    "BrokerConf",
    "BrokerParts",
    "ClassicCommitLog",
    "CommitLogEnd",
    "CommitLogFile",
    "CommitLogView",
    "Damaged",
    "Deleted",
    "FileStop",
    "KeyFileSize",
    "Location",
    "LogDirectory",
    "Move",
    "PartProblem",
    "QueueStatistics",
    "RocksDBQueues",
    "Selected",
    "Skipped",
    "Span",
    "broker_end_of",
    "broker_parts",
    "check_continues",
    "commit_log_files",
    "compare_key_files",
    "consume_queue_columns",
    "consumer_lag",
    "consumer_offsets",
    "decode_chunks",
    "decode_messages",
    "decode_units",
    "encode_messages",
    "encode_units",
    "end_of",
    "end_problems",
    "expanded_messages",
    "expanded_queue_columns",
    "ext_tags_codes",
    "field_at",
    "flushed_until",
    "in_queue",
    "java_hash",
    "key_file_size",
    "locate",
    "log_around",
    "lost_units",
    "moves_of",
    "open_log_directory",
    "queue_ends",
    "queue_statistics",
    "queues_in_rocksdb",
    "read_broker_conf",
    "rebuild_key_files",
    "replay",
    "require_rocksdb",
    "rows_of_messages",
    "sample_positions",
    "sample_ranges",
    "select_entries",
    "tags_code",
    "topic_configs",
    "with_further_units",
]
