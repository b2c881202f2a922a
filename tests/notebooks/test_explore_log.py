"""The notebook that explores a log: its sample, its plots, search, SQL, time ranges, controls."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from dledger_core import Client, ConfigError, StoreMismatchError
from dledger_core.rocketmq import decode_messages, encode_messages
from jobs import notebooks as nb
from jobs._notebooks.samples import damaged_replicas
from jobs._notebooks.sources import append_messages, nodes_table
from tests.client.fake_group import filled, running_group
from tests.notebooks.running import drawn
from tests.rocketmq.golden import MIXED, THREE, extract

HOUR_MS = 3_600_000
BORN_MS = 1_357_016_400_000
"""2013-01-01T05:00Z."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extract(THREE, "n0", tmp_path_factory.mktemp("broker"))


@pytest.fixture(scope="module")
def java(broker: Path) -> nb.Log:
    return nb.open_log(broker)


@pytest.fixture
def group() -> Iterator[Any]:
    with running_group() as running:
        yield running


def appended(group: Any, *bodies: bytes) -> nb.Log:
    group.log.append_bodies(*bodies)
    return nb.open_log(group.peers)


def messages(
    topics: list[str], queues: list[int], hours: list[int], tags: list[str | None] | None = None
) -> list[bytes]:
    return encode_messages(
        topic=pa.array(topics),
        queue_id=pa.array(queues, pa.int32()),
        body=pa.array([f"body {number}".encode() for number in range(len(topics))], pa.binary()),
        tags=pa.array(tags or [None] * len(topics), pa.string()),
        keys=pa.array([f"key{number} other" for number in range(len(topics))]),
        born_timestamp=pa.array([BORN_MS + hour * HOUR_MS for hour in hours]),
    ).to_pylist()


def test_sample_of_directory_is_its_log(java: nb.Log) -> None:
    assert (java.kind, java.first_index, java.end) == ("store of Java DLedger, generation A", 0, 1024)
    assert java.complete
    assert java.damage == ()
    assert java.table["index"].to_pylist() == list(range(1024))
    contents = java.contents()
    assert isinstance(contents, pd.DataFrame)
    assert int(contents["entries"].sum()) == 1024
    assert list(contents["topic"][:2]) == ["metrics-raw", "Clicks"]


def test_sample_of_mixed_log_has_messages_of_both_parts(tmp_path: Path) -> None:
    extract(MIXED, "n0/commitlog", tmp_path)
    store = extract(MIXED, "n0/dledger-n0", tmp_path)
    whole, own, classic = (nb.open_log(path) for path in (store.parent, store, store.parent / "commitlog"))
    assert len(whole) == len(own) + len(classic)
    assert whole.complete
    assert classic.table["index"].null_count == len(classic)
    few = nb.open_log(store.parent / "commitlog", limit=10)
    assert (len(few), few.complete) == (10, False)
    assert few.table["position"][0] == classic.table["position"][0]
    assert few.table["position"][-1] == classic.table["position"][-1]
    at = int(classic.table["position"][5].as_py())
    assert list(classic.at(at, 2)["position"]) == classic.table["position"][5:7].to_pylist()


def test_range_of_commitlog_has_messages_of_its_positions(tmp_path: Path) -> None:
    commitlog = extract(MIXED, "n0/commitlog", tmp_path)
    every = nb.open_log(commitlog).table["position"].to_pylist()
    part = nb.open_log(commitlog, start=every[5], end=every[9])
    assert (part.table["position"].to_pylist(), part.complete) == (every[5:9], False)
    assert "index" not in repr(part)
    assert nb.open_log(commitlog, start=every[-2] + 1).table["position"].to_pylist() == every[-2:]
    assert nb.open_log(commitlog, end=every[2]).table["position"].to_pylist() == every[:2]
    beyond = nb.open_log(commitlog, start=1 << 40)
    assert (len(beyond), beyond.complete, beyond.damage) == (0, False, ())


def test_sample_is_limited_in_entries_and_bytes(broker: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = nb.open_log(broker, limit=64)
    assert (len(few), few.complete) == (64, False)
    assert few.table["index"].to_pylist()[:3] == [0, 1, 32]
    assert few.table["index"].to_pylist()[-2:] == [1022, 1023]
    assert {"1,024", "64", "32"} <= set(re.findall(r"[\d,]*\d", capsys.readouterr().out))
    part = nb.open_log(broker, start=100, end=110)
    assert part.table["index"].to_pylist() == list(range(100, 110))
    assert not part.complete


def test_bytes_of_sample_are_limited(group: Any) -> None:
    big = appended(group, *[bytes(3 << 20)] * 4)
    assert len(big) == 4
    few = nb.open_log(group.peers, limit_bytes=1 << 20)
    assert 0 < len(few) < 4
    assert not few.complete


def test_control_and_orphaned_entries_are_left_out(group: Any) -> None:
    filled(group)
    assert nb.open_log(group.peers).table["index"].to_pylist() == [1, 2, 3, 4, 8, 9]


def test_entry_of_any_kind_is_shown(group: Any) -> None:
    log = appended(group, b"text", b"\xff\xfe", b"", b'{"json": 1}', *messages(["topic"], [3], [0], ["tag"]))
    rows = log.head()
    assert list(rows["body"]) == ["text", "0xff fe", "(empty)", '{"json": 1}', "body 0"]
    assert list(rows["topic"].dropna()) == ["topic"]
    assert "error" not in rows.columns  # such bodies are fine
    assert list(log.contents()["entries"]) == [1, 4]


def test_empty_log_is_sentence(group: Any) -> None:
    log = nb.open_log(group.peers)
    found = [log.contents(), log.head(), log.at(0), log.search("a"), nb.plot_over_time(log), nb.plot_per_queue(log)]
    assert all(isinstance(each, nb.Note) for each in found)
    (sentence,) = {repr(each) for each in found}
    for view in (nb.time_range(log), nb.browser(log)):
        assert view._repr_mimebundle_()["text/plain"] == sentence


def test_single_entry_and_plain_entries_are_sentences(group: Any) -> None:
    one = appended(group, b"one")
    assert isinstance(nb.plot_over_time(one), nb.Note)
    assert isinstance(nb.plot_per_queue(one), nb.Note)
    assert list(one.head()["body"]) == ["one"]


def test_entries_over_time_include_empty_hours(group: Any, tmp_path: Path) -> None:
    log = appended(group, *messages(["a", "b", "a", "a"], [0, 1, 0, 0], [0, 0, 60, 60]))
    figure = drawn(nb.plot_over_time(log), tmp_path)
    first, second = (patch.get_data() for patch in figure.axes[0].patches)
    assert list(first.values[[0, -1]]) == [1, 2]
    assert sum(first.values) == 3
    assert sum(second.values - second.baseline) == 1
    assert np.diff(first.edges) == pytest.approx([1 / 48] * 121)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["b", "a"]
    assert "30 minutes" in figure.axes[0].get_title()


def test_unset_times_are_not_drawn(java: nb.Log, tmp_path: Path) -> None:
    """RocketMQ's own messages are born in 1970."""
    (axes,) = drawn(nb.plot_over_time(java), tmp_path).axes
    edges = axes.patches[0].get_data().edges
    assert edges[-1] - edges[0] < 1


def test_messages_per_queue(group: Any, tmp_path: Path) -> None:
    log = appended(group, b"plain", *messages(["flights", "x$", "flights", "flights"], [0, 7, 0, 1], [0, 0, 0, 0]))
    (axes,) = drawn(nb.plot_per_queue(log), tmp_path).axes
    assert [patch.get_width() for patch in axes.patches] == [2, 1, 1]
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names == ["flights / 0", "flights / 1", r"x\$ / 7"]


def test_search_matches_all_conditions(group: Any) -> None:
    log = appended(group, b"Body of text", *messages(["a", "b", "a"], [0, 0, 1], [0, 1, 2], ["x", "x", None]))
    assert [len(log.search(text)) for text in ("body", "BODY 1", "key2", "b")] == [4, 1, 1, 4]
    assert list(log.search(topic="a", tag="x")["body"]) == ["body 0"]
    assert list(log.search("body", key="key1")["body"]) == ["body 1"]
    assert isinstance(log.search(key="key"), nb.Note)
    assert len(log.search("body", count=2)) == 2


def test_time_range_narrows_sample(group: Any) -> None:
    log = appended(group, *messages(["a"] * 3, [0] * 3, [0, 1, 2]))
    part = log.between("2013-01-01 06:00", "2013-01-01T09:00+02:00")
    assert part.table["body"].to_pylist() == [b"body 1", b"body 2"]
    assert {"06:00:00", "07:00:00"} <= set(repr(part).split())
    assert isinstance(log.between("2014-01-01", "2014-01-02").head(), nb.Note)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_controls_exist_where_ipywidgets_is_installed(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log = appended(group, *messages(["a", "b", "a"], [0] * 3, [0, 1, 2]))
    for view in (nb.time_range(log), nb.browser(log)):
        assert "application/vnd.jupyter.widget-view+json" in view._repr_mimebundle_()
    start, text, topic, shown = nb.browser(log).widget().children
    text.value = "body 2"
    assert "body 2" in shown.value
    topic.value = "b"
    assert "body 2" not in shown.value
    assert start.max == 0
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    for view in (nb.time_range(log), nb.browser(log)):
        assert sorted(view._repr_mimebundle_()) == ["text/html", "text/plain"]


@pytest.mark.spark
def test_sql_reads_sample(spark: Any, java: nb.Log) -> None:
    found = java.sql("SELECT topic, count(*) AS entries, count(text) AS texts FROM log GROUP BY topic ORDER BY 2 DESC")
    assert int(found["entries"].sum()) == 1024
    assert 0 < int(found["texts"].sum()) < 1024
    assert found["topic"][0] == "metrics-raw"


def test_source_that_is_neither_directory_nor_peers_is_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        nb.open_log(tmp_path / "absent")
    with pytest.raises(StoreMismatchError):
        nb.open_log(tmp_path)


def test_table_shows_complete_and_escaped_values(group: Any) -> None:
    rows = appended(group, b"<b>" + b"x" * 40, *messages(["t" * 60], [0], [0], ["<i>"])).head()
    page = rows._repr_html_()
    assert "<b>" not in page
    assert "&lt;b&gt;" in page
    assert page.count('data-of="topic"') == 2
    assert "t…t" in page.replace("<wbr>", "")
    assert type(rows[["index"]]) is pd.DataFrame


def test_damage_is_listed_and_rest_is_shown(tmp_path: Path) -> None:
    damaged = nb.open_log(damaged_replicas(tmp_path)["n1"])
    assert len(damaged) == 1023
    assert any("700" in each for each in damaged.damage)
    assert all(each in repr(damaged) for each in damaged.damage)
    assert damaged._repr_html_().count("<li>") >= len(damaged.damage)


def test_messages_are_appended_in_requests_of_500(group: Any) -> None:
    with Client(group.peers) as client:
        rows = pa.table({"topic": ["t"] * 1100, "queue_id": pa.array([1] * 1100, pa.int32()), "body": [b"b"] * 1100})
        append_messages(client, rows)
        bodies = pa.array([bytes(record.bodies) for record in group.log.records], pa.binary())
        assert decode_messages(bodies, ["topic"]).column("topic").to_pylist() == ["t"] * 1100
        table = nodes_table(client)
    assert list(table["node_id"]) == ["n0", "n1", "n2"]
    log = nb.open_log(group.peers)
    assert list(log.nodes_table().columns) == ["n0", "n1", "n2"]


def test_number_that_node_does_not_report_is_missing(group: Any) -> None:
    with Client(group.peers) as client:
        table = nodes_table(client)
    assert not (table == -1).any(axis=None)
