"""Comparison of the source with the other replicas of its group, before anything is written.

The rule is that of ``dledger repair --from``: a majority decides what an entry is (``replica_comparison``). The group
may have more replicas than are named; what these could have is assumed against the source.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from dledger_core.errors import ConfigError, CorruptRecordError, DLedgerError, StoreMismatchError
from dledger_core.ids import Index
from dledger_core.rocketmq.convert.plan import Step
from dledger_core.rocketmq.convert.prefix import read_commitlog
from dledger_core.rocketmq.convert.source import WithoutMeta, check_broker_idle, check_node_idle
from dledger_core.rocketmq.leaving.job import Job
from dledger_core.rocketmq.leaving.plan import Compared
from dledger_core.rocketmq.replica_comparison import Agreement, Comparison, Entry, Replica, Run, check_distinct
from dledger_core.rocketmq.store.commit_log import commit_log_files
from dledger_core.rocketmq.store.commitlog_prefix import CommitLogFingerprint
from dledger_core.rocketmq.store.location import Location, commitlog_next_to, locate
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.members_file import newest_configuration
from dledger_core.storage.read.store_reader import StoreReader

_GROUP_MIN: Final = 3
"""Size of a group of unknown size: two stores are its majority, and one is not."""
_PEERS: Final = "dLegerPeers"
_SHOWN: Final = 3
"""Ranges that a note names."""
_AUDIT: Final = "compare all replicas with jobs/audit_replicas.py"


def compare_replicas(job: Job) -> Compared:
    """Compare the entries to convert with those of the replicas in the request; without any, return at once.

    Raises:
        ConfigError: the named replicas are too few, or one of them is named twice.
        StoreBusyError: a replica is running, and the commit index of live nodes does not end the conversion.
        StoreMismatchError: a majority has other entries than the source, or more; or these are not its replicas.
        CorruptRecordError: an entry of the source is damaged.
    """
    request, log = job.request, job.source.log
    if not request.replicas or log is None:
        return Compared()
    began = time.monotonic()
    locations = [_located(path) for path in request.replicas]
    stores = [location.store for location in locations if location.store is not None]
    check_distinct(log.path, stores)
    size = _group_size(job, log, 1 + len(stores))
    if 2 * (1 + len(stores)) <= size:
        raise ConfigError(
            f"--replica names {len(stores)} replicas: with the source these are no majority of the group's {size}",
            "",
            "name the stores of all other replicas of the group, each with --replica",
        )
    for store in stores if request.committed is None else ():
        check_broker_idle(store.absolute().parent)
        check_node_idle(Layout(store))
    files = WithoutMeta() if job.source.continued_by_java else OsFiles()
    with ExitStack() as stack:
        opened = [stack.enter_context(closing(Replica(path, files))) for path in (log.path, *stores)]
        _check_same_log(opened)
        found = _Replicas(job, opened, locations, size).compared()
    return replace(found, seconds=time.monotonic() - began)


def _located(path: Path) -> Location:
    location = locate(path)
    location.check()
    if location.store is None:
        raise StoreMismatchError(
            "the replica has a classic CommitLog and no DLedger store",
            str(path),
            "name the store of another replica, or its broker's directory",
        )
    return location


def _group_size(job: Job, log: StoreReader, given: int) -> int:
    """Return the number of the group's replicas: from the store, the broker's configuration, or those given."""
    peers = next((each.value for each in reversed(job.settings.properties) if each.key == _PEERS), "")
    known = sum(bool(each.strip()) for each in peers.split(";"))
    if job.source.meta is not None:
        found = newest_configuration(OsFiles(), Layout(log.path))
        known = 0 if found is None else len(found.configuration.voters)
    return max(given, known or _GROUP_MIN)


def _check_same_log(replicas: Sequence[Replica]) -> None:
    """Raise StoreMismatchError if the stores themselves record that they are not of one log."""
    first = replicas[0]
    for each in replicas[1:]:
        for name, own, other in (
            ("program", _program(first), _program(each)),
            ("group", first.log.group, each.log.group),
            ("log", first.log.log_uuid, each.log.log_uuid),
            ("size of data files", first.sizes[0], each.sizes[0]),
        ):
            if own != other:
                raise StoreMismatchError(
                    f"the {name} of the replica is {other}, and that of the source {own}",
                    str(each.path),
                    "name the stores of the other replicas of its group",
                )


def _program(replica: Replica) -> str:
    return "DLedger for Python" if replica.log.writer == "dledger-python" else "Java DLedger"


class _Replicas:
    """The opened source and its replicas.

    Args:
        job: the run.
        replicas: the source's store, then those of the others.
        locations: of the others.
        size: number of the group's replicas.
    """

    def __init__(self, job: Job, replicas: Sequence[Replica], locations: Sequence[Location], size: int) -> None:
        self._job = job
        self._all = replicas
        self._names = [job.request.source, *job.request.replicas]
        self._locations = locations
        self._size = size
        self._majority = size // 2 + 1
        self._notes: list[str] = []

    def compared(self) -> Compared:
        """Compare everything; raise unless a majority has what the source has."""
        agreement = self._compare_entries()
        if self._job.request.committed is None:  # else a live majority has decided
            self._check_end()
            self._compare_left_out()
        self._compare_classic()
        return Compared(
            len(self._all) - 1,
            agreement.proven,
            _count(agreement.alone),
            notes=(*_notes(agreement, self._names), *self._notes),
        )

    def _comparison(self) -> Comparison:
        return Comparison(self._all, self._majority, records_only=True)

    def _compare_entries(self) -> Agreement:
        comparison, entries, start = self._comparison(), self._job.entries, self._all[0].start
        runs: list[Run] = []
        at = start
        for low, high in [*entries.dropped, (entries.end.index, entries.end.index)]:
            runs += comparison.runs(at, low, self._progress(at - start))
            at = max(at, high)
        agreement = comparison.agreement
        for number, each in enumerate(self._all[1:], 1):
            low, high = max(start, each.start), min(entries.end.index, each.end)
            if low < high and not agreement.equal[number]:
                raise StoreMismatchError(
                    f"the replica has none of the source's entries {low} to {high - 1}",
                    str(self._names[number]),
                    "name the stores of the other replicas of its group",
                    {"start": low, "end": high},
                )
        if runs:
            raise self._difference(runs)
        if agreement.alone and not agreement.proven:
            raise StoreMismatchError(
                "no entry of the source is on a majority of the replicas",
                str(self._all[0].path),
                "name the stores of the other replicas of its group, which have not deleted its entries",
                {"first_index": start, "last_index": entries.end.index - 1},
            )
        return agreement

    def _progress(self, before: int) -> Callable[[int], None]:
        """Return a function that reports progress after this number of entries."""
        total, every = self._job.source.data_bytes, self._job.entries.end.index - self._all[0].start

        def report(entries: int) -> None:
            done = before + entries
            self._job.on_step(Step("compare", done, total * done // max(1, every), total))

        return report

    def _difference(self, runs: Sequence[Run]) -> DLedgerError:
        """Return the error of the first run of entries that differ."""
        run, target = runs[0], self._all[0]
        one = run.end - run.start == 1
        entries = f"entry {run.start}" if one else f"entries {run.start} to {run.end - 1}"
        where = str(target.data.path(run.position) if run.position >= 0 else target.path)
        values: dict[str, Any] = {"start": run.start, "end": run.end, "position": run.position, "ranges": len(runs)}
        if run.unproven is not None:
            damage = f"; the source is damaged: {run.reason}" if run.damaged else ""
            what = f"no majority of the group's {self._size} replicas has the same {entries}{damage}"
            span = str(run.start) if one else f"{run.start}-{run.end - 1}"
            choice = "" if run.damaged else ", or take those of the source with --replica-checked"
            asked = "name the stores of all replicas of the group; then " if len(self._all) < self._size else ""
            remedy = f"{asked}{_AUDIT}, and leave the entries out with --drop-damaged {span}{choice}"
            return StoreMismatchError(what, where, remedy, values)
        holders = [str(self._names[number]) for number in sorted(run.holders)]
        choices = [f"convert {shlex.quote(holders[0])} instead"] if holders else []
        if target.log.writer == "java-a" and run.end < target.end:
            stores = [word for each in self._all[1:] for word in ("--from", str(each.path))]
            choices.append(
                f"repair the source: {shlex.join(['dledger', 'repair', '--dir', str(target.path), *stores])}"
            )
        remedy = ", or ".join(choices) or _AUDIT
        values = values | {"replicas": holders}
        if run.damaged:
            what = f"{entries} of the source {'is' if one else 'are'} damaged, and a majority of the replicas has "
            return CorruptRecordError(f"{what}{'it' if one else 'them'}: {run.reason}", where, remedy, values)
        return StoreMismatchError(f"a majority of the replicas has other bytes in {entries}", where, remedy, values)

    def _check_end(self) -> None:
        """Raise unless the conversion ends with the last entry that may be committed."""
        target, end = self._all[0], self._job.entries.end.index
        recorded = [each.log.checkpoint_commit_index for each in self._all[1:]]
        committed = max((int(each) for each in recorded if each is not None), default=-1)
        if committed >= end:
            other = ", or all entries of this one with --until end" if committed < target.end else ""
            raise StoreMismatchError(
                f"a replica records entry {committed} as committed, and the conversion ends with entry {end - 1}",
                str(self._names[1 + recorded.index(Index(committed))]),
                f"convert that replica{other}",
                {"committed_index": committed, "last_index": end - 1},
            )
        holders: dict[Entry, list[int]] = {}
        for number, each in enumerate(self._all[1:], 1):
            for entry in each.entries(target.end, target.end + 1).values():
                holders.setdefault(entry, []).append(number)
        unseen = self._size - len(self._all)
        for numbers in holders.values():
            if len(numbers) + unseen >= self._majority:
                longest = max(numbers, key=lambda number: self._all[number].end)
                also = f", and {unseen} were not named" if unseen else ""
                raise StoreMismatchError(
                    f"the source ends with entry {target.end - 1}, and {len(numbers)} of the group's {self._size} "
                    f"replicas have the next one{also}: it may be acknowledged",
                    str(target.path),
                    f"convert {shlex.quote(str(self._names[longest]))} instead",
                    {"last_index": target.end - 1, "replica_last_index": self._all[longest].end - 1},
                )

    def _compare_left_out(self) -> None:
        end, stop, comparison = self._job.entries.end.index, self._all[0].end, self._comparison()
        comparison.runs(end, stop)
        proven = comparison.agreement.proven
        if proven:
            self._notes.append(
                f"{proven} entries that are left out are on a majority of the replicas, and may be acknowledged: "
                "--until end converts them"
            )

    def _compare_classic(self) -> None:
        """Compare the CommitLog before the store by its fingerprint."""
        part = self._job.entries.classic
        if part is None:
            return
        source = Path(part.files[0].path).parent
        directories = [source, *(_commitlog_of(each) for each in self._locations)]
        start = max(commit_log_files(path)[0].position for path in directories if path is not None)
        found: list[CommitLogFingerprint | None] = []
        for path in directories:
            try:
                found.append(None if path is None else read_commitlog(path, start).fingerprint)
            except DLedgerError as error:
                if path is source:
                    raise
                self._notes.append(f"the CommitLog before the store of a replica was not compared: {error}")
                found.append(None)
        others = [number for number, each in enumerate(found) if each is not None and each != found[0]]
        if found.count(found[0]) >= self._majority:
            names = ", ".join(str(self._names[number]) for number in others)
            self._notes += [f"{names}: the CommitLog before the store is another one"] if others else []
        elif others:
            raise StoreMismatchError(
                "no majority of the replicas has the CommitLog that precedes the store",
                str(source),
                f"{_AUDIT}, which names the parts that differ, and convert a replica that a majority equals",
                {"start": start, "replicas": [str(self._names[number]) for number in others]},
            )
        else:
            self._notes.append("the CommitLog before the store was not compared: too few replicas have one")


def _commitlog_of(location: Location) -> Path | None:
    """Return the CommitLog that precedes a replica's store, which may be named alone."""
    if location.commitlog is not None or location.store is None:
        return location.commitlog
    return commitlog_next_to(location.store)


def _count(ranges: Sequence[tuple[int, int]]) -> int:
    return sum(end - start for start, end in ranges)


def _shown(ranges: Sequence[tuple[int, int]]) -> str:
    names = [
        f"entry {start}" if start + 1 == end else f"entries {start} to {end - 1}" for start, end in ranges[:_SHOWN]
    ]
    return ", ".join([*names, f"and {_count(ranges[_SHOWN:])} more"] if len(ranges) > _SHOWN else names)


def _notes(agreement: Agreement, names: Sequence[Path]) -> list[str]:
    found = [
        f"{names[number]} has damage, or other bytes than the source and a majority: {_shown(ranges)}"
        for number, ranges in sorted(agreement.faulty.items())
    ]
    if agreement.alone:
        found.append(
            "too few replicas for a majority have these entries, because the others deleted them or do not have them "
            f"yet: {_shown(agreement.alone)}"
        )
    return found
