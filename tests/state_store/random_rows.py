"""Random calls of every repository's methods, the same for each seed and implementation."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from pydantic import JsonValue

from turboserve.contracts.control_declarations import ControlDeclaration
from turboserve.contracts.cost import Correction
from turboserve.contracts.fidelity import QualityLimits
from turboserve.contracts.keys import KeyLimits, KeyRecord, ListKeys
from turboserve.contracts.leading import LeaderRecord
from turboserve.contracts.pool import PoolOrders, PoolReport
from turboserve.contracts.pool_history import PoolRange
from turboserve.contracts.recordings import (
    ListRecordingOrders,
    ListRecordings,
    RecordingRecord,
    RecordingState,
)
from turboserve.contracts.requests import CreateSession, ListSessions
from turboserve.contracts.sessions import (
    Activity,
    ControlReceipt,
    Decision,
    Phase,
    PromptReceipt,
    SessionRecord,
)
from turboserve.contracts.usage import HOURS, ListUsage, UsageDimension
from turboserve.contracts.worker_offers import FrameSize, ServedClass
from turboserve.contracts.workers import WorkerPhase, WorkerRecord
from turboserve.state_store.core import sessions as rules
from turboserve.state_store.core import workers as worker_rules
from turboserve.state_store.core.aging import Aging
from turboserve.state_store.core.change import Change, change_id
from turboserve.state_store.core.receipts import Receipt
from turboserve.state_store.core.rentals import RentalRow
from turboserve.state_store.core.tenants import Tenant
from turboserve.state_store.ports.database import UnitOfWork
from turboserve.state_store.ports.records import LogProgress, UsageShare, ViewerUse

SESSIONS = tuple(f"ses_{n}" for n in range(6))
WORKERS = tuple(f"wk_{n}" for n in range(4))
MODELS = ("ma", "mb")
TENANTS = ("ta", "tb")
POOLS = ("pa", "pb")
LEADERS = ("scheduler", "other")
Call = Callable[[UnitOfWork], Awaitable[Any]]


class RandomRows:
    """Draws calls. All numbers are multiples of a quarter, so that sums are exact in any order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._classes = random.Random(f"classes {seed}")
        self._serial = 0

    def call(self) -> tuple[str, Call]:
        """Return the next call with its name."""
        name = self.random.choice(sorted(name for name in dir(self) if name.startswith("do_")))
        return name.removeprefix("do_"), getattr(self, name)()

    # Values

    def number(self, limit: int = 40) -> float:
        return self.random.randrange(4 * limit) / 4.0

    def serial(self) -> int:
        self._serial += 1
        return self._serial

    def session(self) -> str:
        return self.random.choice(SESSIONS)

    def worker(self) -> str:
        return self.random.choice(WORKERS)

    def maybe(self, value: Any) -> Any:
        return self.random.choice((None, value))

    def request(self) -> CreateSession:
        return CreateSession(
            id=self.session(),
            tenant=self.random.choice(TENANTS),
            model=self.random.choice(MODELS),
            prompt=self.random.choice(("a circle", "a square", "ein Würfel")),
            seed=self.random.randrange(2),
            metadata=self.random.choice(({}, {"k": "v"}, {"é": "ü"})),
            quality=self.maybe(QualityLimits(floor=self.maybe(0.5), pin=self.random.random() < 0.5)),
            max_lead_s=self.maybe(0.75),
            recording=self.maybe("rec_0"),
            key=self.maybe(f"key_{self.random.randrange(3)}"),
        )

    def decision(self, session: str) -> Decision:
        return Decision(
            session=session,
            epoch=self.random.randrange(3),
            worker=self.maybe(self.worker()),
            kind=self.random.choice(("place", "migrated", "stay")),
            reason=self.random.choice(("a", "b")),
            numbers=self.random.choice(({}, {"migration": 1.0}, {"migration": 2.0, "x": 0.5})),
            at=float(self.serial()),
        )

    def tenant(self, name: str) -> Tenant:
        return Tenant(name, self.number(), self.number(), self.random.randrange(99))

    def worker_record(self) -> WorkerRecord:
        worker, model = self.worker(), self.random.choice(MODELS)
        phase, capacity = self.random.choice(list(WorkerPhase)), self.random.randrange(1, 5)
        served = (
            ServedClass(model=model, capacity=capacity),
            *(
                ServedClass(model=name, capacity=self._classes.randrange(5))
                for name in MODELS
                if name != model
            ),
        )
        return WorkerRecord(
            id=worker,
            model=model,
            phase=phase,
            capacity=capacity,
            classes=self._classes.choice((None, served)),
            floor_capacity=self.random.choice((None, 3, 8)),
            transfer=self.random.choice(((), ("tcp://10.0.0.1:1",))),
            chunk_latency_s=self.random.choice(({}, {1: 0.25, 2: 0.5})),
            pool_member=self.maybe("slot-1"),
            controls=self.random.choice(((), (STEER,))),
            frame=self.maybe(FrameSize(width=64, height=32)),
            started_at=self.number(),
            renewed_at=self.number(),
            reason=self.maybe("because"),
        )

    def record(self, before: SessionRecord, now: float) -> SessionRecord:
        """Draw any columns that the table accepts: the repository does not decide what is permitted."""
        migration = self.maybe(self.random.randrange(1, 4))
        return before.model_copy(
            update={
                "phase": self.random.choice(list(Phase)),
                "activity": self.random.choice(list(Activity)),
                "version": before.version + 1,
                "epoch": before.epoch + self.random.randrange(2),
                "worker": self.maybe(self.worker()),
                "target": None if migration is None else self.worker(),
                "migration": migration,
                "own_revision": self.maybe(self.random.randrange(1, 9)),
                "control_seq": self.random.randrange(5),
                "prompt": self.random.choice(("a circle", "a star")),
                "controls": self.random.choice(
                    ({}, {"steer": "left"}, {"camera": {"yaw": 0.5, "a": [None]}})
                ),
                "reason": self.maybe("because"),
                "drop_buffer_seq": self.random.randrange(5),
                "quality": self.maybe(QualityLimits(pin=True)),
                "max_lead_s": self.maybe(1.5),
                "requested_at": self.maybe(now),
                "weights_digest": self.maybe("d1"),
                "weight": self.random.choice((1.0, 2.5)),
                "updated_at": now,
                # The row keeps its own values of these columns.
                "next_chunk": 77,
                "playhead_s": 77.0,
                "unwatched_s": 7.0,
                "waiting_s": 7.0,
            }
        )

    def rental(self) -> RentalRow:
        paid_s = self.number()
        return RentalRow(
            worker=self.worker(),
            pool=self.maybe(self.random.choice(POOLS)),
            member=None,
            kind=self.random.choice(("h100", "l4")),
            gpus=1.0,
            price_hour=3_600.0,
            started_at=self.number(),
            seen_at=self.number(),
            ended_at=self.maybe(self.number()),
            ready=True,
            paid_s=paid_s,
            starting_s=paid_s / 2,
            estimated_s=paid_s / 4,
            accrued_s=0.0,
            source=self.maybe("p1"),
            source_s=self.number(),
            meter="m1",
            meter_s=self.number(),
        )

    # Sessions

    def do_sessions_create(self) -> Call:
        request, now = self.request(), float(self.serial())
        tenant = self.maybe(self.tenant(request.tenant))

        async def run(db: UnitOfWork) -> Any:
            if await db.sessions.get(request.id) is None:
                await db.changes.create(rules.create(request, now), tenant)

        return run

    def do_sessions_write(self) -> Call:
        session, key = self.session(), self.maybe("0a" * 32)
        serial, events = self.serial(), self.random.randrange(1, 4)
        decides = self.random.random() < 0.5
        decision, tenant = self.decision(session), self.maybe(self.tenant(self.random.choice(TENANTS)))
        draw = RandomRows(serial)

        async def run(db: UnitOfWork) -> Any:
            row = await db.sessions.get_row(session, lock=True)
            if row is None:
                return None
            record = draw.record(row.record, float(serial))
            kinds = [f"test{number}" for number in range(events)]
            told = rules.create(CREATE, 1.0).events[0].model_copy(update={"record": record})
            change = Change(
                record,
                tuple(told.model_copy(update={"id": change_id(record, kind)}) for kind in kinds),
                decision if decides else None,
            )
            begun = key if record.migration is not None else None
            await db.changes.write(change, migration_key=begun, tenant=tenant)
            return await db.sessions.get_row(session)

        return run

    def do_sessions_read(self) -> Call:
        session, worker, request, held = self.session(), self.worker(), self.request(), self.session()
        before = self.number(200)

        async def run(db: UnitOfWork) -> Any:
            return [
                await db.sessions.get(session),
                await db.sessions.get_row(session),
                await db.sessions.created_by(request),
                await db.sessions.suspended_since(before, 3),
                (await db.sessions.of_workers({worker: {held}, WORKERS[0]: ()}))(),
                [key.model_dump() for key in await db.sessions.migration_keys(worker)],
                await db.sessions.migration_keys(worker, session),
                await db.sessions.migrating_to(worker),
            ]

        return run

    def do_sessions_page(self) -> Call:
        phases = tuple(self.random.sample(list(Phase), self.random.randrange(4)))
        request = ListSessions(
            tenant=self.maybe(self.random.choice(TENANTS)), phases=phases, limit=self.random.randrange(1, 5)
        )
        before = self.maybe(self.random.randrange(1, 8))
        return lambda db: db.sessions.page(request, before)

    # Fence

    def revision(self) -> int:
        """A new revision, or one that the log had before."""
        return max(1, self.serial() - self.random.choice((0, 0, 40)))

    def do_fence_store(self) -> Call:
        session, epoch, revision = self.session(), self.random.randrange(4), self.revision()
        return lambda db: db.fence.store(session, epoch, revision)

    def do_fence_seen(self) -> Call:
        session, epoch, revision = self.session(), self.random.randrange(4), self.revision()
        return lambda db: db.fence.store_seen(session, epoch, revision)

    def do_fence_reopen(self) -> Call:
        session, epoch = self.session(), self.random.randrange(4)
        other = self.random.randrange(9)

        async def run(db: UnitOfWork) -> Any:
            row = await db.sessions.get(session)
            stored = other if row is None else row.own_revision or other
            return await db.fence.reopen(session, epoch, stored)

        return run

    def do_fence_read(self) -> Call:
        async def run(db: UnitOfWork) -> Any:
            settled = sorted(await db.fence.settled())
            return await db.fence.missing(10), settled, await db.fence.newest()

        return run

    # Progress

    def do_progress_count(self) -> Call:
        reached = [
            LogProgress(
                session, self.random.randrange(9), self.random.randrange(5), self.maybe(self.number())
            )
            for session in self.random.sample([*SESSIONS, "ses_unknown"], self.random.randrange(4))
        ]
        session, number = self.session(), self.serial()

        async def run(db: UnitOfWork) -> Any:
            await db.progress.number_events(session, number)
            return await db.progress.count(reached), await db.sessions.get(session)

        return run

    def do_progress_cursor(self) -> Call:
        before, after = self.random.randrange(3), self.random.randrange(3)

        async def run(db: UnitOfWork) -> Any:
            return [
                await db.progress.position("c"),
                await db.progress.move("c", before, after),
                await db.progress.position("c"),
            ]

        return run

    def do_progress_purge(self) -> Call:
        before, now, ids = self.number(200), float(self.serial()), [self.session(), "ses_unknown"]

        async def run(db: UnitOfWork) -> Any:
            due = await db.progress.unpurged(before, 2)
            await db.progress.mark_purged(due, now)
            return due, await db.progress.unknown(ids)

        return run

    def do_progress_delete(self) -> Call:
        before, limit = self.number(60), self.random.choice((1, 100))
        return lambda db: db.progress.delete_ended(before, limit)

    # Controls

    def do_controls_prompt(self) -> Call:
        session, name = self.session(), f"e{self.random.randrange(12)}"
        seq, at = self.random.randrange(1, 6), self.number()
        control = self.random.choice((None, "steer", "camera"))
        receipt: Receipt
        if control is None:
            receipt = PromptReceipt(
                session=session, prompt_id=name, control_seq=seq, prompt="p", accepted_at=at
            )
        else:
            values: list[JsonValue] = ["links", {"yaw": 1.5, "ü": [None, True]}, None]
            value = self.random.choice(values)
            receipt = ControlReceipt(
                session=session, control_id=name, control_seq=seq, name=control, value=value, accepted_at=at
            )

        async def run(db: UnitOfWork) -> Any:
            await db.controls.insert(receipt)
            return await db.controls.receipt(name)

        return run

    def do_controls_apply(self) -> Call:
        session, seq, chunk = self.session(), self.random.randrange(6), self.random.randrange(9)
        return lambda db: db.controls.settle(session, seq, chunk, 1.0)

    def do_controls_note(self) -> Call:
        decision = self.decision(self.session())
        return lambda db: db.controls.note(decision)

    def do_controls_read(self) -> Call:
        session, version = self.session(), self.random.randrange(1, 6)
        worker, migration = self.worker(), self.random.randrange(1, 3)

        async def run(db: UnitOfWork) -> Any:
            record = await db.sessions.get(session)
            if record is None:
                return await db.controls.decisions_of(session, 5)
            return [
                await db.controls.decided(record, version, worker),
                await db.controls.migrated(record, migration),
                await db.controls.decisions_of(session, 3),
            ]

        return run

    def do_admission(self) -> Call:
        session, model, worker = self.session(), self.random.choice(MODELS), self.worker()
        tenant = self.random.choice((*TENANTS, "tc"))
        renewed, known, locks_tenant = self.number(), self.number(), self.random.random() < 0.5
        behavior_since = self.number() if self.random.random() < 0.5 else None

        async def run(db: UnitOfWork) -> Any:
            census = await db.admission.census(
                session,
                model,
                tenant,
                renewed_after=renewed,
                known_after=known,
                locks_tenant=locks_tenant,
            )
            outlook = await db.admission.outlook(model, since=known, renewed_after=renewed)
            times = None
            if behavior_since is not None:
                times = await db.admission.session_times(model, since=behavior_since)
            used = await db.admission.slots_used(worker, besides=session)
            by_class = await db.admission.slots_by_class(worker, besides=session)
            assert sum(by_class.values()) == used
            return census, outlook, times, dict(by_class)

        return run

    def do_placements(self) -> Call:
        leader, worker, session = self.random.choice(LEADERS), self.worker(), self.session()
        return lambda db: db.placements.lock(leader, worker, session)

    def do_tenants(self) -> Call:
        name, more = self.random.choice(TENANTS), self.random.randrange(9)
        full_at, changes, deletes = self.number(), self.random.random() < 0.7, self.random.random() < 0.2

        async def run(db: UnitOfWork) -> Any:
            before = await db.tenants.lock(name)
            if deletes:
                return before, await db.tenants.delete_unused(full_at)
            if changes:
                stored = before.stored_bytes + more
                await db.tenants.write(replace(before, creations_full_at=full_at, stored_bytes=stored))
            return before

        return run

    # The deployment

    def do_workers_insert(self) -> Call:
        record, told = self.worker_record(), self.random.random() < 0.5

        async def run(db: UnitOfWork) -> Any:
            inserted = await db.workers.insert(record)
            if inserted and told:
                event = worker_rules.joined_event(record, 1.0)
                await db.outbox.add([event.model_copy(update={"id": f"{record.id}-{self.serial()}"})])
            return inserted

        return run

    def do_workers_write(self) -> Call:
        record, gone_at = self.worker_record(), self.maybe(self.number())
        record = record.model_copy(update={"sessions": 3})

        async def run(db: UnitOfWork) -> Any:
            before = await db.workers.get(record.id, lock=True)
            await db.workers.write(record, gone_at=gone_at)
            return before, await db.workers.get(record.id)

        return run

    def do_workers_renewed(self) -> Call:
        workers = self.random.sample([*WORKERS, "wk_unknown"], self.random.randrange(4))
        times = {worker: self.number() for worker in workers}
        latency_s = {1: self.number() + 0.1}

        async def run(db: UnitOfWork) -> Any:
            before = await db.workers.lock_free(workers)
            changed = [before[worker] for worker in sorted(before)]
            if changed:
                after = [one.model_copy(update={"chunk_latency_s": latency_s}) for one in changed]
                await db.workers.write_all(after)
            await db.workers.write_renewed_at(times)
            return sorted(before.items()), [await db.workers.get(worker) for worker in workers]

        return run

    def do_workers_page(self) -> Call:
        include_gone = self.random.random() < 0.5
        return lambda db: db.workers.page(include_gone=include_gone)

    def do_workers_delete(self) -> Call:
        before = self.number(10)
        return lambda db: db.workers.delete_gone(before)

    def do_leaders(self) -> Call:
        name, new_term = self.random.choice(LEADERS), self.random.random() < 0.5
        record = LeaderRecord(name=name, holder=self.maybe("h"), term=self.serial(), beat=self.serial())

        async def run(db: UnitOfWork) -> Any:
            found = [await db.leaders.get(name), await db.leaders.share(name)]
            found.append(await db.leaders.lock(name, new_term=new_term))
            await db.leaders.write(record)
            return [*found, await db.leaders.get(name)]

        return run

    def do_outbox(self) -> Call:
        limit, removed = self.random.randrange(1, 5), self.random.randrange(3)

        async def run(db: UnitOfWork) -> Any:
            found = await db.outbox.oldest(limit)
            await db.outbox.remove([event.number for event in found[:removed]])
            # Numbers have gaps, which differ where a transaction was rolled back.
            return [(e.event_id, e.subject, e.body, e.created_at) for e in found], await db.outbox.backlog()

        return run

    def do_pools_report(self) -> Call:
        report = PoolReport(
            pool=self.random.choice(POOLS),
            model=self.random.choice(MODELS),
            maximum=self.random.randrange(3),
            absorbs=self.random.random() < 0.5,
            absorbs_at_maximum=self.random.random() < 0.5,
            decode_sessions=self.random.choice((None, None, 0, 2, 5)),
            learned=self.maybe("learned"),
            recalls=self.random.random() < 0.5,
        )
        now, process = self.number(), f"p{self.random.randrange(3)}"

        async def run(db: UnitOfWork) -> Any:
            orders = await db.pools.reported(report, now)
            before = await db.pools.processes(report.pool)
            await db.pools.replaced(report.pool, process, ("old",))
            return orders, before, await db.pools.processes(report.pool)

        return run

    def do_pools_order(self) -> Call:
        pool, changed = self.random.choice(POOLS), self.random.sample(["override", "dry_run"], 1)
        orders = PoolOrders(
            pool=pool, version=self.serial(), override=self.maybe(2), dry_run=self.maybe(True)
        )

        async def run(db: UnitOfWork) -> Any:
            before = await db.pools.get(pool, lock=True)
            await db.pools.write(orders, changed)
            return before, await db.pools.get(pool)

        return run

    def do_rentals_put(self) -> Call:
        rows = {row.worker: row for row in (self.rental() for _ in range(self.random.randrange(3)))}
        return lambda db: db.rentals.put(rows.values())

    def do_rentals_accrue(self) -> Call:
        hour = self.random.randrange(2 * HOURS)
        past = PoolRange(pool=self.random.choice(POOLS), since=0, until=9, managed=self.random.random() < 0.5)

        async def run(db: UnitOfWork) -> Any:
            await db.rentals.lock()
            await db.rentals.accrue(hour, hour // HOURS)
            everything = ListUsage(from_day=0, to_day=9)
            fine = everything.model_copy(update={"group_by": tuple(UsageDimension)})
            costs = sorted((await db.pool_history.costs(past)).items())
            shares = sorted(await db.pool_history.tenant_costs(past), key=lambda one: one.tenant or "")
            models = sorted(await db.pool_history.model_costs(past), key=lambda one: one.model or "")
            usage = [await db.rentals.usage(one) for one in (everything, fine)]
            return await db.rentals.used(), usage, costs, shares, models

        return run

    def do_usage(self) -> Call:
        hour, deletes = self.random.randrange(3 * HOURS), self.random.random() < 0.1
        shares = [
            UsageShare(
                self.random.choice(TENANTS),
                self.maybe(f"key_{self.random.randrange(3)}"),
                self.random.choice(("model", "other_64x64")),
                self.random.randrange(5),
                self.number(),
                self.number(),
                self.random.randrange(9),
            )
            for _ in range(self.random.randrange(4))
        ]
        used = {
            self.session(): ViewerUse(self.number(), self.random.randrange(9))
            for _ in range(self.random.randrange(3))
        }
        tenant, after = self.maybe(self.random.choice(TENANTS)), self.maybe("1.ta.key_1.30.model")
        group_by = tuple(one for one in UsageDimension if self.random.random() < 0.4)
        request = ListUsage(tenant=tenant, from_day=0, to_day=2, limit=2, after=after, group_by=group_by)

        async def run(db: UnitOfWork) -> Any:
            await db.progress.add_usage(hour, shares)
            await db.progress.add_viewer_use(hour, used)
            if deletes:
                await db.rentals.forget_usage(1)
            return await db.rentals.usage(request)

        return run

    def do_rentals_read(self) -> Call:
        pool, worker = self.random.choice(POOLS), self.worker()
        tenant, session = self.maybe(self.random.choice(TENANTS)), self.maybe(self.session())

        async def run(db: UnitOfWork) -> Any:
            return [
                await db.rentals.of_pool(pool, {worker}),
                sorted(await db.rentals.beside_workers(), key=lambda pair: pair[1].id),
                await db.rentals.by_kind(),
                await db.rentals.by_pool(),
                await db.rentals.used(),
                await db.rentals.of_sessions(tenant, session, 3),
            ]

        return run

    def do_corrections(self) -> Call:
        correction = Correction(
            id=f"cor{self.random.randrange(8)}",
            session=self.maybe(self.session()),
            gpu_seconds=self.number(),
            money=-self.number(),
            reason="r",
            by="me",
            at=self.number(),
        )
        tenant, session = self.maybe(self.random.choice(TENANTS)), self.session()

        async def run(db: UnitOfWork) -> Any:
            return [
                await db.corrections.add(correction),
                await db.corrections.total(),
                await db.corrections.total(session),
                await db.corrections.newest(tenant, 3),
                await db.corrections.share(session),
            ]

        return run

    def do_keys(self) -> Call:
        key, now = f"key_{self.random.randrange(6)}", self.number()
        record = KeyRecord(
            id=key,
            tenant=self.random.choice(TENANTS),
            scopes=self.random.choice((("admin",), ("pool:write", "sessions:read"))),
            label=self.random.choice(("", "für é")),
            created_at=self.number(),
            expires_at=self.maybe(self.number()),
        )
        inserts, revokes = self.random.random() < 0.5, self.random.random() < 0.2
        digest, salt = f"{self.random.randrange(30):064x}", f"{self.serial():032x}"
        changes, day = self.random.random() < 0.5, self.random.randrange(2)
        limits = KeyLimits(weight=self.maybe(2.0), sessions=self.random.randrange(1, 9))
        uses = {f"key_{n}": self.number() for n in range(self.random.randrange(1, 6))}
        request = ListKeys(
            tenant=self.maybe(self.random.choice(TENANTS)),
            limit=self.random.randrange(1, 4),
            after=self.maybe(self.random.randrange(1, 20)),
        )

        async def run(db: UnitOfWork) -> Any:
            found = [await db.keys.edition()]
            edition = await db.keys.lock(salt)
            if inserts and await db.keys.get(key) is None:
                await db.keys.insert(record, digest)
                await db.keys.write_version(edition.version + 1)
            if revokes:
                await db.keys.revoke(key, now)
            if changes:
                await db.keys.change(key, limits)
            usage = await db.keys.usage(key, day)
            rates = await db.keys.lock_rates(key)
            await db.keys.write_rates(replace(rates, creations_full_at=now))
            await db.keys.note_uses(uses, 5.0)
            answers = [await db.keys.get(key), await db.keys.page(request)]
            return [
                *found,
                edition,
                usage,
                rates,
                *answers,
                await db.keys.valid(now),
                await db.keys.count_valid(now),
            ]

        return run

    def do_recordings(self) -> Call:
        number, after = self.random.randrange(6), self.random.randrange(7)
        session, tenant, now = self.session(), self.random.choice(TENANTS), float(self.serial())
        record = RecordingRecord(
            id=f"rec_{number}",
            session=session,
            tenant=tenant,
            model=self.random.choice(MODELS),
            prompt="a circle",
            state=self.random.choice(list(RecordingState)),
            from_chunk=self.random.randrange(4),
            until_chunk=self.maybe(9),
            next_chunk=self.random.randrange(9),
            chunks=self.random.randrange(9),
            bytes=self.random.randrange(100),
            duration_s=self.number(),
            reason=self.maybe("because"),
            session_failed=number == 0,
            created_at=now,
            updated_at=now,
            completed_at=self.maybe(now),
            expires_at=self.maybe(now + self.random.randrange(-3, 3)),
        )
        pages = [
            ListRecordings(
                tenant=self.maybe(tenant), session=self.maybe(session), limit=3, after=self.maybe(after)
            )
        ]
        orders = ListRecordingOrders(limit=2, after=self.maybe(after))
        deletes, expires = self.random.random() < 0.2, self.random.random() < 0.3

        async def call(db: UnitOfWork) -> Any:
            known = await db.recordings.get(record.id, lock=True)
            if known is None:
                await db.recordings.insert(record)
            else:
                await db.recordings.write(record)
            found: list[Any] = [await db.recordings.get(record.id), await db.recordings.newest(session)]
            found += [await db.recordings.page(request) for request in pages]
            if deletes:
                await db.recordings.delete(record.id)
            expired = await db.recordings.expire(now) if expires else None
            stored = await db.recordings.stored_bytes(tenant)
            return [known, *found, expired, stored, await db.recordings.orders(orders)]

        return call

    def do_clocks(self) -> Call:
        aging = Aging(self.number(), self.number())

        async def run(db: UnitOfWork) -> Any:
            before = await db.clocks.get("c")
            await db.clocks.put("c", aging)
            return before

        return run


STEER = ControlDeclaration(name="steer", description="Direction.", value_schema={"enum": ["left"]})
CREATE = CreateSession(id="ses_x", tenant="ta", model="ma", prompt="p", seed=1)
