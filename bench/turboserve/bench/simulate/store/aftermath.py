"""What follows a commit in the state store: the fence, the event log, the word to the workers, the counts.

The state store's shell in small: `publish/fence.py`, `publish/outbox.py`, `publish/assignments.py`,
`service/aftermath.py` and `accounting.py`, step by step, each of which a crash may cut short.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from turboserve.bench.simulate.engine import Chunk
from turboserve.bench.simulate.kernel import Awaited, Program, sleep
from turboserve.bench.simulate.log import DUPLICATE_WINDOW_S, Entry, Stream
from turboserve.bench.simulate.store.database import Database, Row
from turboserve.bench.simulate.store.hot import Playheads
from turboserve.contracts.chunks import ChunkHeader, Ownership
from turboserve.contracts.errors import DeadlineError, FencedError, TurboServeError, UnavailableError
from turboserve.contracts.sessions import SessionRecord
from turboserve.contracts.workers import Assignment, Incoming
from turboserve.state_store.core.sessions import applied
from turboserve.subjects import EVENT, OWN

CURSOR = "accounting"
SWEEP_S = 1.0
ATTEMPTS = 5
PATIENCE_S = 1.0
"""As in the state store; imported from there, they would bring SQL with them."""
BATCH = 64


class Aftermath:
    """One life of the store's background work."""

    def __init__(
        self,
        program: Program,
        database: Database,
        chunks: Stream,
        events: Stream,
        playheads: Playheads,
        assign: Callable[[str, Assignment], None],
    ) -> None:
        self.program, self.database, self.playheads = program, database, playheads
        self.chunks, self.events = chunks, events
        self._assign = assign
        self._awake: Awaited[bool] = Awaited()
        self._applied: dict[str, int] = {}
        self._appended = 0

    def start(self) -> None:
        self.program.spawn(self._publish_for_ever())
        self.program.spawn(self._sweep_for_ever())
        self.program.spawn(self._count_for_ever())

    def wake(self) -> None:
        self._awake.settle(True)

    def tell(self, record: SessionRecord, *named: str | None) -> None:
        """The word to the workers that a row names, and to those it named before."""
        if record.own_revision is None:
            return
        heard = self.playheads.heard(record)
        for worker in sorted({str(name) for name in (record.worker, *named) if name is not None}):
            if worker != record.target:
                self._assign(worker, Assignment(record=heard))
        if record.target is not None:
            self._assign(record.target, Assignment(record=heard, incoming=self.incoming(heard)))

    def incoming(self, record: SessionRecord) -> Incoming:
        source = self.database.workers.get(record.worker)
        return Incoming(record=record, source=() if source is None else source.transfer)

    def changed(self, record: SessionRecord, *named: str | None) -> SessionRecord:
        self.wake()
        self.tell(record, *named)
        return self.playheads.heard(record)

    async def owned_anew(
        self, record: SessionRecord, fence_revision: int, *named: str | None
    ) -> SessionRecord:
        self.wake()
        row = self.database.sessions.get(record.id)
        assert row is not None
        return await self.fenced(record, Row(record, fence_revision, row.request), *named)

    async def fenced(self, record: SessionRecord, known: Row | None, *named: str | None) -> SessionRecord:
        """Waits for the fence as long as a caller does; it goes on without the caller."""
        settling = self.program.spawn(self._settle_quietly(record.id, known, *named))
        patience: Awaited[SessionRecord | None] = Awaited()
        settling.then(patience.settle)
        self.program.after(PATIENCE_S, patience.settle)
        settled = await patience
        if settled is not None and settled.epoch == record.epoch:
            return self.playheads.heard(settled)
        return self.playheads.heard(record)

    async def _settle_quietly(
        self, session: str, known: Row | None, *named: str | None
    ) -> SessionRecord | None:
        try:
            return await self.settle(session, *named, known=known)
        except TurboServeError:
            return None

    async def settle(
        self, session: str, *named: str | None, known: Row | None = None
    ) -> SessionRecord | None:
        """See to it that the session's current epoch is in the log."""
        row, database = known, self.database
        for _ in range(ATTEMPTS):
            if row is None:
                await sleep(0.001)
                row = database.transaction(lambda: database.sessions.get(session))
            if row is None:
                return None
            record = row.record
            if record.own_revision is not None or record.epoch == 0:
                return record
            revision = await self._write(record, row.fence_revision)
            row = None
            if revision is None:
                continue
            self.tell(record.model_copy(update={"own_revision": revision}), *named)
            await sleep(0.001)
            stored = database.transaction(partial(self._store, session, record.epoch, revision))
            if stored is not None:
                return stored
        return None

    async def _write(self, record: SessionRecord, after: int) -> int | None:
        subject = OWN.of(record.id)
        own = Ownership(session=record.id, epoch=record.epoch, worker=record.worker)
        self._appended += 1
        name = f"own:{self.program.name}:{self.program.life}:{self._appended}"
        try:
            ack = await self.chunks.publish(self.program, subject, own, name, (subject, after), 1.0)
            return int(ack.sequence)
        except FencedError:
            pass
        entry = await self.chunks.read_last(self.program, subject)
        if entry is not None and entry.body.epoch == record.epoch:
            return int(entry.sequence)
        found = entry.sequence if entry else 0
        self.database.transaction(lambda: self._store(record.id, record.epoch, None, found))
        return None

    def _store(
        self, session: str, epoch: int, revision: int | None, found: int | None = None
    ) -> SessionRecord | None:
        row = self.database.sessions.get(session)
        if row is None or row.record.epoch != epoch:
            return None
        if revision is None:
            self.database.write_row(row.record, found)
            return None
        after = row.record.model_copy(update={"own_revision": revision})
        self.database.write_row(after, revision)
        return after

    async def _sweep_for_ever(self) -> None:
        database = self.database
        while True:
            try:
                missing = database.transaction(
                    lambda: [r.id for r in database.rows() if r.own_revision is None and r.epoch > 0]
                )
                for session in missing:
                    await self.settle(session)
            except TurboServeError:
                pass
            await sleep(SWEEP_S)

    # Events

    async def _publish_for_ever(self) -> None:
        while True:
            self._awake = Awaited()
            try:
                more = await self._drain()
            except TurboServeError:
                await sleep(0.5)
                continue
            if more:
                continue
            self.program.after(SWEEP_S, self._awake.settle)
            await self._awake

    async def _drain(self) -> bool:
        database = self.database
        pending = database.transaction(
            lambda: sorted(database.outbox.items(), key=lambda item: item[0])[:BATCH]
        )
        done: list[int] = []
        trouble: UnavailableError | None = None
        horizon = self.program.kernel.now - DUPLICATE_WINDOW_S / 2
        for number, (event, subject) in pending:
            if event.at < horizon:
                # Perhaps published by an earlier life, too long ago for the broker to recognise it.
                last = await self.events.read_last(self.program, subject)
                if last is not None and last.body.at >= event.at and self._stands(last, subject, event.id):
                    done.append(number)
                    continue
            try:
                await self.events.publish(self.program, subject, event, event.id, None, 1.0)
            except DeadlineError as error:
                trouble = error
                break
            done.append(number)
        if done:
            database.transaction(lambda: self._remove(done), durable=False)
        if trouble is not None:
            raise trouble
        return len(pending) == BATCH

    def _remove(self, numbers: list[int]) -> None:
        for number in numbers:
            self.database.outbox.remove(number)

    def _stands(self, last: Entry, subject: str, event_id: str) -> bool:
        """Each subject is published in order: whatever is before the last one is there."""
        return any(
            entry.message_id == event_id
            for entry in self.events.by_subject[subject]
            if entry.sequence <= last.sequence
        )

    # Counting

    async def _count_for_ever(self) -> None:
        """Reads the chunk log in order, from the position that stands beside the counts."""
        database = self.database
        position: int | None = None
        while True:
            try:
                if position is None:
                    position = database.transaction(lambda: database.cursors.get(CURSOR) or 0)
                    self._applied.clear()
                batch = [e for e in self.chunks.entries[position:] if isinstance(e.body, Chunk)]
                await sleep(0.001)
                if batch:
                    told = database.transaction(partial(self._count, batch, position), durable=False)
                    position = batch[-1].sequence
                    if told:
                        self.wake()
            except UnavailableError:
                position = None
            await sleep(self.program.kernel.random.expovariate(2.0))

    def _count(self, entries: list[Entry], position: int) -> int:
        database = self.database
        if (database.cursors.get(CURSOR) or 0) != position:
            # A crash of the database has taken counts back: they are counted again.
            raise UnavailableError("overtaken")
        database.cursors.put(CURSOR, entries[-1].sequence)
        told = 0
        for entry in entries:
            header: ChunkHeader = entry.body.header
            row = database.sessions.get(header.session)
            if row is None:
                continue
            record = row.record
            after = record.model_copy(
                update={
                    "next_chunk": max(record.next_chunk, header.index + 1),
                    "applied_control_seq": max(record.applied_control_seq, header.control_seq),
                    "playhead_s": self.playheads.known(record.id) or record.playhead_s,
                }
            )
            database.write_row(after)
            told += self._mark_applied(after, header)
        if told:
            database.make_durable()
        return told

    def _mark_applied(self, record: SessionRecord, header: ChunkHeader) -> int:
        database = self.database
        now = self.program.kernel.now
        due = [
            (key, receipt)
            for key, (receipt, chunk) in database.controls.items()
            if receipt.session == record.id and receipt.control_seq <= header.control_seq and chunk is None
        ]
        for key, receipt in due:
            database.controls.put(key, (receipt, header.index))
            database.tell(applied(record, receipt, header.index, now), EVENT.of(record.id))
        return len(due)
