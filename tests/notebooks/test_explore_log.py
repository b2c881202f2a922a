"""The notebook that explores a log runs from top to bottom; its plots draw the numbers that they are given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from dledger_core import Client
from dledger_core.rocketmq import decode_messages
from jobs._notebooks.log_plots import append_messages, nodes_table, plot_latency, plot_per_hour, plot_per_queue
from tests.client.fake_group import running_group
from tests.notebooks.running import drawn, execute, in_kernel

NAMES = {0: "EWR", 1: "JFK"}
EVENTS = 6000


@in_kernel
def test_notebook_explores_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shown = execute("explore_log.ipynb", monkeypatch, tmp_path, DLEDGER_NOTEBOOK_EVENTS=str(EVENTS))
    assert f"rows in Delta: {EVENTS}" in shown.text
    assert "verdict: CONSISTENT" in shown.text
    assert len(shown.pictures) == 4


def test_events_per_hour_include_empty_hours(tmp_path: Path) -> None:
    hours = pd.to_datetime(["2013-01-01 05:00", "2013-01-01 05:00", "2013-01-01 08:00"])
    counts = pd.DataFrame({"hour": hours, "queue_id": [0, 2, 0], "count": [3, 4, 5]})
    figure = drawn(plot_per_hour(counts, NAMES), tmp_path)
    first, second = (patch.get_data() for patch in figure.axes[0].patches)
    assert list(first.values) == [3, 0, 0, 5]
    assert list(second.values - second.baseline) == [4, 0, 0, 0]
    assert np.diff(first.edges) == pytest.approx([1 / 24] * 4)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["EWR", "queue 2"]
    drawn(plot_per_hour(counts[:0], NAMES), tmp_path)


def test_events_per_queue(tmp_path: Path) -> None:
    counts = pd.DataFrame({"topic": ["flights"] * 2 + ["x$"], "queue_id": [0, 1, 7], "count": [2000, 30, 4]})
    (axes,) = drawn(plot_per_queue(counts, NAMES), tmp_path).axes
    assert [patch.get_width() for patch in axes.patches] == [2000, 30, 4]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["flights / EWR", "flights / JFK", r"x\$ / 7"]


def test_latency_and_its_median(tmp_path: Path) -> None:
    (axes,) = drawn(plot_latency([0.5, 1.0, 9.0]), tmp_path).axes
    assert sum(patch.get_height() for patch in axes.patches) == 3
    assert axes.get_legend().get_texts()[0].get_text() == "median 1.00 s"
    drawn(plot_latency([]), tmp_path)


def test_messages_are_appended_in_requests_of_500() -> None:
    with running_group() as group, Client(group.peers) as client:
        messages = pa.table(
            {"topic": ["t"] * 1100, "queue_id": pa.array([1] * 1100, pa.int32()), "body": [b"b"] * 1100}
        )
        append_messages(client, messages)
        bodies = pa.array([bytes(record.bodies) for record in group.log.records], pa.binary())
        assert decode_messages(bodies, ["topic"]).column("topic").to_pylist() == ["t"] * 1100
        table = nodes_table(client)
        assert list(table["node_id"]) == ["n0", "n1", "n2"]
