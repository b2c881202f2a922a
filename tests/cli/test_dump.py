"""``dledger dump`` compared with RocketMQ's and Java's own readers on golden stores, and on native logs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import Result

from dledger_core.cli.formats import EntryFormat
from dledger_core.ids import Index
from dledger_core.record import READ_SCHEMA
from dledger_core.rocketmq import encode_messages
from dledger_core.storage import CommitLog, open_store
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.meta_files import load_checkpoint, save_checkpoint
from tests.cli import command
from tests.cli.command import error_of, last_error
from tests.rocketmq.convert.stores import snapshot, store_of, unpacked
from tests.rocketmq.golden import MIXED, THREE, units
from tests.spark_connector.store_writer import StoreWriter
from tests.support.damage import flip, place_of
from tests.support.logs import SMALL, append, visible


def run(*arguments: object, code: int = 0) -> Result:
    return command.run("dump", *arguments, code=code)


def rows(*arguments: object) -> list[dict[str, Any]]:
    return command.rows_of("dump", *arguments)


def text(*arguments: object) -> list[str]:
    return run(*arguments).stdout_bytes.decode().splitlines()


@pytest.fixture(scope="module", params=["0.3.1.2", "0.4.0"])
def java(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Three nodes' stores of each generation."""
    return unpacked(f"dledger-{request.param}-diverged", tmp_path_factory.mktemp("java"))


@pytest.mark.slow
@pytest.mark.parametrize("column", ["topic", "tags", "keys", "queue_id"])
def test_filter_finds_same_messages_as_slow_scan(golden: Path, column: str) -> None:
    store = golden / THREE / "n0" / "dledger-n0"
    everything = rows(store, "--decode", "message")
    wanted = {row[column] for row in everything if row[column] is not None}
    option = {"topic": "--topic", "tags": "--tag", "keys": "--key", "queue_id": "--queue"}[column]
    values = sorted(wanted, key=str)[:12]
    for value in values:
        expected = [row["index"] for row in everything if _fits(row, column, value)]
        assert [row["index"] for row in rows(store, option, value)] == expected
    both = [row["index"] for row in rows(store, option, values[0], option, values[1])]
    assert both == [r["index"] for r in everything if any(_fits(r, column, value) for value in values[:2])]


def _fits(row: dict[str, Any], column: str, value: Any) -> bool:
    """In plain Python, one entry at a time."""
    if column == "keys":
        return f" {value} " in f" {row['keys']} " or row["properties"].get("UNIQ_KEY") == value
    if column == "tags":
        return row["tags"] in {value, *(part.strip() for part in value.split("||"))}
    return bool(row[column] == value)


def test_unique_key_finds_its_message(golden: Path) -> None:
    store = golden / THREE / "n0" / "dledger-n0"
    wanted = rows(store, "--from", 700, "--count", 1, "--decode", "message")[0]
    assert wanted in rows(store, "--key", wanted["properties"]["UNIQ_KEY"])


def test_physical_offset_finds_message_in_both_halves_of_mixed_log(golden: Path) -> None:
    store = golden / MIXED / "n0"
    positions = sorted(unit["commitLogOffset"] for unit in units(MIXED))
    for at in (positions[0], positions[200], positions[-1], positions[-200]):
        for inside in (0, 10):
            (row,) = rows(store, "--from", f"@{at + inside}", "--count", 1)
            assert row["physical_offset"] == at
    classic = rows(store, "--to", "@262144")
    assert len(classic) == 325
    assert {row["index"] for row in classic} == {None}
    assert [row["index"] for row in rows(store, "--from", "@262144")] == list(range(263))
    assert [row["index"] for row in rows(store, "--from", -265)] == [None, None, *range(263)]
    assert rows(store / "commitlog") == classic
    assert rows(store / "commitlog", "--from", -7) == classic[-7:]
    assert rows(store / "dledger-n0", "--commitlog", store / "commitlog", "--to", 2) == rows(store, "--to", 2)


def test_entry_without_append_time_is_found_by_store_time(golden: Path) -> None:
    store = golden / MIXED / "n0"
    everything = rows(store)
    times = [row["store_timestamp"] for row in everything]
    since, until = sorted(times)[100], sorted(times)[400]
    expected = [row for row in everything if since <= row["store_timestamp"] < until]
    assert len(expected) > 250
    assert rows(store, "--from", since, "--to", until) == expected
    assert rows(store, "--from", since, "--to", until, "--count", 5) == expected[:5]


def test_trimmed_log_is_read_from_its_first_index(java: Path, tmp_path: Path) -> None:
    store, _ = store_of(java, "n0")
    shutil.copytree(store, tmp_path / "s")
    everything = rows(store)
    min((tmp_path / "s" / "data").iterdir()).unlink()
    left = rows(tmp_path / "s")
    assert 0 < len(left) < len(everything)
    assert left == everything[-len(left) :]
    first = left[0]["index"]
    assert rows(tmp_path / "s", "--from", first, "--to", first + 2) == left[:2]
    assert rows(tmp_path / "s", "--from", -5000) == rows(tmp_path / "s", "--from", "@0") == left
    refused = last_error(run(tmp_path / "s", "--from", first - 1, code=3).stderr)
    assert (refused.code, refused.values["first_index"]) == ("INDEX_OUT_OF_RANGE", str(first))


def own_log(path: Path) -> None:
    """A no-op, messages one second apart, and a body that is not a message."""
    log = CommitLog.open(path, group="g", node_id="n0", config=SMALL)
    append(log, [], control=b"", now_ms=1_000_000)
    for number in range(10):
        message = encode_messages(
            topic="orders" if number % 2 else "größe",
            queue_id=number % 3,
            body=[f"body {number}".encode()],
            tags="a" if number < 5 else None,
            keys=f"k{number} all",
            properties=pa.array([[("colour", "red, green")]], pa.map_(pa.string(), pa.string())),
        )
        append(log, [message[0].as_py()], now_ms=1_001_000 + 1000 * number)
    append(log, [b"\xff\x00no message"], term=2, now_ms=1_020_000)
    log.close(11)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "dledger-n0"
    own_log(path)
    return path


def test_seek_targets_select_entries_of_native_log(own: Path) -> None:
    everything = rows(own)
    assert [row["index"] for row in everything] == list(range(12))
    positions = [row["position"] for row in everything]
    assert rows(own, "--from", 3, "--to", 5) == everything[3:5]
    assert rows(own, "--from", "first", "--to", "end") == everything
    assert rows(own, "--from", -2) == everything[-2:]
    assert rows(own, "--from", "end") == []
    assert rows(own, "--to", -11) == everything[:1]
    assert rows(own, "--from", f"@{positions[4]}", "--to", f"@{positions[6]}") == everything[4:6]
    assert rows(own, "--from", f"@{positions[4] + 1}", "--to", f"@{positions[6] + 1}") == everything[4:7]
    assert rows(own, "--from", "@99999999") == []
    assert rows(own, "--from", "1970-01-01T00:16:43Z", "--to", "1970-01-01T00:16:45") == everything[3:5]
    assert rows(own, "--from", "1970-01-01T00:16:43.001", "--to", 6) == everything[4:6]
    assert rows(own, "--from", 3, "--count", 2, "--topic", "orders") == rows(own, "--topic", "orders")[1:3]


def test_raw_is_the_body_byte_for_byte(own: Path) -> None:
    def raw(*arguments: object) -> bytes:
        return run(own, *arguments, "--format", "raw").stdout_bytes

    assert raw("--from", 10, "--decode", "message") == b"body 9" + b"\xff\x00no message"
    assert raw("--topic", "orders") == b"body 1body 3body 5body 7body 9"
    with open_store(own) as reader:
        assert raw("--from", 1, "--to", 2) == reader.read(1, 2).column("body")[0].as_py()
    assert raw("--from", "end") == b""


def test_hex_equals_bytes_on_disk(own: Path, golden: Path) -> None:
    for store, data in (
        (own, own / "data"),
        (golden / MIXED / "n0" / "commitlog", golden / MIXED / "n0" / "commitlog"),
    ):
        disk = (data / f"{0:020d}").read_bytes()
        lines = text(store, "--count", 5, "--format", "hex")
        assert len([line for line in lines if line.startswith("# ")]) == 5
        shown = 0
        for line in lines:
            if not line.startswith("# "):
                at, digits = int(line[:16], 16), bytes.fromhex(line[18:66])
                assert disk[at : at + len(digits)] == digits
                shown += len(digits)
        assert shown == at + len(digits)
    assert "body 0" in text(own, "--from", 1, "--count", 1, "--format", "hex", "--decode", "message")[1]


def test_body_that_cannot_be_decompressed_has_error(tmp_path: Path) -> None:
    log = CommitLog.open(tmp_path / "s", group="g", node_id="n0")
    message = encode_messages(topic="t", queue_id=0, body=[b"no zlib"], sys_flag=1)
    append(log, message.to_pylist())
    log.close(0)
    (row,) = rows(tmp_path / "s", "--decode", "message")
    assert (row["topic"], row["body"]) == ("t", None)
    assert row["error"] in text(tmp_path / "s", "--decode", "message")[1]


@pytest.mark.slow
def test_compressed_bodies_are_decoded_in_chunks(tmp_path: Path) -> None:
    import zlib

    log = CommitLog.open(tmp_path / "s", group="g", node_id="n0")
    body = zlib.compress(bytes(20 << 20))
    append(log, encode_messages(topic="t", queue_id=0, body=pa.array([body] * 9), sys_flag=1).to_pylist())
    log.close(8)
    found = run(tmp_path / "s", "--decode", "message", "--format", "raw").stdout_bytes
    assert found == bytes(9 * (20 << 20))


def test_commitlog_rejects_index(golden: Path) -> None:
    assert last_error(run(golden / MIXED / "n0" / "commitlog", "--from", 3, code=3).stderr).code == "CONFIG"


@pytest.mark.parametrize("damage", ["magic", "length", "shorter"])
def test_damaged_commitlog_shows_intact_messages_and_position(golden: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(golden / MIXED / "n0" / "commitlog", tmp_path / "commitlog")
    everything = [row["position"] for row in rows(tmp_path / "commitlog")]
    first = tmp_path / "commitlog" / f"{0:020d}"
    data = bytearray(first.read_bytes())
    at = everything[3]
    if damage == "shorter":
        data[at + 40 :] = bytes(len(data) - at - 40)
        first.write_bytes(data[: at + 40])
    else:
        data[at + (4 if damage == "magic" else 0) : at + (8 if damage == "magic" else 4)] = b"\x7f\xff\xff\xff"
        first.write_bytes(data)
    before = snapshot(tmp_path)
    result = run(tmp_path / "commitlog", "--format", "json", code=4)
    assert snapshot(tmp_path) == before
    error = last_error(result.stderr)
    assert str(tmp_path / "commitlog") in error
    second = [each for each in everything if each >= 131072]
    assert [json.loads(line)["position"] for line in result.stdout.splitlines()] == [*everything[:3], *second]
    assert (error.code, error.values) == ("CORRUPT", {"position": str(at)})


Edit = Callable[[bytearray, int], bytes]


@pytest.mark.parametrize(
    ("number", "edit"),
    [
        (-1, lambda data, at: data[: at + 8] + bytes([data[at + 8] ^ 1]) + data[at + 9 :]),
        (100, lambda data, at: data[:at] + bytes(4) + data[at + 4 :]),
        (-1, lambda data, at: data[: at + 20]),
    ],
    ids=["index of last entry", "magic of entry 100", "truncated file"],
)
def test_damaged_java_store_shows_intact_entries_and_position(
    java: Path, tmp_path: Path, number: int, edit: Edit
) -> None:
    """Java's own reader stops there without an error, and shows nothing after it."""
    store, _ = store_of(java, "n0")
    shutil.copytree(store, tmp_path / "s")
    everything = rows(store)
    at = everything[number]["position"]
    file = sorted((tmp_path / "s" / "data").iterdir())[at // 65536]
    file.write_bytes(edit(bytearray(file.read_bytes()), at % 65536))
    before = snapshot(tmp_path)
    result = run(tmp_path / "s", "--format", "json", code=4)
    assert snapshot(tmp_path) == before
    intact = everything[:number] + (everything[number + 1 :] if number > 0 else [])
    assert [json.loads(line) for line in result.stdout.splitlines()] == intact
    error = last_error(result.stderr)
    assert (error.code, error.values["position"]) == ("CORRUPT", str(at))
    assert error.values.get("index", str(everything[number]["index"])) == str(everything[number]["index"])


def test_missing_committed_entries_at_end_are_reported(tmp_path: Path) -> None:
    log = CommitLog.open(tmp_path / "s", group="g", node_id="n0")
    append(log, [b"one"] * 3)
    log.close(2)
    run(tmp_path / "s")
    beyond = last_error(run(tmp_path / "s", "--from", 9, code=3).stderr)
    assert beyond.code == "INDEX_OUT_OF_RANGE"
    assert {"first_index": "0", "last_index": "2"}.items() <= beyond.values.items()
    for file in (tmp_path / "s" / "data").iterdir():
        file.unlink()
    assert last_error(run(tmp_path / "s", code=4).stderr).code == "CORRUPT"


def test_tag_star_matches_every_message(golden: Path) -> None:
    store = golden / THREE / "n0" / "dledger-n0"
    everything = rows(store, "--topic", "TopicTest", "--format", "json")
    assert rows(store, "--topic", "TopicTest", "--tag", "*") == everything
    assert rows(store, "--topic", "TopicTest", "--tag", "nothing || *") == everything


@pytest.mark.parametrize("form", ["json", "raw"])
def test_closed_pipe_of_dump_is_not_an_error(tmp_path: Path, form: str) -> None:
    log = CommitLog.open(tmp_path / "s", group="g", node_id="n0")
    for _ in range(6):  # more than one batch, and more than a pipe holds
        append(log, [b"x" * 1000] * 2000)
    log.close(11_999)
    dump = f"{' '.join(command.DLEDGER)} dump {tmp_path / 's'} --format {form}"
    piped = f'{dump} | head -c 1; echo "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True, check=True)
    assert (done.stdout[1:], done.stderr) == ("0\n", "indexes 0 to 11999, commit index 11999\n")


# --- formats, on batches ---------------------------------------------------------------------------------------------

TIME = datetime(2013, 1, 1, 5, 17, 0, 250_000, tzinfo=UTC)
ROWS: list[dict[str, Any]] = [
    {"index": 7, "term": 2, "position": 336, "timestamp": TIME, "body": "héllo\n".encode()},
    {"index": 8, "term": 2, "position": 400, "timestamp": None, "body": b"\xff\x00"},
]


def printed(capsys: pytest.CaptureFixture[str], form: str, *batches: pa.RecordBatch) -> list[str]:
    write = EntryFormat(form).printer()
    for batch in batches:
        write(batch)
    return capsys.readouterr().out.splitlines()


def test_json_is_one_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert [json.loads(line) for line in printed(capsys, "json", pa.RecordBatch.from_pylist(ROWS, READ_SCHEMA))] == [
        {"index": 7, "term": 2, "position": 336, "timestamp": "2013-01-01T05:17:00.250000+00:00", "body": "héllo\n"},
        {"index": 8, "term": 2, "position": 400, "timestamp": None, "body_base64": "/wA="},
    ]


def test_table_has_one_heading_and_one_line_per_entry(capsys: pytest.CaptureFixture[str]) -> None:
    batches = [pa.RecordBatch.from_pylist([row], READ_SCHEMA) for row in ROWS]
    assert printed(capsys, "table", *batches) == [
        "index  term  position  time (UTC)               bytes  body",
        "    7     2       336  2013-01-01T05:17:00.250      7  héllo\\n",
        "    8     2       400  -                            2  0xff 00",
    ]


@pytest.mark.parametrize("form", ["table", "json", "hex", "raw"])
def test_no_entries_print_nothing(capsys: pytest.CaptureFixture[str], form: str) -> None:
    assert printed(capsys, form, pa.RecordBatch.from_pylist([], READ_SCHEMA)) == []


def test_last_counts_matching_entries(golden: Path) -> None:
    store = golden / THREE / "n0" / "dledger-n0"
    found = rows(store, "--topic", "TopicTest")
    result = run(store, "--topic", "TopicTest", "--last", 3, "--format", "json")
    assert [json.loads(line) for line in result.stdout.splitlines()] == found[-3:]
    assert f"{len(found)} of 1,024 matched" in result.stderr


@pytest.mark.parametrize("options", [("--topic", "orders"), ("--last", "3"), ("--from", "-3", "--until", "end")])
def test_json_has_the_same_columns_with_every_selection(own: Path, options: tuple[str, ...]) -> None:
    by_index = {row["index"]: row for row in rows(own)}
    for row in rows(own, *options):
        stored = by_index[row["index"]]
        bodies = {"body", "body_base64"}
        assert {name: row[name] for name in row.keys() - bodies} == {n: stored[n] for n in stored.keys() - bodies}
    assert by_index[1]["topic"] == "größe"
    assert "topic" not in by_index[0], "a control entry"
    assert "topic" not in by_index[11], "a body that is not a message"


def test_dump_says_when_the_newest_entry_was_written(own: Path, golden: Path) -> None:
    times = {"1970-01-01T00:16:40", "1970-01-01T00:17:00"}
    assert times <= set(re.findall(r"[-\d]+T[:\d]+", run(own, "--from", "-1h").stderr))
    assert times.isdisjoint(re.findall(r"[-\d]+T[:\d]+", run(own, "--from", "1970-01-01").stderr))
    for store in (golden / THREE / "n0" / "dledger-n0", golden / MIXED / "n0" / "commitlog"):
        newest = max(row["store_timestamp"] for row in rows(store, "--decode", "message") if row["store_timestamp"])
        assert newest[:19] in run(store, "--from", "-1h").stderr


def test_last_counts_after_filters_and_from_before_them(own: Path) -> None:
    assert rows(own, "--topic", "orders", "--from", "-1") == []
    assert [row["index"] for row in rows(own, "--topic", "orders", "--last", 1)] == [10]


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a committed, a losing and an open attempt, and entries after the recorded commit index."""
    with StoreWriter(tmp_path_factory.mktemp("attempts")) as store:
        store.append_attempt(2, batch=0)
        won = store.append_attempt(2, batch=0)
        store.commit(won, batch=0)
        store.append_attempt(2, batch=1)
        store.append_numbers(1)
        path = store.path
    layout = Layout(path)
    checkpoint = load_checkpoint(OsFiles(), layout.checkpoint)
    with open_store(path) as log:
        committed = int(log.last_index) - 1
    save_checkpoint(OsFiles(), layout.checkpoint, replace(checkpoint, commit_index=Index(committed)))
    return path


def test_each_line_that_read_committed_hides_is_marked(attempts: Path) -> None:
    found = rows(attempts)
    with open_store(attempts) as log:
        seen = set(visible(log).column("index").to_pylist())
    assert {row["index"] for row in found if row["hidden"] is None} == seen
    assert {row["hidden"] for row in found} == {None, "control", "aborted", "open", "uncommitted"}
    assert found[-1]["hidden"] == "uncommitted"
    result = run(attempts)
    lines = {line.split()[0]: line for line in result.stdout.splitlines()}
    for row in found:
        assert (row["hidden"] or "none") in lines[str(row["index"])] or row["hidden"] is None
    assert rows(attempts, "--last", 1)[0]["hidden"] == "uncommitted"


def test_damaged_control_entry_leaves_all_entries_and_no_mark(attempts: Path, tmp_path: Path) -> None:
    store = shutil.copytree(attempts, tmp_path / "s")
    expected = rows(store)
    (store / "meta" / "tables").unlink(missing_ok=True)
    at = next(row for row in expected if row["hidden"] == "control" and row["index"] > 0)
    file, offset = place_of(store, at["index"])
    flip(file, offset + 50)
    result = run(store, "--format", "json", code=4)
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["index"] for row in found] == [row["index"] for row in expected if row["index"] != at["index"]]
    assert last_error(result.stderr).code == "CORRUPT"


def test_until_and_to_are_one_option(own: Path) -> None:
    assert rows(own, "--from", 3, "--until", 5) == rows(own, "--from", 3, "--to", 5)


def test_message_id_and_regex_find_their_messages(golden: Path) -> None:
    store = golden / THREE / "n0" / "dledger-n0"
    everything = rows(store, "--decode", "message")
    wanted = everything[700]
    assert rows(store, "--msg-id", wanted["msg_id"].lower()) == [wanted]
    texts = [row for row in everything if row.get("body")]
    part = texts[100]["body"][:12]
    found = rows(store, "--decode", "message", "--grep", f"^{re.escape(part)}")
    assert found == [row for row in texts if row["body"].startswith(part)]
    error_of("dump", store, "--grep", "(")


def test_times_may_be_relative(tmp_path: Path) -> None:
    log = CommitLog.open(tmp_path / "s", group="g", node_id="n0")
    append(log, [b"now"])
    log.close(0)
    ages = [len(rows(tmp_path / "s", "--from", since)) for since in ("-36500d", "-1w")]
    assert ages[0] == 1
    run(tmp_path / "s", "--from", "-1x", code=3)
