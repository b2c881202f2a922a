"""Bugs made on purpose: each removes one guard from a copy of the code, and some seed or test must fail.

``found_by`` names how: ``core`` = seeds of the Raft core alone, ``whole`` = seeds of complete replicas, otherwise the
file whose tests fail. The tests serve where a random run would have to be lucky. A guard is its text; it occurs once
in its room, in whatever file.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]


class Mutation(NamedTuple):
    """One guard of ``dledger_core/<room>`` and the text without it."""

    name: str
    room: str
    guard: str
    without: str
    found_by: str

    def module(self, root: Path = ROOT) -> Path | None:
        """Return the file that contains the guard, or None unless it occurs exactly once."""
        counts = {
            path: path.read_text().count(self.guard) for path in (root / "dledger_core" / self.room).rglob("*.py")
        }
        found = [path for path, count in counts.items() if count]
        return found[0] if sum(counts.values()) == 1 else None


MUTATIONS: Final = (
    Mutation(
        "old entries commit by counting",
        "raft",
        "if index <= log.commit_index or log.term_at(index) != state.term:",
        "if index <= log.commit_index:",
        "core",
    ),
    Mutation(
        "the leader counts itself before its disk",
        "raft",
        "return log.durable_index if member == state.member",
        "return log.last_index if member == state.member",
        "core",
    ),
    Mutation(
        "a vote leaves before it is durable",
        "raft",
        "state.send_persisted(_response(",
        "state.send(_response(",
        "core",
    ),
    Mutation(
        "a vote request leaves before the self-vote is durable",
        "raft",
        "        state.send_persisted(request)",
        "        state.send(request)",
        "core",
    ),
    Mutation(
        "an acknowledgement leaves before the entries are durable",
        "raft",
        "    state.send_persisted(\n        AppendEntriesResponse(",
        "    state.send(\n        AppendEntriesResponse(",
        "core",
    ),
    Mutation(
        "every append truncates the log after it",
        "raft",
        "known = first_index < self.first_index or self._ranges.term_at(first_index) == batch.term",
        "known = first_index < self.first_index",
        "core",
    ),
    Mutation(
        "a late advance counts truncated entries",
        "raft",
        "            persisting.durable_to = min(persisting.durable_to, kept)",
        "            pass",
        "core",
    ),
    Mutation(
        "a truncation does not lower durable_index",
        "raft",
        "        self.durable_index = min(self.durable_index, kept)\n",
        "",
        "core",
    ),
    Mutation(
        "a truncation is not sent to the disk",
        "raft",
        "if index <= self.emitted_index:",
        "if index < self.emitted_index:",
        "core",
    ),
    Mutation(
        "a follower commits what this message did not match",
        "raft",
        "log.commit_to(min(message.commit_index, matched))",
        "log.commit_to(min(message.commit_index, log.last_index))",
        "core",
    ),
    Mutation(
        "a heartbeat carries the plain commit index",
        "raft",
        "commit_index=min(progress.match_index, commit_index)",
        "commit_index=commit_index",
        "core",
    ),
    Mutation(
        "an acknowledgement names the end of the log",
        "raft",
        "accept(state, message.sender, max(matched, log.commit_index))",
        "accept(state, message.sender, log.last_index)",
        "core",
    ),
    Mutation(
        "a vote for a log that lacks entries",
        "raft",
        "granted = willing and _may_elect(state, message)",
        "granted = willing",
        "core",
    ),
    Mutation(
        "the previous entry is not compared",
        "raft",
        "return prev_index <= self.commit_index or self.term_at(prev_index) == prev_term",
        "return True",
        "core",
    ),
    Mutation(
        "a read is answered by old echoes",
        "raft",
        "        state.reads.start_round(state.heartbeat_round, commit_index)",
        "        state.reads.start_round(state.heartbeat_round - 3, commit_index)",
        "core",
    ),
    Mutation(
        "a read before anything of the term is committed",
        "raft",
        "return state.log.term_at(state.log.commit_index) == state.term",
        "return True",
        "core",
    ),
    Mutation(
        "two votes in one term",
        "raft",
        "free = state.voted_for == candidate or (state.voted_for is None and state.leader_id is None)",
        "free = True",
        "core",
    ),
    Mutation(
        "a lost response is never asked for again",
        "raft",
        "self.check_due = watched and self.match_index == self._watch_match and bool(self._inflight)",
        "self.check_due = False",
        "core",
    ),
    Mutation(
        "rejections do not move the probe",
        "raft",
        "            self.become_probe(next_index)\n            # The same",
        "            # The same",
        "core",
    ),
    Mutation(
        "a recovering voter votes at once",
        "raft",
        "        return self.recovering_above is not None\n",
        "        return False\n",
        "whole",
    ),
    Mutation(
        "a recovering voter trusts a leader of the same term",
        "raft",
        "committed = term is not None and term > above",
        "committed = term is not None",
        "whole",
    ),
    Mutation(
        "a recovering voter trusts any match",
        "raft",
        "    if matched >= message.last_index:\n",
        "    if True:\n",
        "whole",
    ),
    Mutation(
        "a repair does not record a recovering voter",
        "server",
        "        await environment.beside(partial(store.mark_recovering_if_end_is_lost, found))\n",
        "        pass\n",
        "whole",
    ),
    Mutation(
        "a store that needs verification is opened at once",
        "server",
        "    if why is not None:\n        raise CorruptRecordError(",
        "    if False:\n        raise CorruptRecordError(",
        "whole",
    ),
    Mutation(
        "the page cache after a failed sync is trusted",
        "storage",
        "        reader.data.rewrite(known, end.position)\n",
        "",
        "whole",
    ),
    Mutation(
        "a repaired store keeps its marker file",
        "storage",
        "            clear_needs_verification(self._files, self._layout)\n",
        "            pass\n",
        "whole",
    ),
    Mutation(
        "a repair takes damage near the end for a torn tail",
        "storage",
        "        if self._checkpoint is None:  # then",
        "        if True:  # then",
        "whole",
    ),
    Mutation(
        "recovery ignores the checkpoint",
        "storage",
        "        if checkpoint is not None and checkpoint.durable_index >= first:\n",
        "        if False:\n",
        "whole",
    ),
    Mutation(
        "a batch ends where a row is lost",
        "storage",
        "        if len(batch_ends(pieces[-1])):\n            break\n",
        "        break\n",
        "whole",
    ),
    Mutation(
        "entries are trimmed before their tables are durable",
        "storage",
        "            self._files.replace(self._layout.tables, tables.data)\n            self._commit_index",
        "            self._commit_index",
        "whole",
    ),
    Mutation(
        "a snapshot install keeps the old tables",
        "server",
        "        self._controls.restart(new_log.tables)\n",
        "",
        "whole",
    ),
    Mutation(
        "entries count as durable before the sync",
        "storage",
        '            if self.config.durability == "fsync" or self._appender.unsynced_bytes > bound:\n',
        "            if self._appender.unsynced_bytes > bound:\n",
        "whole",
    ),
    Mutation(
        "a torn batch keeps its first entries",
        "storage",
        '    return np.flatnonzero(ends_batch(records.headers) | (records.headers["flags"] == 0))',
        '    return np.flatnonzero(records.headers["flags"] >= 0)',
        "whole",
    ),
    Mutation(
        "recovered records are not synced",
        "storage",
        "        reader.data.rewrite(known, end.position)\n    reader.data.sync([base for",
        "    ([base for",
        "whole",
    ),
    Mutation(
        "a new segment's name is not synced",
        "storage",
        "        if made:\n            self.data.sync_dir()\n",
        "",
        "whole",
    ),
    Mutation(
        "a truncation keeps control entries",
        "server",
        "            self._waiting.pop()\n",
        "            break\n",
        "whole",
    ),
    Mutation(
        "an unready leader decides by old tables",
        "server",
        "if not self._replica.is_leader or self._replica.leader_ready:",
        "if True:",
        "whole",
    ),
    Mutation(
        "a repeat in flight is appended again",
        "server",
        "        if flight is None or key.epoch > flight.epoch:\n",
        "        if True:\n",
        "whole",
    ),
    Mutation(
        "a repeat is appended again",
        "storage",
        '            raise SequenceConflictError(what, "", "use a new producer id", about)\n        return found\n',
        '            raise SequenceConflictError(what, "", "use a new producer id", about)\n        return None\n',
        "whole",
    ),
    Mutation(
        "a replaced leader rejects a producer permanently",
        "server",
        "                self._refuse_if_leading(error, reply)\n",
        "                reply(error)\n",
        "whole",
    ),
    Mutation(
        "a vote is not written",
        "storage",
        "                save_hard_state(self._files, self._layout.root, hard_state)\n",
        "",
        "whole",
    ),
    Mutation(
        "a member discards a log that needs no snapshot",
        "raft",
        "    if state.log.matches(previous_index, message.previous_term):",
        "    if state.log.commit_index >= previous_index:",
        "test_resetting.py",
    ),
    Mutation(
        "a late response sends a snapshot chunk again",
        "raft",
        "    if message.offset > outgoing.offset or outgoing.asked:",
        "    if True:",
        "test_resetting.py",
    ),
    Mutation(
        "a candidate counts itself before its disk",
        "raft",
        "state.member not in state.votes and state.is_hard_state_durable",
        "state.member not in state.votes",
        "test_pitfalls.py",
    ),
    Mutation(
        "responses of an older term count",
        "raft",
        "if message.term < state.term:",
        "if message.term < state.term and not isinstance(message, AppendEntriesResponse | RequestVoteResponse):",
        "test_paper_election.py",
    ),
    Mutation(
        "a transfer never ends",
        "raft",
        "        if state.transfer_elapsed >= config.election_ticks_min:\n            state.transferee = None",
        "        pass",
        "test_pitfalls.py",
    ),
    Mutation(
        "a leader without a majority stays",
        "raft",
        "return state.configuration.is_quorum(active) and",
        "return",
        "test_paper_election.py",
    ),
    Mutation(
        "a leader whose disk hangs stays",
        "raft",
        " and state.persist_elapsed < state.config.election_ticks_max",
        "",
        "test_pitfalls.py",
    ),
    Mutation(
        "votes are granted while there is a leader",
        "raft",
        "if state.has_active_leader and not message.transfer:",
        "if False:",
        "test_paper_election.py",
    ),
    Mutation(
        "a stale leader gets no response",
        "raft",
        "        following.reject_heartbeat(state, message)",
        "        pass",
        "test_paper_election.py",
    ),
    Mutation(
        "a torn append time is accepted",
        "storage",
        "    whole: npt.NDArray[np.int64] = ends[~torn]\n",
        "    whole = ends\n",
        "test_torn_header.py",
    ),
    Mutation(
        "a late attempt joins a committed transaction",
        "storage",
        "in query.retired):\n            self._lose([part])\n            return\n",
        "in query.retired):\n            pass\n",
        "test_transactions.py",
    ),
    Mutation(
        "a read does not check bodies",
        "storage",
        "start, lambda: self._read(start, end, max_bytes, body_crc=True)",
        "start, lambda: self._read(start, end, max_bytes, body_crc=False)",
        "test_damage.py",
    ),
    Mutation(
        "damage far from the end is truncated as a torn tail",
        "storage",
        "        if written_end - bad > self.unsynced_bytes_max and stop is not None:",
        "        if False and stop is not None:",
        "test_recovery.py",
    ),
    Mutation(
        "writing continues after a failed sync",
        "storage",
        "        if self._failure is not None:\n            raise self._failure\n        try:",
        "        try:",
        "test_commit_log.py",
    ),
    Mutation(
        "a committed entry may be truncated",
        "storage",
        'invariant(index > self._commit_index, "a committed entry would be cut"',
        'invariant(True, "a committed entry would be cut"',
        "test_commit_log.py",
    ),
    Mutation(
        "a discarded log returns after a crash",
        "storage",
        "                discarding=True,\n",
        "",
        "test_prefix.py",
    ),
    Mutation(
        "file names of a killed process are not made durable",
        "storage",
        "        self._cuts = 0\n        for folder in (layout.root, layout.meta, layout.data, layout.index):\n",
        "        self._cuts = 0\n        for folder in ():\n",
        "test_names.py",
    ),
    Mutation(
        "uncommitted records are written over damage",
        "storage",
        "    if stop > damage.end or stop - 1 > commit_index:\n",
        "    if stop > damage.end:\n",
        "test_repair.py",
    ),
    Mutation(
        "records at another position are written over damage",
        "storage",
        "    if not bool((positions == place(records.sizes, damage.position, data.segment_bytes)).all()):\n",
        "    if False:\n",
        "test_repair.py",
    ),
    Mutation(
        "terms that do not fit are written over damage",
        "storage",
        "    if (before is not None and int(terms[0]) < before) or (after is not None and int(terms[-1]) > after):\n",
        "    if False:\n",
        "test_repair.py",
    ),
    Mutation(
        "a repair does not cross-check",
        "storage",
        "    _cross_check_all(reader, index, damage, records)\n\n\n",
        "\n\n",
        "test_repair.py",
    ),
    Mutation(
        "a failed write leaves no marker file",
        "storage",
        "        if self._failure is None:\n            mark_needs_verification(",
        "        if False:\n            mark_needs_verification(",
        "test_repair.py",
    ),
    Mutation(
        "a damaged row is trusted for a position",
        "storage",
        "    found = reader.read(index, index + 1, 1, body_crc=False).headers[0]\n",
        "    return position, size, 0\n    found = None\n",
        "test_repair.py",
    ),
    Mutation(
        "a damaged first record is trusted for a trim",
        "storage",
        '    return head.index if (int(row["position"]), int(row["index"])) == (base, head.index) else None\n',
        "    return head.index\n",
        "test_prefix.py",
    ),
    Mutation(
        "an interrupted snapshot install prevents a repair",
        "storage",
        "            if found is None or (found.discarding and not write):\n",
        "            if found is None or found.discarding:\n",
        "test_prefix.py",
    ),
    Mutation(
        "rewritten rows are not made durable",
        "storage",
        "        index.sync(wrong[0], wrong[0] + len(wrong[1]))\n",
        "",
        "test_repair.py",
    ),
)
NAMED: Final = {mutation.name: mutation for mutation in MUTATIONS}
LIKELY_SEEDS: Final[dict[str, int]] = {}
"""The seed that failed when this was last tried, where it is not among the first ones. It is tried first."""


def mutate(directory: Path, mutation: Mutation) -> None:
    """Copy the code and its tests, and remove one guard from the copy."""
    shutil.copytree(ROOT / "dledger_core", directory / "dledger_core")
    for room in ("raft", "sim", "storage", "support"):
        shutil.copytree(ROOT / "tests" / room, directory / "tests" / room)
    path = mutation.module(directory)
    if path is None:
        raise AssertionError(f"dledger_core/{mutation.room} does not contain this guard once: {mutation.name}")
    path.write_text(path.read_text().replace(mutation.guard, mutation.without))


def run_python(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python on a copy."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(directory), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def failing_seed(directory: Path, mutation: Mutation, options: Sequence[str] = ("--no-shrink",)) -> str:
    """Return the output of the simulation of a mutated copy if a seed fails, otherwise ""."""
    core = ["--core"] if mutation.found_by == "core" else []
    likely = LIKELY_SEEDS.get(mutation.name, 0)
    for seeds in (f"{likely}..{likely}", "0..299" if core else "0..149"):
        run = run_python(directory, "-m", "tests.sim", *core, *options, "--seeds", seeds)
        noticed = any(kind in run.stderr for kind in ("Violation", "Liveness", "AssertionError", "Corrupt"))
        if run.returncode != 0 and "replay: python -m tests.sim" in run.stderr and noticed:
            return run.stderr
    return ""


def failing_test(directory: Path, mutation: Mutation) -> str:
    """Return the summary of the tests of a mutated room if one fails, or ""."""
    likely = directory / "tests" / mutation.room / mutation.found_by
    options = ["-q", "-x", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir", str(directory)]
    for tests in (likely, likely.parent):
        if tests.exists():
            run = run_python(directory, "-m", "pytest", *options, str(tests))
            summary = run.stdout.splitlines()[-1] if run.stdout else ""
            if run.returncode == 1 and "error" not in summary:
                return summary
    return ""


def attempt(name: str) -> str:
    """Try one mutation on a copy of its own; return the failure that noticed it, or ""."""
    mutation = NAMED[name]
    with tempfile.TemporaryDirectory() as directory:
        mutate(Path(directory), mutation)
        if mutation.found_by in ("core", "whole"):
            return failing_seed(Path(directory), mutation)
        return failing_test(Path(directory), mutation)


def main(jobs: int) -> int:
    """Try all mutations and print which were noticed; return how many were not."""
    missed = 0
    with ThreadPoolExecutor(jobs) as pool:
        for name, failure in zip(NAMED, pool.map(attempt, NAMED), strict=True):
            missed += not failure
            first = failure.splitlines()[0][:70] if failure else ""
            sys.stdout.write(f"{'noticed' if failure else 'MISSED':>8}  {name}: {first}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(NAMED) - missed} of {len(NAMED)} noticed\n")
    return missed
