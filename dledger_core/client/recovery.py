"""The way out of a group without a leader whose voters are recovering: some of them get their vote back.

A recovering voter waits for a leader that was elected without it. Where too many voters are recovering, there is none,
and no node can prove which entries were acknowledged. With the consent of a person, the voters with the best ends
(last term, last index) vote again, as few as an election needs: no other node could have more entries. All voters must
answer, because a missing one may have a better end.

Until they have caught up they elect only logs that reach the best end of all. A voter that lost the newest
configuration too could otherwise be elected alone, or elect a member that was removed since.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dledger_core.client.routing.channel import Channel
from dledger_core.config import Peer, parse_peer
from dledger_core.errors import DLedgerError, UnreachableError
from dledger_core.net import messages
from dledger_core.net.credentials import PLAINTEXT, Credentials

_LOOK: Final = messages.RecoverRequest()


@dataclass(frozen=True, slots=True)
class VoterEnd:
    """The end of one voter's log.

    Attributes:
        node_id: the voter.
        last_term: term of its last entry, -1 if its log is empty.
        last_index: index of its last entry.
        is_recovering: whether it is a recovering voter.
        votes_again: whether it may vote again by this command.
    """

    node_id: str
    last_term: int
    last_index: int
    is_recovering: bool
    votes_again: bool = False

    @property
    def end(self) -> tuple[int, int]:
        """Term and index, which elections compare."""
        return self.last_term, self.last_index


@dataclass(frozen=True, slots=True)
class Recovery:
    """State of a group's voters.

    Attributes:
        leader_id: the leader; None if there is none.
        ends: each voter, in the order of the peers string.
    """

    leader_id: str | None
    ends: tuple[VoterEnd, ...]

    @property
    def is_needed(self) -> bool:
        """Whether votes are given back."""
        return any(end.votes_again for end in self.ends)


def with_votes(ends: Sequence[VoterEnd]) -> tuple[VoterEnd, ...]:
    """Choose the voters that get their vote back: those with the best ends, as many as a majority lacks.

    One does in any case if its end is better than those of all that vote: it may hold the only entry that makes others
    voters, and a majority that can vote then has no candidate.
    """
    recovering = sorted((end for end in ends if end.is_recovering), key=lambda end: end.end, reverse=True)
    others = [end.end for end in ends if not end.is_recovering]
    count = len(ends) // 2 + 1 - len(others)
    if recovering and all(recovering[0].end > end for end in others):
        count = max(count, 1)
    chosen = {end.node_id for end in recovering[: max(count, 0)]}
    return tuple(replace(end, votes_again=end.node_id in chosen) for end in ends)


async def recover(
    peers: Sequence[Peer],
    group: str,
    timeout_s: float,
    *,
    dry_run: bool = False,
    credentials: Credentials = PLAINTEXT,
) -> Recovery:
    """Ask all voters for the ends of their logs and give votes back; do nothing where a leader or a majority is left.

    Args:
        peers: nodes of the group; they name its voters.
        group: its name.
        timeout_s: timeout of each request.
        dry_run: only choose.
        credentials: TLS files and token.

    Raises:
        UnreachableError: a voter does not answer.
        BadRequestError: a voter has changed since it was asked.
    """
    channels: dict[Peer, Channel] = {}

    async def ask(channel: Channel, message: messages.RecoverRequest = _LOOK) -> messages.RecoverResponse:
        request = messages.RECOVER.encode(message, g=group)
        return messages.RECOVER_OK.decode((await channel.request(request, timeout_s=timeout_s)).header)

    async def report(peer: Peer) -> messages.RecoverResponse:
        channel = channels[peer] = Channel(peer, credentials=credentials)
        await channel.open(timeout_s)
        return await ask(channel)

    async def reports_of(asked: Sequence[Peer]) -> dict[Peer, messages.RecoverResponse | BaseException]:
        results = await asyncio.gather(*map(report, asked), return_exceptions=True)
        return dict(zip(asked, results, strict=True))

    try:
        found = await reports_of(peers)
        voters = _voters([each for each in found.values() if isinstance(each, messages.RecoverResponse)]) or peers
        found |= await reports_of([voter for voter in voters if voter not in found])
        reports = _require_all({voter: found[voter] for voter in voters})
        leader_id = next((each.leader for each in reports if each.leader is not None), None)
        ends = tuple(
            VoterEnd(str(voter.node_id), each.last_term, each.last_index, each.is_recovering)
            for voter, each in zip(voters, reports, strict=True)
        )
        recovery = Recovery(leader_id, ends if leader_id is not None else with_votes(ends))
        best = max(ends, key=lambda end: end.end)
        for voter, end in zip(voters, recovery.ends, strict=True):
            if end.votes_again and not dry_run:
                request = messages.RecoverRequest(end=list(end.end), best_end=list(best.end))
                await ask(channels[voter], request)
        return recovery
    finally:
        for channel in channels.values():
            with contextlib.suppress(DLedgerError):
                await channel.close()


def _voters(reports: Sequence[messages.RecoverResponse]) -> tuple[Peer, ...]:
    """Return the voters of the newest configuration that a node has in force, with their addresses."""
    newest = max(reports, key=lambda each: (each.last_term, each.configuration), default=None)
    return () if newest is None else tuple(parse_peer(f"{node}-{address}") for node, address in newest.voters)


def _require_all(found: Mapping[Peer, messages.RecoverResponse | BaseException]) -> list[messages.RecoverResponse]:
    for each in found.values():
        if isinstance(each, BaseException) and not isinstance(each, DLedgerError):
            raise each
    silent = {peer.node_id: each for peer, each in found.items() if isinstance(each, DLedgerError)}
    if silent:
        raise UnreachableError(
            "not all voters answer, and a missing one may have acknowledged entries that the others lack",
            "; ".join(f"{node}: {each}" for node, each in silent.items()),
            f"start all nodes of the group, then run the command again; if the disks of a majority of the voters are "
            f"lost permanently, run dledger recover --lost {','.join(silent)}",
        )
    return [each for each in found.values() if isinstance(each, messages.RecoverResponse)]
