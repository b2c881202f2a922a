"""The metrics of a node in Prometheus' text format, read from the node's state when they are asked for.

``METRICS`` is the list of all of them: name, kind, labels and help follow from it, and the tests compare it with the
table in this folder's README, the alert rules and the dashboard.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client import CONTENT_TYPE_LATEST, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dledger_core.errors import DLedgerError
from dledger_core.ids import member_id
from dledger_core.net.tls_listener import HANDSHAKE_RESULTS
from dledger_core.raft import Role
from dledger_core.server.group import Group
from dledger_core.server.group_state import GroupState
from dledger_core.server.hosted import HostedGroup
from dledger_core.server.monitoring.http_port import HttpResponse
from dledger_core.server.monitoring.measures import Durations
from dledger_core.server.monitoring.observed import ObservedNode, failures_survived

_EVERY: Final = 2
"""Every second bucket of the durations is shown: enough for a quantile, half of the lines."""


@dataclass(frozen=True, slots=True)
class MetricKind:
    """A metric that exists.

    Attributes:
        name: as Prometheus shows it; the series of a histogram end with _bucket, _count and _sum.
        kind: its type.
        labels: its labels.
        text: its help.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    text: str


_GROUP: Final = ("group",)
_FOLLOWER: Final = ("group", "follower")
METRICS: Final = (
    MetricKind("dledger_build_info", "gauge", ("version", "node"), "1; the labels name version and node."),
    MetricKind("dledger_ready", "gauge", (), "1 if the node serves all of its groups, as /readyz says."),
    MetricKind("dledger_event_loop_delay_seconds", "histogram", (), "Lateness of a timer: how long the loop stalls."),
    MetricKind("dledger_client_connections", "gauge", (), "Open connections of clients."),
    MetricKind("dledger_client_connections_limit", "gauge", (), "Limit on them."),
    MetricKind("dledger_peer_connected", "gauge", ("peer",), "1 if the link to another node is open."),
    MetricKind("dledger_requests_in_progress", "gauge", (), "Requests that wait for the disk or for a change."),
    MetricKind("dledger_requests_refused_total", "counter", ("error",), "Requests answered with this error."),
    MetricKind("dledger_quota_refusals_total", "counter", ("quota",), "Refusals because a quota was used up."),
    MetricKind(
        "dledger_tls_handshakes_total",
        "counter",
        ("result",),
        "TLS handshakes: completed, failed, displaced, refused by rate.",
    ),
    MetricKind(
        "dledger_certificate_expiry_timestamp_seconds",
        "gauge",
        (),
        "Time when the first certificate of the node or of its authorities expires; with security only.",
    ),
    MetricKind("dledger_append_inflight_bytes", "gauge", (), "Bytes of appends without a response."),
    MetricKind("dledger_append_inflight_limit_bytes", "gauge", (), "Limit on them; above it appends get BUSY."),
    MetricKind("dledger_response_inflight_bytes", "gauge", (), "Bytes of responses that clients have not taken."),
    MetricKind("dledger_group_state", "gauge", ("group", "state"), "1 for the present state of the group here."),
    MetricKind("dledger_role", "gauge", ("group", "role"), "1 for the present role of this replica."),
    MetricKind("dledger_term", "gauge", _GROUP, "Raft term."),
    MetricKind("dledger_leader_known", "gauge", _GROUP, "1 if this replica is in contact with a leader or leads."),
    MetricKind("dledger_leader_contact_seconds", "gauge", _GROUP, "Time since this replica had contact with a leader."),
    MetricKind("dledger_elections_total", "counter", _GROUP, "Elections that this replica started."),
    MetricKind("dledger_leader_changes_total", "counter", _GROUP, "Times that another leader became known here."),
    MetricKind(
        "dledger_recovering", "gauge", _GROUP, "1 if this voter withholds its vote: the end of its log is lost."
    ),
    MetricKind("dledger_voters", "gauge", _GROUP, "Voters of the group."),
    MetricKind("dledger_learners", "gauge", _GROUP, "Learners of the group."),
    MetricKind("dledger_member_change_pending", "gauge", _GROUP, "1 while a change of members is not committed."),
    MetricKind("dledger_first_index", "gauge", _GROUP, "Index of the first stored entry."),
    MetricKind("dledger_last_index", "gauge", _GROUP, "Index of the last stored entry."),
    MetricKind("dledger_commit_index", "gauge", _GROUP, "Index of the last committed entry that is durable here."),
    MetricKind("dledger_visible_end", "gauge", _GROUP, "End of the entries that read_committed shows."),
    MetricKind("dledger_log_bytes", "gauge", _GROUP, "Bytes of the stored entries."),
    MetricKind("dledger_follower_lag_entries", "gauge", _FOLLOWER, "Entries that a follower lacks; leader only."),
    MetricKind("dledger_follower_lag_bytes", "gauge", _FOLLOWER, "Bytes that a follower lacks; leader only."),
    MetricKind("dledger_follower_active", "gauge", _FOLLOWER, "1 if a follower responds; leader only."),
    MetricKind("dledger_append_batches_total", "counter", _GROUP, "Batches of appends that this leader committed."),
    MetricKind("dledger_appended_entries_total", "counter", _GROUP, "Entries in them."),
    MetricKind("dledger_appended_bytes_total", "counter", _GROUP, "Bytes of their records."),
    MetricKind(
        "dledger_appends_waiting",
        "gauge",
        _GROUP,
        "Appends that wait to be proposed; those that arrived together are one.",
    ),
    MetricKind("dledger_appends_waiting_bytes", "gauge", _GROUP, "Bytes of them."),
    MetricKind("dledger_batches_in_flight", "gauge", _GROUP, "Batches that are proposed and not committed."),
    MetricKind("dledger_commit_duration_seconds", "histogram", _GROUP, "From the proposal of a batch to its commit."),
    MetricKind("dledger_fsync_duration_seconds", "histogram", _GROUP, "Each sync of the log's data files."),
    MetricKind("dledger_reads_total", "counter", _GROUP, "Requests to read entries."),
    MetricKind("dledger_read_entries_total", "counter", _GROUP, "Entries in the responses."),
    MetricKind("dledger_read_bytes_total", "counter", _GROUP, "Bytes of their records."),
    MetricKind("dledger_disk_free_bytes", "gauge", _GROUP, "Free bytes of the disk with the group's store."),
    MetricKind("dledger_disk_size_bytes", "gauge", _GROUP, "Size of that disk."),
    MetricKind("dledger_acknowledges", "gauge", _GROUP, "1 if this replica is a voter that acknowledges appends."),
    MetricKind(
        "dledger_failures_survived",
        "gauge",
        _GROUP,
        "Voters that may fail before no append is acknowledged; negative: none is; leader only.",
    ),
    MetricKind("dledger_disk_full", "gauge", _GROUP, "1 if the disk is nearly full, so that appends are rejected."),
    MetricKind("dledger_scrub_index", "gauge", _GROUP, "Next entry that the scrub reads."),
    MetricKind("dledger_scrub_rounds_total", "counter", _GROUP, "Times that the scrub has read the whole log."),
    MetricKind("dledger_damaged_places", "gauge", _GROUP, "Places with wrong records that wait for their repair."),
    MetricKind("dledger_repairs_total", "counter", _GROUP, "Damaged ranges that were repaired from other nodes."),
    MetricKind("dledger_table_rows", "gauge", ("group", "table"), "Rows of a table about the log's writers."),
    MetricKind("dledger_table_rows_limit", "gauge", ("group", "table"), "Limit on them; at it newcomers are rejected."),
    MetricKind("dledger_open_transactions", "gauge", _GROUP, "Transactions without commit or abort."),
    MetricKind("dledger_pins", "gauge", _GROUP, "Readers that keep entries from retention here."),
    MetricKind("dledger_archived_end", "gauge", _GROUP, "End of what the archive has; only of a log with an archive."),
    MetricKind("dledger_archive_lag_bytes", "gauge", _GROUP, "Bytes from there to the visible end: retention waits."),
    MetricKind("dledger_archive_lag_seconds", "gauge", _GROUP, "Age of the first of these entries, in log time."),
    MetricKind(
        "dledger_archive_differs", "gauge", _GROUP, "1 if an entry here differs from the archive's record of it."
    ),
)
"""All metrics of dledger; the process's own (process_...) are prometheus_client's."""

_KINDS: Final = {kind.name: kind for kind in METRICS}
Values = dict[str, list[tuple[tuple[str, ...], float | Durations]]]
"""Name -> (values of the labels, value); a histogram's values are copies."""


def _copy(durations: Durations) -> Durations:
    copied = Durations()
    copied.counts, copied.total_s = list(durations.counts), durations.total_s
    return copied


class Metrics:
    """The metrics of one node; lives on its event loop.

    Args:
        node: the node.
        delays: lateness of the sampler's timer.
        executor: threads that write the text.
        version: of this package.
    """

    def __init__(self, node: ObservedNode, delays: Durations, executor: Executor, version: str) -> None:
        self._node = node
        self._delays = delays
        self._executor = executor
        self._version = version
        self._process = ProcessCollector(registry=None)

    async def response(self) -> HttpResponse:
        """Return all metrics: read group by group on the event loop, written in a thread."""
        values = self._of_node()
        for group in self._node.groups.values():
            with contextlib.suppress(DLedgerError):  # a group that cannot read its files shows what it could
                _add(values, (group.name,), self._of_group(group))
            await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        body = await loop.run_in_executor(self._executor, self._text, values)
        return HttpResponse(body, CONTENT_TYPE_LATEST)

    def _text(self, values: Values) -> bytes:
        return generate_latest(_Read([*_families(values), *self._process.collect()]))

    def _of_node(self) -> Values:
        node, config, handshakes = self._node, self._node.config, self._node.handshakes()
        expiry = node.expiry()
        values: Values = {
            "dledger_build_info": [((self._version, str(config.self_id)), 1)],
            "dledger_peer_connected": [],
            "dledger_requests_refused_total": [((name,), count) for name, count in sorted(node.refused.items())],
            "dledger_quota_refusals_total": [((name,), count) for name, count in node.quota_refusals.items()],
            "dledger_tls_handshakes_total": [((result,), handshakes[result]) for result in HANDSHAKE_RESULTS],
            "dledger_certificate_expiry_timestamp_seconds": [] if expiry is None else [((), expiry)],
            "dledger_event_loop_delay_seconds": [((), _copy(self._delays))],
        }
        connected = node.connected()
        for peer in node.members.others:
            values["dledger_peer_connected"].append(((str(peer.node_id),), peer.node_id in connected))
        alone = {
            "dledger_ready": not any(node.not_ready()),
            "dledger_client_connections": node.clients(),
            "dledger_client_connections_limit": config.limits.connections,
            "dledger_requests_in_progress": node.requests(),
            "dledger_append_inflight_bytes": node.appends.taken_bytes,
            "dledger_append_inflight_limit_bytes": config.inflight_bytes_max,
            "dledger_response_inflight_bytes": node.service.response_bytes,
        }
        return values | {name: [((), value)] for name, value in alone.items()}

    def _of_group(self, group: Group) -> Iterator[tuple[str, tuple[str, ...], float | Durations]]:
        for state in GroupState:
            yield "dledger_group_state", (state.value,), group.state is state
        measures = group.measures
        yield "dledger_elections_total", (), measures.elections
        yield "dledger_leader_changes_total", (), measures.leader_changes
        yield "dledger_append_batches_total", (), measures.batches
        yield "dledger_appended_entries_total", (), measures.entries
        yield "dledger_appended_bytes_total", (), measures.appended_bytes
        yield "dledger_commit_duration_seconds", (), _copy(measures.commit)
        yield "dledger_fsync_duration_seconds", (), _copy(measures.sync)
        yield "dledger_reads_total", (), measures.reads
        yield "dledger_read_entries_total", (), measures.read_entries
        yield "dledger_read_bytes_total", (), measures.read_bytes
        yield "dledger_scrub_rounds_total", (), self._node.scrub.rounds[group.name]
        yield "dledger_damaged_places", (), self._node.repairs.damaged(group.name)
        yield "dledger_repairs_total", (), self._node.repairs.repaired[group.name]
        if (hosted := group.hosted) is not None:
            yield from self._of_hosted(group, hosted)

    def _of_hosted(self, group: Group, hosted: HostedGroup) -> Iterator[tuple[str, tuple[str, ...], float | Durations]]:
        replica, limits = hosted.replica, self._node.config.limits
        status, log, configuration = replica.raft.status(), replica.log, replica.raft.configuration
        for role in Role:
            yield "dledger_role", (role.value,), status.role is role
        yield "dledger_term", (), status.term
        yield "dledger_leader_known", (), status.has_active_leader or replica.is_leader
        if (contact_ms := group.leader_contact_ms) >= 0:
            yield "dledger_leader_contact_seconds", (), contact_ms / 1000
        yield "dledger_recovering", (), status.is_recovering
        yield "dledger_voters", (), len(configuration.voters)
        yield "dledger_learners", (), len(configuration.learners)
        yield "dledger_member_change_pending", (), status.is_change_pending
        yield "dledger_first_index", (), log.first_index()
        yield "dledger_last_index", (), log.last_index()
        yield "dledger_commit_index", (), replica.readable_end - 1
        yield "dledger_visible_end", (), replica.visible_end
        yield "dledger_log_bytes", (), log.data_bytes
        is_voter = configuration.is_voter(replica.member) and not status.is_recovering
        yield "dledger_acknowledges", (), is_voter and replica.space.accepts_entries
        if replica.is_leader:
            yield "dledger_failures_survived", (), failures_survived(hosted)
            for member in hosted.membership.report().members:
                if member_id(member.node_id, member.store_uuid) != replica.member:
                    follower = (member.node_id,)
                    yield "dledger_follower_lag_entries", follower, member.lag_entries
                    yield "dledger_follower_lag_bytes", follower, member.lag_bytes
                    yield "dledger_follower_active", follower, member.is_active
        waiting, waiting_bytes = hosted.appends.waiting
        yield "dledger_appends_waiting", (), waiting
        yield "dledger_appends_waiting_bytes", (), waiting_bytes
        yield "dledger_batches_in_flight", (), hosted.appends.batches_in_flight
        yield "dledger_disk_free_bytes", (), replica.space.free_bytes
        yield "dledger_disk_size_bytes", (), replica.space.total_bytes
        yield "dledger_disk_full", (), replica.space.is_full
        yield "dledger_scrub_index", (), self._node.scrub.position.get(group.name, log.first_index())
        for table, rows, limit in replica.tables.usage(limits):
            yield "dledger_table_rows", (table,), rows
            yield "dledger_table_rows_limit", (table,), limit
        yield "dledger_open_transactions", (), len(replica.tables.transactions.open)
        yield "dledger_pins", (), len(replica.pins.starts(replica.pin_time_ms))
        if replica.tables.archive.is_active:
            yield "dledger_archived_end", (), replica.tables.archive.end
            yield "dledger_archive_differs", (), replica.measures.archive_differs
            if (lag := replica.measures.archive_lag) is not None:
                yield "dledger_archive_lag_bytes", (), lag.nbytes
                yield "dledger_archive_lag_seconds", (), lag.ms / 1000


def _add(
    values: Values, labels: tuple[str, ...], found: Iterable[tuple[str, tuple[str, ...], float | Durations]]
) -> None:
    for name, more, value in found:
        values.setdefault(name, []).append((labels + more, value))


def _families(values: Values) -> Iterator[Metric]:
    for name, found in values.items():
        kind = _KINDS[name]
        if kind.kind == "histogram":
            histogram = HistogramMetricFamily(name, kind.text, labels=kind.labels)
            for labels, value in found:
                assert isinstance(value, Durations)
                histogram.add_metric(labels, value.cumulative(_EVERY), value.total_s)
            yield histogram
        else:
            family: Metric
            made = CounterMetricFamily if kind.kind == "counter" else GaugeMetricFamily
            family = made(name, kind.text, labels=kind.labels)
            for labels, value in found:
                assert not isinstance(value, Durations)
                family.add_metric(labels, float(value))
            yield family


class _Read(Collector):
    """Families that are complete already, as ``generate_latest`` wants them."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return them."""
        return self._families
