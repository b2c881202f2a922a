"""The targets by name, each with the inputs that it starts from."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.fuzz import seeds
from tests.fuzz.finding import unmeasured
from tests.fuzz.targets.client_answers import run_client_answers
from tests.fuzz.targets.frames import run_connection, run_frame
from tests.fuzz.targets.messages import run_message, run_records, run_request
from tests.fuzz.targets.peers import run_peer_session
from tests.fuzz.targets.remoting import run_remoting
from tests.fuzz.targets.rocketmq import run_properties, run_rocketmq
from tests.fuzz.targets.scanning import run_scan
from tests.fuzz.targets.small_files import (
    run_broker_conf,
    run_checkpoint,
    run_config,
    run_control,
    run_hard_state,
    run_log_json,
    run_members,
    run_peers,
    run_principals,
    run_tables,
)
from tests.fuzz.targets.stores import run_store

REGRESSIONS = Path(__file__).parent / "regressions"


class Target(NamedTuple):
    """A function of one input, and the generator of its seeds."""

    run: Callable[[bytes], None]
    seeds: Callable[[], seeds.Seeds]


TARGETS = {
    "frame": Target(run_frame, seeds.frame),
    "connection": Target(run_connection, seeds.connection),
    "message": Target(run_message, seeds.message),
    "request": Target(run_request, seeds.request),
    "peer_session": Target(run_peer_session, seeds.peer_session),
    "client_answers": Target(run_client_answers, seeds.client_answers),
    "records": Target(run_records, seeds.records),
    "remoting": Target(run_remoting, seeds.remoting),
    "scan": Target(run_scan, seeds.scan),
    "store": Target(run_store, seeds.store),
    "hard_state": Target(run_hard_state, seeds.hard_state),
    "log_json": Target(run_log_json, seeds.log_json),
    "checkpoint": Target(run_checkpoint, seeds.checkpoint),
    "members": Target(run_members, seeds.members),
    "tables": Target(run_tables, seeds.tables),
    "control": Target(run_control, seeds.control),
    "config": Target(run_config, seeds.config),
    "peers": Target(run_peers, seeds.peers),
    "broker_conf": Target(run_broker_conf, seeds.broker_conf),
    "principals": Target(run_principals, seeds.principals),
    "rocketmq": Target(run_rocketmq, seeds.rocketmq),
    "properties": Target(run_properties, seeds.properties),
}


@functools.cache
def inputs_of(name: str) -> dict[str, bytes]:
    """Return the seeds and the regressions of a target by name, after a first run that no limit measures.

    The first use of a library takes memory that must not be counted against an input.
    """
    target = TARGETS[name]
    found = dict(target.seeds()) | {path.name: path.read_bytes() for path in sorted(REGRESSIONS.glob(f"{name}/*"))}
    with unmeasured():
        for data in found.values():
            with contextlib.suppress(Exception):
                target.run(data)
    return found
