"""A RocketMQ broker's configuration: the checked settings of its DLedger group, each value with its line."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from dledger_core.config import check_group_name, parse_peers
from dledger_core.errors import ConfigError
from dledger_core.java_properties import MalformedError, Property, read_java_properties

_T = TypeVar("_T")
_GROUP, _PEERS, _SELF, _ROOT, _SIZE = _KEYS = (
    "dLegerGroup",
    "dLegerPeers",
    "dLegerSelfId",
    "storePathRootDir",
    "mappedFileSizeCommitLog",
)
_ENABLED: Final = "enableDLegerCommitLog"
_SIZE_MIN: Final = 1024
_SIZE_MAX: Final = (1 << 31) - 1
_SIZE_DEFAULT: Final = 1 << 30

_OWN_FLAGS: Final = {
    "fileReservedTime": "--file-reserved-hours",
    "deleteWhen": "--delete-when",
    "diskMaxUsedSpaceRatio": "--disk-space-ratio-to-check-expired",
    "cleanFileForciblyEnable": "--enable-disk-force-clean",
    "flushDiskType": "--durability",
    "preferredLeaderId": "--preferred-leaders",
}
"""Ignored keys, because the option of this project differs in meaning, and the option that is closest."""


@dataclass(frozen=True, slots=True)
class BrokerConf:
    """Settings of a node from a broker's configuration.

    Attributes:
        path: the file.
        group: name of the group.
        peers: its peers string.
        self_id: this node.
        root: the broker's store directory.
        data_segment_bytes: size of a data file.
        ignored: ignored keys, sorted.
        notes: remarks for its owner.
    """

    path: Path
    group: str
    peers: str
    self_id: str
    root: Path
    data_segment_bytes: int
    ignored: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def broker_store(self) -> Path:
        """Directory of the broker's own log."""
        return self.root / f"dledger-{self.self_id}"

    def remarks(self) -> list[str]:
        """Return readable lines: ignored keys and other remarks."""
        lines = [f"{self.path}: {note}" for note in self.notes]
        if self.ignored:
            lines.append(f"{self.path}: ignored: {', '.join(self.ignored)}")
        flags = [f"{_OWN_FLAGS[key]} for {key}" for key in self.ignored if key in _OWN_FLAGS]
        if flags:
            lines.append(f"{self.path}: similar options of this command: {', '.join(flags)}")
        return lines


def read_broker_conf(path: Path) -> BrokerConf:
    """Read a broker's configuration file.

    Raises:
        ConfigError: it cannot be read, a key is missing or its value is wrong.
    """
    return _Reading(path, broker_properties(path)).conf()


def broker_properties(path: Path | None) -> list[Property]:
    """Return the properties of a broker's configuration file, without checks; none without a file.

    Raises:
        ConfigError: the file cannot be read.
    """
    if path is None:
        return []
    try:
        return read_java_properties(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"the file cannot be read: {error.strerror}", str(path), "check --broker-conf") from None
    except MalformedError as error:
        raise ConfigError(str(error), f"{path} line {error.line}", "write four hexadecimal digits after \\u") from None


def whole_number(properties: list[Property], name: str, default: int, path: Path | None) -> int:
    """Return a property that is a number above 0.

    Args:
        properties: of the file.
        name: of the property; the last one counts.
        default: the number without the property.
        path: the file.

    Raises:
        ConfigError: its value is something else.
    """
    text = next((each.value.strip() for each in reversed(properties) if each.key == name), str(default))
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 31):
        raise ConfigError(f"{name} = {text!r} is not a number above 0", str(path), "write a whole number")
    return int(text)


class _Reading:
    def __init__(self, path: Path, properties: list[Property]) -> None:
        self._path = path
        self._all = properties
        self._last = {each.key: each for each in properties}

    def conf(self) -> BrokerConf:
        peers = self._value(_PEERS, "n0-host:port;n1-host:port;n2-host:port, this broker included")
        names = [peer.node_id for peer in self._checked(_PEERS, lambda: parse_peers(peers))]
        group = self._value(_GROUP, "the group's name, the same on all its brokers")
        self._checked(_GROUP, lambda: check_group_name(group))
        self_id = self._value(_SELF, f"this broker's id in {_PEERS}")
        if self_id not in names:
            raise self._wrong(_SELF, f"is not in {_PEERS}", f"use one of {', '.join(names)}")
        return BrokerConf(
            self._path, group, peers, self_id, self._root(), self._size(), self._ignored(), tuple(self._notes())
        )

    def _value(self, key: str, what: str) -> str:
        found = self._last.get(key)
        if found is None:
            near = difflib.get_close_matches(key, [name for name in self._last if name not in _KEYS], n=1, cutoff=0.8)
            hint = f"line {self._last[near[0]].line} has {near[0]}; RocketMQ spells it {key}" if near else ""
            remedy = hint or f"add {key}={what}"
            raise ConfigError(f"{key} is missing", str(self._path), remedy)
        if not found.value.strip():
            raise self._wrong(key, "is empty", f"write {what}")
        return found.value.strip()

    def _checked(self, key: str, check: Callable[[], _T]) -> _T:
        try:
            return check()
        except ConfigError as error:
            raise self._wrong(key, f"is wrong: {error.what}", error.remedy) from None

    def _root(self) -> Path:
        if _ROOT not in self._last:
            return Path.home() / "store"
        text = self._value(_ROOT, "the broker's store directory")
        if "${" in text:
            raise self._wrong(
                _ROOT, "contains a variable", "write the full path; RocketMQ does not replace variables either"
            )
        if not text.isprintable():
            raise self._wrong(_ROOT, "contains a character that is invalid in a path", "write the full path")
        return Path(text)

    def _size(self) -> int:
        if _SIZE not in self._last:
            return _SIZE_DEFAULT
        text = self._value(_SIZE, "a number of bytes")
        size = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(_SIZE_MAX)) else -1
        if not _SIZE_MIN <= size <= _SIZE_MAX:
            remedy = f"write a whole number of bytes from {_SIZE_MIN} to {_SIZE_MAX}, without a unit"
            raise self._wrong(_SIZE, "is not a file size", remedy)
        return size

    def _wrong(self, key: str, what: str, remedy: str) -> ConfigError:
        found = self._last[key]
        return ConfigError(f"{key} = {found.value!r} {what}", f"{self._path} line {found.line}", remedy)

    def _ignored(self) -> tuple[str, ...]:
        return tuple(sorted(set(self._last) - {*_KEYS, _ENABLED}))

    def _notes(self) -> Iterator[str]:
        for each in self._all:
            last = self._last[each.key]
            if each.key in _KEYS and last is not each:
                yield f"line {each.line} is overridden by line {last.line}, which sets {each.key} again"
        enabled = self._last.get(_ENABLED)
        if enabled is None or enabled.value.strip().lower() != "true":
            state = "is not set" if enabled is None else f"= {enabled.value.strip()} (line {enabled.line})"
            yield f"{_ENABLED} {state}: the broker itself runs without DLedger"
        if _ROOT not in self._last:
            yield f"{_ROOT} is not set: RocketMQ's default {self._root()} is used"
