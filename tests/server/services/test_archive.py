"""The archive on the leader: ranges, proofs, lies of a job, versions of members, and what retention waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pytest

from dledger_core import control
from dledger_core.config import LIMITS, StorageConfig, format_peers
from dledger_core.connect import AsyncClient
from dledger_core.control import ArchivedRange, TransactionId
from dledger_core.digest import RowsDigest, rows_digest
from dledger_core.errors import (
    ArchiveRefusedError,
    CorruptRecordError,
    DLedgerError,
    IndexOutOfRangeError,
    OtherLogError,
)
from dledger_core.ids import Index, MemberId
from dledger_core.net.messages import ProveRequest, RangesRequest
from dledger_core.net.protocol import Type
from dledger_core.record import ProposedBatch, data_entries
from dledger_core.server.admin_log import AdminLog
from dledger_core.server.maintenance.archive_guard import ArchiveGuard
from dledger_core.server.maintenance.disk_rounds import DiskRounds
from dledger_core.server.maintenance.retention import RetentionPolicy
from dledger_core.server.services.appends import AppendedRange
from dledger_core.server.services.archive import Archive, range_of
from dledger_core.server.services.membership import Membership
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import Layout, load_log_meta, save_log_meta
from tests.support.faulty_files import FaultyFiles
from tests.support.replica_group import Asker, HandDriven
from tests.support.server_group import RAFT, ServerGroup

T = TypeVar("T")
SEGMENT = 1 << 16
STORAGE = StorageConfig(data_segment_bytes=SEGMENT, index_segment_bytes=3200, preallocate_bytes=0)
TABLE = "file:///archive"
GREEDY = RetentionPolicy(retain_bytes=1, force_clean=True)


class Served:
    """A hand-driven replica with the archive service."""

    def __init__(self, directory: Path, *, voters: tuple[str, ...] = ("n0",), **options: Any) -> None:
        self.n0 = HandDriven(directory, storage=options.pop("storage", STORAGE), voters=voters, **options)
        self.directory = directory

    def __enter__(self) -> Served:
        self.n0.lead()
        self.ask = Asker(self.n0)
        self.membership = Membership(
            self.n0.replica, self._none, AdminLog(self.directory.parent), self._none, LIMITS, lambda: 0.0
        )
        self.archive = Archive(self.ask.appends, self.membership, None, LIMITS, 3 * SEGMENT, 20)
        return self

    def __exit__(self, *_: object) -> None:
        self.n0.replica.store.close_blocking()

    async def _none(self, *_: object) -> Any:
        raise AssertionError

    def append(self, batches: int, nbytes: int = 20_000) -> None:
        for _ in range(batches):
            self.ask.plain(bytes(nbytes))
            self.n0.run()

    def serve(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a request; the other voters take everything."""

        async def drive() -> T:
            task = asyncio.ensure_future(work)
            while not task.done():
                self.n0.acknowledge()
                self.n0.confirm()
                await asyncio.sleep(0.001)
            return task.result()

        return asyncio.run(drive())

    def ranges(self, start: int = -1, until: int | None = None) -> list[list[int]]:
        return self.serve(self.archive.ranges(RangesRequest(start=start, until=until))).ranges

    def rows(self, start: int, end: int) -> pa.Table:
        log, batches = self.n0.log, []
        skip = self.n0.replica.visibility.orphaned(start, end)
        while start < end:
            records = log.read(start, end, 1 << 20)
            batches.append(data_entries(records, start, skip))
            start += records.count
        return pa.Table.from_batches(batches)

    def prove(self, start: int, end: int, digest: RowsDigest | None = None, table: str = TABLE) -> tuple[bool, int]:
        digest = digest or rows_digest(self.rows(start, end))
        request = ProveRequest(start=start, end=end, rows=digest.rows, digest=digest.digest, table=table)
        return self.serve(self.archive.prove(request, "test"))

    def refused(self, start: int, end: int, **options: Any) -> str:
        with pytest.raises(ArchiveRefusedError) as caught:
            self.prove(start, end, RowsDigest(0, b""), **options)
        return caught.value.reason

    @property
    def recorded(self) -> list[tuple[int, int]]:
        return [(found.start, found.end) for found in self.n0.replica.tables.archive.containing(0)]

    def retain(self, policy: RetentionPolicy = GREEDY) -> Index:
        """Run rounds of retention; return the first index."""

        async def rounds() -> None:
            with ThreadPoolExecutor(1) as executor:
                disk = DiskRounds(policy, lambda: [self.n0.replica], executor, lambda _: True)
                for _ in range(3):
                    await disk.retain()
                    self.n0.run()

        asyncio.run(rounds())
        return self.n0.log.first_index()


def test_equal_digest_is_recorded_with_what_identifies_the_range(tmp_path) -> None:
    with Served(tmp_path / "store") as served:
        served.append(5)
        assert served.prove(0, 3) == (True, 2)
        assert served.prove(0, 3) == (True, 2), "again"
        assert served.prove(3, 6) == (True, 3)
        [_, found] = served.n0.replica.tables.archive.containing(0)
        log = served.n0.log
        assert (found.position, found.nbytes) == (log.position_of(3), log.position_of(6) - log.position_of(3))
        assert (found.rows, found.digest) == (3, rows_digest(served.rows(3, 6)).digest)
        assert (found.term, found.last_time_ms) == (1, served.n0.wall_ms)
        assert served.n0.replica.tables.archive.table == TABLE
    with Served(tmp_path / "store") as served:
        assert served.recorded == [(0, 3), (3, 6)]
        assert served.n0.replica.raft.configuration.version == 2


def test_older_programs_refuse_the_store_before_the_first_range_and_after_a_crash(tmp_path) -> None:
    layout, files = Layout(tmp_path / "store"), OsFiles()
    with Served(layout.root) as served:
        served.append(3)
        served.serve(served.membership.raise_version(2, "test"))
        meta = load_log_meta(files, layout.log_meta)
        assert meta is not None
        assert meta.format_version == 2
    # As a crash leaves it that kept the entry with the version, before anyone could count on it.
    save_log_meta(files, layout.log_meta, replace(meta, format_version=1))
    with Served(layout.root):
        meta = load_log_meta(files, layout.log_meta)
        assert meta is not None
        assert meta.format_version == 2


def test_second_of_two_jobs_at_once_hears_that_the_other_was_first(tmp_path) -> None:
    with Served(tmp_path / "store", voters=("n0", "n1", "n2")) as served:
        served.append(6)
        served.n0.acknowledge()
        answers: list[Any] = []
        for end in (3, 5):
            served.archive.record(range_of(served.n0.log, 0, end, []), TABLE, answers.append)
        served.n0.run()
        assert answers == []
        for _ in range(3):
            served.n0.acknowledge()
            served.n0.run()
        assert isinstance(answers[0], AppendedRange)
        assert isinstance(answers[1], ArchiveRefusedError)
        assert answers[1].reason == "not-next"
        assert served.recorded == [(0, 3)]


def test_only_rows_that_read_committed_shows_are_compared_and_a_range_may_have_none(tmp_path) -> None:
    with Served(tmp_path / "store") as served:
        transaction = TransactionId("q", 0, "run")
        served.ask.attempt(transaction, "a", b"row", b"row")
        served.n0.run()
        assert served.n0.replica.visible_end == 1
        assert served.refused(0, 4) == "not-visible"
        served.ask.transactions.abort(transaction, served.ask.answers.append)
        served.n0.run()
        assert served.prove(0, 5, RowsDigest(0, rows_digest(served.rows(0, 1)).digest)) == (True, 0)
        assert served.recorded == [(0, 5)]


@pytest.mark.parametrize(
    "lie", [RowsDigest(2, b"d" * 32), RowsDigest(2, b""), RowsDigest(3, b"d" * 32), RowsDigest(0, b"d" * 32)]
)
def test_wrong_digest_records_nothing_and_gets_the_number_of_rows(tmp_path, lie: RowsDigest) -> None:
    with Served(tmp_path / "store") as served:
        served.append(5)
        last = served.n0.log.last_index()
        assert served.prove(0, 3, lie) == (False, 2)
        assert served.prove(0, 3, replace(rows_digest(served.rows(0, 3)), rows=1)) == (False, 2)
        assert served.n0.log.last_index() == last
        served.prove(0, 3)
        assert served.prove(0, 3, lie) == (False, 2), "a recorded range is not proved again"
        assert served.recorded == [(0, 3)]


def test_gap_overlap_and_what_is_not_visible_or_too_large_is_refused(tmp_path) -> None:
    with Served(tmp_path / "store") as served:
        served.append(30, 1000)
        assert served.refused(1, 3) == "not-next"
        served.prove(0, 3)
        assert [served.refused(*pair) for pair in [(0, 4), (2, 5), (4, 6), (0, 2)]] == ["not-next"] * 4
        assert [served.refused(3, end) for end in (3, 2, 1000)] == ["not-visible"] * 3
        assert served.refused(3, 24) == "too-large"
        served.append(6, 60_000)
        assert served.recorded == [(0, 3)]


@pytest.mark.parametrize("table", ["", "x" * 2001, "s3://key:secret@bucket/table"])
def test_uri_that_the_log_must_not_keep_is_refused(tmp_path, table: str) -> None:
    with Served(tmp_path / "store") as served:
        served.append(2)
        assert served.refused(0, 2, table=table) == "table"


def test_damaged_record_of_the_leader_proves_nothing(tmp_path) -> None:
    files = FaultyFiles()
    with Served(tmp_path / "store", files=files) as served:
        served.append(3)
        digest = rows_digest(served.rows(0, 3))
        files.content(tmp_path / "store/data" / f"{0:020}")[int(served.n0.log.position_of(2)) + 60] ^= 1
        with pytest.raises(CorruptRecordError):
            served.prove(0, 3, digest)
        assert served.recorded == []


def test_profile_a_has_no_archive(tmp_path) -> None:
    storage, raft = replace(STORAGE, profile="A"), replace(RAFT, noop_on_election=False)
    with Served(tmp_path / "store", storage=storage, raft=raft) as served:
        served.append(3)
        assert served.refused(0, 3) == "profile"
        with pytest.raises(ArchiveRefusedError):
            served.ranges()


def test_ranges_are_full_or_old_or_closed_by_the_caller(tmp_path) -> None:
    with Served(tmp_path / "store") as served:
        served.append(30, 100)
        full = served.ranges()
        assert [each[:2] for each in full] == [[0, 20]]
        assert [each[:2] for each in served.ranges(until=25)] == [[0, 20], [20, 25]]
        assert [each[:2] for each in served.ranges(until=3)] == [[0, 3]]
        assert sum(each[2] for each in served.ranges(until=1 << 40)) == served.n0.log.staged_end
        served.append(12, 30_000)
        [_, (start, end, nbytes), *_] = served.ranges()
        assert start == 20 < end < 40
        assert 2 * SEGMENT < nbytes < 4 * SEGMENT
        while found := served.ranges():
            start, end, _ = found[0]
            assert served.prove(start, end)[0]
        open_start = served.serve(served.archive.ranges(RangesRequest())).start
        assert open_start == end
        served.n0.running_ms += 3_599_000  # the entry that recorded the range before has a log time
        assert served.ranges() == []
        served.n0.running_ms += 1_000
        [(start, stop, _)] = served.ranges()
        assert (start, stop) == (end, served.n0.replica.visible_end)


def test_nodes_that_have_not_shown_their_version_are_named(tmp_path) -> None:
    with Served(tmp_path / "store", voters=("n0", "n1", "n2")) as served:
        served.append(3)
        served.n0.acknowledge()
        served.membership.shown(MemberId("n1"), 2)
        served.membership.shown(MemberId("n2"), 1)
        with pytest.raises(ArchiveRefusedError) as caught:
            served.prove(0, 3, RowsDigest(0, b""))
        assert (caught.value.reason, caught.value.values["nodes"]) == ("older-nodes", ["n2"])
        assert served.n0.replica.raft.configuration.version == 0
        served.membership.shown(MemberId("n2"), 2)
        assert served.prove(0, 3)[0]
        assert served.n0.replica.raft.configuration.version == 2
        served.membership.shown(MemberId("n2"), 1)
        assert served.prove(3, 4)[0], "such a node cannot attach any longer"


# --- retention --------------------------------------------------------------------------------------------------------


def test_retention_waits_for_the_archive_until_it_ends(tmp_path) -> None:
    with Served(tmp_path / "store") as served:
        served.append(40)
        served.prove(0, 10)
        assert 0 < served.retain() <= 10
        served.prove(10, 19)
        first = served.retain()
        assert 10 < first <= 19
        served.append(20)
        assert served.retain() == first
        with pytest.raises(ArchiveRefusedError) as caught:
            served.ranges(start=first - 1)
        assert caught.value.reason == "trimmed"
        served.serve(served.archive.end("test"))
        served.serve(served.archive.end("test"))
        assert served.recorded == []
        assert served.retain() > 19


def test_no_caller_trims_what_is_not_archived(tmp_path) -> None:
    with Served(tmp_path / "store") as served:
        served.append(40)
        served.prove(0, 10)
        for segment in reversed(served.n0.log.segment_summaries()):
            served.n0.replica.store.trim(segment.first_index)
            served.n0.run()
        assert 0 < served.n0.log.first_index() <= 10


def test_range_that_waits_for_its_commit_holds_retention_back(tmp_path) -> None:
    with Served(tmp_path / "store", voters=("n0", "n1", "n2")) as served:
        served.append(40)
        served.n0.acknowledge()
        found = ArchivedRange(
            start=0, end=5, rows=0, digest=b"d", position=0, nbytes=1, last_time_ms=0, term=1, check=1
        )
        fields = {"k": "archived", "r": found.row(), "u": TABLE, "b": True}
        served.n0.replica.propose(ProposedBatch(control=control.pack(fields)))
        served.n0.run()
        assert served.recorded == []
        assert served.retain() == 0
        served.n0.depose()
        assert served.retain() == 0, "the next leader may have it"


def test_first_range_is_pinned_while_it_is_proved(tmp_path) -> None:
    with Served(tmp_path / "store") as served:
        served.append(40)
        served.prove(0, 3, RowsDigest(1, b"wrong"))
        assert served.retain() == 0


@pytest.mark.parametrize("field", ["check", "term"])
def test_difference_from_the_record_stops_retention(tmp_path, field: str) -> None:
    with Served(tmp_path / "store") as served:
        served.append(40)
        served.prove(0, 10)
        [found] = served.n0.replica.tables.archive.containing(0)
        recorded = replace(found, **{field: getattr(found, field) ^ 1})
        served.n0.replica.tables.archive.containing = lambda *_, **__: [recorded]
        guard = ArchiveGuard(served.n0.replica, 1000)
        assert guard.deletable_end(0, 9) == 0
        assert served.n0.replica.measures.archive_differs
        assert served.retain() == 0


def test_record_of_entries_that_are_still_to_come_is_no_difference(tmp_path) -> None:
    with Served(tmp_path / "store", voters=("n0", "n1", "n2")) as served:
        served.append(10)  # the others have none of them: another leader's entries may get these indexes
        coming = replace(range_of(served.n0.log, 0, 5, []), check=1)
        served.n0.replica.tables.archive.containing = lambda *_, **__: [coming]
        assert ArchiveGuard(served.n0.replica, 1000).deletable_end(0, 9) < 5
        assert not served.n0.replica.measures.archive_differs


def test_lag_is_measured_in_bytes_and_log_time(tmp_path) -> None:
    with Served(tmp_path / "store") as served:
        guard, measures = ArchiveGuard(served.n0.replica, 600_000), served.n0.replica.measures
        guard.measure()
        assert measures.archive_lag is None
        served.append(10, 1000)
        served.prove(0, 5)
        guard.measure()
        log = served.n0.log
        nbytes = log.position_of(log.last_index() + 1) - log.position_of(5)
        assert measures.archive_lag == (nbytes, 0)
        served.n0.running_ms += 700_000
        guard.measure()
        assert measures.archive_lag == (nbytes, 700_000), "the entry that recorded the range has a log time"


# --- over the wire ----------------------------------------------------------------------------------------------------


async def test_archive_of_a_group_is_the_same_on_all_nodes_and_named_to_readers(tmp_path) -> None:
    storage = StorageConfig(data_segment_bytes=SEGMENT, index_segment_bytes=3200, preallocate_bytes=0)
    retention = RetentionPolicy(retain_bytes=SEGMENT)
    async with (
        ServerGroup(tmp_path, storage=storage, retention=retention) as group,
        AsyncClient(format_peers(group.peers)) as client,
    ):
        assert (await client.archived_ranges()).archive is None
        for _ in range(20):
            await client.append([bytes(20_000)])
        end = (await client.bounds()).end
        found = await client.archivable_ranges(until=end)
        assert [(each.start, each.end) for each in found.ranges] == [(0, end)]
        rows = []
        while len(rows) < 20:
            rows += (await client.fetch(len(rows) + 1, end)).batch.to_pylist()
        table = pa.Table.from_pylist(rows, (await client.fetch(1, 2)).batch.schema)
        proof = await client.prove_archived(0, end, rows_digest(table), table=TABLE)
        assert (proof.equal, proof.rows) == (True, 20)
        recorded = await client.archived_ranges()
        assert [(each.start, each.end, each.rows) for each in recorded.ranges] == [(0, end, 20)]
        await client.append([bytes(20_000)] * 3)
        commit = (await client.bounds()).commit_index
        for node_id in group.nodes:
            await client.fetch(commit, commit + 1, node=node_id, min_commit=commit)
            await group.nodes[node_id].disk_rounds.retain()
            replica = group.hosted(node_id).replica
            assert replica.tables.archive.end == end
            assert replica.raft.first_index > 0
        metadata = await client.metadata()
        assert metadata.archive is not None
        raw = await group.client()
        asked = {"start": end, "end": end + 1, "rows": 0, "digest": b"", "table": TABLE}
        for lie in ({"lu": "of another log"}, {"lu": metadata.log_uuid, "start": 0}):
            with pytest.raises((OtherLogError, ArchiveRefusedError)):
                await raw.ask(Type.PROVE, **(asked | lie))
        assert (metadata.archive.start, metadata.archive.end, metadata.archive.table) == (0, end, TABLE)
        with pytest.raises(IndexOutOfRangeError) as caught:
            await client.get(1)
        assert caught.value.values["archive"] == TABLE
        assert TABLE in caught.value.remedy
        await client.end_archive()
        assert (await client.metadata()).archive is None
        with pytest.raises(DLedgerError) as refused:
            await client.prove_archived(1, 2, RowsDigest(0, b""), table=TABLE)
        assert isinstance(refused.value, ArchiveRefusedError)
