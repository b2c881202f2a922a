"""A broker's configuration: Java's syntax, the keys that count, and the remarks about the others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger_core.errors import ConfigError
from dledger_core.java_properties import MalformedError, read_java_properties
from dledger_core.rocketmq.store.broker_conf import read_broker_conf
from tests.rocketmq.golden import MIXED, REUSED, THREE, members

GOOD = "dLegerGroup=g\ndLegerPeers=n0-h:1;n1-h:2\ndLegerSelfId=n0\nstorePathRootDir=/s\nenableDLegerCommitLog=true\n"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a=b", {"a": "b"}),
        (b"  a  =  b  ", {"a": "b  "}),
        (b"a:b\rc d\r\ne\tf\n g = h", {"a": "b", "c": "d", "e": "f", "g": "h"}),
        (b"a= = b", {"a": "= b"}),
        (b"a  : b=c", {"a": "b=c"}),
        (b"# no\n ! no\n\n \t\nyes", {"yes": ""}),
        (b"a=b\\\n  c\\\r\n   d", {"a": "bcd"}),
        (b"a=b\\\n# no comment\nc=d", {"a": "b# no comment", "c": "d"}),
        (b"# a comment continues? \\\nno=1", {"no": "1"}),
        (b"a=b\\\\\nc=d", {"a": "b\\", "c": "d"}),
        (b"\\\n#a\nb", {"b": ""}),
        (b"a\\=b\\:c\\ d=e", {"a=b:c d": "e"}),
        (b"a\\\\=b", {"a\\": "b"}),
        (b'a=\\t\\n\\r\\f\\x\\z\\"', {"a": '\t\n\r\fxz"'}),
        (b"\\u0061=\\u4e2d\\ud83d\\ude00", {"a": "中😀"}),
        ("größe=ä".encode("latin-1"), {"größe": "ä"}),
        (b"C\\:\\\\store=D:\\\\x", {"C:\\store": "D:\\x"}),
        (b"a=1\na=2", {"a": "2"}),
        (b"a=b\\", {"a": "b"}),
        (b"", {}),
    ],
)
def test_properties_follow_java_syntax(data: bytes, expected: dict[str, str]) -> None:
    """Each vector was read by java.util.Properties too; so were 60,000 random ones, once."""
    assert {each.key: each.value for each in read_java_properties(data)} == expected


def test_properties_count_lines_like_editors() -> None:
    found = read_java_properties(b"# one\r\na=1\n\nb=2\\\n  3\nc=4")
    assert [(each.line, each.key, each.value) for each in found] == [(2, "a", "1"), (4, "b", "23"), (6, "c", "4")]


@given(st.binary(max_size=60))
def test_properties_read_any_bytes_or_name_line(data: bytes) -> None:
    try:
        lines = [each.line for each in read_java_properties(data)]
    except MalformedError as error:
        lines = [error.line]
    assert all(1 <= line <= len(data) + 1 for line in lines)


@pytest.mark.parametrize(
    ("name", "node", "peers", "size"),
    [
        (THREE, "n1", "n0-127.0.0.1:41211;n1-127.0.0.1:41212;n2-127.0.0.1:41213", 262144),
        (MIXED, "n0", "n0-127.0.0.1:42211", 131072),
        (REUSED, "n0", None, None),
    ],
)
def test_conf_of_golden_brokers_is_read(
    tmp_path: Path, name: str, node: str, peers: str | None, size: int | None
) -> None:
    (content,) = members(name, f"broker-{node}.conf").values()
    (tmp_path / "broker.conf").write_bytes(content)
    conf = read_broker_conf(tmp_path / "broker.conf")
    assert (conf.self_id, conf.root, conf.notes) == (node, Path("STORE") / node, ())
    assert conf.broker_store == Path("STORE") / node / f"dledger-{node}"
    assert conf.group == "RaftNode00"
    if peers is not None:
        assert (conf.peers, conf.data_segment_bytes) == (peers, size)
    assert {"brokerName", "listenPort", "fileReservedTime"} <= set(conf.ignored)
    assert not {key for key in conf.ignored if "DLeger" in key or "dLeger" in key}
    ignored, flags = conf.remarks()
    assert {str(tmp_path / "broker.conf"), "autoCreateTopicEnable", "brokerClusterName"} <= set(
        re.split(r"[:,;]? ", ignored)
    )
    assert {"--file-reserved-hours", "fileReservedTime"} <= set(re.split(r"[:,;]? ", flags))


def conf_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "broker.conf"
    path.write_text(text)
    return path


def test_conf_defaults_and_remarks(tmp_path: Path) -> None:
    text = "dLegerGroup=old\ndLegerGroup=g\ndLegerPeers n0-h:1\ndLegerSelfId:n0  \n"
    conf = read_broker_conf(conf_of(tmp_path, text))
    assert (conf.group, conf.self_id, conf.data_segment_bytes, conf.ignored) == ("g", "n0", 1 << 30, ())
    assert conf.root == Path.home() / "store"
    overridden, enabled, root = conf.notes
    assert all(name in overridden for name in ("line 1", "line 2", "dLegerGroup"))
    assert "enableDLegerCommitLog" in enabled
    assert str(Path.home() / "store") in root
    (off,) = read_broker_conf(conf_of(tmp_path, GOOD.replace("=true", "=false"))).notes
    assert ("enableDLegerCommitLog" in off, "line 5" in off) == (True, True)


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        ("dLegerGroup=g", "", ["dLegerGroup", "add dLegerGroup="]),
        (
            "dLegerGroup=g",
            "dLedgerGroup=g",
            ["dLegerGroup", "line 1", "dLedgerGroup"],
        ),
        ("dLegerGroup=g", "dLegerGroup=", ["line 1", "dLegerGroup = '' is empty"]),
        ("dLegerGroup=g", "dLegerGroup=a/b", ["line 1", "dLegerGroup = 'a/b'", "use 1 to 127"]),
        ("n1-h:2", "n1:h:2", ["line 2", "dLegerPeers = ", "'n1:h:2'"]),
        ("n1-h:2", "n0-h:2", ["line 2", "dLegerPeers"]),
        ("SelfId=n0", "SelfId=n9", ["line 3", "dLegerSelfId = 'n9'", "dLegerPeers", "use one of n0, n1"]),
        ("=/s", "=${user.home}/s", ["line 4", "storePathRootDir"]),
        ("=/s", "=\\u12", ["line 4", "\\u12"]),
        ("=/s", "=/s\nmappedFileSizeCommitLog=1G", ["line 5", "mappedFileSizeCommitLog = '1G'", "without a unit"]),
        ("=/s", "=/s\nmappedFileSizeCommitLog=4294967296", ["line 5", "to 2147483647"]),
        ("=/s", "=/s\nmappedFileSizeCommitLog=-1", ["line 5", "'-1'"]),
        ("=/s", "=/s\nmappedFileSizeCommitLog=" + "9" * 5000, ["line 5"]),
        ("=/s", r"=/x/\u0000y", ["line 4", "storePathRootDir"]),
    ],
)
def test_conf_error_names_file_line_key_and_value(tmp_path: Path, before: str, after: str, names: list[str]) -> None:
    path = conf_of(tmp_path, GOOD.replace(before, after))
    with pytest.raises(ConfigError) as caught:
        read_broker_conf(path)
    assert str(path) in str(caught.value)
    assert caught.value.remedy
    for part in names:
        assert part in str(caught.value)


def test_unreadable_conf_is_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        read_broker_conf(tmp_path / "nowhere.conf")
    with pytest.raises(ConfigError):
        read_broker_conf(tmp_path)
