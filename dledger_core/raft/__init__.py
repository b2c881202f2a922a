"""The Raft algorithm alone: messages, ticks and proposals in, ``Ready`` out. No clock, chance, I/O or threads."""

from dledger_core.raft.batch import BATCHES_MAX, Batch, LogStore, TermRun
from dledger_core.raft.chunks import ResetPayloads
from dledger_core.raft.messages import (
    AppendEntries,
    AppendEntriesResponse,
    Heartbeat,
    HeartbeatResponse,
    Message,
    RequestVote,
    RequestVoteResponse,
    Reset,
    ResetResponse,
    TimeoutNow,
)
from dledger_core.raft.node import ProgressStatus, RawNode, Status
from dledger_core.raft.progress import ProgressState
from dledger_core.raft.quorum import Configuration, even_group_warning
from dledger_core.raft.ready import HardState, NewStart, ReadReady, Ready, Role, SoftState

__all__ = [
    "BATCHES_MAX",
    "AppendEntries",
    "AppendEntriesResponse",
    "Batch",
    "Configuration",
    "HardState",
    "Heartbeat",
    "HeartbeatResponse",
    "LogStore",
    "Message",
    "NewStart",
    "ProgressState",
    "ProgressStatus",
    "RawNode",
    "ReadReady",
    "Ready",
    "RequestVote",
    "RequestVoteResponse",
    "Reset",
    "ResetPayloads",
    "ResetResponse",
    "Role",
    "SoftState",
    "Status",
    "TermRun",
    "TimeoutNow",
    "even_group_warning",
]
