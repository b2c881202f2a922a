"""``convert --to commitlog --replica``: the source is compared with the stopped replicas before anything is written."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dledger_core import open_store
from dledger_core.errors import ConfigError, CorruptRecordError, DLedgerError, StoreBusyError, StoreMismatchError
from dledger_core.rocketmq.leaving import CommittedEntry, LeaveReport, LeaveRequest, leave
from tests.cli.command import error_of, last_error, run
from tests.jobs.broker_store import messages, write_broker_store
from tests.rocketmq import golden
from tests.rocketmq.convert.stores import running_broker, snapshot
from tests.rocketmq.convert.test_moved import message_bodies
from tests.rocketmq.golden import MIXED, REUSED, THREE
from tests.rocketmq.leaving.dying_files import DyingFiles, Killed
from tests.rocketmq.leaving.test_leaving import broker, left
from tests.rocketmq.test_replica_repair import BODIES, ENTRIES, FILE_BYTES, place_of, spoil, three
from tests.spark_connector.store_writer import StoreWriter

Change = Callable[[list[Path]], None]


def compared(stores: list[Path], new: Path, **given: Any) -> LeaveReport:
    return left(stores[0], new, replicas=tuple(stores[1:]), replica_checked=False, **given)


def write(store: Path, end: int, *, committed: int | None = None, bodies: list[bytes] = BODIES) -> None:
    """Write a store again, with fewer entries."""
    shutil.rmtree(store)
    write_broker_store(
        store, bodies[:end], committed=end - 1 if committed is None else committed, data_bytes=FILE_BYTES
    )


def ends(*given: tuple[int, int]) -> Change:
    """Write the stores with these ends and commit indexes."""

    def change(stores: list[Path]) -> None:
        for store, (end, committed) in zip(stores, given, strict=True):
            write(store, end, committed=committed)

    return change


def nothing(stores: list[Path]) -> None:
    """Leave the stores as they are."""


def other_bytes(number: int, index: int = 100) -> Change:
    return lambda stores: spoil(stores[number], index)


def no_header(number: int) -> Change:
    return lambda stores: spoil(stores[number], 100, 0, bytes(48))


def lost_file(number: int) -> Change:
    return lambda stores: place_of(stores[number], 100)[0].unlink()


def no_majority(stores: list[Path]) -> None:
    spoil(stores[0], 100)
    spoil(stores[2], 100, 90)


def other_group(stores: list[Path]) -> None:
    write(stores[2], ENTRIES, bodies=messages(range(ENTRIES), body=b"b" * 84))


def other_sizes(stores: list[Path]) -> None:
    shutil.rmtree(stores[2])
    write_broker_store(stores[2], BODIES, committed=ENTRIES - 1, data_bytes=2 * FILE_BYTES)


def trimmed(stores: list[Path]) -> None:
    """Delete the first file of both replicas, as brokers do when their disks are full."""
    for store in stores[1:]:
        min((store / "data").iterdir()).unlink()


def first_indexes(stores: list[Path]) -> int:
    with open_store(stores[1]) as log:
        return int(log.first_index)


@pytest.mark.parametrize(
    ("change", "few", "notes"),
    [
        (nothing, 0, []),
        (other_bytes(2), 0, ["dledger-n2", "entry 100"]),
        (no_header(1), 0, ["dledger-n1", "entry 100"]),
        (lost_file(2), 0, ["dledger-n2", "entries "]),
        (ends((300, 299), (290, 289), (300, 299)), 0, []),
        (ends((300, 299), (290, 289), (290, 289)), 10, ["too few", "entries 290 to 299"]),
        (ends((290, 289), (290, 289), (300, 289)), 0, []),
        (trimmed, None, ["too few", "entries 0 to "]),
    ],
)
def test_source_that_majority_equals_is_converted(
    tmp_path: Path, change: Change, few: int | None, notes: list[str]
) -> None:
    stores = three(tmp_path)
    change(stores)
    if few is None:
        few = first_indexes(stores)
        assert few > 0
    report = compared(stores, tmp_path / "new")
    assert (report.replicas_compared, report.entries_on_few_replicas) == (2, few)
    assert report.entries_compared + few == report.messages == report.last_index + 1
    assert [word for word in notes if word not in "\n".join(report.notes)] == []
    assert len(report.notes) == 1 + bool(notes), "one is about the missing broker's directory"


@pytest.mark.parametrize(
    ("change", "error", "values", "remedy"),
    [
        (other_bytes(0), StoreMismatchError, {"start": 100, "end": 101}, ["convert", "n1/dledger-n1", "repair --dir"]),
        (no_header(0), CorruptRecordError, {"start": 100, "end": 101}, ["convert", "n1/dledger-n1", "repair --dir"]),
        (other_bytes(0, ENTRIES - 1), StoreMismatchError, {"start": ENTRIES - 1}, ["convert", "n1/dledger-n1"]),
        (no_majority, StoreMismatchError, {"start": 100, "end": 101}, ["--drop-damaged 100", "--replica-checked"]),
        (ends((290, 289), (300, 299), (300, 299)), StoreMismatchError, {"committed_index": 299}, ["convert that"]),
        (ends((290, 289), (300, 289), (300, 289)), StoreMismatchError, {"replica_last_index": 299}, ["n1/dledger-n1"]),
        (ends((290, 289), (290, 289), (300, 295)), StoreMismatchError, {"committed_index": 295}, ["convert that"]),
        (other_group, StoreMismatchError, {"start": 0, "end": ENTRIES}, ["of its group"]),
        (other_sizes, StoreMismatchError, {}, ["of its group"]),
    ],
)
def test_source_that_no_majority_equals_is_refused(
    tmp_path: Path, change: Change, error: type[DLedgerError], values: dict[str, int], remedy: list[str]
) -> None:
    stores = three(tmp_path)
    change(stores)
    before = [snapshot(store) for store in stores]
    for dry_run in (True, False):
        with pytest.raises(error) as refused:
            compared(stores, tmp_path / "new", dry_run=dry_run)
        assert type(refused.value) is error
        assert values.items() <= refused.value.values.items()
        assert [words for words in remedy if words not in refused.value.remedy] == []
    assert [snapshot(store) for store in stores] == before
    assert not list((tmp_path / "new").iterdir())


def test_remedies_of_differing_source_work_when_typed(tmp_path: Path) -> None:
    stores = three(tmp_path)
    spoil(stores[0], 100)
    options = ["--to", "commitlog", "--replica", stores[1], "--replica", stores[2]]
    error = error_of("convert", stores[0], tmp_path / "new", *options)
    assert (error.code, error.values["start"], error.values["position"]) == ("STORE_MISMATCH", "100", str(at(stores)))
    assert str(place_of(stores[0], 100)[0]) in error
    [instead] = re.findall(r"convert (\S+) instead", error)
    others = ["--replica", stores[0], "--replica", stores[2]]
    done = run("convert", instead, tmp_path / "other", "--to", "commitlog", *others, "--format", "json")
    assert "entry 100" in "".join(json.loads(done.stdout)["notes"])
    [repair] = re.findall(r"dledger (repair [^()]*)", error)
    run(*shlex.split(repair))
    report = json.loads(run("convert", stores[0], tmp_path / "new", *options, "--format", "json").stdout)
    assert (report["replicas_compared"], report["entries_compared"], report["entries_on_few_replicas"]) == (2, 300, 0)


def at(stores: list[Path]) -> int:
    path, offset, _ = place_of(stores[0], 100)
    return int(path.name) + offset


def test_two_of_three_replicas_are_enough_if_they_agree(tmp_path: Path) -> None:
    stores = three(tmp_path)[:2]
    report = compared(stores, tmp_path / "new")
    assert (report.replicas_compared, report.entries_compared) == (1, ENTRIES)
    spoil(stores[1], 100)
    with pytest.raises(StoreMismatchError, match="no majority of the group's 3 replicas") as refused:
        compared(stores, tmp_path / "other")
    assert "name the stores of all replicas" in refused.value.remedy
    ends((290, 289), (300, 289))(stores)
    with pytest.raises(StoreMismatchError, match="1 were not named"):  # the third may have them too
        compared(stores, tmp_path / "other")


def test_size_of_group_is_that_of_its_configuration(tmp_path: Path) -> None:
    stores = three(tmp_path)
    conf = tmp_path / "broker.conf"
    peers = [f"n{number}-127.0.0.1:{40911 + number}" for number in range(7)]
    for size, enough in ((7, False), (5, True)):
        conf.write_text(f"dLegerPeers={';'.join(peers[:size])}\n")
        if enough:
            assert compared(stores, tmp_path / "new", conf=conf).entries_compared == ENTRIES
        else:
            with pytest.raises(ConfigError, match="no majority of the group's 7"):
                compared(stores, tmp_path / "new", conf=conf)
    spoil(stores[2], 100)  # two of three agree, and these are no majority of five
    with pytest.raises(StoreMismatchError, match="no majority of the group's 5"):
        compared(stores, tmp_path / "other", conf=conf)


def test_store_named_twice_and_excluding_options_are_refused(tmp_path: Path) -> None:
    stores = three(tmp_path)
    for named in ([stores[0], stores[1], stores[1].parent], [stores[0], stores[0], stores[1]]):
        with pytest.raises(ConfigError, match="same store"):
            compared(named, tmp_path / "new")
    with pytest.raises(ConfigError, match="exclude each other"):
        left(stores[0], tmp_path / "new", replicas=tuple(stores[1:]))
    with pytest.raises(ConfigError, match="inside a replica"):
        compared(stores, stores[1] / "new")
    with pytest.raises(ConfigError, match="not compared") as refused:
        left(stores[0], tmp_path / "new", replica_checked=False)
    assert "--replica DIR" in refused.value.remedy
    assert "--replica-checked" in refused.value.remedy
    error = error_of("convert", stores[0], tmp_path / "new", "--group", "g", "--replica", stores[1])
    assert "--to commitlog" in error


def test_running_replica_is_refused_unless_live_nodes_end_conversion(tmp_path: Path) -> None:
    stores = three(tmp_path)
    with open_store(stores[0]) as log:
        last = log.raw(ENTRIES - 11, ENTRIES - 10)
    live = CommittedEntry(ENTRIES - 11, last.first.term, zlib.crc32(last.bodies))
    with running_broker(stores[1].parent):
        with pytest.raises(StoreBusyError):
            compared(stores, tmp_path / "new")
        report = compared(stores, tmp_path / "new", committed=live)
    assert (report.entries_compared, report.entries_left_out) == (ENTRIES - 10, 10)


def test_left_out_entries_of_a_majority_are_named(tmp_path: Path) -> None:
    stores = three(tmp_path)
    ends((300, 280), (290, 280), (290, 280))(stores)
    report = compared(stores, tmp_path / "new", until="committed")
    assert (report.last_index, report.entries_left_out) == (280, 19)
    assert any(note.startswith("9 entries that are left out are on a majority") for note in report.notes)
    ends((300, 280), (290, 285), (290, 280))(stores)
    with pytest.raises(StoreMismatchError) as refused:
        compared(stores, tmp_path / "other", until="committed")
    assert "--until end" in refused.value.remedy
    assert compared(stores, tmp_path / "other", until="end").entries_on_few_replicas == 10


def test_dropped_entries_are_not_compared(tmp_path: Path) -> None:
    stores = three(tmp_path)
    no_majority(stores)
    report = compared(stores, tmp_path / "new", drop=((100, 101),))
    assert (report.entries_compared, report.messages) == (ENTRIES - 1, ENTRIES - 1)


def notes(report: LeaveReport) -> list[str]:
    """Notes of the comparison: that these brokers have no index is one of the source alone."""
    return [note for note in report.notes if "index" not in note]


def test_real_brokers_directories_are_compared(tmp_path: Path) -> None:
    source, conf = broker(THREE, tmp_path)
    others = [golden.extract(THREE, f"{node}/dledger-{node}", tmp_path / "others").parent for node in ("n1", "n2")]
    report = compared([source, *others], tmp_path / "new", conf=conf)
    assert (report.replicas_compared, report.entries_compared, report.entries_on_few_replicas) == (2, 1024, 0)
    assert notes(report) == []
    with pytest.raises(StoreMismatchError, match="size of data files"):
        compared([source, others[0], golden.extract(REUSED, "n0/dledger-n0", tmp_path)], tmp_path / "other", conf=conf)


def test_commitlog_before_store_is_compared_by_its_fingerprint(tmp_path: Path) -> None:
    source, conf = broker(MIXED, tmp_path)
    brokers = [source, *(Path(shutil.copytree(source, tmp_path / name)) for name in ("n1", "n2"))]
    report = compared(brokers, tmp_path / "new", conf=conf)
    assert (report.entries_compared, report.messages, notes(report)) == (263, 588, [])

    def born_elsewhen(path: Path) -> None:
        """Change a time, which no CRC covers."""
        file = min((path / "commitlog").iterdir())
        data = bytearray(file.read_bytes())
        data[47] ^= 1
        file.write_bytes(data)

    born_elsewhen(brokers[2])
    report = compared(brokers, tmp_path / "second", conf=conf)
    assert str(brokers[2]) in "".join(report.notes)
    report = compared([*brokers[:2], brokers[2] / "dledger-n0"], tmp_path / "third", conf=conf)
    assert str(brokers[2]) in "".join(report.notes)
    shutil.rmtree(brokers[2] / "commitlog")
    assert notes(compared(brokers, tmp_path / "fourth", conf=conf)) == []
    born_elsewhen(source)
    with pytest.raises(StoreMismatchError, match="no majority of the replicas has the CommitLog"):
        compared(brokers, tmp_path / "fifth", conf=conf)
    shutil.rmtree(brokers[1] / "commitlog")
    report = compared(brokers, tmp_path / "sixth", conf=conf)
    assert "was not compared" in "".join(report.notes)


def native(directory: Path, bodies: list[bytes], uuid: str = "log-1") -> Path:
    with StoreWriter(directory, uuid=uuid) as writer:
        writer.append([], noop=True)
        writer.append(bodies)
    return writer.path


def test_native_stores_are_compared(tmp_path: Path) -> None:
    first = native(tmp_path / "n0", message_bodies(50))
    stores = [first, *(Path(shutil.copytree(first, tmp_path / name / "dledger-n")) for name in ("n1", "n2"))]
    report = compared(stores, tmp_path / "new")
    assert (report.kind, report.entries_compared, report.messages) == ("dledger", 51, 50)
    with pytest.raises(StoreMismatchError, match="the log of the replica is log-2"):
        compared([*stores[:2], native(tmp_path / "n3", message_bodies(50), "log-2")], tmp_path / "other")
    path = min((first / "data").iterdir())
    data = path.read_bytes()
    path.write_bytes(data.replace(b"body 17", b"bodY 17"))
    with pytest.raises(CorruptRecordError) as refused:
        compared(stores, tmp_path / "other")
    assert refused.value.values["start"] == 18
    assert "repair" not in refused.value.remedy, "native stores are repaired from their peers"
    with pytest.raises(StoreMismatchError, match="the program of the replica"):
        compared([stores[1], three(tmp_path)[0]], tmp_path / "other")


def test_stores_of_generation_b_are_compared(tmp_path: Path) -> None:
    stores = [tmp_path / name / f"dledger-{name}" for name in ("n0", "n1", "n2")]
    for store in stores:
        write_broker_store(store, BODIES, data_bytes=FILE_BYTES)
    assert compared(stores, tmp_path / "new", until="end").entries_compared == ENTRIES


def test_interrupted_run_is_resumed_without_comparing_again(tmp_path: Path) -> None:
    stores, phases = three(tmp_path), list[str]()
    wanted = LeaveRequest(source=stores[0], destination=tmp_path / "new", replicas=tuple(stores[1:]))
    with pytest.raises(Killed):
        leave(wanted, files=DyingFiles(30))
    report = leave(wanted, lambda step: phases.append(step.phase))
    assert (report.resumed, report.replicas_compared, report.entries_compared) == (True, 2, ENTRIES)
    assert "compare" not in phases


def test_run_begun_with_replica_checked_compares_when_asked(tmp_path: Path) -> None:
    stores, phases = three(tmp_path), list[str]()
    checked = LeaveRequest(source=stores[0], destination=tmp_path / "new", replica_checked=True)
    with pytest.raises(Killed):
        leave(checked, files=DyingFiles(30))
    asked = replace(checked, replica_checked=False, replicas=tuple(stores[1:]))
    report = leave(asked, lambda step: phases.append(step.phase))
    assert (report.resumed, report.replicas_compared, report.entries_compared) == (True, 2, ENTRIES)
    assert "compare" in phases


def test_difference_found_by_command_names_entry_and_file(tmp_path: Path) -> None:
    stores = three(tmp_path)
    no_majority(stores)
    options = ("--to", "commitlog", "--replica", stores[1], "--replica", stores[2], "--dry-run")
    error = last_error(run("convert", stores[0], tmp_path / "new", *options, code=3).stderr)
    assert (error.code, error.values["start"]) == ("STORE_MISMATCH", "100")
    assert str(place_of(stores[0], 100)[0]) in error
