"""A node that gets frames of an authenticated peer in any order, ticks, and restarts.

Raft assumes that nodes follow the protocol, so a peer that does not may stop a group. It may never change an entry that
was served, and never end the process: a frame ends the link, or a contradiction quarantines the group, with the reason.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

from dledger_core.config import StorageConfig
from dledger_core.errors import DLedgerError, IndexOutOfRangeError, InvariantViolationError, ProtocolError
from dledger_core.ids import Index, MemberId
from dledger_core.net import codec
from dledger_core.raft import Message
from tests.fuzz.counted_files import CountedFiles
from tests.fuzz.finding import expect
from tests.fuzz.targets.messages import frame_of
from tests.support.replica_group import HandDriven, entries

STEPS_MAX = 24
_STORE = Path("/store")
_VOTERS = ("n0", "n1", "n2")
_STORAGE = StorageConfig(data_segment_bytes=4096, index_segment_bytes=1024, preallocate_bytes=0)
_BODIES = tuple(b"body %d" % number for number in range(12))


def _opened(files: CountedFiles) -> HandDriven:
    return HandDriven(_STORE, voters=_VOTERS, files=files, storage=_STORAGE)


def _ends_of(number: int) -> codec.Ends:
    """Messages come over the link of n1, and every number is one of its groups: this one."""
    del number
    return codec.Ends("g", MemberId("n1"), MemberId("n0"))


@functools.cache
def _origin() -> CountedFiles:
    """A follower with twelve committed entries of two terms, stopped."""
    files = CountedFiles()
    with _opened(files) as n0:
        n0.receive(entries(*_BODIES[:6]))
        n0.run()
        position = int(n0.log.staged_end)
        n0.receive(entries(*_BODIES[6:], first=6, term=2, prev_term=1, position=position, commit_index=11))
        n0.run()
        assert n0.replica.readable_end == len(_BODIES)
    return files


def steps_of(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (kind, content) of each step: u8, u16 length, content."""
    at = 0
    for _ in range(STEPS_MAX):
        if at + 3 > len(data):
            return
        size = int.from_bytes(data[at + 1 : at + 3], "big")
        yield data[at], data[at + 3 : at + 3 + size]
        at += 3 + size


def step(kind: int, content: bytes = b"") -> bytes:
    """Return the input of one step."""
    return bytes([kind]) + len(content).to_bytes(2, "big") + content


class _Session:
    """The node, and what it has served."""

    def __init__(self) -> None:
        self.files = _origin().clone()
        self.files.counted = 0
        self.node = _opened(self.files)
        self.served: dict[int, tuple[int, bytes]] = {}

    def frame(self, content: bytes) -> None:
        found = frame_of(content)
        if found is None:
            return
        try:
            messages = codec.frame_to_messages(found, _ends_of)
        except ProtocolError:
            return  # the link ends
        for _, message in messages:
            self.receive(message)

    def receive(self, message: Message) -> None:
        with contextlib.suppress(ProtocolError):  # the link ends
            self.node.receive(message)
        self.node.run()

    def append(self, content: bytes) -> None:
        """A well-formed message of a leader: term, first index, commit index, then one body; its position is right."""
        term, first, commit, *body = (*content[:3], *[0] * (3 - len(content[:3])), *content[3:])
        log, raft = self.node.log, self.node.replica.raft
        prev_term = raft.term_at(Index(first - 1)) if first else -1
        if prev_term is None or not log.first_index() <= first <= log.last_index() + 1:
            return
        position = int(log.staged_end) if first > log.last_index() else int(log.position_of(first))
        message = entries(
            bytes(body), first=first, term=term, prev_term=prev_term, position=position, commit_index=commit
        )
        self.receive(message)

    def restart(self, *, orderly: bool) -> None:
        if orderly and not self.node.failures:
            self.node.replica.store.close_blocking()
        self.files.kill()
        self.node = _opened(self.files)

    def tick(self, count: int) -> None:
        for _ in range(count):
            if self.node.failures:
                return
            self.node.replica.tick()
            self.node.run()

    def look(self) -> None:
        """Compare what is served with what was; remember new entries."""
        for error in self.node.failures:
            named = isinstance(error, (DLedgerError, InvariantViolationError))
            expect(named and bool(str(error)), "the replica stopped without a reason", it=error)
        self.node.sent.clear()
        replica, log = self.node.replica, self.node.log
        for index in range(int(log.first_index()), int(replica.readable_end)):
            try:
                row = log.read(Index(index), Index(index + 1), 1)
            except IndexOutOfRangeError:
                continue
            found = int(row.headers["term"][0]), bytes(row.data)[48:]
            expect(self.served.setdefault(index, found) == found, "another entry was served", index=index)


def run_peer_session(data: bytes) -> None:
    """Input: steps; 0 = a frame as in ``message``, 1 = an append, 2 = ticks, 3 = a restart, 4 = kill -9."""
    session = _Session()
    session.look()
    expect(len(session.served) <= len(_BODIES), "entries that no node sent")
    for kind, content in steps_of(data):
        match kind % 5:
            case 0:
                session.frame(content)
            case 1:
                session.append(content)
            case 2:
                session.tick((content[:1] or b"\1")[0])
            case restart:
                session.restart(orderly=restart == 3)
        session.look()
    session.restart(orderly=False)
    session.look()
    session.node.replica.store.close_blocking()
