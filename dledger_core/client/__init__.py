"""Clients of a group: append batches, read ranges, follow the leader."""

from dledger_core.client.appends import fingerprint_of
from dledger_core.client.async_client import AsyncLogClient
from dledger_core.client.members import GroupMembers, MemberStatus
from dledger_core.client.node_client import NodeClient
from dledger_core.client.position import (
    RECORD_COLUMNS,
    EntryCheck,
    Lag,
    LogPosition,
    Loss,
    LossKind,
    OpenTransaction,
    check_of,
    find_loss,
    measure_lag,
    record_at,
)
from dledger_core.client.producer import AsyncProducer, Producer
from dledger_core.client.protocol import (
    END_OF_LOG,
    AppendResult,
    AttemptResult,
    Bodies,
    Consistency,
    DigestReport,
    Entry,
    LogClient,
    LogRange,
    Metadata,
    NodeStatus,
    OptionalOperations,
    PositionFetch,
    ProducerState,
    ReadFrom,
    RoleChange,
    TableUsage,
    TransactionState,
)
from dledger_core.client.reads import PrefixFormat, ending_after
from dledger_core.client.routing.node_health import NODE_HEALTH
from dledger_core.client.sync_client import SyncLogClient
from dledger_core.control import Part, TransactionId, fingerprint_sum

__all__ = [
    "END_OF_LOG",
    "NODE_HEALTH",
    "RECORD_COLUMNS",
    "AppendResult",
    "AsyncLogClient",
    "AsyncProducer",
    "AttemptResult",
    "Bodies",
    "Consistency",
    "DigestReport",
    "Entry",
    "EntryCheck",
    "GroupMembers",
    "Lag",
    "LogClient",
    "LogPosition",
    "LogRange",
    "Loss",
    "LossKind",
    "MemberStatus",
    "Metadata",
    "NodeClient",
    "NodeStatus",
    "OpenTransaction",
    "OptionalOperations",
    "Part",
    "PositionFetch",
    "PrefixFormat",
    "Producer",
    "ProducerState",
    "ReadFrom",
    "RoleChange",
    "SyncLogClient",
    "TableUsage",
    "TransactionId",
    "TransactionState",
    "check_of",
    "ending_after",
    "find_loss",
    "fingerprint_of",
    "fingerprint_sum",
    "measure_lag",
    "record_at",
]
