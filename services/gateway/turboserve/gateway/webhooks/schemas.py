"""Schemas of webhooks and deliveries in REST requests and answers."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, Field

from turboserve.contracts.base import Text
from turboserve.contracts.keys import LABEL_LIMIT
from turboserve.contracts.public_events import SCHEMAS
from turboserve.contracts.webhooks import (
    DISABLED_TYPE,
    TYPES_LIMIT,
    URL_LIMIT,
    DeliveryPage,
    DeliveryRecord,
    DeliveryState,
    WebhookRecord,
)
from turboserve.gateway.public import PublicInput, PublicOutput, Timestamp

TYPES = (*(kind.model_fields["type"].default for kind in SCHEMAS), DISABLED_TYPE)
"""Types of events that a webhook may ask for."""
FILTERS = frozenset((*TYPES, *(f"{name.partition('.')[0]}.*" for name in TYPES)))


def _known(name: str) -> str:
    if name not in FILTERS:
        raise ValueError(f"must be one of {', '.join(sorted(FILTERS))}")
    return name


Filter = Annotated[str, Field(max_length=65), AfterValidator(_known)]
_Url = Annotated[Text, Field(min_length=1, max_length=URL_LIMIT)]
_Types = Annotated[list[Filter], Field(max_length=TYPES_LIMIT)]
_Label = Annotated[Text, Field(max_length=LABEL_LIMIT)]


class NewWebhook(PublicInput):
    """A webhook to create."""

    url: _Url = Field(
        description="Where events are sent: `https://`, of a host with a public address.",
        examples=["https://hooks.example.com/turboserve"],
    )
    types: _Types = Field(
        default_factory=list,
        description="Types of the events that are sent, as in the event reference, `KIND.*` for all of a "
        "kind, and `webhook.disabled` for other webhooks of the tenant. Empty: all types.",
        examples=[["session.*", "prompt.applied"]],
    )
    label: _Label = Field("", description="A text for people.", examples=["billing"])


class WebhookChanges(PublicInput):
    """What to change of a webhook. What the request leaves out stays."""

    url: _Url | None = Field(
        None, description="Where events are sent.", examples=["https://hooks.example.com/v2"]
    )
    types: _Types | None = Field(
        None, description="Types of the events that are sent.", examples=[["session.*"]]
    )
    label: _Label | None = Field(None, description="A text for people.", examples=["billing"])
    enabled: bool | None = Field(
        None,
        description="`false`: send nothing, and give up what waits. `true`: send events from now on, and "
        "forget earlier failures.",
        examples=[True],
    )


class Webhook(PublicOutput):
    """A webhook without its secret."""

    id: str = Field(description="Id of the webhook.", examples=["wh_5f3a9c"])
    url: str = Field(description="Where events are sent.", examples=["https://hooks.example.com/turboserve"])
    types: list[str] = Field(
        description="Types of the events that are sent. Empty: all.", examples=[["session.*"]]
    )
    label: str = Field(description="A text for people.", examples=["billing"])
    enabled: bool = Field(description="Whether events are sent.", examples=[True])
    disabled_reason: str | None = Field(
        description="Why the webhook is disabled. `null`: it is enabled.",
        examples=["the receiver answered 410 Gone"],
    )
    failures: int = Field(description="Failed attempts since the last successful one.", examples=[0])
    failing_since: Timestamp | None = Field(description="When the first of them failed. `null`: none has.")
    previous_until: Timestamp | None = Field(
        description="Until when the secret before the last rotation signs as well. `null`: there is none."
    )
    created_at: Timestamp = Field(description="When the webhook was created.")
    created_by: str | None = Field(
        description="Id of the API key that created the webhook. `null`: the gateway needs no keys.",
        examples=["2d06c5c4a1b2c3d4"],
    )

    @classmethod
    def of(cls, record: WebhookRecord) -> Self:
        return cls.model_validate(record.model_dump())


class WebhookText(Webhook):
    """A webhook with its new secret."""

    secret: str | None = Field(
        description="The secret that signs, as Standard Webhooks has it. It is not shown again. `null`: this "
        "is a repeat, and the secret was rotated since.",
        examples=["whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"],
    )

    @classmethod
    def with_secret(cls, record: WebhookRecord, secret: str | None) -> Self:
        return cls.model_validate({**record.model_dump(), "secret": secret})


class WebhookRecords(PublicOutput):
    """The tenant's webhooks, oldest first."""

    webhooks: list[Webhook] = Field(description="The webhooks, disabled ones too.")


class Delivery(PublicOutput):
    """One event, and what became of its delivery."""

    event: str = Field(
        description="Id of the event: the header `webhook-id` of every attempt.", examples=["ev_0f4c2b9d"]
    )
    type: str = Field(description="Type of the event.", examples=["prompt.applied"])
    session: str | None = Field(description="The session. `null`: of no session.", examples=["ses_5f3a9c"])
    state: DeliveryState = Field(
        description="`waiting` for the first or next attempt, `delivered`, or `failed` for good.",
        examples=["waiting"],
    )
    attempts: int = Field(description="Attempts so far.", examples=[2])
    created_at: Timestamp = Field(description="When the event happened.")
    next_attempt_at: Timestamp | None = Field(
        description="Earliest time of the next attempt. `null`: there is none."
    )
    attempted_at: Timestamp | None = Field(description="When the last attempt ended. `null`: there was none.")
    status: int | None = Field(
        description="HTTP status of the last answer. `null`: there was no answer.", examples=[500]
    )
    error: str | None = Field(
        description="Why the last attempt failed.", examples=["the receiver answered 500"]
    )
    finished_at: Timestamp | None = Field(description="When the delivery ended. `null`: it waits.")

    @classmethod
    def of(cls, record: DeliveryRecord) -> Self:
        waits = record.state is DeliveryState.WAITING
        return cls.model_validate(
            {**record.model_dump(), "next_attempt_at": record.due_at if waits else None}
        )


class DeliveryList(PublicOutput):
    """A page of deliveries, newest first."""

    deliveries: list[Delivery] = Field(description="The deliveries.")
    next: int | None = Field(
        description="Value of `after` for the next page. `null`: this is the last page.", examples=[1024]
    )

    @classmethod
    def of(cls, page: DeliveryPage) -> Self:
        return cls(deliveries=[Delivery.of(record) for record in page.deliveries], next=page.next)
