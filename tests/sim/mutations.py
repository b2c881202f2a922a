"""Bugs made on purpose: each removes one guard from a copy of the code; some seed, or some scenario, must notice.

``CORE_MUTATIONS`` are tried with seeds of the Raft core alone, ``WHOLE_MUTATIONS`` with seeds of whole replicas; the
others with the tests of their package, where a random run would have to be lucky.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
Mutation = tuple[str, str, str]
"""A module of ``dledger_core``, the text of the guard (it occurs once), and the text without it."""

CORE_MUTATIONS = {
    "old entries commit by counting": (
        "raft/replication.py",
        "if index <= log.commit_index or log.term_at(index) != state.term:",
        "if index <= log.commit_index:",
    ),
    "the leader counts itself before its disk": (
        "raft/replication.py",
        "matches.append(log.durable_index)",
        "matches.append(log.last_index)",
    ),
    "a vote leaves before it is durable": (
        "raft/election.py",
        "state.send_persisted(_response(",
        "state.send(_response(",
    ),
    "a vote request leaves before the self-vote is durable": (
        "raft/election.py",
        "        state.send_persisted(request)",
        "        state.send(request)",
    ),
    "an acknowledgement leaves before the entries are durable": (
        "raft/following.py",
        "    state.send_persisted(\n        AppendEntriesResponse(",
        "    state.send(\n        AppendEntriesResponse(",
    ),
    "every append cuts the log behind it": (
        "raft/log.py",
        "held = first_index < self.first_index or self._runs.term_at(first_index) == batch.term",
        "held = first_index < self.first_index",
    ),
    "a late advance counts entries that were cut": (
        "raft/log.py",
        "            persisting.durable_to = min(persisting.durable_to, kept)",
        "            pass",
    ),
    "a cut leaves durable_index alone": (
        "raft/log.py",
        "        self.durable_index = min(self.durable_index, kept)\n",
        "",
    ),
    "a cut is not handed to the disk": (
        "raft/log.py",
        "if index <= self.emitted_index:",
        "if index < self.emitted_index:",
    ),
    "a follower commits what this message did not match": (
        "raft/following.py",
        "log.commit_to(min(message.commit_index, matched))",
        "log.commit_to(min(message.commit_index, log.last_index))",
    ),
    "a heartbeat carries the plain commit index": (
        "raft/leadership.py",
        "commit_index=min(progress.match_index, commit_index)",
        "commit_index=commit_index",
    ),
    "an acknowledgement names the end of the log": (
        "raft/following.py",
        "accept(state, message.sender, max(matched, log.commit_index))",
        "accept(state, message.sender, log.last_index)",
    ),
    "a vote for a log that lacks entries": (
        "raft/election.py",
        "granted = willing and _may_elect(state, message)",
        "granted = willing",
    ),
    "the previous entry is not compared": (
        "raft/log.py",
        "return prev_index <= self.commit_index or self.term_at(prev_index) == prev_term",
        "return True",
    ),
    "a read is answered by old echoes": (
        "raft/leadership.py",
        "        state.reads.start_round(state.heartbeat_round, commit_index)",
        "        state.reads.start_round(state.heartbeat_round - 3, commit_index)",
    ),
    "a read before anything of the term is committed": (
        "raft/leadership.py",
        "return state.log.term_at(state.log.commit_index) == state.term",
        "return True",
    ),
    "two votes in one term": (
        "raft/election.py",
        "free = state.voted_for == candidate or (state.voted_for is None and state.leader_id is None)",
        "free = True",
    ),
    "a lost answer is never asked for": (
        "raft/progress.py",
        "self.check_due = watched and self.match_index == self._watch_match and bool(self._inflight)",
        "self.check_due = False",
    ),
    "refusals do not move the probe": (
        "raft/progress.py",
        "            self.become_probe(next_index)\n            # Asking",
        "            # Asking",
    ),
}

SCENARIO_MUTATIONS = {
    "a member gives up a log that needs no reset": (
        "raft/resetting.py",
        "    if state.log.matches(previous_index, message.previous_term):",
        "    if state.log.commit_index >= previous_index:",
    ),
    "a late answer sends a piece of a reset again": (
        "raft/resetting.py",
        "    if message.offset > outgoing.offset or outgoing.asked:",
        "    if True:",
    ),
    "a candidate counts itself before its disk": (
        "raft/election.py",
        "state.node_id not in state.votes and state.is_hard_state_durable",
        "state.node_id not in state.votes",
    ),
    "answers of an older term count": (
        "raft/raft.py",
        "if message.term < state.term:",
        "if message.term < state.term and not isinstance(message, AppendEntriesResponse | RequestVoteResponse):",
    ),
    "a transfer never ends": (
        "raft/leadership.py",
        "        if state.transfer_elapsed >= config.election_ticks_min:\n            state.transferee = None",
        "        pass",
    ),
    "a leader that hears nobody stays": (
        "raft/leadership.py",
        "return voters >= state.configuration.majority and",
        "return",
    ),
    "a leader whose disk hangs stays": (
        "raft/leadership.py",
        " and state.persist_elapsed < state.config.election_ticks_max",
        "",
    ),
    "candidates are heard while there is a leader": (
        "raft/raft.py",
        "if state.has_active_leader and not message.transfer:",
        "if False:",
    ),
    "a stale leader is not told": (
        "raft/raft.py",
        "        following.refuse_heartbeat(state, message)",
        "        pass",
    ),
}

STORAGE_MUTATIONS: dict[str, Mutation] = {
    "a torn append time is believed": (
        "storage/recovery.py",
        "    whole: npt.NDArray[np.int64] = ends[~torn]\n",
        "    whole = ends\n",
    ),
    "a late attempt joins a committed transaction": (
        "storage/transactions.py",
        "in query.retired):\n            self._lose([part])\n            return\n",
        "in query.retired):\n            pass\n",
    ),
    "a read does not check bodies": (
        "storage/durable_log.py",
        "start, lambda: self._read(start, end, max_bytes, body_crc=True)",
        "start, lambda: self._read(start, end, max_bytes, body_crc=False)",
    ),
    "damage far from the end is cut like a torn tail": (
        "storage/recovery.py",
        "        if written_end - bad > self.unsynced_bytes_max and stop is not None:",
        "        if False and stop is not None:",
    ),
    "writing goes on after a failed sync": (
        "storage/commit_log.py",
        "        if self._failure is not None:\n            raise self._failure\n        try:",
        "        try:",
    ),
    "a committed entry may be cut": (
        "storage/commit_log.py",
        'invariant(index > self._commit_index, "a committed entry would be cut"',
        'invariant(True, "a committed entry would be cut"',
    ),
    "what was discarded comes back after a crash": (
        "storage/commit_log.py",
        "                discarding=True,\n",
        "",
    ),
    "names that a dead process left are not made durable": (
        "storage/commit_log.py",
        "            files.sync_dir(folder)",
        "            pass",
    ),
}

REPAIR_MUTATIONS: dict[str, Mutation] = {
    "what is not known to be committed is written over damage": (
        "storage/repair.py",
        "    if stop > damage.end or stop - 1 > commit_index:\n",
        "    if stop > damage.end:\n",
    ),
    "records that lie elsewhere are written over damage": (
        "storage/repair.py",
        "    if not bool((positions == place(records.sizes, damage.position, data.segment_bytes)).all()):\n",
        "    if False:\n",
    ),
    "terms that do not fit are written over damage": (
        "storage/repair.py",
        "    if (before is not None and int(terms[0]) < before) or (after is not None and int(terms[-1]) > after):\n",
        "    if False:\n",
    ),
    "a repair asks no second witness": (
        "storage/repair.py",
        "    _cross_check_all(reader, index, damage, records)\n\n\n",
        "\n\n",
    ),
    "a failed write leaves no mark": (
        "storage/commit_log.py",
        "            mark_needs_verification(self._files, self._layout, ",
        "            str(",
    ),
    "a damaged row tells where an entry lies": (
        "storage/log_queries.py",
        "    found = reader.read(index, index + 1, 1, body_crc=False).headers[0]\n",
        "    return position, size, 0\n    found = None\n",
    ),
    "a damaged head tells what may be deleted": (
        "storage/log_queries.py",
        '    return head.index if (int(row["position"]), int(row["index"])) == (base, head.index) else None\n',
        "    return head.index\n",
    ),
    "a new start that was interrupted keeps a store from being repaired": (
        "storage/repair.py",
        "            if found is None or (found.discarding and not write):\n",
        "            if found is None or found.discarding:\n",
    ),
    "rows that are mended are not made durable": (
        "storage/damage.py",
        "        index.sync(wrong[0], wrong[0] + len(wrong[1]))\n",
        "",
    ),
}

WHOLE_MUTATIONS: dict[str, Mutation] = {
    "a node whose log lost its end votes at once": (
        "raft/state.py",
        "        return self.recovering_above is None\n",
        "        return True\n",
    ),
    "a node whose log lost its end trusts a leader of the same term": (
        "raft/state.py",
        "committed = term is not None and term > self.recovering_above",
        "committed = term is not None",
    ),
    "a node whose log lost its end trusts any match": (
        "raft/following.py",
        "    if matched >= message.last_index:\n",
        "    if True:\n",
    ),
    "a node without a vote does not say so to its disk": (
        "server/repair.py",
        "        await environment.beside(partial(store.mark_recovering_if_end_is_lost, found))\n",
        "        pass\n",
    ),
    "a suspect store is opened as any other": (
        "server/repair.py",
        "    if why is not None:\n        raise CorruptRecordError(",
        "    if False:\n        raise CorruptRecordError(",
    ),
    "what a failed sync left in the page cache is believed": (
        "storage/recovery.py",
        "        reader.data.rewrite(known, end.position)\n",
        "",
    ),
    "a repaired store stays suspect": (
        "storage/repair.py",
        "            clear_needs_verification(self._files, self._layout)\n",
        "            pass\n",
    ),
    "a repair takes damage near the end for a torn tail": (
        "storage/repair.py",
        "        if self._checkpoint is None:  # then",
        "        if True:  # then",
    ),
    "the checkpoint vouches for nothing": (
        "storage/recovery.py",
        "        if checkpoint is not None and checkpoint.durable_index >= first:\n",
        "        if False:\n",
    ),
    "a batch ends where a row is lost": (
        "storage/log_queries.py",
        "        if len(batch_ends(pieces[-1])):\n            break\n",
        "        break\n",
    ),
    "a prefix is deleted before its tables are durable": (
        "storage/commit_log.py",
        "            self._files.replace(self._layout.tables, tables.data)\n            self._commit_index",
        "            self._commit_index",
    ),
    "a reset forgets the tables": (
        "server/replica.py",
        "        self._controls.restart(new_log.tables)\n",
        "",
    ),
    "entries count as durable before the sync": (
        "storage/commit_log.py",
        '            if self.config.durability == "fsync" or self._appender.unsynced_bytes > bound:\n',
        "            if self._appender.unsynced_bytes > bound:\n",
    ),
    "a torn batch keeps its first entries": (
        "storage/recovery.py",
        '    return np.flatnonzero(ends_batch(records.headers) | (records.headers["flags"] == 0))',
        '    return np.flatnonzero(records.headers["flags"] >= 0)',
    ),
    "what recovery found is not synced": (
        "storage/recovery.py",
        "        reader.data.rewrite(known, end.position)\n    reader.data.sync([base for",
        "    ([base for",
    ),
    "a new segment's name is not synced": (
        "storage/appender.py",
        "        if made:\n            self.data.sync_dir()\n",
        "",
    ),
    "a cut leaves control entries behind": (
        "server/controls.py",
        "            self._waiting.pop()\n",
        "            break\n",
    ),
    "an unready leader judges by old tables": (
        "server/appends.py",
        "if not self._replica.is_leader or self._replica.leader_ready:",
        "if True:",
    ),
    "a repeat in flight is appended again": (
        "server/in_flight.py",
        "        if flight is None or key.epoch > flight.epoch:\n",
        "        if True:\n",
    ),
    "a repeat is appended again": (
        "storage/producers.py",
        "        return found\n",
        "        return None\n",
    ),
    "a vote is not written": (
        "storage/commit_log.py",
        "                save_hard_state(self._files, self._layout.root, hard_state)\n",
        "",
    ),
}


def mutate(directory: Path, mutation: Mutation) -> None:
    """Copies the code and the tests of the simulation, compiled as they are, and removes one guard."""
    module, guard, without = mutation
    shutil.copytree(ROOT / "dledger_core", directory / "dledger_core")
    for package in ("raft", "sim", "storage", "support"):
        shutil.copytree(ROOT / "tests" / package, directory / "tests" / package)
    path = directory / "dledger_core" / module
    text = path.read_text()
    if text.count(guard) != 1:
        raise AssertionError(f"{module} no longer contains the guard that this case removes")
    path.write_text(text.replace(guard, without))


def run_python(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python on a copy."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(directory), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def escapes_seeds(directory: Path, mutation: Mutation, *, core: bool, likely: int = 0) -> str:
    """Returns "" if some seed notices a mutation, else what the run said; tries the seed that did so before first."""
    mutate(directory, mutation)
    for seeds in (f"{likely}..{likely}", "0..299" if core else "0..149"):
        run = run_python(directory, "-m", "tests.sim", *["--core"] * core, "--seeds", seeds)
        last_lines = "".join(run.stderr.strip().splitlines()[-3:])
        noticed = any(kind in last_lines for kind in ("Violation", "Liveness", "AssertionError", "Corrupt"))
        if run.returncode != 0 and "replay: python -m tests.sim" in run.stderr and noticed:
            return ""
    return run.stderr or "all seeds passed"


def escapes_scenarios(directory: Path, mutation: Mutation, noticed_by: str) -> str:
    """Returns "" if one of the mutated package's tests ``noticed_by`` fails, else what the run said."""
    mutate(directory, mutation)
    tests, *select = f"tests/{Path(mutation[0]).parent}/{noticed_by}".split()
    options = ("-q", "-x", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir", str(directory))
    run = run_python(directory, "-m", "pytest", *options, tests, *select)
    summary = run.stdout.splitlines()[-1] if run.stdout else ""
    return "" if run.returncode == 1 and "error" not in summary else f"{run.stdout}{run.stderr}"


NOTICED_BY: Final = {
    "a member gives up a log that needs no reset": "test_resetting.py",
    "a late answer sends a piece of a reset again": "test_resetting.py",
    "a candidate counts itself before its disk": "test_pitfalls.py",
    "a transfer never ends": "test_pitfalls.py",
    "a leader whose disk hangs stays": "test_pitfalls.py",
    "answers of an older term count": "test_paper_election.py",
    "a stale leader is not told": "test_paper_election.py",
    "a leader that hears nobody stays": "test_paper_election.py",
    "candidates are heard while there is a leader": "test_paper_election.py",
    "a torn append time is believed": "test_torn_header.py",
    "a late attempt joins a committed transaction": "test_transactions.py",
    "a read does not check bodies": "test_damage.py",
    "damage far from the end is cut like a torn tail": "test_recovery.py -k far_from_the_end",
    "writing goes on after a failed sync": "test_commit_log.py",
    "a committed entry may be cut": "test_commit_log.py",
    "what was discarded comes back after a crash": "test_prefix.py",
    "names that a dead process left are not made durable": "test_names.py",
    "what is not known to be committed is written over damage": "test_repair.py -k never_written",
    "records that lie elsewhere are written over damage": "test_repair.py -k lies_elsewhere",
    "terms that do not fit are written over damage": "test_repair.py -k does_not_fit",
    "a repair asks no second witness": "test_repair.py -k never_written",
    "a failed write leaves no mark": "test_repair.py -k failed_sync_marks",
    "a damaged row tells where an entry lies": "test_repair.py -k believe_a_damaged_row",
    "rows that are mended are not made durable": "test_repair.py -k believe_a_damaged_row",
    "a damaged head tells what may be deleted": "test_prefix.py",
    "a new start that was interrupted keeps a store from being repaired": "test_prefix.py",
}
"""The tests that notice, as pytest is told them: to try all of the package takes long."""
NOTICED_BY_SEED: Final = {
    "old entries commit by counting": 1,
    "an acknowledgement names the end of the log": 1,
    "a vote for a log that lacks entries": 1,
    "a lost answer is never asked for": 1,
    "refusals do not move the probe": 1,
    "a new segment's name is not synced": 1,
    "a repeat in flight is appended again": 1,
    "a cut leaves control entries behind": 1,
    "a heartbeat carries the plain commit index": 1,
    "the previous entry is not compared": 1,
    "two votes in one term": 2,
    "a repair takes damage near the end for a torn tail": 2,
    "what recovery found is not synced": 6,
    "a prefix is deleted before its tables are durable": 7,
    "a reset forgets the tables": 7,
    "a follower commits what this message did not match": 10,
    "what a failed sync left in the page cache is believed": 18,
    "a cut leaves durable_index alone": 21,
    "a batch ends where a row is lost": 23,
    "a cut is not handed to the disk": 29,
    "a late advance counts entries that were cut": 38,
    "a read is answered by old echoes": 95,
    "a node whose log lost its end trusts any match": 124,
}
"""The first seed that noticed, where it is not 0. After a change of the simulation it may be another: all are tried."""
SCENARIOS: Final = SCENARIO_MUTATIONS | STORAGE_MUTATIONS | REPAIR_MUTATIONS
ALL: Final = CORE_MUTATIONS | WHOLE_MUTATIONS | SCENARIOS


def attempt(name: str) -> str:
    """Tries one mutation on a copy of its own; returns "" if it was noticed, else what the run said."""
    with tempfile.TemporaryDirectory() as directory:
        if name in SCENARIOS:
            return escapes_scenarios(Path(directory), ALL[name], NOTICED_BY[name])
        return escapes_seeds(
            Path(directory), ALL[name], core=name in CORE_MUTATIONS, likely=NOTICED_BY_SEED.get(name, 0)
        )


def main(jobs: int) -> int:
    """Tries all mutations and prints which were noticed; returns how many were not."""
    missed = 0
    with ThreadPoolExecutor(jobs) as pool:
        for name, said in zip(ALL, pool.map(attempt, ALL), strict=True):
            missed += bool(said)
            sys.stdout.write(f"{'MISSED' if said else 'noticed':>8}  {name}\n")
    sys.stdout.write(f"{len(ALL) - missed} of {len(ALL)} noticed\n")
    return missed
