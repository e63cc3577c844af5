"""Two session tables in random histories: one log, a store, and transfers that break anywhere."""

from __future__ import annotations

import dataclasses
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.table_bench import LEASE_S
from tests.worker.table_migrations import FROM, A, B, row
from turboserve.contracts.sessions import Phase, SessionRecord
from turboserve.contracts.workers import Incoming, MigrationStage
from turboserve.worker.service import commands, events, migration_commands
from turboserve.worker.service.table import Table
from turboserve.worker.transfer.errors import TransferError


@dataclasses.dataclass
class Held:
    """A session in a worker's engine."""

    run: int
    next: int
    place: str = "slab"
    paused: bool = False
    quiesce_request: int | None = None
    quiesced: bool = False


@dataclasses.dataclass
class Copy:
    """A transfer under way, from one worker to the other."""

    fetch: migration_commands.FetchState
    source: str
    stage: str = "ask"
    state: int = 0


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 100.0
        self.tables = {name: Table(name, "toyworld", 2, LEASE_S) for name in (A, B)}
        self.engines: dict[str, dict[str, Held]] = {A: {}, B: {}}
        self.mail: dict[str, list[events.Input]] = {A: [], B: []}
        self.flying: dict[tuple[str, str], commands.PublishChunk] = {}
        self.generating = {A: False, B: False}
        self.rows = {f"s{n}": row(f"s{n}", version=1, epoch=0, worker=None) for n in range(3)}
        self.logs: dict[str, list[tuple[int, str]]] = {session: [] for session in self.rows}
        self.revision = 0
        self.copies: dict[tuple[str, str], Copy] = {}
        self.words: dict[tuple[str, str], set[object]] = {}
        """Commands of a source's table about its transfer: "rest", or the number of a manifest."""
        self.sealed: dict[str, int] = {}
        """Session → the migration whose target has everything it needs."""
        self.calm = False
        self.commits = 0
        for session in self.rows:
            self.change(session, phase=Phase.ACTIVE, worker=self.random.choice((A, B)))

    # The store

    def change(self, session: str, **changes: object) -> None:
        old = self.rows[session]
        if old.phase.ended:
            return
        if "worker" in changes:
            self.revision += 1
            changes |= {"epoch": old.epoch + 1, "own_revision": self.revision}
        if "migration" not in changes and set(changes) != {"prompt", "control_seq"}:
            changes |= {"migration": None, "target": None}
        record = old.model_copy(update={"version": old.version + 1, **changes})
        self.rows[session] = record
        for name in {old.worker, old.target, record.worker, record.target} - {None}:
            assert name is not None
            self.mail[name].append(events.Assigned(record, self.incoming(record, name)))

    @staticmethod
    def incoming(record: SessionRecord, name: str) -> Incoming | None:
        return Incoming(record=record, source=FROM) if record.target == name else None

    def renew(self, name: str) -> None:
        rows = [r for r in self.rows.values() if not r.phase.ended]
        mine = tuple(r for r in rows if r.worker == name)
        coming = tuple(found for r in rows if (found := self.incoming(r, name)) is not None)
        self.mail[name].append(events.Renewed(self.now, mine, incoming=coming))

    def used(self, name: str) -> int:
        return sum(name in (r.worker, r.target) and r.phase.holds_slot for r in self.rows.values())

    def decide(self) -> None:
        session = self.random.choice(list(self.rows))
        record = self.rows[session]
        other = B if record.worker == A else A
        match self.random.randrange(8):
            case 0 | 1 | 2 if record.migration is None and record.worker is not None:
                number = {"migration": record.version + 1, "target": other}
                if record.phase is Phase.ACTIVE and self.used(other) < 2:
                    self.change(session, phase=Phase.MIGRATING, **number)
                elif record.phase is Phase.SUSPENDED:
                    self.change(session, **number)
            case 3 if record.migration is not None:
                phase = Phase.ACTIVE if record.phase is Phase.MIGRATING else record.phase
                self.change(session, phase=phase)
            case 4 if record.phase in (Phase.ACTIVE, Phase.MIGRATING):
                self.change(session, phase=Phase.SUSPENDED)
            case 5 if record.phase is Phase.SUSPENDED and record.worker is not None:
                if self.used(record.worker) < 2:
                    self.change(session, phase=Phase.ACTIVE, worker=record.worker)
            case 6:
                self.change(session, prompt=f"p{record.version}", control_seq=record.control_seq + 1)
            case 7:
                self.renew(self.random.choice((A, B)))
        self.commit()

    def commit(self) -> None:
        """Commit the migrations that a target reports as verified."""
        for name, table in self.tables.items():
            for report in table.incoming.reports():
                record = self.rows[report.session]
                verified = report.stage is MigrationStage.VERIFIED and record.migration == report.migration
                if not verified or record.target != name or self.random.random() < 0.5:
                    continue
                assert len(self.logs[report.session]) <= report.next_chunk, "a chunk after the seal"
                self.commits += 1
                running = record.phase is Phase.MIGRATING
                self.change(report.session, phase=Phase.ACTIVE if running else Phase.SUSPENDED, worker=name)

    # The engines and the wires

    def compute(self) -> None:
        for name, engine in self.engines.items():
            if not self.generating[name]:
                continue
            for session, held in list(engine.items()):
                if held.place == "leaving" and self.random.random() < 0.5:
                    held.place = "host"
                    self.mail[name].append(events.MovedToHost(session, held.run, held.next))
                elif held.quiesce_request is not None and self.random.random() < 0.5:
                    self.mail[name].append(
                        events.Quiesced(session, held.run, held.next, held.quiesce_request)
                    )
                    held.quiesce_request, held.quiesced = None, True
                elif held.place == "slab" and not held.paused and not held.quiesced:
                    record = self.rows[session]
                    given = record.migration is not None and self.sealed.get(session) == record.migration
                    assert not given, "it generates what its target may own"
                    if self.random.random() < 0.5:
                        held.next += 1
                        self.mail[name].append(events.ChunkPackaged(session, held.run, held.next - 1, 0))

    def wire(self) -> None:
        """Do one step of one transfer, or end it."""
        if not self.copies:
            return
        key = self.random.choice(list(self.copies))
        (session, target), copy = key, self.copies[key]
        table, engine = self.tables[copy.source], self.engines[copy.source]
        words = self.words.get((copy.source, session), set())
        migration = copy.fetch.migration
        if not self.calm and self.random.random() < 0.05:
            self.broken(key)
            return
        if copy.stage == "ask":
            try:
                table.offer(session, migration, target)
            except TransferError as error:
                if not error.retryable or self.random.random() < 0.2:
                    self.failed(key)
                return
            self.words[copy.source, session] = set()
            copy.stage = "bulk"
        elif copy.stage == "bulk":
            copy.stage = "rest"
            self.give(copy.source, events.QuiesceRequested(session, migration))
        elif copy.stage == "rest" and "rest" in words:
            held = engine.get(session)
            if held is None or not (held.quiesced or held.place == "host"):
                self.broken(key)
                return
            copy.stage, copy.state = "seal", held.next
        elif copy.stage == "seal" and copy.state in words:
            entry = table.entries.get(session)
            if (
                entry is None
                or entry.outgoing_migration is None
                or entry.outgoing_migration.migration != migration
            ):
                self.broken(key)
                return
            self.give(copy.source, events.ManifestSent(session, migration))
            self.sealed[session] = migration
            copy.stage = "arrive"
        elif copy.stage == "arrive":
            del self.copies[key]
            place = "host" if copy.fetch.on_host else "slab"
            self.engines[target][session] = Held(
                copy.fetch.run, copy.state, place, quiesced=not copy.fetch.on_host
            )
            self.give(target, events.StateReceived(session, copy.fetch.run, copy.state, 0, "d", 1, 0.1))
            self.give(copy.source, events.TransferEnded(session, migration))

    def broken(self, key: tuple[str, str]) -> None:
        """Break the connection: the target retries or gives up."""
        copy = self.copies[key]
        if copy.stage != "ask":
            self.give(copy.source, events.TransferEnded(key[0], copy.fetch.migration))
        if self.random.random() < 0.5:
            self.failed(key)
        elif key in self.copies:
            copy.stage = "ask"

    def failed(self, key: tuple[str, str]) -> None:
        copy = self.copies.pop(key, None)
        if copy is not None:
            self.give(key[1], events.StateFetchFailed(key[0], copy.fetch.run, "broken"))

    def carry_out(self, name: str, command: commands.Command) -> None:
        engine, mail = self.engines[name], self.mail[name]
        match command:
            case commands.GenerateUntil() | commands.StopGenerating():
                self.generating[name] = isinstance(command, commands.GenerateUntil)
            case commands.ReadLogEnd(session=session, query=query):
                log = self.logs[session]
                mail.append(events.LogEndRead(session, query, len(log), bool(log) and log[-1][1] == name))
            case commands.FetchLatents(session=session, query=query):
                mail.append(events.LatentsFetched(session, query))
            case commands.Admit(session=session, run=run, next_chunk=index):
                assert session not in engine
                engine[session] = Held(run, index)
            case commands.Evict(session=session, run=run):
                if session in engine and engine[session].run == run:
                    del engine[session]
            case commands.Suspend(session=session, run=run):
                assert (engine[session].run, engine[session].place) == (run, "slab")
                assert not engine[session].quiesced
                engine[session].place = "leaving"
            case commands.Resume(session=session, run=run):
                assert (engine[session].run, engine[session].place) == (run, "host")
                engine[session].place = "slab"
            case commands.PauseGeneration(session=session):
                engine[session].paused = True
            case commands.ResumeGeneration(session=session):
                engine[session].paused = False
            case commands.Quiesce(session=session, number=number):
                assert not engine[session].quiesced
                engine[session].quiesce_request = number
            case commands.Unquiesce(session=session, run=run):
                assert engine[session].run == run
                engine[session].quiesce_request, engine[session].quiesced = None, False
            case migration_commands.SendFinalDelta(session=session):
                self.words.setdefault((name, session), set()).add("rest")
            case migration_commands.SendManifest(session=session, next_chunk=index):
                self.words.setdefault((name, session), set()).add(index)
            case migration_commands.CancelTransfer(session=session):
                for key, copy in list(self.copies.items()):
                    if key[0] == session and copy.source == name and copy.stage != "ask":
                        copy.stage = "ask"
            case migration_commands.FetchState(session=session):
                source = B if name == A else A
                self.copies[session, name] = Copy(command, source)
            case migration_commands.CancelFetch(session=session, run=run):
                ended = self.copies.get((session, name))
                if ended is not None and ended.fetch.run == run:
                    del self.copies[session, name]
                    if ended.stage != "ask":
                        self.mail[ended.source].append(events.TransferEnded(session, ended.fetch.migration))
                if session in engine and engine[session].run == run:
                    del engine[session]
            case commands.PublishChunk():
                assert (name, command.session) not in self.flying, "two publications in flight"
                self.flying[name, command.session] = command

    def land(self, key: tuple[str, str]) -> None:
        command, (name, session) = self.flying.pop(key), key
        log, record = self.logs[session], self.rows[session]
        fate = 1.0 if self.calm else self.random.random()
        if fate < 0.15:
            outcome = events.PublishOutcome.UNKNOWN
        elif command.index < len(log):
            outcome = (
                events.PublishOutcome.ACKED if log[command.index][1] == name else events.PublishOutcome.FENCED
            )
        elif command.ownership[1] != record.own_revision:
            outcome = events.PublishOutcome.FENCED
        else:
            assert command.index == len(log), "a gap in the log"
            assert record.worker == name
            log.append((record.epoch, name))
            outcome = events.PublishOutcome.ACKED if fate > 0.25 else events.PublishOutcome.UNKNOWN
        self.give(name, events.Published(session, command.run, command.index, command.ownership, outcome))

    LOSSY = (events.Assigned, events.Renewed)
    ORDERED = (events.ChunkPackaged, events.MovedToHost, events.Quiesced)

    def deliver(self, name: str) -> None:
        mail = self.mail[name]
        if not mail:
            return
        first = next((n for n, message in enumerate(mail) if isinstance(message, self.ORDERED)), None)
        free = [n for n, message in enumerate(mail) if not isinstance(message, self.ORDERED)]
        message = mail.pop(self.random.choice(free + ([] if first is None else [first])))
        if isinstance(message, self.LOSSY) and not self.calm:
            if self.random.random() < 0.2:
                return
            if self.random.random() < 0.2:
                mail.append(message)
        self.give(name, message)

    def give(self, name: str, message: events.Input) -> None:
        for command in self.tables[name].handle(message, self.now):
            self.carry_out(name, command)
        in_slabs = sum(held.place != "host" for held in self.engines[name].values())
        assert in_slabs <= 2, "more sessions in slabs than there are"
        assert self.tables[name].slots_used <= 2

    def step(self) -> None:
        match self.random.randrange(7):
            case 0:
                self.decide()
            case 1:
                self.compute()
            case 2:
                self.now += self.random.random()
                for name in (A, B):
                    self.give(name, events.Tick())
            case 3:
                if self.flying:
                    self.land(self.random.choice(list(self.flying)))
            case 4:
                for _ in range(4):
                    self.wire()
            case _:
                self.deliver(self.random.choice((A, B)))

    def settle(self) -> None:
        """End the faults, and begin no migration: those under way end as the store's scheduler ends them."""
        self.calm = True
        for turn in range(60):
            for name in (A, B):
                self.renew(name)
                while self.mail[name]:
                    self.deliver(name)
            for key in list(self.flying):
                self.land(key)
            for _ in range(8):
                self.wire()
            self.commit()
            if turn == 40:
                for session, record in list(self.rows.items()):
                    if record.migration is not None:
                        running = record.phase is Phase.MIGRATING
                        self.change(session, phase=Phase.ACTIVE if running else record.phase)
            self.compute()
            self.now += 0.3
            for name in (A, B):
                self.give(name, events.Tick())


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_invariants_hold_in_any_history_of_migrations(seed: int) -> None:
    world = World(seed)
    for _ in range(500):
        world.step()
    world.settle()
    for session, record in world.rows.items():
        epochs = [epoch for epoch, _ in world.logs[session]]
        assert epochs == sorted(epochs)
        for name, engine in world.engines.items():
            assert (session in engine) <= (record.worker == name), "memory that nobody wants"
    assert not world.copies
    assert all(not list(table.incoming) for table in world.tables.values())
    active = [session for session, record in world.rows.items() if record.phase is Phase.ACTIVE]
    before = {session: len(world.logs[session]) for session in active}
    world.settle()
    assert all(len(world.logs[session]) > count for session, count in before.items())


def test_migrations_are_committed_in_these_histories() -> None:
    """Otherwise the test above would be empty."""
    total = 0
    for seed in range(30):
        world = World(seed)
        for _ in range(500):
            world.step()
        total += world.commits
    assert total > 15
