"""The plots of the notebook on queues show the numbers that they are given, each color with one meaning."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from matplotlib.colors import to_hex

from dledger_core.rocketmq import QueueStatistics, consumer_lag, encode_messages, queue_statistics
from jobs._notebooks.note import Note
from jobs._notebooks.queue_counts import open_queues
from jobs._notebooks.queue_plots import plot_depth, plot_rates, plot_skew, plot_tags, plot_waiting
from jobs._notebooks.style import ATTENTION, COLORS, NEUTRAL, OTHER, TAG_COLORS, WARNING, label, labels
from tests.notebooks.running import drawn
from tests.rocketmq.golden import MIXED, REUSED, THREE, extract, messages

ALL = (plot_depth, lambda s: plot_rates(s, 1.0), plot_skew, plot_tags)


def counted(name: str, bucket_seconds: float = 1.0) -> QueueStatistics:
    bodies = pa.array(list(messages(name).values()), pa.binary())
    return queue_statistics([pa.RecordBatch.from_pydict({"body": bodies})], bucket_seconds)


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


@pytest.mark.parametrize("name", [THREE, MIXED])
def test_queues_that_the_broker_lost_are_named(tmp_path: Path, name: str) -> None:
    broker = extract(name, "n0", tmp_path)
    intact = open_queues(broker)
    assert intact.damage == ()
    row = max(intact.everything.queues.to_pylist(), key=lambda row: row["messages"])
    queue = broker / "consumequeue" / row["topic"] / str(row["queue_id"])
    last = max(queue.iterdir())
    content = bytearray(last.read_bytes())
    at = row["end_offset"] * 20 - int(last.name)
    content[at - 40 : at] = bytes(40)
    last.write_bytes(content)
    cut, command = open_queues(broker).damage
    assert f"{row['topic']} / {row['queue_id']} " in cut
    assert str(row["end_offset"] - 2) in re.findall(r"\d+", cut)
    assert str(broker / "consumequeue") in command
    shutil.rmtree(queue.parent)
    of_topic = [each for each in intact.everything.queues.to_pylist() if each["topic"] == row["topic"]]
    assert len(open_queues(broker).damage) == len(of_topic) + 1
    shutil.rmtree(broker / "consumequeue")
    assert open_queues(broker).damage == ()
    assert str(open_queues(broker).facts()) != str(intact.facts())


def test_empty_log_is_sentence_instead_of_plot(tmp_path: Path) -> None:
    nothing = queue_statistics([])
    for plot in ALL:
        assert isinstance(plot(nothing), Note)
    assert isinstance(plot_waiting(consumer_lag(tmp_path, nothing.queues)), Note)
    assert isinstance(plot_waiting(None), Note)


def with_topics(names: list[str]) -> QueueStatistics:
    queues = pa.array(range(len(names)), pa.int32())
    bodies = encode_messages(topic=pa.array(names), queue_id=queues, body=[b""] * len(names), tags=pa.array(names))
    return queue_statistics([pa.RecordBatch.from_pydict({"body": bodies})])


def test_odd_names_are_drawn(tmp_path: Path) -> None:
    statistics = with_topics(["$x^2$", "中文", "a\nb", "x" * 200, "%", "\U0001d518\x01"])
    for plot in (plot_depth, lambda s: plot_rates(s, 1.0), plot_tags):
        drawn(plot(statistics), tmp_path)
    assert isinstance(plot_skew(statistics), Note)
    assert label("a$\n中") == r"a\$\u000a\u4e2d"
    assert label("x" * 200) == "x" * 13 + "…" + "x" * 13


def test_labels_of_different_names_differ(tmp_path: Path) -> None:
    long = [f"{'orders' * 5}-{middle}-{'events' * 5}" for middle in ("eu", "us")]
    ends = [f"{'orders' * 9}{end}" for end in ("-a", "-b")]
    same = ["x" * 30 + "1" + "x" * 40, "x" * 30 + "2" + "x" * 40]
    names = [*long, *ends, *same, "a\nb", "a\\u000ab", None]
    found = labels(names)
    assert list(found) == names
    assert len(set(found.values())) == len(names)
    assert max(map(len, found.values())) <= 34
    (axes,) = drawn(plot_depth(with_topics(long)), tmp_path).axes
    assert len({text.get_text().partition(" / ")[0] for text in axes.get_yticklabels()}) == 2


def test_colors_of_topics_and_tags_do_not_mean_problems(tmp_path: Path) -> None:
    problems = {to_hex(WARNING), to_hex(ATTENTION)}
    assert problems.isdisjoint(map(to_hex, (*COLORS, *TAG_COLORS, OTHER, NEUTRAL)))
    assert len({*COLORS, *TAG_COLORS}) == len(COLORS) + len(TAG_COLORS)
    statistics = with_topics([f"topic {number}" for number in range(12)])
    for plot in (plot_depth, lambda s: plot_rates(s, 1.0), plot_tags):
        (axes,) = drawn(plot(statistics), tmp_path).axes
        assert problems.isdisjoint(to_hex(patch.get_facecolor()) for patch in axes.patches)
