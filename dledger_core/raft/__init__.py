"""The Raft algorithm alone: messages, ticks and proposals in, ``Ready`` out. No clock, randomness, I/O or threads."""

from dledger_core.raft.batch import (
    BATCHES_MAX,
    Batch,
    InstalledSnapshot,
    LogStore,
    Payload,
    Proposal,
    SnapshotPayloads,
    TermRange,
)
from dledger_core.raft.configuration import (
    UNKNOWN,
    AddLearner,
    Configuration,
    MemberChange,
    Promote,
    Remove,
    SetAddress,
    SetVersion,
    even_group_warning,
)
from dledger_core.raft.configurations import ConfigurationInForce
from dledger_core.raft.floor import Floor
from dledger_core.raft.messages import (
    AppendEntries,
    AppendEntriesResponse,
    Condition,
    Heartbeat,
    HeartbeatResponse,
    InstallSnapshot,
    InstallSnapshotResponse,
    Message,
    RequestVote,
    RequestVoteResponse,
    TimeoutNow,
)
from dledger_core.raft.node import ProgressStatus, RawNode, Status
from dledger_core.raft.pointers import LogPointers, check_pointers
from dledger_core.raft.progress import ProgressState
from dledger_core.raft.ready import HardState, LogRestart, ReadReady, Ready, Role, SoftState

__all__ = [
    "BATCHES_MAX",
    "UNKNOWN",
    "AddLearner",
    "AppendEntries",
    "AppendEntriesResponse",
    "Batch",
    "Condition",
    "Configuration",
    "ConfigurationInForce",
    "Floor",
    "HardState",
    "Heartbeat",
    "HeartbeatResponse",
    "InstallSnapshot",
    "InstallSnapshotResponse",
    "InstalledSnapshot",
    "LogPointers",
    "LogRestart",
    "LogStore",
    "MemberChange",
    "Message",
    "Payload",
    "ProgressState",
    "ProgressStatus",
    "Promote",
    "Proposal",
    "RawNode",
    "ReadReady",
    "Ready",
    "Remove",
    "RequestVote",
    "RequestVoteResponse",
    "Role",
    "SetAddress",
    "SetVersion",
    "SnapshotPayloads",
    "SoftState",
    "Status",
    "TermRange",
    "TimeoutNow",
    "check_pointers",
    "even_group_warning",
]
