"""Does the simulation see the bugs it is there for? Each case removes one guard from a copy of the core.

A case passes when some seed fails, or one of ``tests/raft`` where a random run would have to be lucky.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MUTATIONS = {
    "old entries commit by counting": (
        "replication.py",
        "if index <= log.commit_index or log.term_at(index) != state.term:",
        "if index <= log.commit_index:",
    ),
    "the leader counts itself before its disk": (
        "replication.py",
        "matches.append(log.durable_index)",
        "matches.append(log.last_index)",
    ),
    "a vote leaves before it is durable": (
        "election.py",
        "state.send_persisted(_response(",
        "state.send(_response(",
    ),
    "a vote request leaves before the self-vote is durable": (
        "election.py",
        "        state.send_persisted(request)",
        "        state.send(request)",
    ),
    "an acknowledgement leaves before the entries are durable": (
        "following.py",
        "    state.send_persisted(\n        AppendEntriesResponse(",
        "    state.send(\n        AppendEntriesResponse(",
    ),
    "every append cuts the log behind it": (
        "log.py",
        "held = first_index < self.first_index or self._runs.term_at(first_index) == batch.term",
        "held = first_index < self.first_index",
    ),
    "a late advance counts entries that were cut": (
        "log.py",
        "            persisting.durable_to = min(persisting.durable_to, kept)",
        "            pass",
    ),
    "a cut leaves durable_index alone": (
        "log.py",
        "        self.durable_index = min(self.durable_index, kept)\n",
        "",
    ),
    "a cut is not handed to the disk": (
        "log.py",
        "if index <= self._handed_index:",
        "if index < self._handed_index:",
    ),
    "a follower commits what this message did not match": (
        "following.py",
        "log.commit_to(min(message.commit_index, matched))",
        "log.commit_to(min(message.commit_index, log.last_index))",
    ),
    "a heartbeat carries the plain commit index": (
        "leadership.py",
        "commit_index=min(progress.match_index, commit_index)",
        "commit_index=commit_index",
    ),
    "an acknowledgement names the end of the log": (
        "following.py",
        "match_index=max(matched, log.commit_index)",
        "match_index=log.last_index",
    ),
    "a vote for a log that lacks entries": (
        "election.py",
        "granted = willing and state.log.is_up_to_date(message.last_index, message.last_term)",
        "granted = willing",
    ),
    "the previous entry is not compared": (
        "log.py",
        "return prev_index <= self.commit_index or self.term_at(prev_index) == prev_term",
        "return True",
    ),
    "a read is answered by old echoes": (
        "leadership.py",
        "        state.reads.start_round(state.heartbeat_round, commit_index)",
        "        state.reads.start_round(state.heartbeat_round - 3, commit_index)",
    ),
    "a read before anything of the term is committed": (
        "leadership.py",
        "return state.log.term_at(state.log.commit_index) == state.term",
        "return True",
    ),
    "two votes in one term": (
        "election.py",
        "free = state.voted_for == candidate or (state.voted_for is None and state.leader_id is None)",
        "free = True",
    ),
    "a lost answer is never asked for": (
        "progress.py",
        "self.check_due = watched and self.match_index == self._watch_match and bool(self._inflight)",
        "self.check_due = False",
    ),
    "refusals do not move the probe": (
        "progress.py",
        "            self.become_probe(next_index)\n            # Asking",
        "            # Asking",
    ),
}

RARE_MUTATIONS = {
    "a candidate counts itself before its disk": (
        "election.py",
        "state.node_id not in state.votes and state.is_hard_state_durable",
        "state.node_id not in state.votes",
    ),
    "answers of an older term count": (
        "raft.py",
        "if message.term < state.term:",
        "if message.term < state.term and not isinstance(message, AppendEntriesResponse | RequestVoteResponse):",
    ),
    "a transfer never ends": (
        "leadership.py",
        "        if state.transfer_elapsed >= config.election_ticks_min:\n            state.transferee = None",
        "        pass",
    ),
    "a leader that hears nobody stays": (
        "leadership.py",
        "return voters >= state.configuration.majority and",
        "return",
    ),
    "a leader whose disk hangs stays": (
        "leadership.py",
        " and state.persist_elapsed < state.config.election_ticks_max",
        "",
    ),
    "candidates are heard while there is a leader": (
        "raft.py",
        "if state.hears_leader and not message.transfer:",
        "if False:",
    ),
    "a stale leader is not told": (
        "raft.py",
        "        following.refuse_heartbeat(state, message)",
        "        pass",
    ),
}


@pytest.mark.sim
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_simulation_notices(name: str, tmp_path: Path) -> None:
    mutate(tmp_path, *MUTATIONS[name])
    run = run_python(tmp_path, "-m", "tests.sim", "--seeds", "0..299")
    assert run.returncode != 0, f"300 seeds do not notice: {name}"
    assert "replay: python -m tests.sim --seeds" in run.stderr, run.stderr
    last_lines = "".join(run.stderr.strip().splitlines()[-2:])
    assert any(kind in last_lines for kind in ("Violation", "Liveness", "AssertionError")), run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", RARE_MUTATIONS)
def test_a_scenario_notices(name: str, tmp_path: Path) -> None:
    mutate(tmp_path, *RARE_MUTATIONS[name])
    options = ("-q", "-x", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir", str(tmp_path))
    run = run_python(tmp_path, "-m", "pytest", *options, "tests/raft")
    assert run.returncode == 1, f"no test notices: {name}\n{run.stdout}{run.stderr}"
    assert "error" not in run.stdout.splitlines()[-1], run.stdout


def mutate(directory: Path, module: str, guard: str, without: str) -> None:
    """Copies the core and its tests, and removes one guard."""
    shutil.copytree(ROOT / "dledger_core" / "raft", directory / "dledger_core" / "raft")
    for part in ("config.py", "errors.py", "ids.py"):
        shutil.copy(ROOT / "dledger_core" / part, directory / "dledger_core" / part)
    (directory / "dledger_core" / "__init__.py").write_text("")
    for package in ("raft", "sim", "support"):
        shutil.copytree(ROOT / "tests" / package, directory / "tests" / package)
    path = directory / "dledger_core" / "raft" / module
    source = path.read_text()
    assert source.count(guard) == 1, f"{module} no longer contains the guard that this case removes"
    path.write_text(source.replace(guard, without))


def run_python(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(directory)},
        capture_output=True,
        text=True,
        check=False,
    )
