"""Follows the orders: starts, stops and deletes recordings. Each recording has a task of its own."""

from __future__ import annotations

import asyncio

from turboserve import logs
from turboserve.bus.chunk_log import ChunkLog
from turboserve.contracts.errors import TurboServeError
from turboserve.contracts.recordings import ListRecordingOrders, RecordingOrder, RecordingRef
from turboserve.recorder import metrics
from turboserve.recorder.core.orders import plan
from turboserve.recorder.settings import Settings
from turboserve.recorder.storage import Storage
from turboserve.recorder.writer import RecordingWriter, folder_of
from turboserve.recording_subjects import FORGET_RECORDING, LIST_RECORDING_ORDERS
from turboserve.service import Runtime
from turboserve.tasks import BackgroundTasks
from turboserve.telemetry_names import REASON
from turboserve.wording import counted

BEHIND_LIMIT = 40
"""Chunks by which a recording may be behind before /readyz warns. The log keeps at least as many."""

log = logs.get("recorder")


class Recorder:
    """The recordings that this process writes and deletes."""

    def __init__(self, runtime: Runtime, settings: Settings, storage: Storage) -> None:
        self._bus, self._clock, self._settings, self._storage = runtime.bus, runtime.clock, settings, storage
        self._chunks = ChunkLog(runtime.bus, lambda reason: metrics.foreign_chunks.add(1, {REASON: reason}))
        self._writers: dict[str, RecordingWriter] = {}
        self._deleting: set[str] = set()
        self._tasks = BackgroundTasks()
        self.listed = False
        """Whether the orders were listed since the start."""

    async def run(self) -> None:
        """Follow the orders until the service stops."""
        await self._chunks.listen()
        metrics.chunks_behind.add(self, lambda recorder: recorder.behind)
        metrics.recordings_open.add(self, lambda recorder: len(recorder._writers))
        while True:
            try:
                self._apply(await self._orders())
                self.listed = True
            except TurboServeError as error:
                log.info("orders not listed", error=error.detail)
            await asyncio.sleep(self._settings.recording_poll_s)

    async def close(self) -> None:
        """End all writers. What they have read and not stored stays in the log."""
        for writer in self._writers.values():
            writer.stop()
        await self._tasks.wait(3.0)
        await self._tasks.stop()

    @property
    def behind(self) -> int:
        """Chunks by which the recording that is furthest behind is behind the log."""
        return max((writer.behind for writer in self._writers.values()), default=0)

    def storage_warning(self) -> str | None:
        return self._storage.failing

    def behind_warning(self) -> str | None:
        late = [writer.behind for writer in self._writers.values() if writer.behind > BEHIND_LIMIT]
        if not late:
            return None
        behind = counted(len(late), "recording is", "recordings are")
        return f"{behind} behind, by up to {counted(max(late), 'chunk')}"

    async def _orders(self) -> list[RecordingOrder]:
        found: list[RecordingOrder] = []
        after: int | None = None
        while True:
            page = await self._bus.call(LIST_RECORDING_ORDERS, ListRecordingOrders(after=after))
            found += page.orders
            if page.next is None:
                return found
            after = page.next

    def _apply(self, orders: list[RecordingOrder]) -> None:
        changes = plan(orders, self._writers.keys(), self._deleting)
        for order in changes.update:
            self._writers[order.recording].update(order)
        for recording in changes.stop:
            self._writers[recording].stop()
        for order in changes.start:
            writer = RecordingWriter(
                order, self._bus, self._chunks, self._storage, self._settings.segment_limits, self._clock
            )
            self._writers[order.recording] = writer
            self._tasks.create(self._write(writer), f"record {order.session}")
        for order in changes.delete:
            self._deleting.add(order.recording)
            self._tasks.create(self._delete(order), f"delete {order.recording}")

    async def _write(self, writer: RecordingWriter) -> None:
        order = writer.order
        try:
            log.info("records", recording=order.recording, session=order.session, chunk=order.from_chunk)
            await writer.run()
        except Exception:
            # The next listing starts it again.
            log.exception("recording interrupted", recording=order.recording)
        finally:
            del self._writers[order.recording]

    async def _delete(self, order: RecordingOrder) -> None:
        try:
            objects = await self._storage.delete(folder_of(order.tenant, order.recording))
            await self._bus.call(FORGET_RECORDING, RecordingRef(recording=order.recording))
            log.info("recording deleted", recording=order.recording, tenant=order.tenant, objects=objects)
        except TurboServeError as error:
            log.warning("recording not deleted yet", recording=order.recording, error=error.detail)
        finally:
            self._deleting.discard(order.recording)
