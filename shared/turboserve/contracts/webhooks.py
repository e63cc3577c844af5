"""Webhooks: where a tenant's events are sent, what was sent, and the requests about both."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from turboserve.contracts.base import Contract, Count, Id, Note, Secret, Text, Traceparent, UnixSeconds
from turboserve.contracts.keys import Label, SaltText

WEBHOOKS_LIMIT = 20
"""Maximum number of webhooks of one tenant."""
TYPES_LIMIT = 32
URL_LIMIT = 2_048
TAKE_LIMIT = 32
BODY_LIMIT = 2**20
"""Maximum length of an event in a delivery, characters."""

WebhookUrl = Annotated[Text, Field(min_length=1, max_length=URL_LIMIT)]
EventType = Annotated[str, StringConstraints(pattern=r"^[a-z]{1,32}(\.[a-z_]{1,32})?$", max_length=65)]
EventFilter = Annotated[str, StringConstraints(pattern=r"^[a-z]{1,32}(\.([a-z_]{1,32}|\*))?$", max_length=65)]
"""A type of events, or all types of one kind: `prompt.*`."""
EventFilters = Annotated[tuple[EventFilter, ...], Field(max_length=TYPES_LIMIT)]
EventBody = Annotated[str, Field(max_length=BODY_LIMIT)]
HttpStatus = Annotated[int, Field(ge=100, le=999)]

TEST_TYPE = "webhook.test"
DISABLED_TYPE = "webhook.disabled"


class DeliveryState(StrEnum):
    """What became of a delivery."""

    WAITING = "waiting"
    """It waits for its first or next attempt, or is being sent."""
    DELIVERED = "delivered"
    """The receiver answered an attempt with a status of 200 to 299."""
    FAILED = "failed"
    """No further attempt follows."""


class WebhookRecord(Contract):
    """A row of `webhooks`. It has no secret: see `DeriveSecret`."""

    id: Id
    tenant: Id
    url: WebhookUrl
    types: EventFilters = ()
    """Types of the events that are sent. Empty: all types."""
    label: Label = ""
    enabled: bool = True
    disabled_reason: Note | None = None
    """Why the webhook is disabled. None: it is enabled."""
    salt: SaltText
    """The secret derives from it."""
    previous_salt: SaltText | None = None
    """Salt of the secret before the last rotation, which signs as well until `previous_until`."""
    previous_until: UnixSeconds | None = None
    failures: Count = 0
    """Failed attempts since the last successful one."""
    failing_since: UnixSeconds | None = None
    """When the first of these attempts failed. None: the last attempt succeeded, or there was none."""
    created_at: UnixSeconds
    created_by: Id | None = None
    """Id of the API key that created the webhook. None: the gateway needs no keys."""


class DeliveryRecord(Contract):
    """A row of `webhook_deliveries`, without the event itself."""

    webhook: Id
    event: Id
    """Id of the event: the `webhook-id` of every attempt."""
    type: EventType
    session: Id | None = None
    state: DeliveryState = DeliveryState.WAITING
    attempts: Count = 0
    created_at: UnixSeconds
    """Time of the event."""
    due_at: UnixSeconds
    """Earliest time of the next attempt."""
    attempted_at: UnixSeconds | None = None
    status: HttpStatus | None = None
    """Status of the last attempt's answer. None: there was no answer."""
    error: Note | None = None
    """Why the last attempt failed."""
    finished_at: UnixSeconds | None = None
    """None: the delivery waits."""


class CreateWebhook(Contract):
    """gateway → state store: create a webhook. Answered with `WebhookRecord`.

    A repeat with a known id and the same tenant, URL, types and label creates no second webhook.
    """

    id: Id
    """Chosen by the gateway."""
    tenant: Id
    url: WebhookUrl
    types: EventFilters = ()
    label: Label = ""
    salt: SaltText
    created_by: Id | None = None


class WebhookRef(Contract):
    """gateway → state store: read or delete a webhook of the tenant."""

    webhook: Id
    tenant: Id


class ListWebhooks(Contract):
    """gateway → state store: list the tenant's webhooks. Answered with `WebhookList`."""

    tenant: Id


class WebhookList(Contract):
    """Webhooks of one tenant, oldest first."""

    webhooks: tuple[WebhookRecord, ...]


class ChangeWebhook(WebhookRef):
    """gateway → state store: change a webhook. None: that stays. Answered with `WebhookRecord`."""

    url: WebhookUrl | None = None
    types: EventFilters | None = None
    label: Label | None = None
    enabled: bool | None = None


class RotateSecret(WebhookRef):
    """gateway → state store: use a new secret. Answered with `WebhookRecord`.

    The secret before it signs as well for a while. One before that signs no more.
    """

    salt: SaltText


class DeliveryRef(WebhookRef):
    """gateway → state store: send an event again. Answered with `DeliveryRecord`."""

    event: Id


class SendTestEvent(WebhookRef):
    """gateway → state store: send an event `webhook.test`. Answered with `DeliveryRecord`."""

    event: Id
    """Id of the event, chosen by the gateway. A repeat creates no second event."""


class ListDeliveries(WebhookRef):
    """gateway → state store: list deliveries, newest first. Answered with `DeliveryPage`."""

    state: DeliveryState | None = None
    limit: int = Field(default=100, ge=1, le=1_000)
    after: Count | None = None
    """The `next` of the previous page."""


class DeliveryPage(Contract):
    """One page of deliveries. `next` None: the last page."""

    deliveries: tuple[DeliveryRecord, ...]
    next: Count | None = None


class TakeDeliveries(Contract):
    """webhooks → state store: claim deliveries that are due. Answered with `TakenDeliveries`.

    Until the claim ends, no other sender gets them. A sender that dies leaves them to the next claim.
    """

    limit: int = Field(ge=1, le=TAKE_LIMIT)


class TakenDelivery(Contract):
    """A delivery that one sender attempts now."""

    claim: Id
    webhook: Id
    url: WebhookUrl
    salts: tuple[SaltText, ...] = Field(min_length=1, max_length=2)
    """Salts of the secrets that sign, newest first."""
    event: Id
    type: EventType
    session: Id | None = None
    attempt: Count
    """Number of the attempt: 1, 2, 3, …"""
    body: EventBody
    """The event as the log has it; of `webhook.…`: the data of the message, as JSON."""
    created_at: UnixSeconds
    traceparent: Traceparent | None = None


class TakenDeliveries(Contract):
    """Claimed deliveries."""

    deliveries: tuple[TakenDelivery, ...] = Field(default=(), max_length=TAKE_LIMIT)


class ReportDelivery(Contract):
    """webhooks → state store: the outcome of an attempt. Answered with `Done`. A repeat changes nothing."""

    claim: Id
    webhook: Id
    event: Id
    status: HttpStatus | None = None
    """Status of the answer. None: there was none."""
    error: Note | None = None
    """Why there was no answer."""
    retry_after_s: float | None = Field(default=None, ge=0, le=1e9)
    """Time after which the receiver asks for the next attempt, seconds."""


class DeriveSecret(Contract):
    """gateway → webhooks: check a URL and derive a webhook's secret. Answered with `WebhookSecret`.

    Refused with `invalid_input` if the service does not send to such a URL.
    """

    webhook: Id
    salt: SaltText
    url: WebhookUrl | None = None
    """None: check no URL."""


class WebhookSecret(Contract):
    """The secret of a webhook under a salt, as its receiver gets it: `whsec_…`."""

    secret: Annotated[Secret, Field(min_length=16, max_length=128)]
