"""Identity of a replica's log, the logs that it continues, and whether one of them is still alive."""

from __future__ import annotations

import logging
from dataclasses import asdict
from functools import partial
from typing import Any

from dledger_core.errors import LogContestedError, LogContinuedError
from dledger_core.ids import Index, node_of
from dledger_core.lineage import AncestorLog, Ancestors, Response, ancestor_rows, contains, respond
from dledger_core.server.replica.attachments import StoreClaim
from dledger_core.server.replica.ready_loop import ReadyLoop

_LOG = logging.getLogger(__name__)


class Lineage:
    """The log of one replica and its ancestors.

    Args:
        loop: the replica's.

    Attributes:
        forked: the error for appends, once a log that this one continues was seen alive.
    """

    def __init__(self, loop: ReadyLoop) -> None:
        self._loop = loop
        self._log = loop.log
        self._controls = loop.controls
        self._is_adopted = loop.log.log_uuid is not None
        self.forked: LogContestedError | None = None

    @property
    def log_uuid(self) -> str | None:
        """Identity of the log, once its first entry is committed here."""
        return self._log.log_uuid or self._controls.tables.log_uuid

    @property
    def chain(self) -> Ancestors:
        """The logs that this log continues, oldest first."""
        tables = self._controls.tables
        return tables.chain if tables.log_uuid == self.log_uuid else self._log.chain

    def follows(self, log_uuid: str, index: int, term: int) -> bool | None:
        """Whether this log continues another one and contains its entry of this index and term.

        None if it is the same log, or while that is not known here; see ``lineage.contains``.
        """
        if log_uuid == self.log_uuid:
            return None
        return contains(
            self.chain,
            log_uuid,
            index,
            term,
            first_index=self._loop.raft.first_index,
            commit_index=self._controls.commit_index,
            term_at=lambda index: self._loop.raft.term_at(Index(index)),
        )

    def refusal(self, link: AncestorLog, theirs: StoreClaim) -> LogContinuedError:
        """Return the refusal of a store of an ancestor; declare a fork if this log lacks its committed entry.

        The refusal names the store's reaction, for the end that it showed. A node of 0.2.0 reacts to the chain, by
        indexes alone, and would stop a majority with committed entries of another term: it gets the chain only if its
        store may stop.
        """
        group, node_id, committed = self._loop.group, str(node_of(theirs.member)), theirs.committed_index
        if theirs.commit_term is not None:
            has_committed = self.follows(link.log_uuid, committed, theirs.commit_term)
        else:
            has_committed = False if theirs.commit_index > link.index else None
        has_end = self.follows(link.log_uuid, theirs.last_index, theirs.last_term)
        response = respond(has_committed=has_committed, has_end=has_end)
        if response is Response.STAY:
            self.fork(link, node_id, committed, theirs.commit_term)
        logs = {"ours": self.log_uuid, "theirs": theirs.log_uuid}
        values: dict[str, Any] = {"group": group, "response": response.value} | logs
        if response is Response.STOP:
            values |= {"end": [theirs.last_term, theirs.last_index], "chain": ancestor_rows(self.chain)}
        return LogContinuedError(
            f"log {self.log_uuid} continues log {link.log_uuid} of {node_id} up to index {link.index}",
            "",
            "see the log of that node",
            values,
        )

    def unrecorded(self) -> dict[str, Any]:
        """Return the fields by which a leader's no-op makes the identity part of the log, if no entry has yet."""
        uuid = self._log.log_uuid
        if uuid is None or self._controls.tables.log_uuid == uuid:
            return {}
        chain = {"c": [asdict(link) for link in self._log.chain]} if self._log.chain else {}
        return {"k": "log", "u": uuid} | chain

    def adopt(self) -> None:
        """Let the store record what the log's own entries say of its identity."""
        tables = self._controls.tables
        if tables.log_uuid is not None and not self._is_adopted:
            self._is_adopted = True
            self._loop.disk.run(partial(self._log.adopt_uuid, tables.log_uuid))
        if tables.log_uuid == self._log.log_uuid and tables.chain != self._log.chain:
            self._loop.disk.run(partial(self._log.adopt_ancestors, tables.chain))  # a member that was admitted later

    def fork(self, link: AncestorLog, node_id: str, index: int, term: int | None) -> None:
        """Refuse appends from now on: a store of the continued log has a committed entry that this log lacks."""
        # Two logs with committed entries would both grow, and no later step could join them: an operator has to choose
        # (test_majority_that_is_alive_stays_and_new_log_refuses_appends).
        if self.forked is None:
            _LOG.critical(
                "appends refused, the continued log is alive: group=%s log=%s continued=%s index=%d peer=%s "
                "committed_index=%d committed_term=%s remedy=decide which log stays, stop the nodes of the other one "
                "and move their stores away, restart the rest",
                self._loop.group,
                self.log_uuid,
                link.log_uuid,
                link.index,
                node_id,
                index,
                term,
            )
        self.forked = LogContestedError(
            f"log {self.log_uuid} continues log {link.log_uuid} up to index {link.index}, and lacks a committed entry "
            f"of that log that {node_id} has, at index {index}" + ("" if term is None else f" of term {term}"),
            f"group {self._loop.group}",
            "decide which log stays: stop the nodes of the other one, move their stores away, restart the rest",
            {"group": self._loop.group, "log": self.log_uuid, "continued": link.log_uuid, "index": link.index},
        )
