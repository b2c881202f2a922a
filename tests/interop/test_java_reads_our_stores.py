"""Java DLedger itself opens our stores: profile A with 0.3.1.2, which RocketMQ ships, profile B with 0.4.0."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from dledger_core import control, open_store
from dledger_core.cluster import free_ports
from dledger_core.config import StorageConfig
from dledger_core.ids import Index, Term
from dledger_core.raft import HardState
from dledger_core.rocketmq.convert import ConvertRequest, convert
from tests.interop.java_dledger import Entry, JavaDLedger
from tests.rocketmq.convert.stores import GOLDEN, PEERS, store_of, unpacked
from tests.rocketmq.golden import MIXED, THREE, extract
from tests.support.growing_store import everything
from tests.support.logs import append, open_log

pytestmark = [pytest.mark.integration, pytest.mark.slow]

DATA_BYTES, INDEX_BYTES = 16384, 1024


def entries(store: Path) -> list[Entry]:
    """Every entry as we read it."""
    with open_store(store) as reader:
        rows = everything(reader)
    names = ("index", "term", "magic", "position")
    return [Entry(*(row[name] for name in names), len(row["body"]) + 48, row["body"]) for row in rows]


def write_own(directory: Path, profile: str, entries_wanted: int = 400) -> Path:
    """Write a native store: batches of all sizes, terms, control entries in profile B, a truncation, many segments."""
    chance = random.Random(7)
    config = StorageConfig(data_segment_bytes=DATA_BYTES, index_segment_bytes=INDEX_BYTES, profile=profile)
    path = directory / "dledger-n0"
    log = open_log(None, path, config)
    term = 0
    while log.last_index() < entries_wanted:
        leads = chance.random() < 0.05 or log.last_index() < 0
        term += leads
        bodies = [chance.randbytes(chance.choice((0, 1, 17, 300, 2000))) for _ in range(chance.randint(1, 9))]
        body = None
        if profile == "B" and (leads or chance.random() < 0.2):
            fields = {"k": "producer", "p": "p", "e": 0, "s": int(log.last_index()) + 1, "n": len(bodies), "c": 0}
            body = b"" if leads else control.pack(fields)
        append(log, bodies, term, control=body, now_ms=1_700_000_000_000 + int(log.last_index()))
    cut = Index(log.last_index() - 20)
    log.stage_truncate(cut)
    log.persist(HardState(Term(term + 1), None), cut, [])
    append(log, [b"behind the cut"], term + 1, now_ms=1_700_000_001_000)
    log.close(log.last_index())
    return path


def converted(source: Path, directory: Path, node: str = "n0", **options: Any) -> tuple[Path, Any]:
    """Convert a store; return the new one and the report."""
    store = directory / f"dledger-{node}"
    request = ConvertRequest(source=source, destination=store, group="g", self_id=node, peers=PEERS, **options)
    return store, convert(request)


def sizes_of(store: Path) -> tuple[int, int]:
    meta = json.loads((store / "meta/log.json").read_text())
    return meta["data_segment_bytes"], meta["index_segment_bytes"]


def read_by_java(java: JavaDLedger, store: Path, scratch: Path) -> list[Entry]:
    """Entries of a copy, because Java's recovery may write."""
    shutil.copytree(store, scratch / store.name)
    return java.read(scratch, store.name.removeprefix("dledger-"), *sizes_of(store))


@pytest.mark.parametrize("profile", ["A", "B"])
def test_java_reads_what_we_wrote(java: JavaDLedger, tmp_path: Path, profile: str) -> None:
    store = write_own(tmp_path / "own", profile)
    ours = entries(store)
    assert len({entry.position // DATA_BYTES for entry in ours}) > 5
    assert {entry.magic for entry in ours} == ({1} if profile == "A" else {1, 2})
    assert read_by_java(java, store, tmp_path / "java") == ours


@pytest.mark.parametrize("profile", ["A", "B"])
@pytest.mark.parametrize("name", [name for name in GOLDEN if name.endswith(("three", "rejoined"))])
def test_java_reads_what_we_converted(java: JavaDLedger, tmp_path: Path, name: str, profile: str) -> None:
    source, node = store_of(unpacked(name, tmp_path), "")
    store, _ = converted(source, tmp_path / "new", node, profile=profile)
    assert read_by_java(java, store, tmp_path / "java") == entries(store)


@pytest.mark.parametrize("profile", ["A", "B"])
def test_java_reads_converted_broker_log(java: JavaDLedger, tmp_path: Path, profile: str) -> None:
    """Classic messages and a generation A log become one log; then a native log becomes generation A."""
    extract(MIXED, "n0/commitlog", tmp_path)
    source = extract(MIXED, "n0/dledger-n0", tmp_path).parent
    store, report = converted(source, tmp_path / "new", profile=profile, index_segment_bytes=1 << 20)
    assert report.messages_moved == 588
    assert read_by_java(java, store, tmp_path / "java") == entries(store)


@pytest.mark.parametrize("profile", ["A"])
def test_java_a_reads_log_without_control_entries(java: JavaDLedger, tmp_path: Path, profile: str) -> None:
    source = write_own(tmp_path / "own", "B")
    store, _ = converted(source, tmp_path / "new", profile=profile)
    found = read_by_java(java, store, tmp_path / "java")
    assert found == entries(store)
    assert [entry.body for entry in found] == [entry.body for entry in entries(source) if entry.magic == 1]


@pytest.mark.parametrize("profile", ["A", "B"])
def test_java_continues_native_store(java: JavaDLedger, tmp_path: Path, profile: str) -> None:
    store = write_own(tmp_path / "own", profile)
    ours = entries(store)
    shutil.copytree(store, tmp_path / "java" / store.name)
    store = tmp_path / "java" / store.name
    config = java.config(tmp_path / "java", "n0", DATA_BYTES, INDEX_BYTES, *free_ports(1))
    bodies = [b"java %d" % number * 200 for number in range(40)] + [b""]
    indexes = java.append(config, bodies)
    begin = ours[-1].index + 1
    assert indexes == list(range(begin, begin + len(bodies)))
    back = store
    if profile == "B":  # Java's records carry neither time nor CRC: they are taken over by a conversion
        back, report = converted(store, tmp_path / "back")
        (note,) = report.notes
        assert "Java DLedger" in note
    found = entries(back)
    assert found[: len(ours)] == ours
    assert [entry.body for entry in found[len(ours) :]] == bodies
    log = open_log(None, back, StorageConfig())
    assert log.hard_state.term >= found[-1].term
    assert log.last_index() == found[-1].index
    append(log, [b"ours again"], log.hard_state.term + 1)
    log.close()
    assert [entry.body for entry in entries(back)[len(ours) :]] == [*bodies, b"ours again"]
    with open_store(back) as reader:
        assert reader.verify().findings == ()


def test_broker_log_is_read_equally_before_and_after_java(java_a: JavaDLedger, tmp_path: Path) -> None:
    """A real broker's log: Java reads the converted one exactly as it reads the broker's own."""
    source = extract(THREE, "n0/dledger-n0", tmp_path)
    store, _ = converted(source, tmp_path / "new", profile="A")
    sizes = sizes_of(store)
    assert java_a.read(store.parent, "n0", *sizes) == java_a.read(source.parent, "n0", *sizes)
