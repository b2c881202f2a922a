"""The table of entries: fitted to a width, readable at each, complete with ``--wide``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from rich.cells import cell_len

from dledger_core.cli.formats import EntryFormat
from dledger_core.cli.previews import preview, shortened, visible
from dledger_core.control import pack
from dledger_core.record import RECORD_SCHEMA
from dledger_core.rocketmq import encode_messages
from dledger_core.storage import CommitLog
from tests.cli.command import error_of, rows_of, run
from tests.rocketmq.convert.stores import unpacked
from tests.rocketmq.golden import MIXED, THREE
from tests.support.logs import append

WIDTHS = (40, 80, 100, 120, 200)


@pytest.fixture(scope="module")
def mixed_bodies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A no-op, plain bodies, a producer's control entry, then messages."""
    path = tmp_path_factory.mktemp("bodies") / "s"
    log = CommitLog.open(path, group="g", node_id="n0")
    append(log, [], control=b"", now_ms=1_000_000)
    for body in (b"plain text\n", b"\x00\x01\xff" * 40, b"", "größe".encode()):
        append(log, [body], now_ms=1_001_000)
    message = encode_messages(topic="orders", queue_id=7, body=[b'{"paid": true}'], keys="order-4711", tags="paid")
    append(log, message.to_pylist(), now_ms=1_002_000)
    append(log, [b"plain again"], now_ms=1_003_000)
    log.close(7)
    return path


def lines(monkeypatch: pytest.MonkeyPatch, width: int, *arguments: object) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    return run("dump", *arguments).stdout.splitlines()


@pytest.mark.parametrize("width", WIDTHS)
def test_table_of_broker_fits_the_terminal_and_shows_the_queue(
    golden: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    for store, count in ((golden / MIXED / "n0", 588), (golden / THREE / "n0" / "dledger-n0", 1024)):
        shown = lines(monkeypatch, width, store)
        assert max(map(cell_len, shown)) <= width
        assert len([line for line in shown if line and "body" not in line.split()]) == count
        words = shown[0].split()
        assert words[0] == "index"
        assert words[-1] == "body"
        if width >= 80:
            assert {"topic", "queue", "offset", "(UTC)"} <= set(words)
        if width >= 120:
            assert {"tags", "keys"} <= set(words)


@pytest.mark.parametrize("width", WIDTHS)
def test_table_of_plain_bodies_fits_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    store = unpacked("dledger-0.4.0-three", tmp_path) / "dledger-n0"
    shown = lines(monkeypatch, width, store)
    assert max(map(cell_len, shown)) <= width
    assert len(shown) == 1 + 267
    assert not {"topic", "(UTC)"} & set(shown[0].split())  # no entry has one
    assert len([line for line in shown if " 0x" in line]) > 250


def test_narrow_table_names_left_out_columns(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = golden / THREE / "n0" / "dledger-n0"
    notes = {}
    for width in ("80", "120"):
        monkeypatch.setenv("COLUMNS", width)
        notes[width] = run("dump", store).stderr
    assert (("tags" in notes["80"], "keys" in notes["80"]), "tags" in notes["120"]) == ((True, True), False)


def test_columns_of_a_line_start_below_their_headings(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = golden / THREE / "n0" / "dledger-n0"
    heading, *shown = lines(monkeypatch, 120, store, "--from", 900)
    at = heading.index("topic")
    topics = [row["topic"] for row in rows_of("dump", store, "--from", 900, "--decode", "message")]
    for line, topic in zip(shown, topics, strict=True):
        cell = line[at:].split()[0]
        assert cell == topic or ("…" in cell and topic.startswith(cell.split("…")[0]))


def test_wide_table_has_every_column_and_complete_values(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = golden / MIXED / "n0"
    heading, *shown = lines(monkeypatch, 80, store, "--wide")
    words = "index term position time (UTC) hidden topic queue offset tags keys message id bytes body"
    assert heading.split() == words.split()
    for line, row in zip(shown, rows_of("dump", store), strict=True):
        assert "…" not in line
        assert all(visible(str(row[name] or "-")) in line for name in ("topic", "tags", "keys", "msg_id"))
        body = row.get("body", "")
        assert line.endswith(visible(body) if body and "\0" not in body else line[-1:])


def test_wide_is_rejected_for_other_formats(golden: Path) -> None:
    error_of("dump", golden / MIXED / "n0", "--wide", "--format", "json")


def test_mixed_log_shows_positions_then_indexes(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = lines(monkeypatch, 80, golden / MIXED / "n0", "--from", -264)
    assert [line.split()[0] for line in shown[1:]] == ["@236895", *map(str, range(263))]


def test_plain_bodies_and_messages_in_one_log_differ(mixed_bodies: Path, tmp_path: Path) -> None:
    def bodies(*arguments: object) -> list[str]:
        return [" ".join(line.split()[1:]) for line in run("dump", mixed_bodies, *arguments).stdout.splitlines()]

    time = "1970-01-01T00:16:41.000"
    plain = bodies("--to", 5, "--wide")
    assert plain[1].endswith("(control) no-op")
    assert [line.partition(time)[2].split("  ")[-1].split()[-1] for line in plain[2:]][2] == "(empty)"
    assert plain[2].endswith(r"plain text\n")
    assert plain[3].endswith("0x00 01 ff" + " 00 01 ff" * 39)
    assert plain[5].endswith("größe")
    message = next(line for line in bodies() if "orders" in line)
    assert message.split()[-2:] == ['{"paid":', "true}"]
    assert "order-4711" in message
    raw = bodies("--decode", "none", "--from", 5, "--count", 1)
    assert "orders" not in raw[0]
    assert " 0x00 00 " in raw[1]


def batch(*rows: dict[str, Any]) -> pa.RecordBatch:
    empty = dict.fromkeys(RECORD_SCHEMA.names) | {"position": 0, "magic": 1, "body": b""}
    made = pa.RecordBatch.from_pylist([empty | row for row in rows], RECORD_SCHEMA)
    topics = pa.array([row.get("topic") for row in rows], pa.string())
    tags = pa.array([row.get("tags") for row in rows], pa.string())
    return made.append_column("topic", topics).append_column("tags", tags)


def test_first_message_after_plain_entries_gets_new_heading(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    write = EntryFormat("table").printer()
    write(batch({"index": 1, "term": 1, "body": b"one"}))
    write(batch({"index": 2, "term": 1, "body": b"two", "topic": "orders"}))
    write(batch({"index": 3, "term": 1, "body": b"three", "topic": "a" * 60}))
    write(batch({"index": 123456, "term": 1, "body": b"four" * 60}))
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown if line] == ["index", "1", "index", "2", "3", "123456"]
    assert "topic" in shown[3]
    assert "aaaa…aaaa" in shown[5]
    assert max(map(len, shown)) <= 80


def test_piped_table_is_wider_than_a_terminal(golden: Path) -> None:
    shown = run("dump", golden / THREE / "n0" / "dledger-n0").stdout.splitlines()
    assert 120 < max(map(cell_len, shown)) <= 200


@pytest.mark.parametrize(
    ("body", "width", "expected"),
    [
        (b"short", 10, "short"),
        (b"a line\nand another", 12, r"a lin…nother"),
        ("日本語日本語".encode(), 7, "日…語"),
        (b"\xff\x00", 10, "0xff 00"),
        (bytes(100), 20, "0x00 00 00 00 00 …"),
        (bytes(100), 40, "0x00 00 00 00 00 00 00 00 … (100 bytes)"),
        (b"", 10, "(empty)"),
        ("\u202eright to left".encode(), 30, r"\u202eright to left"),
        (b"x" * 5000 + "ü".encode() * 5000, 11, "xxxxx…üüüüü"),
        (b"\xff\x00", None, "0xff 00"),
        (b"x" * 500, None, "x" * 500),
    ],
)
def test_preview_fits_and_names_what_it_shows(body: bytes, width: int | None, expected: str) -> None:
    assert preview(body, width) == expected


@pytest.mark.parametrize("text", ["", "a", "äöü" * 9, "日本語" * 9, "😀" * 9])
def test_shortened_text_fits_each_width(text: str) -> None:
    for width in range(cell_len(text) + 2):
        found = shortened(text, width)
        assert cell_len(found) <= width
        assert (found == text) is (cell_len(text) <= width)
    for width in range(40):
        assert cell_len(preview(text.encode(), width)) <= width
        assert cell_len(preview(text.encode() + b"\xff", width)) <= width


def test_configuration_entry_shows_its_members(tmp_path: Path) -> None:
    log = CommitLog.open(tmp_path / "s", group="g", node_id="n0")
    append(log, [], configuration=pack({"voters": ["n0/a"], "version": 1, "t": 5}))
    log.close(0)
    (shown,) = run("dump", tmp_path / "s", "--wide").stdout.splitlines()[1:]
    assert shown.endswith("(membership) voters=['n0/a'] version=1 t=5")
