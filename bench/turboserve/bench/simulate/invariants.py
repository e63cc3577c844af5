"""The design's invariants, each with a name, checked at the events that could break it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from turboserve.autoscaler.messages import Command as PoolCommand
from turboserve.autoscaler.messages import Drain, Launch, Release
from turboserve.bench.simulate.engine import Chunk, begin
from turboserve.bench.simulate.gateway import Viewer
from turboserve.bench.simulate.log import Entry
from turboserve.bench.simulate.names import INVARIANTS, brief, entry_in_brief
from turboserve.bench.simulate.scheduler import Term
from turboserve.bench.simulate.worker import Worker
from turboserve.contracts.chunks import Ownership
from turboserve.contracts.pool import SlotPhase
from turboserve.contracts.sessions import Activity, Phase, SessionRecord
from turboserve.contracts.workers import WorkerPhase
from turboserve.scheduler.messages import BeginMove, Place, Report
from turboserve.scheduler.messages import Command as SchedulerCommand
from turboserve.subjects import CHUNK, OWN

if TYPE_CHECKING:
    from turboserve.bench.simulate.world import World


class Checker:
    """Watches one world; a violation is counted and noted, and the run goes on."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.violations: Counter[str] = Counter()
        self.messages: list[str] = []
        self.gone: set[str] = set()
        """Workers of which that is committed."""
        self._moved: dict[str, tuple[int, int]] = {}
        """Session → epoch under which it was moved, and the chain of the state that was."""
        self.launches = self.drains = self.moves = self.resizes = 0

    def fail(self, name: str, message: str) -> None:
        assert name in INVARIANTS, name
        self.violations[name] += 1
        line = f"{name}: {message}"
        self._world.kernel.note("VIOLATION", line)
        if len(self.messages) < 20:
            self.messages.append(f"{self._world.kernel.now:.3f} s: {line}")

    # Rows

    def row(self, before: SessionRecord | None, after: SessionRecord) -> None:
        """A session's row was committed."""
        self._world.kernel.note(
            f"row {after.id} v{after.version} {after.phase} {after.activity} e{after.epoch} {after.worker}"
            f" own={after.own_revision} next={after.next_chunk} target={after.target}"
        )
        if before is not None:
            self._owner(before, after)
        if after.phase.holds_slot:
            for worker in {after.worker, after.target} - {None}:
                self._room(str(worker))
        if after.phase is Phase.FAILED:
            self.fail("converges_after_faults", f"{after.id} failed: {after.reason}")

    def _owner(self, before: SessionRecord, after: SessionRecord) -> None:
        if after.version < before.version:
            self.fail("epochs_increase", f"{after.id} goes back from version {before.version}")
        changed = after.worker != before.worker
        placed = after.phase is Phase.ACTIVE and before.phase not in (Phase.ACTIVE, Phase.MIGRATING)
        if after.epoch < before.epoch or after.epoch > before.epoch + 1:
            self.fail("epochs_increase", f"{after.id}: {before.epoch} → {after.epoch}")
        elif (changed or placed) and after.epoch != before.epoch + 1:
            self.fail("epochs_increase", f"{after.id}: another owner under epoch {after.epoch}")
        decision = self._world.database.decisions.get((after.id, after.version))
        if after.version > before.version and decision is not None and decision.kind == "moved":
            self._flipped(before, after)

    def _flipped(self, before: SessionRecord, after: SessionRecord) -> None:
        """A move was committed: the target must have the state that the log's end was made from."""
        self.moves += 1
        entries = self._world.chunks.by_subject.get(CHUNK.of(after.id), [])
        worker = self._world.workers.get(str(after.worker))
        if worker is None or not worker.program.up:
            return
        state = worker.engine.states.get(after.id)
        if state is None or state.digest != after.state_digest:
            self.fail("verified_before_flip", f"{after.id} moves to {after.worker}, which holds {state}")
            return
        self._moved[after.id] = (after.epoch, state.chain)
        last = entries[-1].body if entries else None
        # A source that took over itself and made nothing yet may have begun without its context.
        other = last is not None and last.header.epoch == before.epoch and last.chain != state.chain
        if state.next_chunk != len(entries) or other:
            self.fail("verified_before_flip", f"{after.id} moves with {state.digest}, the log ends otherwise")

    def _room(self, worker: str) -> None:
        capacity = self._world.capacity.get(worker)
        used = self._world.database.slots_used(worker)
        if capacity is not None and used > capacity:
            self.fail("capacity", f"{worker} is given {used} of {capacity}")

    # The chunk log

    def appended(self, entry: Entry) -> None:
        """The broker has accepted an entry of CHUNKS."""
        stream, body = self._world.chunks, entry.body
        self._world.kernel.note(f"append {entry.sequence} {entry.subject} {entry_in_brief(body)}")
        if isinstance(body, Ownership):
            self._fence(entry, body)
            return
        header = body.header
        own = stream.last(OWN.of(header.session))
        if own is None or (own.body.epoch, own.body.worker) != (header.epoch, header.worker):
            self.fail(
                "one_executor", f"{header.worker} at {header.epoch} wrote {entry.subject}, own is {own}"
            )
        entries = stream.by_subject[entry.subject]
        last: Chunk | None = entries[-2].body if len(entries) > 1 else None
        if header.index != (0 if last is None else last.header.index + 1):
            self.fail(
                "chunks_contiguous", f"{entry.subject}: {header.index} after {last and last.header.index}"
            )
        self._chained(body, last)

    def _fence(self, entry: Entry, body: Ownership) -> None:
        entries = self._world.chunks.by_subject[entry.subject]
        if len(entries) > 1 and entries[-2].body.epoch >= body.epoch:
            self.fail("epochs_increase", f"{entry.subject}: {entries[-2].body.epoch}, then {body.epoch}")

    def _chained(self, chunk: Chunk, last: Chunk | None) -> None:
        header = chunk.header
        epoch, chain = self._moved.pop(header.session, (0, 0))
        if epoch == header.epoch and chain != chunk.parent:
            self.fail("verified_before_flip", f"{header.session}: {header.index} is of another state")
        if last is None:
            if chunk.parent != begin(self._world.seeds.get(header.session, 0)):
                self.fail("chunks_contiguous", f"{header.session} does not begin at its beginning")
            return
        follows = chunk.parent == last.chain
        if header.epoch == last.header.epoch and not follows:
            self.fail("chunks_contiguous", f"{header.session}: {header.index} is not made from the last")

    # Workers

    def buried(self, name: str) -> None:
        """It is committed that a worker is gone: from now on its sessions may be others'."""
        self.gone.add(name)
        worker = self._world.workers.get(name)
        if worker is not None and worker.program.up and worker.engine.generating:
            self.fail("one_executor", f"{name} is taken for dead while its lease holds")

    def begins_chunk(self, worker: Worker, session: str) -> None:
        """A worker's engine begins a chunk."""
        if worker.id in self.gone:
            self.fail("one_executor", f"{worker.id} generates {session} after it was taken for dead")
        if worker.engine.used > worker.engine.slabs:
            self.fail("capacity", f"{worker.id} holds {worker.engine.used} in {worker.engine.slabs} slabs")

    # Viewers

    def delivered(self, viewer: Viewer, entry: Entry) -> None:
        index = entry.body.header.index
        stands = self._world.chunks.entries[entry.sequence - 1] is entry
        if index != viewer.next or not stands:
            self.fail(
                "client_sees_prefix", f"{viewer.name} of {viewer.session} gets {index}, not {viewer.next}"
            )
        viewer.next = index + 1

    # Commands

    def scheduler_says(self, term: Term, command: SchedulerCommand) -> None:
        if not isinstance(command, Report):
            self._world.kernel.note(f"scheduler {term.term}", brief(command))
        leaders = [p.program.name for p in self._world.schedulers if p.at_work and p.at_work.leads()]
        if len(leaders) > 1:
            self.fail("one_leader", f"{leaders} lead at once")
        if isinstance(command, Place | BeginMove):
            worker = term.core.view.workers[command.worker]
            if worker.load > worker.capacity:
                self.fail("capacity", f"the scheduler gives {worker.id} {worker.load} of {worker.capacity}")

    def pool_says(self, command: PoolCommand) -> None:
        if not isinstance(command, Launch | Drain | Release):
            return
        self._world.kernel.note("autoscaler", type(command).__name__, command.slot, command.worker)
        self.launches += isinstance(command, Launch)
        if isinstance(command, Release) and command.worker is not None:
            self._released(command.worker, command.reason)
        if isinstance(command, Drain):
            self.drains += 1
            self._shrinks(command.worker)

    def resized(self, size: int, reason: str) -> None:
        """The controller has decided that the pool shall have `size` workers."""
        autoscaler, now = self._world.autoscaler, self._world.kernel.now
        self._world.kernel.note("autoscaler resizes", autoscaler.core.target, size, reason)
        self.resizes += 1
        heard_at = autoscaler.heard_at
        shrinks = size < autoscaler.core.target
        if shrinks and (heard_at is None or now - heard_at > autoscaler.policy.stale_s):
            self.fail("stale_metrics_never_shrink", f"to {size}, last heard at {heard_at}: {reason}")

    def _released(self, name: str, reason: str) -> None:
        worker, row = self._world.workers.get(name), self._world.database.workers.get(name)
        alive = worker is not None and worker.program.up
        if not alive or row is None or row.phase is WorkerPhase.GONE:
            return
        held = [r.id for r in self._world.database.rows() if r.worker == name and not r.phase.ended]
        if held:
            self.fail("scale_in_harmless", f"{name} is released ({reason}) and holds {held}")

    def _shrinks(self, name: str) -> None:
        """A drain is right only as far as the pool has more workers than it is asked to have."""
        pool = self._world.autoscaler.core
        wanted = sum(slot.wanted for slot in pool.slots.values())
        draining = next((s for s in pool.slots.values() if s.worker == name), None)
        if wanted < pool.target or (draining is not None and draining.wanted):
            self.fail("stale_metrics_never_shrink", f"{name} is drained, {wanted} of {pool.target} stay")

    # States at rest

    def unsettled(self) -> str | None:
        """Why the world is not at rest: some session that should run and does not; None if it is."""
        world = self._world
        for record in world.database.rows():
            trouble = None if record.phase.ended else self._unsettled(record)
            if trouble is not None:
                return f"{record.id}: {trouble}"
        if len(world.database.outbox):
            return f"{len(world.database.outbox)} events wait"
        pool = world.autoscaler.core
        ready = sum(slot.phase is SlotPhase.READY for slot in pool.slots.values())
        if ready != pool.target:
            return f"{ready} of {pool.target} workers are ready"
        return None

    def _unsettled(self, record: SessionRecord) -> str | None:
        world = self._world
        if record.epoch > 0 and record.own_revision is None:
            return "its fence is not in the log"
        if record.phase is Phase.MIGRATING or record.move is not None:
            return "it is being moved"
        if record.phase is Phase.REQUESTED or record.phase is Phase.SUSPENDED:
            return self._waits(record) if record.activity is Activity.WATCHING else None
        worker = world.workers.get(str(record.worker))
        if worker is None or not worker.program.up:
            return self._waits(record)
        state = worker.engine.states.get(record.id)
        if state is None or state.on_host or state.halted or not worker.engine.generating:
            return f"{record.worker} does not run it: {state}"
        elsewhere = [
            other.id
            for other in world.workers.values()
            if other is not worker and other.program.up and record.id in other.engine.states
        ]
        if elsewhere:
            return f"{elsewhere} hold it as well"
        return self._unwatched(record)

    def _waits(self, record: SessionRecord) -> str | None:
        """It needs a worker: only while every slot is taken and the pool may not grow."""
        autoscaler = self._world.autoscaler
        if self._world.free_slots() > 0:
            return f"it waits ({record.worker} had it), and there is room"
        if autoscaler.core.target < autoscaler.policy.most:
            return "it waits, and the pool could grow"
        return None

    def _unwatched(self, record: SessionRecord) -> str | None:
        world = self._world
        if not world.is_watched(record.id):
            return None
        made = len(world.chunks.by_subject.get(CHUNK.of(record.id), ()))
        if made <= world.made_when_calm.get(record.id, -1) + 1:
            return "its video does not go on"
        if record.applied_control_seq < record.control_seq:
            return "its prompt is not applied"
        return None

    def memory(self) -> str | None:
        """What is still held although every session has ended."""
        for worker in self._world.workers.values():
            if not worker.program.up:
                continue
            left = {
                "states": len(worker.engine.states),
                "rows": len(worker.table.entries),
                "chunks": len(worker.made),
                "copies": worker.copies,
            }
            if any(left.values()):
                return f"{worker.id} holds {left}"
        return None
