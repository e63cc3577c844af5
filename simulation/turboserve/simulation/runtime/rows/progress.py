"""Progress of the log, and the deletion of expired rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from turboserve.contracts.sessions import SessionRecord
from turboserve.simulation.runtime.rows.changes import lock_all
from turboserve.simulation.runtime.rows.locks import LockMode
from turboserve.simulation.runtime.rows.session import Session
from turboserve.simulation.runtime.rows.usage import Used, add_usage, lock_usage
from turboserve.state_store.core.receipts import receipt_text
from turboserve.state_store.core.tenants import created_bytes, text_bytes
from turboserve.state_store.ports.records import LogProgress, UsageShare, ViewerUse


class MemoryProgress:
    """`ProgressRepository` in one session of the server."""

    def __init__(self, session: Session) -> None:
        self._db, self._rows = session, session.tables.sessions

    async def position(self, cursor: str) -> int:
        cursors = self._db.tables.cursors

        def run() -> int:
            self._db.insert_if_absent(cursors, cursor, 0)
            return self._db.get(cursors, cursor) or 0

        return await self._db.execute(run)

    async def move(self, cursor: str, before: int, after: int) -> bool:
        cursors = self._db.tables.cursors

        def run() -> bool:
            if self._db.get(cursors, cursor) != before:
                return False
            if self._db.lock(cursors, cursor, LockMode.NO_KEY_UPDATE) != before:
                return False
            self._db.update(cursors, cursor, after)
            return True

        return await self._db.execute(run)

    async def count(self, reached: Sequence[LogProgress]) -> dict[str, SessionRecord]:
        if not reached:
            return {}
        news = {item.session: item for item in reached}

        def run() -> dict[str, SessionRecord]:
            records = {}
            for session, entry in lock_all(self._db, news):
                item, before = news[session], entry.record
                playhead_s = before.playhead_s if item.playhead_s is None else item.playhead_s
                record = before.model_copy(
                    update={
                        "next_chunk": max(before.next_chunk, item.next_chunk),
                        "applied_control_seq": max(before.applied_control_seq, item.control_seq),
                        "playhead_s": playhead_s,
                    }
                )
                self._db.update(self._rows, session, entry.with_record(record))
                records[session] = record
            return records

        return await self._db.execute(run)

    async def add_usage(self, hour: int, shares: Iterable[UsageShare]) -> None:
        sums = {
            (share.tenant, share.key or "", share.model): Used(
                chunks=share.chunks,
                video_seconds=share.video_seconds,
                viewer_seconds=share.viewer_seconds,
                delivered_bytes=share.delivered_bytes,
            )
            for share in UsageShare.by_owner(shares)
        }

        def run() -> None:
            lock_usage(self._db, hour, sums)
            add_usage(self._db, hour, sums)

        if sums:
            await self._db.execute(run)

    async def add_viewer_use(self, hour: int, used: Mapping[str, ViewerUse]) -> None:
        def run() -> list[UsageShare]:
            entries = [(self._db.get(self._rows, session), use) for session, use in used.items()]
            return [
                use.share(entry.record.tenant, entry.record.key, entry.record.model)
                for entry, use in entries
                if entry is not None
            ]

        await self.add_usage(hour, await self._db.execute(run))

    async def number_events(self, session: str, event_sequence: int) -> None:
        def run() -> None:
            for _, entry in lock_all(self._db, [session]):
                record = entry.record.model_copy(update={"event_sequence": event_sequence})
                self._db.update(self._rows, session, replace(entry, record=record))

        await self._db.execute(run)

    async def unpurged(self, ended_before: float, limit: int) -> Sequence[str]:
        def run() -> list[str]:
            found = self._db.find(self._rows, "ended", False)
            due = [(entry.ended_at, session) for session, entry in found if entry.ended_at is not None]
            return [session for ended_at, session in sorted(due) if ended_at < ended_before][:limit]

        return await self._db.execute(run)

    async def unknown(self, ids: Sequence[str]) -> Sequence[str]:
        def run() -> list[str]:
            return [session for session in ids if self._db.get(self._rows, session) is None]

        return await self._db.execute(run)

    async def mark_purged(self, ids: Iterable[str], now: float) -> None:
        wanted = list(ids)

        def run() -> None:
            for session, entry in lock_all(self._db, wanted):
                self._db.update(self._rows, session, replace(entry, purged_at=now))

        await self._db.execute(run)

    async def delete_ended(self, ended_before: float, limit: int) -> int:
        tables = self._db.tables

        def run() -> int:
            due = sorted(
                (entry.ended_at, tables.sessions.rows[session].number, session)
                for session, entry in self._db.find(self._rows, "ended", True)
                if entry.ended_at is not None and entry.ended_at < ended_before
            )[:limit]
            freed: Counter[str] = Counter()
            for *_, session in due:
                entry = self._db.lock(self._rows, session)
                if entry is None:
                    continue
                prompts = self._db.find(tables.controls, "session", session)
                created = created_bytes(entry.first_prompt, entry.record.metadata.items())
                freed[entry.record.tenant] += created + entry.controls_bytes
                freed[entry.record.tenant] += sum(
                    text_bytes(receipt_text(control.receipt)) for _, control in prompts
                )
                self._db.delete(self._rows, session)
                for control, _ in self._db.find(tables.controls, "session", session):
                    self._db.delete(tables.controls, control)
                for number, _ in self._db.find(tables.decisions, "session", session):
                    self._db.delete(tables.decisions, number)
            for name in sorted(freed):
                tenant = self._db.lock(tables.tenants, name, LockMode.NO_KEY_UPDATE)
                if tenant is not None:
                    left = max(tenant.stored_bytes - freed[name], 0)
                    self._db.update(tables.tenants, name, replace(tenant, stored_bytes=left))
            return len(due)

        return await self._db.execute(run)
