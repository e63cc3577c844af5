"""The repository of webhooks and their deliveries. For its errors, see `ports.sessions`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from turboserve.contracts.webhooks import DeliveryPage, DeliveryRecord, ListDeliveries, WebhookRecord
from turboserve.state_store.ports.records import DueDelivery, WebhookPurge

PURGE_ROWS = 2_000
"""Maximum number of deliveries that one statement deletes or ends, so that it ends in time."""

GIVEN_UP = "more deliveries wait for this webhook than are kept"
"""Error of a delivery that `WebhookRepository.purge` ends."""
WEBHOOK_FIXED = frozenset({"id", "tenant", "created_at", "created_by"})
"""Fields of a webhook that never change."""


class WebhookRepository(Protocol):
    async def lock(self) -> None:
        """Exclude other transactions that create webhooks."""

    async def get(self, webhook: str, *, lock: bool = False) -> WebhookRecord | None: ...

    async def of_tenant(self, tenant: str) -> list[WebhookRecord]:
        """Return the tenant's webhooks, oldest first."""

    async def insert(self, record: WebhookRecord) -> None:
        """Insert a webhook. Raises ConflictError if its id exists."""

    async def write(self, record: WebhookRecord) -> None:
        """Write what changes of a webhook; the caller holds its lock."""

    async def delete(self, webhook: str) -> None:
        """Delete a webhook and at most `PURGE_ROWS` of its deliveries. `purge` deletes the others."""

    async def deliver(self, record: DeliveryRecord, body: str) -> None:
        """Insert a delivery. The outbox inserts those of events. A known event changes nothing."""

    async def delivery(self, webhook: str, event: str) -> tuple[DeliveryRecord, str | None] | None:
        """Lock a delivery. Returns it and its claim."""

    async def write_delivery(self, record: DeliveryRecord) -> None:
        """Write the outcome of an attempt, and end the claim; the caller holds the webhook's lock."""

    async def page(self, request: ListDeliveries) -> DeliveryPage: ...

    async def ready(self, now: float, limit: int) -> list[WebhookRecord]:
        """Lock at most `limit` enabled webhooks with deliveries that are due and not claimed.

        Those come first that had their turn the longest time ago. Skips webhooks that another transaction
        has locked.
        """

    async def turn(self, names: Sequence[str], now: float) -> None:
        """Note that these webhooks had their turn; the caller holds their locks."""

    async def lock_tenants(self, tenants: Collection[str]) -> None:
        """Exclude other transactions that count the attempts of these tenants and then claim deliveries."""

    async def claimed(self, tenants: Collection[str], now: float) -> dict[str, dict[str, int]]:
        """Return how many deliveries senders attempt now, for each of these tenants by webhook.

        Webhooks without any are absent.
        """

    async def due(self, places: Sequence[tuple[str, int]], now: float) -> list[DueDelivery]:
        """Return deliveries that are due, not claimed and not held back: see `core.webhooks.holds_back`.

        `places`: for each webhook, the maximum number. The first of each webhook come first, in the order of
        `places`, then the second ones.
        """

    async def claim(self, numbers: Sequence[int], claim: str, until: float, now: float) -> None:
        """Give deliveries that wait to a sender until this time, and note that their webhooks had a turn."""

    async def give_up(self, webhook: str, reason: str, now: float) -> None:
        """End all deliveries of a webhook that wait."""

    async def purge(self, before: float, backlog: int, now: float) -> WebhookPurge:
        """Delete finished deliveries from before this time, and deliveries of deleted webhooks.

        Of the deliveries of one webhook that wait, the newest `backlog` stay; the others end. One call
        deletes or ends about `PURGE_ROWS` rows, and skips what another transaction has locked. It has more
        to do if one of the numbers is `PURGE_ROWS` or greater.
        """
