"""Rows of webhooks and of their deliveries, as `tables` keeps them."""

from __future__ import annotations

from dataclasses import dataclass

from turboserve.contracts.webhooks import DeliveryRecord, WebhookRecord


@dataclass(frozen=True, slots=True)
class WebhookEntry:
    """A row of `webhooks`."""

    record: WebhookRecord
    number: int
    taken_at: float = 0.0


@dataclass(frozen=True, slots=True)
class DeliveryEntry:
    """A row of `webhook_deliveries`."""

    number: int
    record: DeliveryRecord
    body: str
    claim: str | None = None
    claimed_until: float | None = None
    traceparent: str | None = None

    @property
    def session(self) -> str | None:
        return self.record.session

    @property
    def attempts(self) -> int:
        return self.record.attempts
