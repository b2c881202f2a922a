"""Damage outside the body of a message, and the bytes that no check covers: ``verify`` counts what it can miss."""

from __future__ import annotations

import json
import struct
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest

from dledger_core import open_store
from dledger_core.errors import CorruptRecordError
from dledger_core.rocketmq import consume_queue_columns, decode_messages, encode_messages
from dledger_core.storage import StoreReader
from tests.cli import command
from tests.jobs.broker_store import write_broker_store, write_commitlog
from tests.rocketmq.convert.stores import GOLDEN, converted, unpacked
from tests.rocketmq.golden import MIXED, NAMES, REUSED, TESTDATA, THREE, extract
from tests.support.archives import unpack

INTACT = 40
"""More than the entries from which a store learns what its log contains."""
PROPERTIES = {"KEYS": "k1", "TAGS": "TagA", "UNIQ_KEY": "U000001"}
KINDS: dict[str, dict] = {
    "plain": {},
    "one property": {"properties": {"K": "v"}},
    "no properties": {"properties": {}},
    "empty body": {"body": [b""]},
    "IPv6": {"born_host": "[::1]:5000", "store_host": "[2001:db8::ff]:10911"},
    "V2": {"topic": "t" * 200, "store_host": "[::1]:1"},
    "compressed": {"sys_flag": 0x301, "body": [zlib.compress(b"hello" * 20)]},
}


def message(**changes: object) -> bytes:
    given = {"topic": "Orders", "queue_id": 3, "body": [b"hello world"], "properties": PROPERTIES}
    given |= {"queue_offset": 5, "born_timestamp": 1_760_000_000_000, "store_timestamp": 1_760_000_000_500}
    return encode_messages(**(given | changes))[0].as_py()


def signed(record: bytes) -> bytes:
    """The record with the CRC property that a broker with ``enabledAppendPropCRC`` appends, at its position."""
    if record[-20:-11] == b"__CRC32#\x01":
        record = record[:-20]
    else:
        at = record.index(b"Orders") + len("Orders") if b"Orders" in record else len(record) - 2
        length = struct.unpack_from(">h", record, at)[0] + 20
        record = struct.pack(">i", len(record) + 20) + record[4:at] + struct.pack(">h", length) + record[at + 2 :]
    digits = str(zlib.crc32(record) & 0x7FFFFFFF).zfill(10)[::-1]
    return record + b"__CRC32#\x01" + digits.encode() + b"\x02"


@dataclass(frozen=True)
class Log:
    """A store that a broker wrote: what is changed in it, and the bytes of each message."""

    path: Path
    places: list[int]
    sizes: list[int]

    def change(self, row: int, patch: Callable[[bytearray], None]) -> None:
        files = sorted((self.path / "data").iterdir(), reverse=True)
        file = next(each for each in files if int(each.name) <= self.places[row])
        start, data = self.places[row] - int(file.name), bytearray(file.read_bytes())
        record = bytearray(data[start : start + self.sizes[row]])
        patch(record)
        data[start : start + self.sizes[row]] = record
        file.write_bytes(data)


def log_of(directory: Path, records: list[bytes], *, crc: bool = False) -> Log:
    data_bytes = 1 << 22
    places = write_broker_store(directory, records, data_bytes=data_bytes)
    log = Log(directory, places, [len(record) for record in records])
    if crc:
        (file,) = (directory / "data").iterdir()
        data = bytearray(file.read_bytes())
        for place, size in zip(places, log.sizes, strict=True):
            data[place : place + size] = signed(bytes(data[place : place + size]))
        file.write_bytes(data)
    return log


def found_in(path: Path) -> tuple[set[int], dict]:
    """The indexes with findings, and the report."""
    (report,) = json.loads(command.run("verify", path, "--format", "json", code=None).stdout)
    found = [each for each in report["findings"] if each["start"] is not None]
    return {index for each in found for index in range(each["start"], each["end"])}, report


def noticed(directory: Path, record: bytes, *, crc: bool = False) -> list[bool]:
    """Flip each bit of a message, each in a message of its own; whether all flips of each byte are noticed."""
    count = len(record) * 8
    log = log_of(directory, [record] * (count + 2 * INTACT), crc=crc)
    (file,) = (directory / "data").iterdir()
    data = bytearray(file.read_bytes())
    for bit in range(count):
        data[log.places[INTACT + bit] + bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)
    found, _ = found_in(directory)
    assert found <= set(range(INTACT, INTACT + count))
    return [all(INTACT + 8 * at + bit in found for bit in range(8)) for at in range(len(record))]


@pytest.mark.parametrize("kind", KINDS)
def test_unnoticed_bytes_are_those_that_verify_counts(tmp_path: Path, kind: str) -> None:
    record = message(**KINDS[kind])
    path = log_of(tmp_path / "intact", [record] * 10).path
    _, report = found_in(path)
    seen = noticed(tmp_path / "flipped", record)
    assert report["findings"] == report["remarks"] == []
    assert report["unchecked_bytes"] == 10 * seen.count(False)
    assert report["checksum_bytes"] + report["compared_bytes"] == 10 * seen.count(True)


@pytest.mark.parametrize("kind", ["plain", "no properties"])
def test_every_flipped_bit_is_noticed_in_a_message_with_a_crc_property(tmp_path: Path, kind: str) -> None:
    record = signed(message(**KINDS[kind]))
    path = log_of(tmp_path / "intact", [record] * 10, crc=True).path
    assert found_in(path)[1]["checksum_bytes"] == 10 * len(record)
    assert all(noticed(tmp_path / "flipped", record, crc=True))


def test_classic_commitlog_notices_the_same_bytes(tmp_path: Path) -> None:
    record = message()
    seen = noticed(tmp_path / "log", record)
    places = write_commitlog(tmp_path / "commitlog", [record] * len(record), file_bytes=1 << 18)
    (file,) = (tmp_path / "commitlog").iterdir()
    _, report = found_in(tmp_path / "commitlog")
    assert report["unchecked_bytes"] == len(record) * seen.count(False)
    data = bytearray(file.read_bytes())
    for at in range(8, len(record)):  # size and magic lead to the next message
        data[places[at] + at] ^= 1 if seen[at] else 0x20
    file.write_bytes(data)
    positions = {each["position"] for each in found_in(tmp_path / "commitlog")[1]["findings"]}
    assert {places[at] for at in range(8, len(record)) if seen[at]} <= positions


@pytest.mark.parametrize(
    ("offset", "patch"),
    [
        ("properties", b"\0" * 20),
        ("all properties", b""),
        ("topic", b"\0\0\0\0\0\0"),
        ("topic", b"Ord\xffrs"),
        ("sys_flag", b"\0\0\0\x01"),
        ("physical_offset", b"\0\0\0\0\0\0\0\x01"),
        ("physical_offset", None),
    ],
)
def test_zeros_and_contradictions_are_damage_in_every_view(tmp_path: Path, offset: str, patch: bytes | None) -> None:
    log = log_of(tmp_path / "log", [message() for _ in range(10)])

    def change(record: bytearray) -> None:
        start = record.index(b"KEYS")
        at = {"properties": len(record) - 20, "all properties": start, "topic": record.index(b"Orders")}
        at |= {"sys_flag": 36, "physical_offset": 28}
        new = patch if patch else bytes(8) if patch is None else bytes(len(record) - start)
        record[at[offset] : at[offset] + len(new)] = new

    log.change(5, change)
    expected = set() if patch is None else {5}  # a physical offset of 0 is not set
    assert found_in(log.path)[0] == expected
    command.run("dump", log.path, code=4 if expected else 0)
    options = ("--group", "g", "--self-id", "n0", "--peers", "n0-127.0.0.1:1", "--dry-run")
    command.run("convert", log.path, tmp_path / "copy", *options, code=4 if expected else 0)
    with open_store(log.path, opaque=True) as store:
        bodies = store.read(0, 10).column("body")
    with open_store(log.path) as store:
        assert [row for row in range(10) if not readable(store, row)] == sorted(expected)
    placed = offset == "physical_offset"  # the codec does not know where a message is stored, unless it is given
    for batch in (decode_messages(bodies), consume_queue_columns(bodies)):
        assert [row["error"] is None for row in batch.to_pylist()] == [row != 5 or placed for row in range(10)]
    positions = pa.array([place if row != 5 or patch else 0 for row, place in enumerate(log.places)])
    errors = consume_queue_columns(bodies, ["error"], positions=positions)["error"].to_pylist()
    assert {row for row, error in enumerate(errors) if error} == expected


def readable(store: StoreReader, row: int) -> bool:
    try:
        return store.messages(row, row + 1).read_all().num_rows == 1
    except CorruptRecordError:
        return False


def test_messages_that_clients_write_are_no_damage(tmp_path: Path) -> None:
    tags = [b"\xed\xa0\xbd\xed\xb8\x80", b"ok\xf0\x9f\x98", b"a\xc0\x80b", b"\xff\xfe", b"a\0b"]
    records = []
    for tag in tags:
        record = message(properties={"TAGS": "x" * len(tag), "UNIQ_KEY": "U"})
        records.append(record.replace(b"x" * len(tag), tag))
    tail = bytes([0x7F, 0, 0x1F, 0x41, 0x80, 0xFF, 2, 0x54, 0x41, 0x47, 0x53, 1, 0x5A, 0, 0, 0, 0, 9, 9, 9])
    undefined = message(properties={"A": "a", "B": "b" * 17})
    records += [undefined.replace(b"B\x01" + b"b" * 17 + b"\x02", end) for end in (tail, bytes(20))]
    resent = message(properties={"__CRC32#": "0123456789", "A": "a"})
    assert b"__CRC32#" not in resent  # it would be the CRC of another record
    stale = message(properties={"X" * 8: "0123456789", "B": "b"}).replace(b"X" * 8, b"__CRC32#")
    records += [resent, stale, message(properties={"__CRC32C": "0123456789"})]
    log = log_of(tmp_path / "log", records)
    found, report = found_in(log.path)
    assert found == set()
    (remark,) = report["remarks"]
    assert (remark["kind"], remark["count"], remark["index"]) == ("PROPERTIES_NOT_TEXT", 6, 0)


def test_store_time_that_goes_back_is_a_remark(tmp_path: Path) -> None:
    times = [1_760_000_000_000, 1_760_000_000_900, 1_760_000_000_400, 1_760_000_000_800, 1_760_000_001_000]
    log = log_of(tmp_path / "log", [message(store_timestamp=time) for time in times])
    write_commitlog(tmp_path / "commitlog", [message(store_timestamp=time) for time in times])
    for path, index in ((log.path, 2), (tmp_path / "commitlog", None)):
        (report,) = json.loads(command.run("verify", path, "--format", "json").stdout)
        (remark,) = report["remarks"]
        assert (remark["kind"], remark["count"], remark["index"]) == ("STORE_TIME_BACK", 2, index)
        assert "500" in remark["message"].split()


def golden(directory: Path) -> list[Path]:
    """The stores and CommitLogs of real brokers and of Java DLedger."""
    found = [extract(name, f"{node}/dledger-{node}", directory) for name, node in ((THREE, "n1"), (REUSED, "n0"))]
    found += [extract(MIXED, "n0/dledger-n0", directory), extract(MIXED, "n0/commitlog", directory)]
    for archive in sorted(TESTDATA.glob("*.tar.xz")):
        with tarfile.open(archive) as opened:
            unpack(opened, directory / archive.name)
        found += sorted((directory / archive.name).rglob("commitlog"))
    return found


def test_no_golden_store_and_no_converted_one_has_a_finding(tmp_path: Path) -> None:
    assert set(NAMES) == {THREE, MIXED, REUSED}
    for number, path in enumerate(golden(tmp_path)):
        assert found_in(path)[1]["findings"] == [], path
        copy = tmp_path / f"copy-{number}"
        converted(path, copy)
        assert found_in(copy)[1]["findings"] == [], path
    for name in GOLDEN:
        for path in sorted(unpacked(name, tmp_path).glob("dledger-*")):
            assert found_in(path)[1]["findings"] == [], path


def test_topic_that_topics_json_lacks_is_a_remark(tmp_path: Path) -> None:
    records = [message(), message(topic="Ordesr"), message(topic="Ordesr")]
    log_of(tmp_path / "dledger-n0", records)
    write_commitlog(tmp_path / "classic" / "commitlog", records)
    for broker, name in ((tmp_path, "dledger-n0"), (tmp_path / "classic", "commitlog")):
        assert found_in(broker / name)[1]["remarks"] == []
        (broker / "config").mkdir()
        (broker / "config" / "topics.json").write_text('{"topicConfigTable": {"Orders": {"topicName": "Orders"}}}')
        (report,) = json.loads(command.run("verify", broker / name, "--format", "json").stdout)
        (remark,) = report["remarks"]
        assert (remark["kind"], remark["count"]) == ("TOPIC_UNKNOWN", 2)
        assert "Ordesr" in remark["message"]
