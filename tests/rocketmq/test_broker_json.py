"""JSON of a broker's ``config`` directory: as Fastjson writes it, and with the copy that a broker loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dledger_core import ConfigError
from dledger_core.rocketmq import consumer_offsets, topic_configs
from jobs._rebuild.broker import read_consumers
from tests.rocketmq.golden import MIXED, REUSED, THREE, extract

BARE = '{\n\t"offsetTable":{\n\t\t"Orders@g{0:1}":{0:5,1:7\n\t\t},\n\t\t"%RETRY%g1@g1":{0:0\n\t\t}\n\t}\n}'
FOUND = {("Orders", "g{0:1}"): {0: 5, 1: 7}, ("%RETRY%g1", "g1"): {0: 0}}
QUOTED = json.dumps({"offsetTable": {f"{t}@{g}": {str(q): at for q, at in o.items()} for (t, g), o in FOUND.items()}})


@pytest.mark.parametrize(("text", "copy"), [(BARE, None), (QUOTED, "{"), (None, BARE), ("", BARE), (BARE[:50], QUOTED)])
def test_consumer_offsets_are_read_as_a_broker_loads_them(tmp_path: Path, text: str | None, copy: str | None) -> None:
    (tmp_path / "config").mkdir()
    for name, content in (("consumerOffset.json", text), ("consumerOffset.json.bak", copy)):
        if content is not None:
            (tmp_path / "config" / name).write_text(content)
    assert consumer_offsets(tmp_path) == FOUND
    assert read_consumers(str(tmp_path)) == {
        ("Orders", 0): {"g{0:1}": 5},
        ("Orders", 1): {"g{0:1}": 7},
        ("%RETRY%g1", 0): {"g1": 0},
    }


@pytest.mark.parametrize("text", ["{", "[]", '{"offsetTable": {"t@g": {"x": 1}}}', '{"offsetTable": {"t@g": null}}'])
def test_unreadable_consumer_offsets_are_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "consumerOffset.json").write_text(text)
    with pytest.raises(ConfigError):
        consumer_offsets(tmp_path)


@pytest.mark.parametrize(
    ("archive", "node"), [(THREE, "n0"), (THREE, "n1"), (THREE, "n2"), (MIXED, "n0"), (REUSED, "n0")]
)
def test_files_of_real_brokers_are_read(tmp_path: Path, archive: str, node: str) -> None:
    broker = extract(archive, f"{node}/config", tmp_path).parent
    offsets, topics = consumer_offsets(broker), topic_configs(broker)
    assert topics is not None
    assert all(topics[name]["topicName"] == name for name in topics)
    named = {topic for topic, _ in offsets if not topic.startswith("%RETRY%")}
    assert named or archive == REUSED
    assert named <= topics.keys()
    (broker / "config" / "topics.json").write_text("")
    assert topic_configs(broker)
