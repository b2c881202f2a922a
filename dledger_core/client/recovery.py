"""The way out of a group without a leader whose voters are recovering: some of them get their vote back.

A recovering voter waits for a leader that was elected without it. Where too many voters are recovering, there is none,
and no node can prove which entries were acknowledged. With the consent of a person, the voters with the best ends
(last term, last index) vote again, as few as a majority needs: no other node could have more entries. All voters must
answer, because a missing one may have a better end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dledger_core.client.routing.channel import Channel
from dledger_core.config import Peer
from dledger_core.errors import ConfigError, DLedgerError, UnreachableError
from dledger_core.net import messages


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
    """Choose the voters that get their vote back: those with the best ends, as many as a majority lacks."""
    recovering = [end for end in ends if end.is_recovering]
    lacking = len(ends) // 2 + 1 - (len(ends) - len(recovering))
    best = sorted(recovering, key=lambda end: (end.last_term, end.last_index), reverse=True)
    chosen = {end.node_id for end in best[: max(lacking, 0)]}
    return tuple(replace(end, votes_again=end.node_id in chosen) for end in ends)


async def recover(peers: Sequence[Peer], group: str, timeout_s: float, *, dry_run: bool = False) -> Recovery:
    """Ask all voters for the ends of their logs and give votes back; do nothing where a leader or a majority is left.

    Args:
        peers: all voters of the group.
        group: its name.
        timeout_s: timeout of each request.
        dry_run: only choose.

    Raises:
        UnreachableError: a voter does not answer.
        ConfigError: ``peers`` are not the voters that the nodes know.
        BadRequestError: a voter has changed since it was asked.
    """
    channels = [Channel(peer) for peer in peers]

    async def ask(channel: Channel, end: list[int] | None = None) -> messages.RecoverResponse:
        request = messages.RECOVER.encode(messages.RecoverRequest(end=end), g=group)
        return messages.RECOVER_OK.decode((await channel.request(request, timeout_s=timeout_s)).header)

    async def report(channel: Channel) -> messages.RecoverResponse:
        await channel.open(timeout_s)
        return await ask(channel)

    try:
        found = await asyncio.gather(*map(report, channels), return_exceptions=True)
        reports = [each for each in found if isinstance(each, messages.RecoverResponse)]
        _require_all(peers, found)
        _require_same(peers, reports)
        leader_id = next((each.leader for each in reports if each.leader is not None), None)
        ends = tuple(
            VoterEnd(str(peer.node_id), each.last_term, each.last_index, each.is_recovering)
            for peer, each in zip(peers, reports, strict=True)
        )
        recovery = Recovery(leader_id, ends if leader_id is not None else with_votes(ends))
        for channel, end in zip(channels, recovery.ends, strict=True):
            if end.votes_again and not dry_run:
                await ask(channel, [end.last_term, end.last_index])
        return recovery
    finally:
        for channel in channels:
            with contextlib.suppress(DLedgerError):
                await channel.close()


def _require_all(peers: Sequence[Peer], found: Sequence[messages.RecoverResponse | BaseException]) -> None:
    for each in found:
        if isinstance(each, BaseException) and not isinstance(each, DLedgerError):
            raise each
    silent = [
        f"{peer.node_id}: {each}" for peer, each in zip(peers, found, strict=True) if isinstance(each, DLedgerError)
    ]
    if silent:
        raise UnreachableError(
            "not all voters answer, and a missing one may have acknowledged entries that the others lack",
            "; ".join(silent),
            "start all nodes of the group, then run the command again",
        )


def _require_same(peers: Sequence[Peer], reports: Sequence[messages.RecoverResponse]) -> None:
    """Raise unless each node names the same voters: one that was left out was not asked."""
    asked = sorted(str(peer.node_id) for peer in peers)
    for peer, each in zip(peers, reports, strict=True):
        if sorted(each.voters) != asked:
            raise ConfigError(
                "the peers string does not name all voters and only them, and one that is not asked may have "
                "acknowledged entries that the others lack",
                str(peer.node_id),
                "name all nodes of the group in --peers",
                {"peers": asked, "voters": sorted(each.voters)},
            )
