"""``verify`` on native stores: each kind of damage is reported with its place, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dledger_core.errors import CorruptRecordError
from dledger_core.record import segment_name
from dledger_core.storage import Finding, open_store
from tests.support.faulty_files import FaultyFiles
from tests.support.logs import STORE, append, open_log, received

Damage = Callable[[FaultyFiles, list[int]], None]


def store() -> tuple[FaultyFiles, list[int]]:
    """60 entries of 128 bytes in 12 batches over three files; returns the position of each."""
    files = FaultyFiles()
    log = open_log(files)
    for number in range(12):
        append(log, [bytes([number + 1]) * 80] * 5, term=1 + number // 6)
    positions = [int(log.position_of(i)) for i in range(60)]
    log.close(40)
    return files, positions


def flip(files: FaultyFiles, position: int) -> None:
    files.content(STORE / "data" / segment_name(position - position % 4096))[position % 4096] ^= 1


def flip_row(files: FaultyFiles, row: int, offset: int) -> None:
    at = row * 32 + offset
    files.content(STORE / "index" / segment_name(at - at % 1024))[at % 1024] ^= 1


def found(files: FaultyFiles) -> list[tuple[str, int, int, str]]:
    before = {name: bytes(inode.content) for name, inode in files.names.items()}
    report = open_store(STORE, files=files).verify()
    assert {name: bytes(inode.content) for name, inode in files.names.items()} == before
    assert all(isinstance(finding, Finding) for finding in report.findings)
    return [(f.kind, f.start, f.end, f.severity) for f in report.findings]


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        pytest.param(lambda _f, _p: None, [], id="none"),
        pytest.param(lambda f, p: flip(f, p[17] + 60), [("CORRUPT", 17, 18, "error")], id="a body"),
        pytest.param(lambda f, p: flip(f, p[17] + 5), [("CORRUPT", 17, 18, "error")], id="a size"),
        pytest.param(lambda f, p: flip(f, p[17] + 31), [("CORRUPT", 17, 18, "error")], id="a position"),
        pytest.param(lambda f, p: flip(f, p[0] + 3), [("CORRUPT", 0, 1, "error")], id="the first magic"),
        pytest.param(lambda f, p: flip(f, p[59] + 70), [("CORRUPT", 59, 60, "error")], id="the last body"),
        pytest.param(
            lambda f, p: (flip(f, p[17] + 60), flip(f, p[18] + 60), flip(f, p[40] + 60)),
            [("CORRUPT", 17, 19, "error"), ("CORRUPT", 40, 41, "error")],
            id="three bodies",
        ),
        pytest.param(lambda f, _p: flip_row(f, 31, 4), [("INDEX_MISMATCH", 31, 32, "warning")], id="a row"),
        pytest.param(lambda f, _p: flip_row(f, 33, 3), [("CORRUPT", 33, 34, "error")], id="a row's magic"),
    ],
)
def test_verify_reports_damage_with_its_kind(damage: Damage, expected: list[tuple[str, int, int, str]]) -> None:
    files, positions = store()
    damage(files, positions)
    assert found(files) == expected


def test_verify_reports_path_and_position() -> None:
    files, positions = store()
    flip(files, positions[40] + 60)
    reader = open_store(STORE, files=files)
    [finding] = reader.verify().findings
    base = positions[40] - positions[40] % 4096
    assert (finding.path, finding.position) == (str(STORE / "data" / segment_name(base)), positions[40])
    with pytest.raises(CorruptRecordError) as caught:
        reader.read(30, 50)
    assert (caught.value.where, caught.value.values) == (finding.path, {"index": 40, "position": positions[40]})
    assert reader.read(41, 60).num_rows == 19


def test_verify_reports_a_misdirected_write_with_a_valid_crc() -> None:
    files, positions = store()
    content = files.content(STORE / "data" / segment_name(0))
    content[positions[9] : positions[10]] = content[positions[8] : positions[9]]
    assert found(files) == [("CORRUPT", 9, 10, "error")]


def test_verify_reports_a_falling_term() -> None:
    files, positions = store()
    flip(files, positions[45] + 23)  # 2 becomes 3
    assert ("CORRUPT", 45, 46, "error") in found(files)
    files, positions = store()
    files.content(STORE / "data" / segment_name(4096))[positions[45] % 4096 + 23] = 1
    assert ("TERM_REGRESSION", 45, 46, "error") in found(files)


def test_verify_reports_a_gap() -> None:
    files, positions = store()
    content = files.content(STORE / "data" / segment_name(4096))
    for at in range(35, 60):
        if 4096 <= positions[at] < 8192:
            content[positions[at] % 4096 + 15] += 1  # the index, low byte
    kinds = found(files)
    assert ("INDEX_GAP", 35, 36, "error") in kinds


def test_verify_reports_zeros_below_the_checkpoint() -> None:
    files, positions = store()
    content = files.content(STORE / "data" / segment_name(0))
    content[positions[10] : positions[14]] = bytes(positions[14] - positions[10])
    assert found(files) == [("CORRUPT", 10, 14, "error")]
    files.content(STORE / "data" / segment_name(4096))[:] = bytes(4096)
    assert ("CORRUPT", positions.index(4096), 60, "error") in found(files)


def test_verify_reports_a_torn_tail_as_a_warning() -> None:
    files, positions = store()
    log = open_log(files)
    copy = append(log, [b"z" * 80] * 2)
    position = int(received(copy).payload.headers["position"][1])
    files.content(STORE / "data" / segment_name(position - position % 4096))[position % 4096 + 60] ^= 1
    reader = open_store(STORE, files=files)
    assert reader.last_index == 59
    assert found(files) == [("TORN_TAIL", 60, 61, "warning")]
    assert reader.commit_index == 40
    assert positions[59] < position
