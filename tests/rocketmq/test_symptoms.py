"""The page of symptoms: each command prints what the page says, on a small store with that problem."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import dledger_core.rocketmq
from tests.cli.command import run
from tests.contracts.small_file_stores import classic, generation_a, generation_b
from tests.rocketmq.golden import MIXED, REUSED, THREE
from tests.rocketmq.leaving.test_leaving import broker
from tests.support.damage import KINDS, DataFiles

PAGE = (Path(dledger_core.rocketmq.__file__).parent / "SYMPTOMS.md").read_text()
SECTION = re.compile(r"^## (.+)\n+(?:[^`#]+\n\n)?```\n\$ (dledger .+)\n((?:.+\n)+)```", re.MULTILINE)
SYMPTOMS = {title: (command, printed.splitlines()) for title, command, printed in SECTION.findall(PAGE)}


def damaged(kind: str) -> Callable[[Path], Path]:
    """Make a store of a broker with this damage."""

    def make(directory: Path) -> Path:
        path, data = generation_a(directory / "g")
        KINDS[kind](DataFiles(data))
        return path

    return make


def damaged_classic(kind: str) -> Callable[[Path], Path]:
    def make(directory: Path) -> Path:
        commitlog, data = classic(directory / "broker")
        KINDS[kind](DataFiles(data))
        return commitlog.parent

    return make


def damaged_index(directory: Path) -> Path:
    path, _ = generation_a(directory)
    file = min((path / "index").iterdir())
    content = file.read_bytes()
    file.write_bytes(content[:320] + bytes(320) + content[640:])
    return path


def in_two_directories(directory: Path) -> Path:
    path, data = generation_b(directory)
    data.rename(path.parent / "disk-2")
    return path.parent


def without_queue(directory: Path) -> Path:
    path, _ = broker(MIXED, directory)
    next((path / "consumequeue/Transfers/0").iterdir()).unlink()
    return path


def with_empty_queue_file(directory: Path) -> Path:
    path, _ = broker(MIXED, directory)
    [first] = (path / "consumequeue/Transfers/0").iterdir()
    size = first.stat().st_size
    (first.parent / f"{size:020d}").write_bytes(bytes(size))
    return path


MADE: dict[str, Callable[[Path], Path]] = {
    "The broker does not start: a data file is missing": damaged("lost_file"),
    "The broker does not start: IllegalArgumentException in correctMinOffset": with_empty_queue_file,
    "Consumers fail at one message": damaged("flipped_body"),
    "After a power loss the log is shorter": damaged("lost_end"),
    "The index is damaged, the data is not": damaged_index,
    "The store is in several directories": in_two_directories,
    "Messages are stored, and consumers do not get them": without_queue,
    "Two messages have the same queue offset": lambda directory: broker(REUSED, directory)[0],
    "A CommitLog has a hole of zeros": damaged_classic("zeros"),
    "Files of a CommitLog were exchanged or restored under wrong names": damaged_classic("swapped"),
    "RocketMQ warns that DLedger mode is deprecated": lambda directory: broker(THREE, directory)[0],
}


def test_every_symptom_of_page_has_its_store() -> None:
    assert SYMPTOMS.keys() == MADE.keys()


@pytest.mark.parametrize("symptom", MADE, ids=lambda title: title[:60])
def test_command_of_page_prints_its_text(tmp_path: Path, symptom: str) -> None:
    command, printed = SYMPTOMS[symptom]
    path = MADE[symptom](tmp_path)
    words = [
        str(path) if word.startswith("/data/broker") and word != "/data/broker-new" else word
        for word in command.removeprefix("dledger ").split()
    ]
    words = [
        {"/data/broker-new": str(tmp_path / "new"), "broker.conf": str(tmp_path / "broker-n0.conf")}.get(w, w)
        for w in words
    ]
    shown = " ".join(run(*words, code=None).output.split())
    assert [line for line in printed if line not in shown] == []
