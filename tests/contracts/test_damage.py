"""Damage of every kind, in every kind of store, is shown by every way to look at it: none is silent.

A case is a store, what happens to its files, and a way to look. Each way must end with the exit code of damage, name
the file, and never print the damaged bytes.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest

from dledger_core import open_store
from dledger_core.rocketmq import decode_messages
from tests.cli import command
from tests.contracts.small_file_stores import CONVERT
from tests.jobs.auditing import audit
from tests.rocketmq.convert.stores import unpacked
from tests.rocketmq.golden import MIXED, REUSED, THREE, extract
from tests.support.damage import flip, overwrite, place_of

STORES = {"three": (THREE, "n0"), "reused": (REUSED, "n0"), "mixed": (MIXED, "n0")}
_SYS_FLAG_AT = 36


@dataclass(frozen=True)
class Damaged:
    """A store, the entry in it whose message has a flipped bit, and bytes that only this message has."""

    path: Path
    index: int
    position: int
    topic: str
    hidden: bytes
    outside: bool


@pytest.fixture(params=[(store, part) for store in STORES for part in ("body", "outside")], ids=" ".join)
def flipped(request: pytest.FixtureRequest, tmp_path: Path) -> Damaged:
    store, part = request.param
    name, node = STORES[store]
    path = extract(name, f"{node}/dledger-{node}", tmp_path)
    with open_store(path) as reader:
        index = int(reader.last_index) // 2
        row = reader.read(index, index + 1).to_pylist()[0]
    message = decode_messages(pa.array([row["body"]], pa.binary())).to_pylist()[0]
    file, offset = place_of(path, index)
    outside = part == "outside"
    flip(file, offset + 48 + (_SYS_FLAG_AT if outside else row["body"].index(message["body"])), 1)
    wrong = bytes([message["body"][0] ^ 1]) + message["body"][1:]
    hidden = message["msg_id"].encode() if outside else wrong
    return Damaged(path, index, row["position"], message["topic"], hidden, outside=outside)


def test_verify_names_a_message_with_a_flipped_bit(flipped: Damaged) -> None:
    (store,) = json.loads(command.run("verify", flipped.path, "--format", "json", code=1).stdout)
    (found,) = store["findings"]
    assert (found["kind"], found["start"], found["end"]) == ("CORRUPT", flipped.index, flipped.index + 1)
    assert (found["position"], found["topic"]) == (flipped.position, flipped.topic)
    assert Path(found["path"]).parent == flipped.path / "data"
    assert json.loads(command.run("verify", flipped.path, "--opaque", "--format", "json").stdout)[0]["findings"] == []


@pytest.mark.parametrize("decode", [(), ("--decode", "message"), ("--format", "json"), ("--format", "hex")])
def test_dump_ends_with_code_4_at_a_message_with_a_flipped_bit(flipped: Damaged, decode: tuple[str, ...]) -> None:
    result = command.run("dump", flipped.path, "--from", flipped.index - 1, *decode, code=4)
    assert f"indexes {flipped.index} to {flipped.index} are damaged" in result.stderr
    assert flipped.hidden not in result.stdout_bytes
    assert str(flipped.index) in result.stderr
    command.run("dump", flipped.path, "--opaque", *decode)


def test_dump_shows_the_entries_around_a_message_with_a_flipped_bit(flipped: Damaged) -> None:
    everything = command.rows_of("dump", flipped.path, "--opaque")
    result = command.run("dump", flipped.path, "--format", "json", code=4)
    shown = [json.loads(line) for line in result.stdout.splitlines()]
    assert shown == [row for row in everything if row["index"] != flipped.index]
    command.run("dump", flipped.path, "--from", flipped.index + 1)
    command.run("dump", flipped.path, "--to", flipped.index)


def test_convert_refuses_a_message_with_a_flipped_bit(flipped: Damaged, tmp_path: Path) -> None:
    result = command.run("convert", flipped.path, tmp_path / "copy", *CONVERT, code=4)
    assert str(flipped.index) in result.stderr
    command.run("convert", flipped.path, tmp_path / "copy", *CONVERT, "--opaque")


def test_audit_names_every_replica_with_a_flipped_message(flipped: Damaged, tmp_path: Path) -> None:
    archive, node = next(each for each in STORES.values() if each[0] in str(flipped.path))
    intact = extract(archive, f"{node}/dledger-{node}", tmp_path / "intact")
    double = shutil.copytree(flipped.path, tmp_path / "double")
    wrong = (flipped.index, flipped.index + 1)
    for stores, replicas in (({"intact": intact}, ["damaged"]), ({"double": double}, ["damaged", "double"])):
        found = audit({"damaged": flipped.path, **stores})
        assert [(f.kind.value, f.replica, (f.start, f.end)) for f in found] == [("CORRUPT", n, wrong) for n in replicas]


def test_decoded_message_with_a_flipped_bit_has_an_error_and_no_wrong_body(flipped: Damaged) -> None:
    with open_store(flipped.path, opaque=True) as reader:
        bodies = reader.read(flipped.index - 1, flipped.index + 2).column("body")
    found = decode_messages(bodies).to_pylist()
    assert [row["error"] is None for row in found] == [True, False, True]
    assert (found[1]["body"] is None) != flipped.outside
    assert found[1]["topic"] == flipped.topic


ENDS = ("last data file missing", "second half of the last data file zero")


@pytest.fixture(params=[(version, end) for version in ("0.3.1.2", "0.4.0") for end in ENDS], ids=" ".join)
def lost_end(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path, int]:
    """A Java store without its end, an intact replica, and the first entry that is missing."""
    version, end = request.param
    directory = unpacked(f"dledger-{version}-three", tmp_path)
    store, intact = directory / "dledger-n0", directory / "dledger-n1"
    file = max((store / "data").iterdir())
    with open_store(store) as reader:
        written = int(reader.position_end) - int(file.name)
    if end == ENDS[0]:
        file.unlink()
    else:
        content = file.read_bytes()
        file.write_bytes(content[: written // 2] + bytes(len(content) - written // 2))
    with open_store(store) as reader:
        return store, intact, int(reader.last_index) + 1


def test_lost_end_of_a_java_store_is_missing_in_every_view(lost_end: tuple[Path, Path, int], tmp_path: Path) -> None:
    store, intact, start = lost_end
    (report,) = json.loads(command.run("verify", store, "--format", "json", code=1).stdout)
    assert [(f["kind"], f["start"], f["end"]) for f in report["findings"]] == [("MISSING", start, 267)]
    command.run("dump", store, code=4)
    command.run("convert", store, tmp_path / "copy", *CONVERT, code=4)
    command.run("convert", store, tmp_path / "copy", *CONVERT, "--cut-tail")
    # The last entry that is left may have lost its end too: without a CRC only a comparison shows it.
    (found,) = [f for f in audit({"lost": store, "intact": intact}) if f.kind.value != "CORRUPT"]
    assert (found.replica, found.start, found.end, found.severity.value) == ("lost", start, 267, "critical")
    assert found.kind.value in ("MISSING", "MISSING_COMMITTED")


@pytest.mark.parametrize("version", ["0.3.1.2", "0.4.0"])
@pytest.mark.parametrize("edit", [(0, b"\0\0\0\0"), (8, b"\x40")], ids=["magic", "index"])
def test_damaged_first_record_of_a_java_store_moves_no_index(
    tmp_path: Path, version: str, edit: tuple[int, bytes]
) -> None:
    store = unpacked(f"dledger-{version}-three", tmp_path) / "dledger-n0"
    file = min((store / "data").iterdir())
    overwrite(file, *edit)
    with open_store(store) as reader:
        assert (reader.first_index, reader.last_index) == (0, 266)
        assert reader.read(1, 267).num_rows == 266
    (report,) = json.loads(command.run("verify", store, "--format", "json", code=1).stdout)
    assert [(f["kind"], f["start"], f["end"]) for f in report["findings"]] == [("CORRUPT", 0, 1)]
    command.run("dump", store, code=4)


def test_entries_that_a_running_broker_appends_are_not_missing(tmp_path: Path) -> None:
    store = unpacked("dledger-0.4.0-three", tmp_path) / "dledger-n0"
    file = max((store / "data").iterdir())
    content = file.read_bytes()
    _, at = place_of(store, 260)
    file.write_bytes(content[:at] + bytes(len(content) - at))
    with open_store(store) as lost, open_store(store) as running:
        assert lost.missing == (260, 267)
        file.write_bytes(content)
        assert running.missing is None


@pytest.mark.parametrize("value", ["--5", "²", "9" * 5000, "-7", ""])
def test_damaged_checkpoint_of_java_is_no_commit_index(tmp_path: Path, value: str) -> None:
    store = unpacked("dledger-0.3.1.2-three", tmp_path) / "dledger-n0"
    (store / "checkpoint").write_text(f"committedIndex={value}\nendIndex=266\n", encoding="utf-8")
    with open_store(store) as reader:
        assert (reader.commit_index, reader.last_index) == (None, 266)


def test_entries_after_a_record_that_was_cut_are_missing(tmp_path: Path) -> None:
    """The header of the cut record is intact: it does not look like an entry of a running broker."""
    store = unpacked("dledger-0.4.0-three", tmp_path) / "dledger-n0"
    with open_store(store) as reader:
        size = int(reader.raw(230, 231, 1).sizes[0])
    file, offset = place_of(store, 230)
    os.truncate(file, offset + 48 + (size - 48) // 2)
    with open_store(store) as reader:
        assert (reader.last_index, reader.missing) == (229, (230, 267))
