"""The audit on stores, without Spark: each seeded fault gives one right finding, a healthy set none."""

from __future__ import annotations

import os
import shutil
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dledger_core import open_store
from dledger_core.errors import ConfigError
from jobs._audit.compare import compare_entries, index_findings
from jobs._audit.judge import verdict_of
from jobs._audit.model import Class
from jobs._audit.plan import sections
from jobs._audit.replicas import store_replicas
from tests.jobs.auditing import SPAN, audit, digests, overwrite
from tests.spark_connector.store_writer import StoreWriter
from tests.support import archives

GOLDEN = Path(__file__).resolve().parents[1] / "storage" / "testdata"
ENTRIES = 600

Stores = dict[str, Path]


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    """Three equal stores of 600 entries in two terms, over several segments."""
    with StoreWriter(tmp_path / "made") as writer:
        writer.append([b"first"], noop=True)
        while writer.end < ENTRIES // 2:
            writer.append_numbers(49, "a body of some length, so that there are several segments " * 4)
        writer.term = 2
        writer.append_numbers(ENTRIES - writer.end)
    copies = {name: tmp_path / name for name in ("n0", "n1", "n2")}
    for path in copies.values():
        shutil.copytree(writer.path, path)
    return copies


def place_of(store: Path, index: int) -> tuple[Path, int]:
    """Return the data file and the offset of a record."""
    with open_store(store) as reader:
        position = reader.read(index, index + 1).column("position")[0].as_py()
    files = sorted((store / "data").iterdir())
    file = max(path for path in files if int(path.name) <= position)
    return file, position - int(file.name)


def flip(store: Path, index: int, at: int = 48 + 3) -> None:
    file, offset = place_of(store, index)
    before = file.read_bytes()[offset + at]
    overwrite(file, offset + at, bytes([before ^ 0x10]))


def flip_crc(store: Path, index: int) -> None:
    flip(store, index, 40)


def flip_time(store: Path, index: int) -> None:
    flip(store, index, 39)


def set_term(store: Path, index: int, term: int) -> None:
    """Rewrites a term in the record alone."""
    file, offset = place_of(store, index)
    overwrite(file, offset + 16, struct.pack(">q", term))


def set_term_twice(store: Path, index: int, term: int) -> None:
    """Rewrites a term in the record and in its index row, so that the two agree."""
    set_term(store, index, term)
    files = sorted((store / "index").iterdir())
    file = max(path for path in files if int(path.name) <= index * 32)
    overwrite(file, index * 32 - int(file.name) + 24, struct.pack(">q", term))


def raise_term(store: Path, index: int) -> None:
    set_term_twice(store, index, 9)


def lower_term(store: Path, index: int) -> None:
    set_term_twice(store, index, 0)


def raise_term_in_the_record(store: Path, index: int) -> None:
    set_term(store, index, 9)


def wipe_header(store: Path, index: int) -> None:
    file, offset = place_of(store, index)
    overwrite(file, offset, bytes(48))


def swap(store: Path, index: int) -> None:
    file, offset = place_of(store, index)
    other_file, other = place_of(store, index + 1)
    assert file == other_file
    data = file.read_bytes()
    assert other - offset > 48
    size = struct.unpack(">i", data[other + 4 : other + 8])[0]
    overwrite(file, offset, data[other : other + size] + data[offset:other])


def test_equal_stores_have_no_findings(stores: Stores) -> None:
    assert audit(stores) == []
    replicas = store_replicas(stores)
    assert not any(compare_entries(p.replicas, p.start, p.end)["findings"] for p in sections(replicas))
    assert [finding for replica in replicas for finding in index_findings(replica)] == []


@pytest.mark.parametrize("read_bytes", [1, 3000, 40_000, 1 << 20])
def test_digests_do_not_depend_on_size_of_read(stores: Stores, read_bytes: int) -> None:
    replicas = store_replicas(stores)
    expected = digests(replicas).drop("read_at")
    assert expected.num_rows == 3 * -(-ENTRIES // SPAN)
    assert digests(replicas, read_bytes=read_bytes).drop("read_at") == expected


@pytest.mark.parametrize(
    ("fault", "kind", "index", "count"),
    [
        (flip, "CORRUPT", 130, 1),
        (flip, "CORRUPT", 127, 1),
        (flip, "CORRUPT", ENTRIES - 1, 1),
        (flip_crc, "CORRUPT", 400, 1),
        (wipe_header, "CORRUPT", 256, 1),
        (swap, "CORRUPT", 200, 2),
        (raise_term, "TERM_REGRESSION", 128, 1),
        (raise_term, "TERM_REGRESSION", 255, 1),
        (lower_term, "TERM_REGRESSION", 500, 1),
        (raise_term_in_the_record, "CORRUPT", 300, 1),
    ],
)
def test_fault_in_one_store_gives_one_finding(
    stores: Stores, fault: Callable[[Path, int], None], kind: str, index: int, count: int
) -> None:
    fault(stores["n1"], index)
    before = {path: path.read_bytes() for path in stores["n1"].rglob("*") if path.is_file()}
    (found,) = audit(stores)
    assert (found.kind.value, found.replica, found.start, found.end, found.count) == (
        kind,
        "n1",
        index,
        index + count,
        count,
    )
    assert found.evidence["index"] == index
    assert found.evidence["agree"] == ["n0", "n2"]
    assert found.evidence["disagree"] == ["n1"]
    assert set(found.evidence["replicas"]) == {"n0", "n1", "n2"}
    assert verdict_of([found], []) == "INCONSISTENT"
    assert {path: path.read_bytes() for path in before} == before


def test_two_faults_give_two_findings(stores: Stores) -> None:
    flip(stores["n0"], 10)
    flip(stores["n2"], 11)
    assert [(f.kind.value, f.replica, f.start) for f in audit(stores)] == [("CORRUPT", "n0", 10), ("CORRUPT", "n2", 11)]


def test_other_append_time_differs_in_layout_only(stores: Stores) -> None:
    flip_time(stores["n2"], 300)
    (found,) = audit(stores)
    assert (found.kind.value, found.replica) == ("LAYOUT_DIFFERS", "n2")
    assert found.start <= 300 < found.end
    assert verdict_of([found], []) == "CONSISTENT"


def test_other_bytes_with_right_crc_have_diverged(stores: Stores, tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "other") as writer:
        writer.append([b"first"], noop=True)
        while writer.end < ENTRIES // 2:
            writer.append_numbers(49, "a body of some length, so that there are several segments " * 4)
        writer.term = 2
        writer.append_numbers(ENTRIES - writer.end, "bodY")
    (found,) = [f for f in audit(stores | {"n1": writer.path}) if f.kind is not Class.LAYOUT_DIFFERS]
    assert (found.kind.value, found.replica, found.end) == ("CORRUPT", "n1", ENTRIES)
    assert found.count == ENTRIES - found.start
    difference = found.evidence["first_difference"]
    assert difference["offset"] == 3
    assert bytes.fromhex(difference["window"]["n1"]).startswith(b"bodY")
    assert bytes.fromhex(difference["window"]["n0"]).startswith(b"body")


def test_stale_copy_lags(stores: Stores, tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "made", term=3) as writer:
        writer.append_numbers(50)
    (found,) = audit({"n0": writer.path, "n1": stores["n1"]})
    assert (found.kind.value, found.replica, found.start, found.end) == ("LAGGING", "n1", ENTRIES, ENTRIES + 50)
    assert verdict_of([found], []) == "CONSISTENT"


def test_log_without_its_end_misses_committed_entries(stores: Stores) -> None:
    last = sorted((stores["n1"] / "data").iterdir())[-1]
    last.unlink()
    with open_store(stores["n1"]) as reader:
        first_lost = reader.last_index + 1  # what recovery would keep: whole batches
    (found,) = audit(stores)
    assert (found.kind.value, found.replica) == ("MISSING_COMMITTED", "n1")
    assert (found.start, found.end) == (first_lost, ENTRIES)


def test_wiped_tail_below_checkpoint_is_damage(stores: Stores) -> None:
    file, offset = place_of(stores["n1"], ENTRIES - 5)
    overwrite(file, offset, bytes(file.stat().st_size - offset))
    (found,) = audit(stores)
    assert (found.kind.value, found.replica, found.start, found.end) == ("CORRUPT", "n1", ENTRIES - 5, ENTRIES)


def test_damaged_index_file_is_named_though_entries_are_readable(stores: Stores) -> None:
    index = sorted((stores["n1"] / "index").iterdir())[0]
    overwrite(index, 50 * 32 + 10, b"\xff")
    found = [finding for replica in store_replicas(stores) for finding in index_findings(replica)]
    for findings in (audit(stores), found):
        assert [(f.kind.value, f.replica, f.start, f.end) for f in findings] == [("INDEX_MISMATCH", "n1", 50, 51)]


def test_stores_of_other_logs_are_refused(stores: Stores, tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "foreign", uuid="log-2") as writer:
        writer.append_numbers(3)
    with pytest.raises(ConfigError, match="logs"):
        store_replicas(stores | {"n2": writer.path})
    with StoreWriter(tmp_path / "foreign", group="other") as writer:
        writer.append_numbers(3)
    with pytest.raises(ConfigError, match="groups"):
        store_replicas(stores | {"n2": writer.path})
    with pytest.raises(ConfigError, match="--replica n2"):
        store_replicas(stores | {"n2": tmp_path})


@pytest.fixture(params=["0.3.1.2", "0.4.0"])
def java(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Stores]:
    """Unpacks three stores that Java wrote."""

    def unpack(name: str) -> Stores:
        name = f"dledger-{request.param}-{name}"
        with tarfile.open(GOLDEN / f"{name}.tar.gz") as archive:
            archives.unpack(archive, tmp_path)
        return {node: tmp_path / name / f"dledger-{node}" for node in ("n0", "n1", "n2")}

    return unpack


def test_stores_that_java_wrote_are_consistent(java: Callable[[str], Stores]) -> None:
    assert audit(java("three")) == []


def test_old_tail_of_java_leader_was_never_committed(java: Callable[[str], Stores]) -> None:
    found = audit(java("diverged"))
    assert [(f.kind.value, f.start, f.end) for f in found] == [
        ("DIVERGED_UNCOMMITTED", 135, 153),
        ("LAGGING", 153, 195),
        ("LAGGING", 189, 195),
    ]
    assert found[0].replica == found[1].replica != found[2].replica
    assert verdict_of(found, []) == "CONSISTENT"


def test_flipped_byte_in_java_store_shows_by_comparison(java: Callable[[str], Stores]) -> None:
    stores = java("three")
    flip(stores["n2"], 20)
    (found,) = audit(stores)
    assert (found.kind.value, found.replica, found.start, found.count) == ("CORRUPT", "n2", 20, 1)
    assert found.evidence["first_difference"]["offset"] == 3
    assert verdict_of([found], []) == "INCONSISTENT"


def keeps_commit_index(store: Path) -> bool:
    return (store / "checkpoint").exists()


@pytest.mark.parametrize("at", [0, 4, 11, 32 + 12])
def test_damaged_header_near_end_of_java_store_is_damage(java: Callable[[str], Stores], at: int) -> None:
    """Java's own recovery ends there; the entries after it are compared."""
    stores = java("three")
    flip(stores["n1"], 100, at)
    (found,) = audit(stores)
    assert (found.kind.value, found.replica, found.start, found.end) == ("CORRUPT", "n1", 100, 101)
    assert store_replicas(stores)[1].end == store_replicas(stores)[0].end
    assert verdict_of([found], []) == "INCONSISTENT"


@pytest.mark.parametrize("index", [20, 100, 180, 250])
def test_another_term_in_java_store_is_one_finding(java: Callable[[str], Stores], index: int) -> None:
    """In its last files a view ends there, since what follows has a lower term; the index knows better."""
    stores = java("three")
    set_term(stores["n1"], index, 9)
    (found,) = audit(stores)
    assert (found.replica, found.start, found.end) == ("n1", index, index + 1)
    assert found.severity.value == "critical"
    assert verdict_of([found], []) == "INCONSISTENT"


@pytest.mark.parametrize(("fault", "count"), [(wipe_header, 1), (swap, 2)])
@pytest.mark.parametrize("index", [20, 100, 250])
def test_fault_in_java_store_gives_one_finding(
    java: Callable[[str], Stores], fault: Callable[[Path, int], None], count: int, index: int
) -> None:
    stores = java("three")
    fault(stores["n1"], index)
    (found,) = audit(stores)
    assert (found.kind.value, found.replica, found.start, found.end) == ("CORRUPT", "n1", index, index + count)


@pytest.mark.parametrize("lost", [["n1"], ["n0", "n1", "n2"]])
def test_java_store_that_lost_its_end(java: Callable[[str], Stores], lost: list[str]) -> None:
    stores = java("three")
    recorded = keeps_commit_index(stores["n0"])
    for name in lost:
        max((stores[name] / "data").iterdir()).unlink()
    with open_store(stores["n1"]) as reader:
        end = reader.last_index + 1
    found = [(f.kind.value, f.replica, f.start, f.end) for f in audit(stores)]
    kind = "MISSING_COMMITTED" if recorded else "MISSING"
    assert found == [(kind, name, end, 267) for name in lost]


@pytest.mark.parametrize("left", [0, 40, 100, 30_000])
def test_java_store_whose_last_file_was_cut(java: Callable[[str], Stores], left: int) -> None:
    stores = java("three")
    os.truncate(max((stores["n2"] / "data").iterdir()), left)
    with open_store(stores["n2"]) as reader:
        end = reader.last_index + 1
    found = [(f.kind.value, f.replica, f.start, f.end) for f in audit(stores)]
    # The checkpoint of generation A covers them; in generation B only the index shows that more is missing.
    missing = [] if keeps_commit_index(stores["n2"]) or end == 267 else [("MISSING", "n2", end + 1, 267)]
    assert found == [("CORRUPT", "n2", end, end + 1), *missing]


def test_java_store_without_its_index(java: Callable[[str], Stores]) -> None:
    stores = java("three")
    shutil.rmtree(stores["n0"] / "index")
    (found,) = audit(stores)
    assert (found.kind.value, found.replica, found.start, found.end) == ("INDEX_MISMATCH", "n0", 0, 267)
