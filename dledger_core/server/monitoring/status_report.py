"""The content of the status page as JSON: verdict, groups and their nodes, history, events, readers, transactions."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from dledger_core.client.members import STALLED
from dledger_core.client.verdict import GroupHealth, Reason, reasons_of, verdict_of
from dledger_core.server.hosted import HostedGroup
from dledger_core.server.monitoring.cluster_probe import ClusterProbe, GroupProbe, NodeProbe
from dledger_core.server.monitoring.events import RecentEvents
from dledger_core.server.monitoring.history import History
from dledger_core.server.monitoring.observed import ObservedNode
from dledger_core.storage.tables.transactions import TransactionTable

_ROWS_MAX: Final = 50
"""Readers, transactions and queries that are shown per group."""


class StatusReport:
    """Makes the report of one node; lives on its event loop.

    Args:
        node: the node.
        cluster: probes the other nodes.
        history: the last 15 minutes of this node.
        events: its recent events.
        version: of this package.
    """

    def __init__(
        self, node: ObservedNode, cluster: ClusterProbe, history: History, events: RecentEvents, version: str
    ) -> None:
        self._node = node
        self._cluster = cluster
        self._history = history
        self._events = events
        self._version = version
        self._started_s = time.monotonic()

    async def report(self, groups: Sequence[str]) -> dict[str, Any]:
        """Return the report about these groups."""
        probes = await self._cluster.probe(list(groups))
        groups_seen = [probe.health() for probe in probes]
        reasons = [reason for each in groups_seen for reason in self._reasons(each)]
        verdict = verdict_of(groups_seen, reasons)
        shown = []
        for probe in probes:
            shown.append(self._group(probe))
            await asyncio.sleep(0)
        config = self._node.config
        return {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "node": {
                "id": str(config.self_id),
                "address": config.me.address,
                "version": self._version,
                "uptime_s": round(time.monotonic() - self._started_s),
            },
            "verdict": {
                "level": verdict.level.name.lower(),
                "text": verdict.text,
                "reasons": list(verdict.reasons),
                "remedies": {reason.text: reason.remedy for reason in reasons if reason.remedy},
            },
            "groups": shown,
            "interval_s": self._history.interval_s,
            "history": self._history.series(groups, {probe.name: probe.commits for probe in probes}),
            "events": [self._event(event) for event in self._events.newest(frozenset(groups))],
        }

    def _reasons(self, group: GroupHealth) -> list[Reason]:
        hosted = self._node.groups[group.name].hosted
        differs = hosted is not None and hosted.replica.measures.archive_differs
        return reasons_of(group, self._node.repairs.damaged(group.name), differs=differs)

    def _event(self, event: Any) -> dict[str, Any]:
        found = dataclasses.asdict(event)
        found["time"] = datetime.fromtimestamp(found.pop("time_s"), UTC).isoformat(timespec="milliseconds")
        return found

    def _group(self, probe: GroupProbe) -> dict[str, Any]:
        hosted = self._node.groups[probe.name].hosted
        health = probe.health()
        best = max((node.commit_index for node in probe.nodes if node.commit_index is not None), default=None)
        found = {
            "name": probe.name,
            "leader": probe.leader_id,
            "term": max((node.term for node in probe.nodes if node.term is not None), default=None),
            "commit_index": best,
            "survives": health.failures_survived,
            "voters": health.voters,
            "acknowledging": list(health.acknowledging()),
            "change_pending": probe.members is not None and probe.members.is_change_pending,
            "nodes": [self._node_of(node, probe, best) for node in probe.nodes],
            "tables": [{"table": table, "rows": rows, "limit": limit} for table, rows, limit in probe.tables],
            "archive": None if probe.archive is None else dataclasses.asdict(probe.archive),
        }
        return found | (self._here(hosted) if hosted is not None else {"here": None})

    def _node_of(self, node: NodeProbe, probe: GroupProbe, best: int | None) -> dict[str, Any]:
        members = () if probe.members is None else probe.members.members
        member = next((each for each in members if each.node_id == node.node_id), None)
        behind = None if best is None or node.commit_index is None else best - node.commit_index
        contact_s = 0.0 if node.answers else self._history.contact_s(node.node_id)
        found = dataclasses.asdict(node)
        return found | {
            "node_id": str(node.node_id),
            "member": None if member is None else member.role,
            "is_removed": member is None and probe.members is not None and node.role != "waiting",
            "is_stalled": member is not None and STALLED in member.conditions,
            "lag_entries": behind if member is None or node.answers else member.lag_entries,
            "lag_bytes": None if member is None else member.lag_bytes,
            "catches_up_s": None if member is None else member.seconds_left,
            "contact_s": None if contact_s is None else round(contact_s),
        }

    def _here(self, hosted: HostedGroup) -> dict[str, Any]:
        """Return the part that only this node knows: the readers that pin here, and the tables of the log."""
        replica = hosted.replica
        transactions, end = replica.tables.transactions, replica.visible_end
        now_ms = replica.log_time.now_ms
        pins = sorted(replica.pins.rows(replica.pin_time_ms), key=lambda pin: pin[1])[:_ROWS_MAX]
        opened = list(itertools.islice(transactions.open.items(), _ROWS_MAX))
        return {
            "here": {
                "first_index": int(replica.log.first_index()),
                "visible_end": int(end),
                "scrub_index": self._node.scrub.position.get(replica.group),
                "damaged": self._node.repairs.damaged(replica.group),
                "pins": [
                    {"reader": name, "start": start, "lag": max(int(end) - start, 0), "left_s": round(left_ms / 1000)}
                    for name, start, left_ms in pins
                ],
                "transactions": [
                    {
                        "query": query,
                        "batch": batch,
                        "run": found.run_id,
                        "first_index": int(found.first_index),
                        "rows": sum(part.rows for part in found.parts),
                        "inactive_s": round(max(now_ms - found.active_ms, 0) / 1000),
                    }
                    for (query, batch), found in opened
                ],
                "queries": list(itertools.islice(_streams(transactions, now_ms), _ROWS_MAX)),
            }
        }


def _streams(transactions: TransactionTable, now_ms: int) -> Iterator[dict[str, Any]]:
    """Yield the streams that write, as of this log time, the most recently active first."""
    for query, found in transactions.queries.streams():
        inactive_s = round(max(now_ms - found.active_ms, 0) / 1000)
        opened = transactions.open.batches(query)
        # The newest control entry of a query is that commit, unless it wrote or aborted a later micro-batch.
        is_commit_newest = found.newest in found.committed and not opened
        is_commit_newest &= all(batch <= found.newest for batch, _ in found.aborted)
        yield {
            "query": query,
            "newest_batch": found.newest if found.newest >= 0 else None,
            "committed_s": inactive_s if is_commit_newest else None,
            "inactive_s": inactive_s,
            "open": opened,
            "end": max((each.last_index for each in found.committed.values()), default=-1) + 1,
        }
