"""Clients of a group: append batches, read ranges, follow the leader."""

from dledger_core.client.async_client import AsyncClient
from dledger_core.client.continuity import EntryCheck, LogPosition, Loss, LossKind, check_of, find_loss
from dledger_core.client.lag import Lag, measure_lag, record_at
from dledger_core.client.producer import AsyncProducer, Producer
from dledger_core.client.results import (
    AppendResult,
    AttemptResult,
    DigestReport,
    Entry,
    LogBounds,
    Metadata,
    NodeStatus,
    PositionFetch,
    ProducerState,
    RoleChange,
    TransactionState,
)
from dledger_core.client.routing.cluster_view import ReadFrom
from dledger_core.client.sync_client import Client
from dledger_core.control import Part, TransactionId
from dledger_core.rocketmq.client.client import JavaClient
from dledger_core.rocketmq.client.options import JavaOptions

__all__ = [
    "AppendResult",
    "AsyncClient",
    "AsyncProducer",
    "AttemptResult",
    "Client",
    "DigestReport",
    "Entry",
    "EntryCheck",
    "JavaClient",
    "JavaOptions",
    "Lag",
    "LogBounds",
    "LogPosition",
    "Loss",
    "LossKind",
    "Metadata",
    "NodeStatus",
    "Part",
    "PositionFetch",
    "Producer",
    "ProducerState",
    "ReadFrom",
    "RoleChange",
    "TransactionId",
    "TransactionState",
    "check_of",
    "find_loss",
    "measure_lag",
    "record_at",
]
