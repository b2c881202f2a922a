"""The targets by name, and the corpus of each."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.finding import unmeasured
from tests.fuzz.targets.frames import run_connection, run_frame
from tests.fuzz.targets.messages import run_message, run_records, run_request
from tests.fuzz.targets.remoting import run_remoting
from tests.fuzz.targets.rocketmq import run_properties, run_rocketmq
from tests.fuzz.targets.scanning import run_scan
from tests.fuzz.targets.settings import run_config, run_peers
from tests.fuzz.targets.small_files import run_checkpoint, run_control, run_currterm, run_log_json, run_tables
from tests.fuzz.targets.stores import run_store

CORPUS = Path(__file__).parent / "corpus"

TARGETS: dict[str, Callable[[bytes], None]] = {
    "frame": run_frame,
    "connection": run_connection,
    "message": run_message,
    "request": run_request,
    "records": run_records,
    "remoting": run_remoting,
    "scan": run_scan,
    "store": run_store,
    "currterm": run_currterm,
    "log_json": run_log_json,
    "checkpoint": run_checkpoint,
    "tables": run_tables,
    "control": run_control,
    "config": run_config,
    "peers": run_peers,
    "rocketmq": run_rocketmq,
    "properties": run_properties,
}

FAILING: dict[str, str] = {}
"""An input of the corpus (``target/name``) whose bug is not fixed yet → the reason. Its test must fail until it is."""


def corpus_of(target: str, directory: Path = CORPUS) -> list[Path]:
    """Return the files of a target's corpus, sorted."""
    return sorted(path for path in (directory / target).glob("*") if path.is_file())


@functools.cache
def warm_up(target: str) -> None:
    """Run the target's seeds once, so that the first use of libraries is not counted against an input."""
    with unmeasured():
        for path in corpus_of(target):
            with contextlib.suppress(Exception):
                TARGETS[target](path.read_bytes())
