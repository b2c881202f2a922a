"""``dledger look`` on every kind of directory, on damage, on a large log, and on a running group."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dledger_core import LocalCluster
from dledger_core.rocketmq.inspection import SAMPLE_ENTRIES
from dledger_core.storage import CommitLog
from tests.cli.command import error_of, result_of, rows_of, run
from tests.rocketmq.convert.stores import snapshot, unpacked
from tests.rocketmq.golden import MIXED, THREE, extract, messages
from tests.spark_connector.store_writer import StoreWriter
from tests.support.damage import flip, overwrite, place_of
from tests.support.logs import append


def test_look_shows_a_broker_with_a_mixed_log(tmp_path: Path) -> None:
    for within in ("n0/commitlog", "n0/dledger-n0", "n0/consumequeue"):
        extract(MIXED, within, tmp_path)
    broker = tmp_path / MIXED / "n0"
    before = snapshot(broker)
    found = result_of("look", broker)
    assert snapshot(broker) == before
    assert (found["entries"], found["sampled"], found["messages"], found["damage"]) == (588, 588, 588, [])
    assert (found["first_index"], found["since"]) == (
        0,
        rows_of("dump", broker)[0]["store_timestamp"].replace("T", " "),
    )
    assert found["topics"][0]["messages"] == max(topic["messages"] for topic in found["topics"])
    assert found["last"][-1]["index"] == found["last_index"] == 262
    assert any(command.startswith("dledger convert ") for command in found["next"])
    parts = f"--commitlog {broker / 'commitlog'} --store {broker / 'dledger-n0'} "
    assert any(parts in command for command in found["next"])


def test_look_shows_a_classic_commitlog(tmp_path: Path) -> None:
    found = result_of("look", extract(MIXED, "n0/commitlog", tmp_path))
    classic = [position for position in messages(MIXED) if position < 262_144]
    assert (found["what"], found["entries"], found["damage"]) == ("classic CommitLog", len(classic), [])


def test_look_reports_a_damaged_message_of_a_commitlog(tmp_path: Path) -> None:
    classic = extract(MIXED, "n0/commitlog", tmp_path)
    flip(min(classic.iterdir()), 90)
    found = result_of("look", classic, code=1)
    assert found["damage"][0].startswith("bytes 0 to ")
    assert found["entries"] == len([position for position in messages(MIXED) if position < 262_144]) - 1


@pytest.mark.parametrize("version", ["0.3.1.2", "0.4.0"])
def test_look_lists_several_stores_and_shows_each(tmp_path: Path, version: str) -> None:
    directory = unpacked(f"dledger-{version}-three", tmp_path)
    found = result_of("look", directory)
    assert [row["last_index"] for row in found["nodes"]] == [266, 266, 266]
    one = result_of("look", directory / "dledger-n0")
    assert (one["entries"], one["messages"], one["topics"]) == (267, 0, [])
    assert [each["term"] for each in one["terms"]] == [1, 2, 3]


def test_parent_of_damaged_stores_shows_damage_and_is_verified(tmp_path: Path) -> None:
    directory = unpacked("dledger-0.4.0-three", tmp_path)
    assert {row["damage"] for row in result_of("look", directory)["nodes"]} == {0}
    assert result_of("verify", directory)[0]["findings"] == []
    assert len(result_of("verify", directory)) == 3
    file, offset = place_of(directory / "dledger-n1", 100)
    overwrite(file, offset, bytes(4))
    shutil.rmtree(directory / "dledger-n2" / "data")
    (directory / "dledger-n2" / "data").mkdir()
    (directory / "dledger-n2" / "data" / f"{0:020d}").write_bytes(b"\1" * 100)
    found = result_of("look", directory, code=1)
    assert {Path(row["store"]).name for row in found["nodes"] if row["damage"]} >= {"dledger-n1"}
    assert any(str(directory / "dledger-n1") in each and "100" in each for each in found["damage"])
    assert f"dledger look {directory / 'dledger-n1'}" in found["next"]
    assert f"dledger verify {directory}" in found["next"]
    reports = {Path(row["store"]).name: row["findings"] for row in result_of("verify", directory, code=1)}
    assert [(each["start"], each["end"]) for each in reports["dledger-n1"]] == [(100, 101)]
    assert reports["dledger-n0"] == []


def test_look_reports_damage_with_exit_code_1(tmp_path: Path) -> None:
    store = extract(THREE, "n0/dledger-n0", tmp_path)
    file, offset = place_of(store, 500)
    flip(file, offset + 150)
    found = result_of("look", store, code=1)
    assert " 500 " in found["damage"][0]
    assert any(command.startswith("dledger verify ") for command in found["next"])
    max((store / "data").iterdir()).unlink()
    assert result_of("look", store, code=1)["damage"]


def test_look_reads_a_sample_of_a_large_log(tmp_path: Path) -> None:
    log = CommitLog.open(tmp_path / "s", group="g", node_id="n0")
    for _ in range(5):
        append(log, [b"a body"] * 10_000)
    log.close(49_999)
    found = result_of("look", tmp_path / "s")
    assert (found["entries"], found["sampled"]) == (50_000, SAMPLE_ENTRIES)
    assert found["last"][-1] == found["last"][-1] | {"index": 49_999, "body": "a body"}


def test_look_rejects_other_targets(tmp_path: Path) -> None:
    error_of("look", tmp_path)
    error_of("look", "nothing")
    error_of("look", "n0-nowhere")


def test_look_shows_consume_queues(tmp_path: Path) -> None:
    queues = extract(MIXED, "n0/consumequeue", tmp_path)
    found = result_of("look", queues)
    shutil.copytree(queues, tmp_path / "broker" / "consumequeue")
    assert found["units"] > 0
    assert result_of("look", tmp_path / "broker")["units"] == found["units"]


def test_look_reports_damage_in_the_commitlog_of_a_mixed_log(tmp_path: Path) -> None:
    for within in ("n0/commitlog", "n0/dledger-n0"):
        extract(MIXED, within, tmp_path)
    flip(min((tmp_path / MIXED / "n0" / "commitlog").iterdir()), 90)
    found = result_of("look", tmp_path / MIXED / "n0", code=1)
    assert found["damage"][0].startswith("bytes 0 to ")
    assert found["entries"] == 587


def test_look_names_each_part_of_a_brokers_directory(tmp_path: Path) -> None:
    broker = extract(MIXED, "n0", tmp_path)
    for part, what in (
        ("consumequeue/Clicks", "consume queues of a broker"),
        ("consumequeue/Clicks/0", "consume queues of a broker"),
        ("index", "key index of a broker"),
        ("checkpoint", "checkpoint of a broker"),
        ("dledger-n0/checkpoint", "checkpoint of a Java DLedger store"),
    ):
        assert result_of("look", broker / part)["what"] == what
    assert result_of("look", broker / "index")["keys"] > 588
    for part, above in (
        ("config", broker),
        ("dledger-n0/data", broker / "dledger-n0"),
        ("commitlog/00000000000000000000", broker / "commitlog"),
    ):
        assert error_of("look", broker / part).endswith(f"dledger look {above}")


def test_look_lists_several_brokers(tmp_path: Path) -> None:
    classic = extract(MIXED, "n0/commitlog", tmp_path / "x")
    for node in ("n0", "n1"):
        shutil.copytree(classic, tmp_path / "brokers" / node / "commitlog")
    shutil.copytree(extract(MIXED, "n0/dledger-n0", tmp_path / "x"), tmp_path / "brokers" / "n1" / "dledger-n0")
    one, two = result_of("look", tmp_path / "brokers")["nodes"]
    assert (one["what"], one["last_index"]) == ("classic CommitLog", None)
    assert (two["what"] == one["what"], two["last_index"]) == (False, 262)
    (tmp_path / "brokers" / "app" / "data").mkdir(parents=True)
    found = result_of("look", tmp_path / "brokers")
    assert ([Path(each["path"]).name for each in found["skipped"]], len(found["nodes"])) == (["app"], 2)
    assert {Path(row["store"]).name for row in rows_of("verify", tmp_path / "brokers")[0]} == {
        "commitlog",
        "dledger-n0",
    }
    shutil.rmtree(tmp_path / "brokers" / "n0")
    assert result_of("look", tmp_path / "brokers")["entries"] == 588, "the only broker in a directory"


@pytest.mark.integration
def test_look_shows_a_running_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalCluster(1, tmp_path / "cluster") as cluster:
        monkeypatch.setenv("DLEDGER_PEERS", cluster.peers)
        run("append", "one", "two")
        found = result_of("look")
        assert [row["body"] for row in found["last"]] == ["one", "two"]
        assert found["nodes"][0]["role"] == "leader"
        assert found["next"][0] == "dledger tail"
        monkeypatch.delenv("DLEDGER_PEERS")
        assert result_of("look", cluster.peers)["next"][0] == f"dledger tail --peers {cluster.peers}"


@pytest.mark.parametrize("hidden", [3, 2 * SAMPLE_ENTRIES])
def test_look_shows_last_entries_that_read_committed_shows(tmp_path: Path, hidden: int) -> None:
    with StoreWriter(tmp_path, segment_bytes=1 << 22) as store:
        store.append_numbers(7)
        store.append_attempt(hidden, batch=0)
        store.append([], entry={"k": "abort", "q": "q", "b": 0, "r": "r1"})
        shown = store.end
        store.append_numbers(2)
        store.append_attempt(hidden, batch=1)
        end = store.end
    found = result_of("look", store.path)
    assert [row["index"] for row in found["last"]] == [4, 5, 6, shown, shown + 1]
    assert (found["entries"], found["hidden"]) == (end, {"aborted": hidden, "open": hidden + 1})


def test_look_names_control_entry_that_leaves_transactions_unknown(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as store:
        store.append_attempt(3, batch=0)
        store.append([], entry={"k": "abort", "q": "q", "b": 0, "r": "r1"})
    file, offset = place_of(store.path, 4)
    flip(file, offset + 60)
    found = result_of("look", store.path, code=1)
    assert [row["index"] for row in found["last"]] == [1, 2, 3]
    assert any(str(file) in text for text in found["damage"])
