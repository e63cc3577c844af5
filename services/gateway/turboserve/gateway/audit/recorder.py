"""Records changing requests in the audit log, before they are answered."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from turboserve import logs
from turboserve.bus import Bus
from turboserve.clock import Clock
from turboserve.contracts.audit import ENTRIES_LIMIT, AuditEntry, NoteAudit
from turboserve.contracts.errors import InvalidInputError, TurboServeError
from turboserve.gateway.auth.access import Identity
from turboserve.gateway.auth.middleware import admitted
from turboserve.gateway.auth.throttle import LogBudget
from turboserve.ids import new_id
from turboserve.subjects import NOTE_AUDIT

ANSWER_S = 1.5
"""Time for which an answer waits until its entry is stored, seconds."""
WAITING_LIMIT = 10_000
"""Maximum number of entries that wait for the state store. Then the oldest are lost, which is logged."""
REFUSED_PER_MINUTE = 600
"""Maximum number of refused requests that one gateway records per minute, so that no sender fills the log."""
RETRY_S = 1.0
READS = frozenset({"GET", "HEAD", "OPTIONS"})
TARGETS = ("link", "key", "pool", "recording", "webhook", "session")
"""Path parameters that name what an order changes. The first that a path has counts."""

log = logs.get("audit")


class AuditRecorder:
    """Sends entries to the state store. While it is away, they wait in memory."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus, self._clock = bus, clock
        self._waiting: deque[AuditEntry] = deque(maxlen=WAITING_LIMIT)
        self._refused = LogBudget(REFUSED_PER_MINUTE)
        self._sending = asyncio.Lock()
        self._came = asyncio.Event()

    async def record(self, entry: AuditEntry) -> None:
        """Have the entry stored, if the state store answers within `ANSWER_S`. Never raises."""
        if entry.code is not None and self._refused.take(self._clock.monotonic()) is None:
            return
        if len(self._waiting) == WAITING_LIMIT:
            log.error("an entry of the audit log is lost", operation=self._waiting[0].operation)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._send()
        except (TurboServeError, TimeoutError) as error:
            log.warning("the audit log waits", entries=len(self._waiting), error=str(error)[:200])
            self._came.set()

    async def run(self) -> None:
        """Send again what could not be sent; never returns."""
        while True:
            await self._came.wait()
            await asyncio.sleep(RETRY_S)
            try:
                await self._send()
            except TurboServeError as error:
                log.debug("the audit log waits", entries=len(self._waiting), error=error.detail)
            else:
                self._came.clear()

    async def _send(self) -> None:
        """Send all that waits. Raises UnavailableError; a repeat adds no second row."""
        async with self._sending:
            while self._waiting:
                entries = tuple(self._waiting)[:ENTRIES_LIMIT]
                await self._bus.call(NOTE_AUDIT, NoteAudit(entries=entries))
                for entry in entries:
                    if self._waiting and self._waiting[0] is entry:
                        self._waiting.popleft()


class AuditedRoute(APIRoute):
    """A route whose changing requests are in the audit log, refused ones too."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if (self.methods or READS) <= READS:
            return handle
        operation = self.operation_id or self.name

        async def audited(request: Request) -> Response:
            recorder: AuditRecorder = request.app.state.gateway.audit
            try:
                response = await handle(request)
            except TurboServeError as error:
                await recorder.record(await _entry(request, operation, error.status, error.code))
                raise
            except RequestValidationError:
                invalid = InvalidInputError
                await recorder.record(await _entry(request, operation, invalid.status, invalid.code))
                raise
            except Exception:
                await recorder.record(await _entry(request, operation, 500, TurboServeError.code))
                raise
            await recorder.record(await _entry(request, operation, response.status_code, None, response))
            return response

        return audited


async def _entry(
    request: Request, operation: str, status: int, code: str | None, response: Response | None = None
) -> AuditEntry:
    caller: Identity = admitted(request.scope)
    names = {**request.path_params}
    target = next((names[kind] for kind in TARGETS if kind in names), "")
    change = ""
    if response is not None:
        # What was refused may have anything in it. What was accepted has only members of its schema.
        change = (await request.body()).decode(errors="replace")
        target = _created(response) or target
    return AuditEntry(
        id=new_id("aud"),
        at=request.app.state.gateway.clock.wall(),
        operation=operation,
        tenant=caller.tenant,
        key=caller.grant.link if caller.grant is not None and caller.grant.link else caller.key_id,
        address=request.client.host if request.client else "",
        path=request.url.path,
        target=target,
        change=change,
        status=status,
        code=code,
    )


def _created(response: Response) -> str | None:
    """Return the id of what the answer created. The rest of an answer may have secrets."""
    if response.status_code != 201:
        return None
    found = json.loads(bytes(response.body)).get("id")
    return found if isinstance(found, str) else None
