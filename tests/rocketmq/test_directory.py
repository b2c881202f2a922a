"""One rule for what a directory contains, and one for where the log of a store ends."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dledger_core import StoreMismatchError, open_store
from dledger_core.rocketmq import end_of, locate
from tests.rocketmq import golden


@pytest.fixture
def broker(tmp_path: Path) -> Path:
    """A broker's directory with a store and the CommitLog before it."""
    golden.extract(golden.MIXED, "n0/commitlog", tmp_path)
    return golden.extract(golden.MIXED, "n0/dledger-n0", tmp_path).parent


def test_locate_tells_stores_commitlogs_and_brokers_apart(broker: Path) -> None:
    store, commitlog = broker / "dledger-n0", broker / "commitlog"
    found = locate(broker)
    assert (found.store, found.commitlog, found.stores) == (store, commitlog, (store,))
    assert (found.is_store, found.is_commitlog) == (False, False)
    assert locate(store).is_store
    assert locate(commitlog).is_commitlog
    assert locate(store / "meta" if (store / "meta").is_dir() else store / "index").store is None


def test_locate_names_stores_below_a_node_directory(tmp_path: Path, broker: Path) -> None:
    node = tmp_path / "node"
    for group in ("a", "b"):
        shutil.copytree(broker / "dledger-n0", node / group / "dledger-n0")
    found = locate(node)
    assert found.store is None
    assert found.stores == (node / "a" / "dledger-n0", node / "b" / "dledger-n0")
    with pytest.raises(StoreMismatchError) as caught:
        found.one_store()
    assert all(str(store) in caught.value.remedy for store in found.stores)
    with pytest.raises(StoreMismatchError):
        found.check()


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir, Path.touch], ids=["missing", "empty", "file"])
def test_locate_rejects_paths_without_a_log(tmp_path: Path, make: object) -> None:
    path = tmp_path / "x"
    make(path)  # type: ignore[operator]
    with pytest.raises(StoreMismatchError):
        locate(path).check()
    with pytest.raises(StoreMismatchError):
        locate(path).one_store()


def test_locate_finds_a_native_store_without_data(tmp_path: Path) -> None:
    (tmp_path / "s" / "meta").mkdir(parents=True)
    (tmp_path / "s" / "meta" / "log.json").write_text("{}")
    assert locate(tmp_path / "s").is_store


def test_one_store_rejects_a_commitlog_and_names_its_tools(broker: Path) -> None:
    with pytest.raises(StoreMismatchError) as caught:
        locate(broker / "commitlog").one_store()
    assert "audit_replicas.py" in caught.value.remedy


def test_end_of_an_intact_store_is_clean(broker: Path) -> None:
    with open_store(broker / "dledger-n0") as store:
        end = end_of(store)
        assert (end.end, end.position) == (store.last_index + 1, store.position_end)
    assert (end.damaged, end.torn, end.missing_committed, end.lost) == (None, False, None, None)


def record_of(store: Path, back: int) -> tuple[int, Path, int]:
    """Index, file and offset of the entry that is ``back`` before the end."""
    with open_store(store) as reader:
        index = int(reader.last_index) - back
        position = int(reader.records(index, index + 1, 1).headers["position"][0])
        size = reader.segment_bytes[0]
    return index, store / "data" / f"{position - position % size:020d}", position % size


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_end_of_a_store_with_damage_before_complete_entries(broker: Path) -> None:
    store = broker / "dledger-n0"
    index, file, offset = record_of(store, 3)
    overwrite(file, offset, bytes(4))  # its magic: Java's recovery ends the log there
    with open_store(store) as reader:
        end = end_of(reader)
    assert (end.end, end.damaged) == (index + 4, (index, index + 1))
    assert end.lost is not None
    assert end.lost[0] == index


def test_end_of_a_store_with_a_torn_record(broker: Path) -> None:
    store = broker / "dledger-n0"
    index, file, offset = record_of(store, 0)
    overwrite(file, offset + 8, b"\x7f")  # the index of its last entry
    with open_store(store) as reader:
        end = end_of(reader)
    assert (end.end, end.torn) == (index, True)


def test_end_of_a_store_without_its_committed_end(broker: Path) -> None:
    store = broker / "dledger-n0"
    index, file, offset = record_of(store, 5)
    with open_store(store) as reader:
        committed = reader.commit_index
        position_end = int(reader.position_end) % reader.segment_bytes[0]
    overwrite(file, offset, bytes(position_end - offset))
    with open_store(store) as reader:
        end = end_of(reader)
    assert end.end == index
    if committed is None:
        assert end.missing_committed is None
    else:
        assert end.missing_committed == (index, committed + 1)
        assert end.lost == (index, max(committed + 1, end.recorded_end or 0))


def test_end_of_a_store_with_a_short_last_file(broker: Path) -> None:
    store = broker / "dledger-n0"
    files = sorted((store / "data").iterdir())
    if len(files) == 1:  # Java's files have one size: a second one that is shorter
        with open_store(store) as reader:
            size = reader.segment_bytes[0]
        files.append(store / "data" / f"{int(files[0].name) + size:020d}")
    index, file, offset = record_of(store, 0)
    assert file in files
    with file.open("r+b") as opened:
        opened.truncate(offset + 20)
    with open_store(store) as reader:
        end = end_of(reader)
    assert end.end == index
    if file != files[0]:
        assert end.damaged == (index, index + 1)
