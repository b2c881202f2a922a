"""The audit on stores, without Spark: each seeded fault gives one right finding, a healthy set none."""

from __future__ import annotations

import os
import shutil
import struct
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dledger_core import open_store
from dledger_core.errors import ConfigError
from jobs._audit.compare import compare_entries, index_findings
from jobs._audit.judge import verdict_of
from jobs._audit.model import Class
from jobs._audit.plan import sections
from jobs._audit.replicas import store_replicas
from tests.jobs.auditing import SPAN, audit, brief, digests
from tests.spark_connector.store_writer import StoreWriter
from tests.support import archives
from tests.support.damage import flip_entry, overwrite, place_of

GOLDEN = Path(__file__).resolve().parents[1] / "storage" / "testdata"
ENTRIES = 600
LONG = "a body of some length, so that there are several segments " * 4

Stores = dict[str, Path]
Fault = Callable[[Path, int], None]
Java = Callable[[str], Stores]


def write(directory: Path, last_body: str = "body") -> Path:
    """Write a store of 600 entries in two terms, over several segments."""
    with StoreWriter(directory) as writer:
        writer.append([b"first"], noop=True)
        while writer.end < ENTRIES // 2:
            writer.append_numbers(49, LONG)
        writer.term = 2
        writer.append_numbers(ENTRIES - writer.end, last_body)
    return writer.path


@pytest.fixture
def stores(tmp_path: Path) -> Stores:
    """Three equal stores."""
    made = write(tmp_path / "made")
    return {name: Path(shutil.copytree(made, tmp_path / name)) for name in ("n0", "n1", "n2")}


@pytest.fixture(params=["0.3.1.2", "0.4.0"])
def java(request: pytest.FixtureRequest, tmp_path: Path) -> Java:
    """Unpacks three stores that Java wrote."""

    def unpack(name: str) -> Stores:
        name = f"dledger-{request.param}-{name}"
        with tarfile.open(GOLDEN / f"{name}.tar.gz") as archive:
            archives.unpack(archive, tmp_path)
        return {node: tmp_path / name / f"dledger-{node}" for node in ("n0", "n1", "n2")}

    return unpack


# --- faults ---------------------------------------------------------------------------------------------------------


def set_term(term: int, *, in_row: bool) -> Fault:
    """Write a term into the record, and into its index row, so that the two agree."""

    def fault(store: Path, index: int) -> None:
        file, offset = place_of(store, index)
        overwrite(file, offset + 16, struct.pack(">q", term))
        if in_row:
            file = max(path for path in (store / "index").iterdir() if int(path.name) <= index * 32)
            overwrite(file, index * 32 - int(file.name) + 24, struct.pack(">q", term))

    return fault


def wipe_header(store: Path, index: int) -> None:
    file, offset = place_of(store, index)
    overwrite(file, offset, bytes(48))


def swap(store: Path, index: int) -> None:
    """Swap a record and the next one."""
    file, offset = place_of(store, index)
    other_file, other = place_of(store, index + 1)
    assert file == other_file
    data = file.read_bytes()
    size = struct.unpack(">i", data[other + 4 : other + 8])[0]
    overwrite(file, offset, data[other : other + size] + data[offset:other])


# --- native stores --------------------------------------------------------------------------------------------------


def test_equal_stores_have_no_findings(stores: Stores) -> None:
    assert audit(stores) == []
    replicas = store_replicas(stores)
    assert not any(compare_entries(part.replicas, part.start, part.end)["findings"] for part in sections(replicas))
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
        pytest.param(flip_entry, "CORRUPT", 130, 1, id="body"),
        pytest.param(flip_entry, "CORRUPT", 127, 1, id="last body of a range"),
        pytest.param(flip_entry, "CORRUPT", ENTRIES - 1, 1, id="last body"),
        pytest.param(partial(flip_entry, at=40), "CORRUPT", 400, 1, id="crc"),
        pytest.param(wipe_header, "CORRUPT", 256, 1, id="header wiped"),
        pytest.param(swap, "CORRUPT", 200, 2, id="swapped"),
        pytest.param(set_term(9, in_row=True), "TERM_REGRESSION", 128, 1, id="term above, first of a range"),
        pytest.param(set_term(9, in_row=True), "TERM_REGRESSION", 255, 1, id="term above, last of a range"),
        pytest.param(set_term(0, in_row=True), "TERM_REGRESSION", 500, 1, id="term below"),
        pytest.param(set_term(9, in_row=False), "CORRUPT", 300, 1, id="term of the record alone"),
    ],
)
def test_fault_in_one_store_gives_one_finding(stores: Stores, fault: Fault, kind: str, index: int, count: int) -> None:
    fault(stores["n1"], index)
    (found,) = audit(stores)
    assert (brief([found]), found.count) == ([(kind, "n1", index, index + count)], count)
    evidence = found.evidence
    assert (evidence["index"], evidence["agree"], evidence["disagree"]) == (index, ["n0", "n2"], ["n1"])
    assert set(evidence["replicas"]) == {"n0", "n1", "n2"}
    assert verdict_of([found], []) == "INCONSISTENT"


def test_two_faults_give_two_findings(stores: Stores) -> None:
    flip_entry(stores["n0"], 10)
    flip_entry(stores["n2"], 11)
    assert brief(audit(stores)) == [("CORRUPT", "n0", 10, 11), ("CORRUPT", "n2", 11, 12)]


def test_other_append_time_differs_in_layout_only(stores: Stores) -> None:
    flip_entry(stores["n2"], 300, 39)
    (found,) = audit(stores)
    assert (found.kind.value, found.replica) == ("LAYOUT_DIFFERS", "n2")
    assert found.start <= 300 < found.end
    assert verdict_of([found], []) == "CONSISTENT"


def test_other_bytes_with_right_crc_have_diverged(stores: Stores, tmp_path: Path) -> None:
    other = write(tmp_path / "other", "bodY")
    (found,) = [f for f in audit(stores | {"n1": other}) if f.kind is not Class.LAYOUT_DIFFERS]
    assert (found.kind.value, found.replica, found.end) == ("CORRUPT", "n1", ENTRIES)
    assert found.count == ENTRIES - found.start
    difference = found.evidence["first_difference"]
    assert difference["offset"] == 3
    assert bytes.fromhex(difference["window"]["n1"]).startswith(b"bodY")
    assert bytes.fromhex(difference["window"]["n0"]).startswith(b"body")


def test_stale_copy_lags(stores: Stores, tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "made", term=3) as writer:
        writer.append_numbers(50)
    found = audit({"n0": writer.path, "n1": stores["n1"]})
    assert brief(found) == [("LAGGING", "n1", ENTRIES, ENTRIES + 50)]
    assert verdict_of(found, []) == "CONSISTENT"


def test_log_without_its_end_misses_committed_entries(stores: Stores) -> None:
    max((stores["n1"] / "data").iterdir()).unlink()
    with open_store(stores["n1"]) as reader:
        first_lost = reader.last_index + 1  # what recovery would keep: whole batches
    assert brief(audit(stores)) == [("MISSING_COMMITTED", "n1", first_lost, ENTRIES)]


def test_wiped_tail_below_checkpoint_is_damage(stores: Stores) -> None:
    file, offset = place_of(stores["n1"], ENTRIES - 5)
    overwrite(file, offset, bytes(file.stat().st_size - offset))
    assert brief(audit(stores)) == [("CORRUPT", "n1", ENTRIES - 5, ENTRIES)]


def test_damaged_index_file_is_named_though_entries_are_readable(stores: Stores) -> None:
    overwrite(min((stores["n1"] / "index").iterdir()), 50 * 32 + 10, b"\xff")
    expected = [("INDEX_MISMATCH", "n1", 50, 51)]
    assert brief(audit(stores)) == expected
    assert brief([finding for replica in store_replicas(stores) for finding in index_findings(replica)]) == expected


def test_stores_of_other_logs_are_refused(stores: Stores, tmp_path: Path) -> None:
    for more in ({"uuid": "log-2"}, {"group": "other"}):
        with StoreWriter(tmp_path / "foreign", **more) as writer:
            writer.append_numbers(3)
        with pytest.raises(ConfigError):
            store_replicas(stores | {"n2": writer.path})
    with pytest.raises(ConfigError, match="n2"):
        store_replicas(stores | {"n2": tmp_path})


# --- stores that Java wrote -----------------------------------------------------------------------------------------


def test_stores_that_java_wrote_are_consistent(java: Java) -> None:
    assert audit(java("three")) == []


def test_old_tail_of_java_leader_was_never_committed(java: Java) -> None:
    found = audit(java("diverged"))
    assert [(f.kind.value, f.start, f.end) for f in found] == [
        ("DIVERGED_UNCOMMITTED", 135, 153),
        ("LAGGING", 153, 195),
        ("LAGGING", 189, 195),
    ]
    assert found[0].replica == found[1].replica != found[2].replica
    assert verdict_of(found, []) == "CONSISTENT"


@pytest.mark.parametrize(
    ("fault", "index", "count", "corrupt"),
    [
        # Java's records have no CRC: the others show that the body is wrong.
        pytest.param(flip_entry, 20, 1, True, id="body"),
        *(
            pytest.param(partial(flip_entry, at=at), 100, 1, True, id=f"byte {at} of a header")
            for at in (0, 4, 11, 32 + 12)
        ),
        *(pytest.param(wipe_header, index, 1, True, id=f"header wiped at {index}") for index in (20, 100, 250)),
        *(pytest.param(swap, index, 2, True, id=f"swapped at {index}") for index in (20, 100, 250)),
        *(
            pytest.param(set_term(9, in_row=False), index, 1, False, id=f"term at {index}")
            for index in (20, 100, 180, 250)
        ),
    ],
)
def test_fault_in_java_store_gives_one_finding(java: Java, fault: Fault, index: int, count: int, corrupt: bool) -> None:
    """Also where Java's own recovery would end the log: the entries after it are compared."""
    stores = java("three")
    fault(stores["n1"], index)
    (found,) = audit(stores)
    assert (found.replica, found.start, found.end) == ("n1", index, index + count)
    assert found.severity.value == "critical"
    assert verdict_of([found], []) == "INCONSISTENT"
    if corrupt:
        assert found.kind.value == "CORRUPT"
        assert {replica.end for replica in store_replicas(stores)} == {267}


@pytest.mark.parametrize("lost", [["n1"], ["n0", "n1", "n2"]])
def test_java_store_that_lost_its_end(java: Java, lost: list[str]) -> None:
    stores = java("three")
    recorded = (stores["n0"] / "checkpoint").exists()
    for name in lost:
        max((stores[name] / "data").iterdir()).unlink()
    with open_store(stores["n1"]) as reader:
        end = reader.last_index + 1
    kind = "MISSING_COMMITTED" if recorded else "MISSING"
    assert brief(audit(stores)) == [(kind, name, end, 267) for name in lost]


@pytest.mark.parametrize("left", [0, 40, 100, 30_000])
def test_java_store_whose_last_file_was_cut(java: Java, left: int) -> None:
    stores = java("three")
    os.truncate(max((stores["n2"] / "data").iterdir()), left)
    with open_store(stores["n2"]) as reader:
        end = reader.last_index + 1
    # The checkpoint of generation A covers them; in generation B only the index shows that more is missing.
    recorded = (stores["n2"] / "checkpoint").exists()
    missing = [] if recorded or end == 267 else [("MISSING", "n2", end + 1, 267)]
    assert brief(audit(stores)) == [("CORRUPT", "n2", end, end + 1), *missing]


def test_java_store_without_its_index(java: Java) -> None:
    stores = java("three")
    shutil.rmtree(stores["n0"] / "index")
    assert brief(audit(stores)) == [("INDEX_MISMATCH", "n0", 0, 267)]
