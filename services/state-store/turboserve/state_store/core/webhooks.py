"""Rules of webhooks: when deliveries are attempted, in which order, and when a webhook is disabled.

No I/O, no clock, no randomness: `now` is Unix seconds, `jitter` is from 0 to 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from turboserve.contracts.errors import ConflictError, WebhookLimitError
from turboserve.contracts.webhooks import (
    WEBHOOKS_LIMIT,
    ChangeWebhook,
    CreateWebhook,
    DeliveryRecord,
    DeliveryState,
    ReportDelivery,
    RotateSecret,
    WebhookRecord,
)

RETRY_AFTER_S = (5.0, 30.0, 120.0, 600.0, 1_800.0, 3_600.0, 7_200.0, 14_400.0, 21_600.0, 36_000.0)
"""Time between one attempt and the next, seconds: eleven attempts in about a day."""
JITTER = 0.2
"""Each time is longer or shorter by up to this share, so that deliveries that failed together spread."""
ATTEMPTS = len(RETRY_AFTER_S) + 1
ORDERED_ATTEMPTS = 4
"""Failed attempts after which a delivery no longer holds back the later ones of its session."""
ASKED_S = 3_600.0
"""Maximum time by which an answer's `Retry-After` delays the next attempt, seconds."""
DISABLE_FAILURES = 20
"""Minimum number of failed attempts in a row before a webhook is disabled."""
GONE = 410


class _Queued(Protocol):
    """What the order needs to know of a delivery that waits."""

    @property
    def number(self) -> int: ...
    @property
    def session(self) -> str | None: ...
    @property
    def attempts(self) -> int: ...


@dataclass(frozen=True)
class WebhookRules:
    """Limits of the deployment."""

    concurrency: int = 8
    """Maximum number of attempts to one webhook at the same time."""
    tenant_concurrency: int = 24
    """Maximum number of attempts to all webhooks of a tenant at the same time."""
    overlap_s: float = 86_400.0
    """Time for which the secret before the last rotation signs as well, seconds."""
    disable_after_s: float = 172_800.0
    """A webhook is disabled when no attempt has succeeded for this long, seconds."""

    def created(self, request: CreateWebhook, count: int, now: float) -> WebhookRecord:
        """Return the row of a new webhook of a tenant with `count` webhooks. Raises WebhookLimitError."""
        if count >= WEBHOOKS_LIMIT:
            raise WebhookLimitError(
                f"this tenant has {count} webhooks, at most {WEBHOOKS_LIMIT} are allowed",
                field="tenant",
                limit=WEBHOOKS_LIMIT,
            )
        return WebhookRecord.model_validate(request.model_dump() | {"created_at": now})

    def rotated(self, record: WebhookRecord, request: RotateSecret, now: float) -> WebhookRecord:
        """Return the row with a new secret. A repeat changes nothing."""
        if request.salt == record.salt:
            return record
        return record.model_copy(
            update={
                "salt": request.salt,
                "previous_salt": record.salt,
                "previous_until": now + self.overlap_s,
            }
        )

    def places(self, record: WebhookRecord, in_flight: int) -> int:
        """Return how many further deliveries may be attempted now.

        A webhook whose last attempt failed gets one attempt at a time, so that dead receivers take few of the
        places that all webhooks share.
        """
        most = 1 if record.failures else self.concurrency
        return max(0, most - in_flight) if record.enabled else 0

    def shared(self, tenants: Iterable[str], in_flight: Mapping[str, int]) -> Iterator[bool]:
        """Yield whether each of the deliveries, in their order, may be attempted now.

        `tenants` has the tenant of each. `in_flight` counts the attempts of each tenant that run already.
        """
        attempts = Counter(in_flight)
        for tenant in tenants:
            fits = attempts[tenant] < self.tenant_concurrency
            attempts[tenant] += fits
            yield fits

    def attempted(
        self,
        record: WebhookRecord,
        delivery: DeliveryRecord,
        report: ReportDelivery,
        now: float,
        jitter: float,
    ) -> tuple[WebhookRecord, DeliveryRecord]:
        """Return both rows after an attempt of a delivery that waits."""
        made = {
            "attempts": delivery.attempts + 1,
            "attempted_at": now,
            "status": report.status,
            "error": report.error,
        }
        if report.status is not None and 200 <= report.status < 300:
            healthy = record.model_copy(update={"failures": 0, "failing_since": None})
            made |= {"state": DeliveryState.DELIVERED, "finished_at": now, "error": None}
            return healthy, delivery.model_copy(update=made)
        since = now if record.failing_since is None else record.failing_since
        failing = record.model_copy(update={"failures": record.failures + 1, "failing_since": since})
        reason = self._disables(failing, report.status, now)
        if reason is not None:
            failing = disabled(failing, reason)
        if reason is not None or delivery.attempts + 1 >= ATTEMPTS:
            made |= {"state": DeliveryState.FAILED, "finished_at": now}
        else:
            made["due_at"] = now + delay_s(delivery.attempts + 1, jitter, report.retry_after_s)
        return failing, delivery.model_copy(update=made)

    def _disables(self, record: WebhookRecord, status: int | None, now: float) -> str | None:
        """Return why the webhook is to be disabled after a failed attempt; None if it is not."""
        if status == GONE:
            return "the receiver answered 410 Gone"
        if record.failing_since is None or record.failures < DISABLE_FAILURES:
            return None
        failing_s = now - record.failing_since
        if failing_s < self.disable_after_s:
            return None
        return f"{record.failures} attempts in a row failed within {failing_s / 3_600:.1f} hours"


def delay_s(attempts: int, jitter: float, asked_s: float | None = None) -> float:
    """Return the time until the next attempt after `attempts` failed ones, seconds.

    `asked_s`: the receiver's own wish.
    """
    own = RETRY_AFTER_S[min(attempts, len(RETRY_AFTER_S)) - 1] * (1.0 + JITTER * (2.0 * jitter - 1.0))
    return own if asked_s is None else max(own, min(asked_s, ASKED_S))


def disabled(record: WebhookRecord, reason: str) -> WebhookRecord:
    return record.model_copy(update={"enabled": False, "disabled_reason": reason})


def changed(record: WebhookRecord, request: ChangeWebhook) -> WebhookRecord:
    """Return the row after a user's change. Another URL, and enabling, forget the failures."""
    fields = ("url", "types", "label")
    update: dict[str, Any] = {name: value for name in fields if (value := getattr(request, name)) is not None}
    if update.get("url", record.url) != record.url:
        update |= {"failures": 0, "failing_since": None}
    after = record.model_copy(update=update)
    if request.enabled is None or request.enabled == record.enabled:
        return after
    if not request.enabled:
        return disabled(after, "disabled by its tenant")
    fresh = {"enabled": True, "disabled_reason": None, "failures": 0, "failing_since": None}
    return after.model_copy(update=fresh)


def repeated(found: WebhookRecord, request: CreateWebhook) -> WebhookRecord:
    """Return the row that has the request's id. Raises ConflictError if another request created it."""
    wanted = request.model_dump(include={"tenant", "url", "types", "label"})
    if any(getattr(found, name) != value for name, value in wanted.items()):
        raise ConflictError(f"the webhook id {request.id} is taken", field="id")
    return found


def holds_back(earlier: _Queued, later: _Queued) -> bool:
    """Return whether a delivery that waits holds back another one of its webhook.

    Events of one session are sent one after the other, until one of them has failed `ORDERED_ATTEMPTS` times.
    """
    return (
        earlier.session is not None
        and earlier.session == later.session
        and earlier.number < later.number
        and earlier.attempts < ORDERED_ATTEMPTS
    )


def signing_salts(record: WebhookRecord, now: float) -> tuple[str, ...]:
    """Return the salts of the secrets that sign at this time, newest first."""
    if record.previous_salt is None or record.previous_until is None or record.previous_until <= now:
        return (record.salt,)
    return record.salt, record.previous_salt


def redelivered(delivery: DeliveryRecord, now: float) -> DeliveryRecord:
    """Return a delivery that begins anew. One that waits is only due at once."""
    if delivery.state is DeliveryState.WAITING:
        return delivery.model_copy(update={"due_at": min(delivery.due_at, now)})
    fresh = {"state": DeliveryState.WAITING, "attempts": 0, "due_at": now, "finished_at": None}
    return delivery.model_copy(update=fresh)


def wants(types: tuple[str, ...], event: str) -> bool:
    """Return whether a webhook with these filters gets an event of this type."""
    return not types or event in types or f"{event.partition('.')[0]}.*" in types
