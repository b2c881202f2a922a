"""Recoveries: nodes are lost, or called lost, operators continue the log of the others in a new one, and stores return.

In a third of the seeds, up to twice, some members of the newest log vanish: their machines stop, permanently or
for a time, or the network is cut and they continue. Operators run ``dledger recover`` for the others until nothing is
left to do: the real ``decide``, with the real functions of each store (``survivor``), among all other faults. An
operator may be interrupted before any message, and another one may be at work. A survivor may have a hole in its log.

The new log is a group of its own, with its own checker and clients, and the old one continues if it can. Where no
committed entry was lost, clients with all that they have in flight move to the new log. Once the network is healed, or
a machine starts again, stores of old logs meet the new ones.

What a recovery may lose are entries that no survivor has. So the new log has

* the entry at each commit index that a survivor knows, and all entries before it;
* each entry that a survivor has and whose leader counted a majority of it: entries before it are committed with it. (An
  entry of an older term below it that a survivor has without it may be lost: the paper's figure 8.)

A store stops only if the new log has all its entries, and the new log refuses appends if, and only if, it lacks an
entry that a store which met it knows to be committed. These are the violations of ``search.recoveries``.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, cast

from dledger_core.errors import DLedgerError, LogContinuedError
from dledger_core.ids import Index, MemberId, NodeId, Term, node_of
from dledger_core.lineage import Ancestors, LogEnd, RecoveryRecord, Response, find_link
from dledger_core.raft import Batch, ConfigurationInForce, HardState
from dledger_core.recovery import (
    Electable,
    FillHoles,
    Holes,
    Recovered,
    Refused,
    SurvivorAnswer,
    TakeRecord,
    Unanswered,
    decide,
    holes_of,
)
from dledger_core.storage.files.identity import first_configuration
from tests.sim import survivor
from tests.sim.clients import History, all_clients
from tests.sim.membership import MemberChanges
from tests.sim.network import Network
from tests.sim.safety import SafetyChecker, check
from tests.sim.virtual_time import Resume, Wait, run_task
from tests.support.faulty_files import Crash
from tests.support.history import Append, Decision

if TYPE_CHECKING:
    from tests.sim.replica_member import ReplicaMember
    from tests.sim.simulator import Fault, Simulator

ATTEMPTS = 40
REFUSALS_MAX = 5
SPARES = 2
NO_STORE: Final = decide(frozenset(), {}, str)
MEET_UNITS = 100


@dataclass(frozen=True, slots=True)
class RecoveryMix:
    """How often something strikes in a run with recoveries."""

    cut_off: float
    returns: float
    hole: float
    operators: int
    accepts_loss: bool


def draw_recovery(seed: int) -> RecoveryMix | None:
    """Draw whether nodes are called lost in a run, and how."""
    source = random.Random(f"{seed}/recovery")
    if source.random() < 0.65:
        return None
    return RecoveryMix(
        cut_off=source.choice((0.0, 0.5, 1.0)),
        returns=source.choice((0.0, 0.5, 1.0)),
        hole=source.choice((0.0, 0.5, 1.0)),
        operators=source.choice((1, 1, 2)),
        accepts_loss=source.random() < 0.5,
    )


def draw_recoveries(seed: int, until: int) -> list[Fault]:
    """Draw when nodes are lost; from a source of its own."""
    from tests.sim.simulator import Fault

    if draw_recovery(seed) is None:
        return []
    source = random.Random(f"{seed}/recoveries")
    times = [source.randrange(until // 8, until // 2)]
    times += [source.randrange(until // 2, until - until // 8) for _ in range(source.choice((0, 1, 1)))]
    return [Fault(at, "recover", source.getrandbits(32)) for at in times]


@dataclass(eq=False)
class Disaster:
    """Nodes of a group that are called lost, and what operators have done since.

    Attributes:
        group: the group.
        lost: the nodes that an operator names.
        records: the records that an operator has made.
    """

    group: Simulator
    lost: set[NodeId]
    accepts_loss: bool
    is_over: bool = False
    refusals: int = 0
    why: str = ""
    records: dict[str, RecoveryRecord] = field(default_factory=dict)


class Recoveries:
    """All recoveries of a run; it has none if ``mix`` is None."""

    def __init__(self, sim: Simulator, mix: RecoveryMix | None) -> None:
        self._sim = sim
        self._mix = mix
        self._disasters: list[Disaster] = []
        self._cut_off: set[NodeId] = set()
        self._away: set[MemberId] = set()
        self._uuids = 0

    # --- for the simulation ------------------------------------------------------------------------------------

    def keeps_away(self, member: Any) -> bool:
        """Whether the machine of a member does not start now."""
        return member.node_id in self._away

    def are_over(self) -> bool:
        """Whether no recovery is in progress, and what met may have reacted."""
        return all(disaster.is_over for disaster in self._disasters) and self._sim.time.now > self._settled_at

    def has_ended(self, group: Simulator) -> bool:
        """Whether nothing is demanded of a group: it has lost its majority, or its log is forked."""
        if not group.is_disturbed and not group.log_is_new:
            return False
        running = [member for member in group.members.values() if member.running and not member.waits]
        if any(member.up and member.replica.lineage.forked is not None for member in running):
            return True
        voters = group.checker.configuration.configuration.voters
        configurations = [member.core.configuration for member in running if member.up]
        names = {member.node_id for member in running} & voters
        alive = group.checker.configuration.configuration.is_quorum(names)
        return not alive or not all(each.is_quorum({m.node_id for m in running}) for each in configurations)

    def let_return(self) -> None:
        """Heal the network, and start the machines that will."""
        self._settled_at = self._sim.time.now + 6 * MEET_UNITS
        self._heal()
        for name in sorted(self._away):
            self._start(name)

    def on_install(self, member: ReplicaMember) -> None:
        """Perhaps lose all others while the tables of a member with an archive are ahead of its log."""
        tables, source = member.replica.tables, random.Random(f"{self._sim.seed}/{member.node_id}/{member.life}")
        is_ahead = tables.archive.is_active and tables.applied_index > member.core.last_index
        if is_ahead and member.sim is self._sim.groups[-1] and source.random() < 0.7:
            self._sim.time.after(1, lambda: self.strike(source, attempts=0, kept=member.node_id))

    def strike(self, source: random.Random, attempts: int = ATTEMPTS, kept: MemberId | None = None) -> None:
        """Call nodes of the newest log lost, once no store that was set back has to be recognized first."""
        group = self._sim.groups[-1]
        if not self._sim.faults_on or self._mix is None or group.is_disturbed:
            return
        lost = self._drawn(group, source)
        voters = group.checker.configuration.configuration.voters
        if kept is not None:
            lost = set(voters) - {kept}
        if not voters - lost - (group.changes.lost if group.changes is not None else set()):
            lost = set()  # a change has just emptied the other disks: nothing is left to recover from
        is_busy = not all(disaster.is_over for disaster in self._disasters)
        if any(member.was_set_back for member in group.members.values()) or not lost or is_busy:
            if attempts:
                self._sim.time.after(50, lambda: self.strike(source, attempts - 1))
            return
        group.is_disturbed = True
        disaster = Disaster(group, {node_of(name) for name in lost}, self._mix.accepts_loss)
        self._disasters.append(disaster)
        self._sim.note("lost", sorted(lost))
        left = [member for name, member in group.members.items() if name not in lost and member.running]
        if source.random() < self._mix.hole and left:
            group.shared.damages.hole(source.choice(left), source)
        if source.random() < self._mix.cut_off:
            self._cut(group, lost)
            self._sim.time.after(source.randrange(300, 3000), self._heal)
        else:
            self._stop(group, lost, source)
        for _ in range(self._mix.operators):
            delay = source.randrange(10, 500)
            self._sim.time.after(delay, lambda: self._run(self._operate(disaster)))
        if len(self._disasters) == 1:
            self._meet_later()

    def _drawn(self, group: Simulator, source: random.Random) -> set[MemberId]:
        """Draw the members that are lost: mostly a majority of the voters."""
        configuration = group.checker.configuration.configuration
        voters = sorted(configuration.voters)
        few = len(voters) // 2
        count = source.randrange(len(voters) - few, len(voters)) if len(voters) > 1 else 0
        if source.random() < 0.1:
            count = source.randrange(len(voters))
        lost = source.sample(voters, count)
        return {*lost, *(learner for learner in sorted(configuration.learners) if lost and source.random() < 0.3)}

    def _cut(self, group: Simulator, lost: set[MemberId]) -> None:
        self._sim.counters["members cut off"] += len(lost)
        self._cut_off = {node_of(name) for name in lost}
        for a in group.names:
            for b in group.names:
                if (node_of(a) in self._cut_off) != (node_of(b) in self._cut_off):
                    group.network.cut.add((a, b))
        group.network.isolated |= group.network.cut

    def _heal(self) -> None:
        self._cut_off = set()
        for group in self._sim.groups:
            group.network.cut.clear()
            group.network.heal()

    def _stop(self, group: Simulator, lost: set[MemberId], source: random.Random) -> None:
        for name in sorted(lost):
            member = group.members[name]
            if source.random() < self._mix_of.returns:
                self._away.add(name)
                self._sim.counters["machines lost for a time"] += 1
                self._sim.time.after(source.randrange(300, 4000), lambda name=name: self._start(name))
            else:
                group.changes.lost.add(name)
                self._sim.counters["machines lost"] += 1
            if member.running:
                member.die("crashes")

    @property
    def _mix_of(self) -> RecoveryMix:
        assert self._mix is not None
        return self._mix

    def _start(self, name: MemberId) -> None:
        if name in self._away:
            self._away.remove(name)
            (member,) = (group.members[name] for group in self._sim.groups if name in group.members)
            if not member.running:
                member.sim.start(member)

    # --- operators -----------------------------------------------------------------------------------------------

    def _run(self, work: Any) -> None:
        def end(_: object, error: BaseException | None) -> None:
            if error is not None:
                raise error

        run_task(work, lambda: True, end)

    async def _pause(self, low: int, high: int) -> None:
        units = self._sim.source.randrange(low, high)

        def begin(resume: Resume) -> None:
            self._sim.time.after(units, lambda: resume(None, None))

        await Wait(begin)

    async def _operate(self, disaster: Disaster) -> None:
        """Ask, decide and act, as the command does, until nothing is left to do."""
        sim, tried = self._sim, cast("Holes | None", None)
        while not disaster.is_over:
            answers = await self._asked(disaster)
            lost = frozenset(disaster.lost)
            accepts = disaster.accepts_loss or (not sim.faults_on and disaster.refusals > 2 * REFUSALS_MAX)
            action = decide(lost, answers, self._new_uuid, accepts_loss=accepts, tried=tried)
            sim.counters[f"recoveries: {type(action).__name__}"] += 1
            sim.note("operator", sorted(lost), repr(action))
            match action:
                case Recovered():  # a survivor that did not answer is still to be asked
                    started = any(group.log_uuid in disaster.records for group in sim.groups)
                    disaster.is_over = not started or self._is_complete(disaster)
                case Electable(_, leader, replaced):
                    # An operator replaces a lost member then, or waits for the election.
                    disaster.is_over = not sim.faults_on or bool(leader or replaced or lost)
                case Refused() | Unanswered():
                    # The only store that is left was no member yet where its log ends now: a backup is the way out.
                    disaster.is_over |= action == NO_STORE and any(
                        answers[node].log_uuid for node in answers.keys() - lost
                    )
                    disaster.refusals += 1
                    disaster.why = repr(action)
                    self._correct(disaster, action, answers)
                case _:
                    if isinstance(action, FillHoles):
                        tried = holes_of(lost, answers)
                    if isinstance(action, TakeRecord):
                        self._check_record(disaster, action.record, answers)
                    if not await self._acted(disaster, action):
                        tried = None
            disaster.is_over |= self._is_complete(disaster)
            await self._pause(20, 120)
        for group in self._new_groups(disaster):  # a survivor that was lost meanwhile: an operator removes it there
            absent = (each for each in group.members.values() if each.comes_from_another_log and not each.life)
            group.changes.lost.update(each.node_id for each in absent)

    def _is_complete(self, disaster: Disaster) -> bool:
        """Whether all survivors are in a new log: stores of the old one that answer too only confuse an operator."""
        new = self._new_groups(disaster)
        return any(all(group.members[name].life for name in group.bootstrapped.members) for group in new)

    def _new_groups(self, disaster: Disaster) -> list[Simulator]:
        return [group for group in self._sim.groups if group.log_uuid in disaster.records]

    def _new_uuid(self) -> str:
        self._uuids += 1
        return f"u{self._uuids}"

    async def _asked(self, disaster: Disaster) -> dict[NodeId, SurvivorAnswer]:
        answers = {}
        for node in sorted({node_of(name) for name in disaster.group.members}):
            await self._pause(1, 20)
            member = self._process(disaster.group, node)
            if member is None or not self._reaches(member):
                continue
            if not member.life:
                answers[node] = SurvivorAnswer(node_id=node)
                continue
            try:
                answers[node] = survivor.answer(member)
            except Crash:
                member.die("crashes in a recovery")
            except OSError:
                continue
        return answers

    def _process(self, group: Simulator, node: NodeId) -> ReplicaMember | None:
        """Return the newest store of a node, in whatever log it is now."""
        for each in reversed(self._sim.groups):
            found = [m for m in each.members.values() if m.node == node and (m.life or not m.continues)]
            if found and (each is group or found[-1].continues is not None):
                return cast("ReplicaMember", found[-1])
        return None

    def _reaches(self, member: ReplicaMember) -> bool:
        sim = self._sim
        alive = (member.running or not member.life) and member.stalled_until <= sim.time.now
        return alive and member.node not in self._cut_off and not (sim.faults_on and sim.chance(0.05))

    def _correct(self, disaster: Disaster, action: Refused | Unanswered, answers: dict[NodeId, SurvivorAnswer]) -> None:
        """Name other nodes lost, as an operator does who reads the refusal."""
        group = disaster.group
        newest = [self._process(group, node_of(name)) for name in group.members]
        # By its newest store: one that waited for its record is called lost in the old log, and runs in the new one.
        dead = {each.node for each in newest if each and each.node_id in each.sim.changes.lost and not each.waits}
        if isinstance(action, Unanswered):
            # A learner that has not got beyond the link yet shows the members of the continued log.
            foreign = {node for node in action.nodes if self._process(group, node) is None}
            disaster.lost |= (dead | foreign) & set(action.nodes)
            return
        held = [set(answer.held.lost) for answer in answers.values() if answer.held is not None]
        if held:
            disaster.lost = max(held, key=len)
            return
        known = {member.node_id for answer in answers.values() for member in answer.members}
        present = {node for node, answer in answers.items() if answer.log_uuid is not None}
        wiped = answers.keys() - present
        disaster.lost = (disaster.lost | ((wiped | dead) & known)) - present

    async def _acted(self, disaster: Disaster, action: survivor.Change) -> bool:
        """Send an action to its nodes; return whether all carried it out."""
        sim = self._sim
        for node in action.nodes:
            await self._pause(1, 20)
            if sim.faults_on and sim.chance(0.1):
                sim.counters["recoveries interrupted"] += 1
                return False
            member = self._process(disaster.group, node)
            if member is None or not member.life or not self._reaches(member):
                return False
            member.crash_soon()
            try:
                await survivor.carry_out(member, action)
            except Crash:
                member.die("crashes in a recovery")
                return False
            except (DLedgerError, OSError) as error:
                sim.counters[f"recoveries: a store refuses, {type(error).__name__}"] += 1
                return False
            finally:
                if member.waits:
                    member.sim.changes.lost.add(member.node_id)
        return True

    # --- what a new log must have --------------------------------------------------------------------------------

    def _check_record(self, disaster: Disaster, record: RecoveryRecord, answers: dict[NodeId, SurvivorAnswer]) -> None:
        """Check that the log of a new record has what its survivors know to be committed, and what they have of it."""
        if record.log_uuid in disaster.records:
            return
        disaster.records[record.log_uuid] = record
        group, ends = disaster.group, {node: answer.end for node, answer in answers.items()}
        survivors = [each.node_id for each in record.survivors]
        best = record.voter.node_id
        for index, term, counted in group.checker.commit_points:
            holders = [node for node in survivors if self._has(group, node, ends[node], index, term)]
            kept = not holders or self._has(group, best, ends[best], index, term)
            check(kept, "a new log lacks a committed entry that a survivor has", best, holders, index, term, counted)
        for node in survivors:
            end = ends[node]
            assert end is not None
            index = Index(end.commit_index)
            check(record.term >= end.term, "a new log starts in a term that a survivor has seen", node, record.term)
            committed = group.checker.committed_batch(index)
            if committed is not None:
                kept = self._has(group, best, ends[best], index, committed.term)
                check(kept, "a new log lacks an entry that a survivor knows to be committed", best, node, index)

    def _has(self, group: Simulator, node: NodeId, end: LogEnd | None, index: Index, term: Term) -> bool:
        """Whether a store has an entry, by what it wrote and by the end that it claims."""
        member = self._process(group, node)
        assert member is not None
        assert end is not None
        disk = member.disk
        return index <= end.last_index and (index < disk.first_index() or self._term_at(member, index) == term)

    @staticmethod
    def _term_at(member: ReplicaMember, index: Index) -> Term:
        return member.disk.term_at(index)

    # --- the new log ----------------------------------------------------------------------------------------------

    def move(self, member: ReplicaMember) -> None:
        """Continue a store that belongs to a new log now."""
        state = member.store.identity.recovery
        assert state is not None
        record = state.record
        assert record is not None
        group = next((group for group in self._sim.groups if group.log_uuid == record.log_uuid), None)
        if group is None:
            group = self._continued(member.sim, record)
        moved = group.members[member.store.member]
        moved.continues = record
        moved.files, moved.clock_offset, moved.was_hurt = member.files, member.clock_offset, member.was_hurt
        moved.files.before_sync = moved.preallocate_at_sync
        moved.lost_after, moved.checkpoint_lost = member.lost_after, member.checkpoint_lost
        moved.members_once_lost = True
        moved.writing = replace(member.writing, hard_state=None)
        moved.disk = self._shadow(member, record)
        if moved.node_id in group.bootstrapped.voters or member.was_cut:
            moved.lost_after, moved.checkpoint_lost = None, False
            moved.writing = type(moved.writing)()
        member.sim.shared.damages.move(member, group.shared.damages, moved)
        member.running = member.up = member.waits = False
        member.life += 1
        member.is_moved = True
        for other in self._sim.groups:  # of another recovery, which the store never reaches
            for each in other.members.values():
                if each.node == member.node and each.comes_from_another_log and not each.life and each is not moved:
                    other.changes.lost.add(each.node_id)
        self._sim.counters["stores continued"] += 1
        group.start(moved)

    def _shadow(self, member: ReplicaMember, record: RecoveryRecord) -> Any:
        """Return the entries that a store wrote, without configurations, which count no longer."""
        disk, state = member.disk.copy(), member.store.identity.recovery
        assert state is not None
        end = state.retired.end.last_index
        if member.cut_start is not None:  # it may have ended the log, and not recorded the end
            with member.store.repairing(write=False) as store:
                last_index = store.inspect().last_index
            ends = [disk.first_index() - 1, *(batch.last_index for batch in disk.batches)]
            kept = max(last for last in ends if last < member.cut_start)
            check(last_index in (end, kept), "a cut left another end", member.node_id, last_index, end, kept)
            end = min(end, last_index)
        is_known = record.voter.node_id == member.node or member.was_cut
        disk.replace_batches(self._plain(batch) for batch in disk.batches if not is_known or batch.last_index <= end)
        disk.hard_state = HardState(Term(record.term), None)
        disk.in_force_before = ConfigurationInForce(Index(-1), first_configuration(record))
        check(not is_known or disk.last_index() == end, "a store has another end than it says", member.node_id, end)
        return disk

    @staticmethod
    def _plain(batch: Batch) -> Batch:
        if getattr(batch.payload, "configuration", None) is None:
            return batch
        payload = type(batch.payload)(batch.payload)  # type: ignore[call-arg]
        payload.configuration = None  # type: ignore[attr-defined]
        return replace(batch, payload=payload)

    def _continued(self, old: Simulator, record: RecoveryRecord) -> Simulator:
        """Return the group of a new log."""
        self._sim.counters["logs continued"] += 1
        voter = self._process(old, record.voter.node_id)
        assert voter is not None
        group = copy.copy(old)
        group.log_uuid, group.log_is_new, group.is_disturbed = record.log_uuid, True, False
        group.bootstrapped = first_configuration(record)
        kind = type(voter)
        nodes = [len({node_of(name) for each in self._sim.groups for name in each.names}) + at for at in range(SPARES)]
        group.names = [*sorted(group.bootstrapped.members), *(kind.name_of(node) for node in nodes)]
        group.network = Network(group.names, old.network.faults, old.source, old.counters)
        assert old.changes is not None
        group.changes = MemberChanges(group, old.changes.mix)
        group.members = {}
        for name in group.names:
            group.members[name] = kind(group, name, old.source.getrandbits(32))
            if name in group.bootstrapped.members:
                group.members[name].continues = record
        group.checker = SafetyChecker(group.members, group.bootstrapped)
        group.shared = kind.shared(group)
        group.shared.iteration_delay = old.shared.iteration_delay
        prefix = list(self._prefix(old, voter, record))
        group.checker.continue_log(prefix, record)
        group.shared.archives.observe(None)
        self._check_chain(group, record.continues)
        self._sim.groups.append(group)
        self._divide_clients(old, group, record)
        return group

    def _prefix(self, old: Simulator, voter: ReplicaMember, record: RecoveryRecord) -> Iterator[Batch]:
        """Yield the entries of a new log that it takes from the old one."""
        disk, end = self._shadow(voter, record), -1
        for batch in old.checker.committed:
            if batch.first_index < disk.first_index():
                # A survivor's log may start within a batch, with the rest of it lost.
                count = min(batch.count, disk.last_index() + 1 - batch.first_index)
                payload = type(batch.payload)(batch.payload[:count])  # type: ignore[call-arg, index]
                payload.configuration = batch.configuration  # type: ignore[attr-defined]
                yield batch if count == batch.count else replace(batch, count=count, payload=payload)
                end = Index(batch.first_index + count - 1)
        for batch in disk.batches:
            if batch.first_index > end:
                check(batch.first_index == end + 1, "a survivor's log has a gap", voter.node_id, end, batch)
                yield batch
                end = batch.last_index
        check(end == record.point.index, "a record continues another end", voter.node_id, end, record.point)

    def _check_chain(self, group: Simulator, chain: Ancestors) -> None:
        """Check that no link claims more of a log than the new one has."""
        for link in chain:
            if link.index >= 0:
                batch = group.checker.committed_batch(link.index)
                found = batch is not None and batch.term == link.term
                check(found, "a log claims an entry of another one that it lacks", group.log_uuid, link, batch)

    def _divide_clients(self, old: Simulator, group: Simulator, record: RecoveryRecord) -> None:
        """Move the clients to a new log that lacks no committed entry; give a log without clients some."""
        new, number = group.checker, len(self._sim.groups)
        lacking = [batch for batch in old.checker.committed if not new.contains(batch)]
        history: History = group.shared.history
        history.calls = list(old.shared.history.calls)
        point = record.point.index
        group.shared.deleted = {at: row for at, row in old.shared.deleted.items() if at <= point}
        group.shared.orphaned = [(start, min(end, point + 1)) for start, end in old.shared.orphaned if start <= point]
        if not lacking:
            for client in old.clients:
                client.sim, client.history = group, history
            group.clients, old.clients = old.clients, []
        else:
            self._sim.counters["committed batches that a new log lacks"] += len(lacking)
            lost = set()
            for at, call in enumerate(history.calls):
                batch = old.checker.committed_batch(call.last) if isinstance(call, Append) else None
                if call.status == "ok" and (batch is None or not new.contains(batch)):
                    history.calls[at] = replace(call, status="unknown")
                    lost.add(getattr(call, "attempt", ""))
            for at, call in enumerate(history.calls):  # a commit is lost with an attempt that it lists
                if isinstance(call, Decision) and lost & set(call.attempts):
                    history.calls[at] = replace(call, status="fail")
            group.clients = []
        for each in (old, group):
            if not each.clients:
                each.clients = all_clients(each, each.shared.history, f"@{number}{each.log_uuid}")
                for client in each.clients:
                    client.start()

    # --- returns --------------------------------------------------------------------------------------------------

    def _meet_later(self) -> None:
        def meet() -> None:
            for at, old in enumerate(self._sim.groups):
                for new in self._sim.groups[at + 1 :]:
                    self._meet(old, new)
            self._meet_later()

        self._sim.time.after(MEET_UNITS, meet)

    def _meet(self, old: Simulator, new: Simulator) -> None:
        """Let running stores of an old log attach to nodes of a new one."""
        chance = 0.3 if self._sim.faults_on else 1.0
        for store in [member for member in old.members.values() if member.up]:
            for member in [member for member in new.members.values() if member.up]:
                apart = (store.node in self._cut_off) != (member.node in self._cut_off)
                if not apart and self._sim.chance(chance):
                    self._attach(store, member)

    def _attach(self, store: ReplicaMember, member: ReplicaMember) -> None:
        link = find_link(member.replica.lineage.chain, store.replica.log_uuid)
        if link is None:
            return
        shown = store.shown
        error = member.replica.lineage.refusal(link, shown)
        response, counters = Response(error.values["response"]), self._sim.counters
        counters[f"returns: {response.value}"] += 1
        known = store.sim.checker.committed_batch(shown.committed_index)
        has_known = known is None or member.sim.checker.contains(known)
        if response is Response.STAY:
            check(not has_known, "a store forks a log that has its committed entries", store.node_id, known)
            check(member.replica.lineage.forked is not None, "a forked log takes appends", member.node_id)
        elif not has_known and member.replica.commit_index >= link.index:
            check(False, "a log lacks a committed entry and is not forked", store.node_id, member.node_id, known)
        life = store.life
        self._sim.time.after(
            self._sim.source.randrange(1, 30),
            lambda: self._continue(store, member, error) if store.life == life else None,
        )

    def _continue(self, store: ReplicaMember, member: ReplicaMember, error: LogContinuedError) -> None:
        """React to a log that continues another one, as the node of that store does."""
        end = store.replica.store.end
        if not store.up or error.values["response"] != Response.STOP.value or error.values["end"] != list(end):
            return
        store.crash_soon()
        try:
            survivor.set_aside(store)
        except Crash:
            store.die("crashes in a recovery")
            return
        except DLedgerError as failure:
            store.failed(failure)
            return
        store.sim.changes.lost.add(store.node_id)
        for batch in store.disk.batches:
            kept = member.sim.checker.contains(batch)
            check(kept, "a store stops although the new log lacks an entry that it has", store.node_id, batch)
