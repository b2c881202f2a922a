"""JSON files in a broker's ``config`` directory, read as the broker reads them.

Fastjson writes the queue ids of ``consumerOffset.json`` as bare numbers (``{0:5,1:7}``), which JSON does not allow. A
broker moves a file to ``NAME.bak`` before it writes a new one. At its start it loads the copy if the file is missing,
empty or not parsable. Source: RocketMQ's ``ConfigManager.load``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from dledger_core.errors import ConfigError

_T = TypeVar("_T")
_CONFIG: Final = "config"
_FILE_BYTES_MAX: Final = 64 << 20
_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|([{,]\s*)(-?\d+)(?=\s*:)', re.DOTALL)
"""A string, which stays as it is, or a bare number that is a key."""
_UNREADABLE: Final = (OSError, ValueError, KeyError, TypeError, AttributeError)


def parse_broker_json(text: str) -> Any:
    """Parse JSON as Fastjson writes it.

    Raises:
        ValueError: it is malformed.
    """
    return json.loads(_TOKEN.sub(lambda found: f'{found[1]}"{found[2]}"' if found[2] else found[0], text))


def consumer_offsets(broker: Path) -> dict[tuple[str, str], dict[int, int]]:
    """Return the next offset of each queue id by topic and consumer group; empty if the broker has recorded none.

    Args:
        broker: the broker's store directory, which contains ``config/consumerOffset.json``.

    Raises:
        ConfigError: neither the file nor its copy can be read.
    """
    return _read(broker, "consumerOffset.json", _offsets) or {}


def topic_configs(broker: Path) -> dict[str, dict[str, Any]] | None:
    """Return the configuration of each topic; None if the broker has recorded none.

    Args:
        broker: the broker's store directory, which contains ``config/topics.json``.

    Raises:
        ConfigError: neither the file nor its copy can be read.
    """
    return _read(
        broker, "topics.json", lambda content: {str(k): dict(v) for k, v in content["topicConfigTable"].items()}
    )


def _offsets(content: Any) -> dict[tuple[str, str], dict[int, int]]:
    found = {}
    for name, offsets in content["offsetTable"].items():
        topic, _, consumer = name.partition("@")
        found[topic, consumer] = {int(queue): int(offset) for queue, offset in offsets.items()}
    return found


def _read(broker: Path, name: str, parse: Callable[[Any], _T]) -> _T | None:
    """Return the content of a file, else of its copy; None if neither has any."""
    failed: Exception | None = None
    for path in (broker / _CONFIG / name, broker / _CONFIG / f"{name}.bak"):
        try:
            if path.stat().st_size > _FILE_BYTES_MAX:
                raise ValueError(f"it has more than {_FILE_BYTES_MAX:,} bytes")
            text = path.read_text(encoding="utf-8")
            if text:
                return parse(parse_broker_json(text))
        except FileNotFoundError:
            pass
        except _UNREADABLE as error:
            failed = failed or error
    if failed is None:
        return None
    remedy = f"restore it from a copy of the broker's directory, or from another broker of the group; {name}.bak too"
    why = f"{type(failed).__name__}: {failed}" if not isinstance(failed, (OSError, ValueError)) else str(failed)
    raise ConfigError(
        f"the broker's {name} cannot be read, nor {name}.bak: {why}", str(broker / _CONFIG / name), remedy
    )
