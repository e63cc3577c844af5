"""Takes deliveries that are due, attempts each once, and reports the outcome."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from opentelemetry.trace import SpanKind
from pydantic import ValidationError

from turboserve import logs
from turboserve.contracts.errors import InvalidInputError, TurboServeError
from turboserve.contracts.versions import SchemaVersionError
from turboserve.contracts.webhooks import TAKE_LIMIT, ReportDelivery, TakeDeliveries, TakenDelivery
from turboserve.service import Runtime
from turboserve.tasks import BackgroundTasks
from turboserve.telemetry import context_from, tracer, within
from turboserve.telemetry_names import SESSION, WEBHOOK, WEBHOOK_ATTEMPT, WEBHOOK_OUTCOME
from turboserve.webhook_subjects import REPORT_DELIVERY, TAKE_DELIVERIES
from turboserve.webhooks import metrics
from turboserve.webhooks.client import BlockedAddressError, SendError, WebhookClient
from turboserve.webhooks.core.payloads import payload
from turboserve.webhooks.core.signing import derive_key, signatures
from turboserve.webhooks.settings import Settings

REPORTS = 8
"""Maximum number of attempts to report an outcome. Then the claim ends, and the event is sent again."""
REPORT_RETRY_S = 0.25
STOP_S = 3.0
"""Time for attempts under way when the service stops, seconds. Others are made again by the next process."""
AGENT = "TurboServe-Webhooks/1"

log = logs.get("sender")
_trace = tracer("webhooks")


class Sender:
    """Attempts deliveries. Any number of senders may run; none keeps anything that others need."""

    def __init__(self, runtime: Runtime, settings: Settings, client: WebhookClient, master: bytes) -> None:
        self._bus, self._clock, self._settings = runtime.bus, runtime.clock, settings
        self._client, self._master = client, master
        self._wake = asyncio.Event()
        self._tasks = BackgroundTasks(lambda _task: self._wake.set())
        self._stopping = False
        self.reached = False
        """Whether the last request for deliveries was answered."""

    async def run(self) -> None:
        """Take and attempt deliveries until the service stops."""
        metrics.in_flight.add(self, lambda sender: sum(1 for _ in sender._tasks))
        while not self._stopping:
            self._wake.clear()
            taken = await self._take()
            for delivery in taken:
                self._tasks.create(self._attempt(delivery), f"deliver {delivery.event}")
            if not taken:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.webhook_poll_s):
                        await self._wake.wait()

    async def close(self) -> None:
        """Take no more deliveries, and wait a moment for the attempts under way."""
        self._stopping = True
        await self._tasks.wait(STOP_S)
        await self._tasks.stop()
        await self._client.close()

    async def _take(self) -> tuple[TakenDelivery, ...]:
        free = self._settings.webhook_sends - sum(1 for _ in self._tasks)
        if free <= 0:
            return ()
        try:
            found = await self._bus.call(TAKE_DELIVERIES, TakeDeliveries(limit=min(free, TAKE_LIMIT)))
        except TurboServeError as error:
            if self.reached:
                log.warning("deliveries not read", error=error.detail)
            self.reached = False
            return ()
        self.reached = True
        return found.deliveries

    async def _attempt(self, delivery: TakenDelivery) -> None:
        attributes = {WEBHOOK: delivery.webhook, WEBHOOK_ATTEMPT: delivery.attempt}
        if delivery.session is not None:
            attributes[SESSION] = delivery.session
        with (
            within(context_from(delivery.traceparent)),
            _trace.start_as_current_span(
                "deliver event", kind=SpanKind.CLIENT, attributes=attributes
            ) as span,
        ):
            outcome, report = await self._send(delivery)
            span.set_attribute(WEBHOOK_OUTCOME, outcome)
            await self._report(report)

    async def _send(self, delivery: TakenDelivery) -> tuple[str, ReportDelivery]:
        """Make one attempt. Returns its outcome for metrics, and the report."""
        began = self._clock.monotonic()
        status, error, retry_after_s = None, None, None
        try:
            body = payload(delivery)
            answer = await self._client.post(delivery.url, self._headers(delivery, body), body)
        except (SendError, InvalidInputError) as problem:
            blocked = isinstance(problem, BlockedAddressError | InvalidInputError)
            outcome, error = "blocked" if blocked else "failed", str(problem)
        except (ValidationError, SchemaVersionError):
            log.warning("event cannot be read", event_id=delivery.event, type=delivery.type)
            outcome, error = "failed", "this version of the service cannot read the event"
        except Exception:
            # Without a report, the event would be attempted at every end of a claim, without end.
            log.exception("attempt broken", event_id=delivery.event, webhook=delivery.webhook)
            outcome, error = "failed", "the attempt broke in the service itself"
        else:
            status, retry_after_s = answer.status, answer.retry_after_s
            outcome = "delivered" if 200 <= status < 300 else "refused"
            error = None if outcome == "delivered" else f"the receiver answered {status}"
        metrics.attempts.add(1, {WEBHOOK_OUTCOME: outcome})
        metrics.attempt_duration.record(self._clock.monotonic() - began, {WEBHOOK_OUTCOME: outcome})
        if outcome == "delivered" and delivery.attempt == 1:
            metrics.delivery_delay.record(max(0.0, self._clock.wall() - delivery.created_at))
        log.debug("attempt", webhook=delivery.webhook, event_id=delivery.event, outcome=outcome, error=error)
        report = ReportDelivery(
            claim=delivery.claim,
            webhook=delivery.webhook,
            event=delivery.event,
            status=status,
            error=error,
            retry_after_s=retry_after_s,
        )
        return outcome, report

    def _headers(self, delivery: TakenDelivery, body: bytes) -> dict[str, str]:
        keys = [derive_key(self._master, salt, delivery.webhook) for salt in delivery.salts]
        timestamp = int(self._clock.wall())
        return {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "user-agent": AGENT,
            "webhook-id": delivery.event,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signatures(keys, delivery.event, timestamp, body),
        }

    async def _report(self, report: ReportDelivery) -> None:
        for number in range(REPORTS):
            try:
                await self._bus.call(REPORT_DELIVERY, report)
                return
            except TurboServeError as error:
                log.debug("outcome not reported yet", event_id=report.event, error=error.detail)
                await asyncio.sleep(min(REPORT_RETRY_S * 2**number, 5.0))
        log.warning("outcome not reported: the event is sent again", event_id=report.event)
