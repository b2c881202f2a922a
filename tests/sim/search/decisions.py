"""The decisions of one member, made by the real functions: each once for each combination of arguments.

Logs are tuples of terms, floors (term, index), with an index of None for ∞. A core answers from the state of its disk,
as after a start: it knows no leader, so it votes whenever the rules of votes let it.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

from dledger_core.errors import EndLostError, IdentityLostError
from dledger_core.ids import NO_INDEX, NO_TERM, Index, MemberId, Term
from dledger_core.net.attach import floor_of_row
from dledger_core.raft import (
    AppendEntries,
    AppendEntriesResponse,
    Message,
    RequestVote,
    RequestVoteResponse,
    Role,
)
from dledger_core.raft import floor as floors
from dledger_core.raft.progress import Progress
from dledger_core.server.replica.attachments import StoreClaim
from dledger_core.server.replica.peer_reports import PeerReports
from dledger_core.server.replica.peer_watermarks import PeerWatermarks
from dledger_core.server.replica.ready_loop import ReadyLoop
from dledger_core.storage.files.acknowledged_file import Remembered
from tests.support.group import CONFIG, NODES, Member, only
from tests.support.memory_store import MemoryStore, log_of

Log: TypeAlias = tuple[int, ...]
FloorRow: TypeAlias = tuple[int, int | None] | None
Memory: TypeAlias = tuple[int, int, int, int]
"""A member's memory of another store: its term, the one it led in, term and index that it acknowledged."""

NOTHING: Memory = (NO_TERM, NO_TERM, NO_TERM, NO_INDEX)
SELF, OTHER, THIRD = 0, 1, 2
"""The vote that a member has given: its own, the other's one, that of a third member; None if it gave none."""
STORE = MemberId("n1/store")


def end_of(log: Log) -> tuple[int, int]:
    """Return term and index of the last entry."""
    return (log[-1] if log else NO_TERM), len(log) - 1


def row_of(floor: floors.Floor | None) -> FloorRow:
    """Return a floor as the states have it."""
    return None if floor is None else (int(floor.term), None if floor.index is None else int(floor.index))


def floor_of(row: FloorRow) -> floors.Floor | None:
    """Return the floor of a state."""
    return None if row is None else floors.Floor(Term(row[0]), None if row[1] is None else Index(row[1]))


def memory_of(found: Remembered) -> Memory:
    """Return a memory as the states have it."""
    return found.term, found.led, *found.acknowledged


def remembered(memory: Memory) -> Remembered:
    """Return the memory of a state."""
    return Remembered(memory[0], memory[1], (memory[2], memory[3]))


class Decisions:
    """The decisions of a search; a new object after a rule is switched off.

    Args:
        nodes: number of voters.
    """

    def __init__(self, nodes: int) -> None:
        self._voters = NODES[:nodes]
        self.grants = cache(self._grants)
        self.may_campaign = cache(self._may_campaign)
        self.followed = cache(self._followed)
        self.opened = cache(self._opened)
        self.raised = cache(self._raised)
        self.voted = cache(self._voted)
        self.led = cache(self._led)
        self.acknowledged = cache(self._acknowledged)
        self.truncated = cache(self._truncated)
        self.attached = cache(self._attached)
        self.match_after = cache(self._match_after)

    def _core(self, term: int, log: Log, floor: FloorRow = None, vote: int | None = None, **options: Any) -> Member:
        voted_for = None if vote is None else self._voters[vote]
        member = Member(
            voters=self._voters,
            store=MemoryStore(log_of(*log)),
            term=term,
            voted_for=voted_for,
            floor=floor_of(floor),
            **options,
        )
        member.run()
        return member

    # --- the core ----------------------------------------------------------------------------------------------

    def _may_campaign(self, term: int, log: Log, floor: FloorRow, is_starting: bool) -> bool:
        """Whether a member campaigns."""
        member = self._core(term, log, floor, start_ticks=is_starting)
        member.raw.campaign()
        return member.role is Role.PRE_CANDIDATE

    def _grants(
        self,
        term: int,
        vote: int | None,
        log: Log,
        floor: FloorRow,
        is_starting: bool,
        asked: int,
        last: tuple[int, int],
    ) -> bool:
        """Whether a member votes for a log that ends with ``last``, (term, index), in the term ``asked``."""
        member = self._core(term, log, floor, vote, start_ticks=is_starting)
        request = RequestVote(
            sender=self._voters[OTHER],
            target=self._voters[SELF],
            term=Term(asked),
            last_term=Term(last[0]),
            last_index=Index(last[1]),
            pre=False,
            transfer=False,
        )
        (response,) = only(member.step(request), RequestVoteResponse)
        return response.granted

    def _followed(
        self, term: int, log: Log, floor: FloorRow, commit: int, leads: int, sent: Log, end: int, told: int
    ) -> tuple[Log, FloorRow, int, int]:
        """Return log, floor, commit index and acknowledged index after entries of a leader whose log ends there."""
        member = self._core(term, log, floor, commit_index=commit)
        request = AppendEntries(
            sender=self._voters[OTHER],
            target=self._voters[SELF],
            term=Term(leads),
            prev_index=NO_INDEX,
            prev_term=NO_TERM,
            commit_index=Index(told),
            batches=tuple(log_of(*sent)),
            last_index=Index(end),
        )
        (response,) = only(member.step(request), AppendEntriesResponse)
        assert response.accepted
        return (
            tuple(member.log_terms()),
            row_of(member.raw.floor),
            member.commit_index,
            int(response.match_index),
        )

    def _opened(
        self, term: int, vote: int | None, log: Log, floor: FloorRow, is_end_lost: bool
    ) -> tuple[int, int | None, FloorRow]:
        """Return term, vote and floor of a store that is opened, perhaps after the end of its log was lost."""
        needed = floors.higher(floor_of(floor), floors.Floor(Term(term))) if is_end_lost else floor_of(floor)
        return self._shown(self._core(term, log, row_of(needed), vote))

    def _raised(
        self, term: int, vote: int | None, log: Log, floor: FloorRow, needed: FloorRow
    ) -> tuple[int, int | None, FloorRow]:
        """Return term, vote and floor of a replica whose end is lost, as another node says."""
        member = self._core(term, log, floor, vote)
        loop = SimpleNamespace(raft=member.raw, run=lambda change, *arguments: change(*arguments))
        PeerReports(cast("ReadyLoop", loop)).raise_floor(floor_of(needed))
        member.run()
        return self._shown(member)

    def _shown(self, member: Member) -> tuple[int, int | None, FloorRow]:
        voted_for = member.store.hard_state.voted_for
        vote = None if voted_for is None else self._voters.index(voted_for)
        return member.term, vote, row_of(member.raw.floor)

    def _match_after(self, log: Log, match: int, their_log: Log) -> int:
        """Return the last entry that a leader counts of a member after its attach."""
        leader = self._core(max(log, default=0), log)
        progress = Progress(Index(match + 1))
        progress.match_index = Index(match)
        leader.raw.state.progress[self._voters[OTHER]] = progress
        last_term, last_index = end_of(their_log)
        leader.raw.report_end(self._voters[OTHER], Term(last_term), Index(last_index))
        return int(progress.match_index)

    # --- memory of the others ----------------------------------------------------------------------------------

    def _observed(self, memory: Memory, message: Message) -> Memory:
        known = PeerWatermarks({"store": remembered(memory)})
        known.observe(message)
        return memory_of((known.unwritten() or {}).get("store", remembered(memory)))

    def _voted(self, memory: Memory, term: int) -> Memory:
        """Return the memory after a vote of the other store, or its request for one."""
        return self._observed(
            memory, RequestVoteResponse(sender=STORE, target=NODES[0], term=Term(term), granted=True, pre=False)
        )

    def _led(self, memory: Memory, term: int) -> Memory:
        """Return the memory after a message of the other store as a leader."""
        return self._observed(
            memory,
            AppendEntries(
                sender=STORE,
                target=NODES[0],
                term=Term(term),
                prev_index=NO_INDEX,
                prev_term=NO_TERM,
                commit_index=NO_INDEX,
                batches=(),
            ),
        )

    def _acknowledged(self, memory: Memory, term: int, index: int) -> Memory:
        """Return the memory after an acknowledgement of the other store."""
        return self._observed(
            memory,
            AppendEntriesResponse(
                sender=STORE,
                target=NODES[0],
                term=Term(term),
                accepted=True,
                match_index=Index(index),
                hint_term=NO_TERM,
                hint_first_index=Index(index + 1),
                last_index=Index(index),
            ),
        )

    def _truncated(self, memory: Memory, index: int) -> Memory:
        """Return the memory after the own log was truncated from ``index`` on."""
        known = PeerWatermarks({"store": remembered(memory)})
        known.truncated(Index(index))
        return memory_of((known.unwritten() or {}).get("store", remembered(memory)))

    def _attached(
        self, memory: Memory, log: Log, commit: int, term: int, their_log: Log, their_commit: int, floor: FloorRow
    ) -> tuple[str, Memory, FloorRow]:
        """Return the verdict on a store that attaches ("" = it is taken), the memory, and the floor that it needs."""
        known = PeerWatermarks({"store": remembered(memory)})
        last_term, last_index = end_of(their_log)
        committed = min(their_commit, last_index)
        shown = StoreClaim(
            STORE,
            "log",
            Term(term),
            Term(last_term),
            Index(last_index),
            1,
            Index(their_commit),
            Term(their_log[committed]) if committed >= 0 else None,
            floor_of(floor),
            shows_floor=True,
        )
        here = self._core(max(log, default=0), log)
        try:
            known.check("group", shown, here.raw, Index(commit))
        except IdentityLostError as error:
            return error.name, memory, None
        except EndLostError as error:
            return error.name, memory, row_of(floor_of_row(error.values["floor"]))
        return "", memory_of((known.unwritten() or {}).get("store", remembered(memory))), None


assert CONFIG.election_ticks_max > 1, "a core that starts waits"
