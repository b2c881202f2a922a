"""The notebook on queues runs on a real broker's store and shows what its oracle says; its plots show those numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dledger_core.rocketmq import QueueStatistics, consumer_lag, encode_messages, queue_statistics
from jobs._notebooks.queue_plots import plot_depth, plot_rates, plot_skew, plot_tags, plot_waiting
from jobs._notebooks.style import label
from tests.notebooks.running import drawn, execute, in_kernel
from tests.rocketmq.golden import MIXED, REUSED, THREE, extract, messages, oracle

ALL = (plot_depth, lambda s: plot_rates(s, 1.0), plot_skew, plot_tags)


def counted(name: str, bucket_seconds: float = 1.0) -> QueueStatistics:
    bodies = pa.array(list(messages(name).values()), pa.binary())
    return queue_statistics([pa.RecordBatch.from_pydict({"body": bodies})], bucket_seconds)


@in_kernel
def test_notebook_shows_broker_s_queues(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shown = execute("consume_queues.ipynb", monkeypatch, tmp_path)
    queues = [one for one in oracle(THREE) if one["kind"] == "queue" and one["max"] > 0]
    assert f"queues: 18 of {len(queues)}\n" in shown.text
    assert f"messages: 952 of {sum(one['max'] for one in queues)}\n" in shown.text
    assert "queue offsets given out twice: 0" in shown.text
    assert len(shown.pictures) == 5
    assert any("waiting" in page for page in shown.pages)


@in_kernel
def test_it_takes_mixed_log_and_leaves_it_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    extract(MIXED, "n0/commitlog", tmp_path)
    store = extract(MIXED, "n0/dledger-n0", tmp_path)
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / "temp").mkdir()
    shown = execute("consume_queues.ipynb", monkeypatch, tmp_path / "temp", DLEDGER_BROKER=str(store.parent))
    assert "CommitLog: 2 files, positions 0 to 262144" in shown.text
    assert f"of {len([one for one in oracle(MIXED) if one['kind'] == 'unit'])}\n" in shown.text
    assert [path for path in sorted(tmp_path.rglob("*")) if tmp_path / "temp" not in (path, *path.parents)] == before


def test_depth_and_duplicate_offsets_are_drawn(tmp_path: Path) -> None:
    statistics = counted(REUSED)
    (axes,) = drawn(plot_depth(statistics), tmp_path).axes
    widths = [patch.get_width() for patch in axes.patches]
    rows = sorted(statistics.queues.to_pylist(), key=lambda row: -row["messages"])
    assert widths == [row["messages"] for row in rows] + [row["spare"] for row in rows]
    assert sum(widths[len(rows) :]) == 9
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names[0] == "metrics-raw / 0"


@pytest.mark.parametrize("bucket", [0.1, 5.0])
def test_area_under_rates_is_number_of_messages(tmp_path: Path, bucket: float) -> None:
    statistics = counted(THREE, bucket)
    figure = drawn(plot_rates(statistics, bucket), tmp_path)
    total = 0.0
    for patch in figure.axes[0].patches:
        values, edges, baseline = patch.get_data()
        heights = values - baseline
        assert len(heights) <= 240
        assert (heights >= 0).all()
        total += float((heights * np.diff(edges) * 86_400).sum())
    assert total == pytest.approx(sum(statistics.queues["messages"].to_pylist()))
    assert len(figure.legends[0].get_texts()) == 7  # six topics and the rest


def test_skew_is_drawn_around_even_share(tmp_path: Path) -> None:
    statistics = counted(THREE).of_users()
    (axes,) = drawn(plot_skew(statistics), tmp_path).axes
    dots = [np.asarray(one.get_offsets())[:, 0] for one in axes.collections]
    assert [round(float(each.mean()), 6) for each in dots] == [1.0, 1.0, 1.0]
    assert [round(float(each.max()), 4) for each in dots] == [
        round(value, 4) for value in statistics.skew()["skew"].to_pylist()
    ]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["user_profile (5)", "Clicks (3)", "%sys|like% (2)"]


def test_every_tag_is_in_bar(tmp_path: Path) -> None:
    statistics = counted(THREE).of_users()
    figure = drawn(plot_tags(statistics), tmp_path)
    total = sum(patch.get_width() for patch in figure.axes[0].patches)
    assert total == sum(statistics.queues["messages"].to_pylist())
    assert [text.get_text() for text in figure.legends[0].get_texts()][-2:] == ["8 other tags", "no tag"]


def test_waiting_messages_are_drawn(tmp_path: Path) -> None:
    broker = extract(THREE, "n0/config", tmp_path).parent
    (axes,) = drawn(plot_waiting(consumer_lag(broker, counted(THREE).queues)), tmp_path).axes
    assert [patch.get_width() for patch in axes.patches] == [3, 2, 0, 0, 0, 0]
    assert axes.get_yticklabels()[1].get_text() == "CG_workers  ←  Jobs"


def test_empty_log_and_odd_names_are_drawn(tmp_path: Path) -> None:
    nothing = queue_statistics([])
    for plot in ALL:
        assert "nothing to show" in drawn(plot(nothing), tmp_path).axes[0].texts[0].get_text()
    assert "nothing to show" in plot_waiting(consumer_lag(tmp_path, nothing.queues)).axes[0].texts[0].get_text()
    names = ["$x^2$", "中文", "a\nb", "x" * 200, "%", "\U0001d518\x01"]
    odd = encode_messages(
        topic=pa.array(names), queue_id=pa.array(range(6), pa.int32()), body=[b""] * 6, tags=pa.array(names)
    )
    statistics = queue_statistics([pa.RecordBatch.from_pydict({"body": odd})])
    for plot in ALL:
        drawn(plot(statistics), tmp_path)
    assert label("a$\n中") == r"a\$\u000a\u4e2d"
    assert label("x" * 200) == "x" * 13 + "…" + "x" * 13
