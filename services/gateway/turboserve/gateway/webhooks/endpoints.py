"""REST: /v1/webhooks."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Response
from starlette.requests import HTTPConnection

from turboserve.contracts.keys import Scope
from turboserve.contracts.webhooks import DeliveryState
from turboserve.gateway.audit.recorder import AuditedRoute
from turboserve.gateway.auth.middleware import Caller, Tenant, needs
from turboserve.gateway.paging import AfterNumber
from turboserve.gateway.problems.schemas import BODY, problems
from turboserve.gateway.sessions.parameters import idempotency_header
from turboserve.gateway.webhooks.schemas import (
    Delivery,
    DeliveryList,
    NewWebhook,
    Webhook,
    WebhookChanges,
    WebhookRecords,
    WebhookText,
)
from turboserve.gateway.webhooks.service import TenantWebhooks


def _service_of(connection: HTTPConnection) -> TenantWebhooks:
    found: TenantWebhooks = connection.app.state.gateway.webhooks
    return found


router = APIRouter(prefix="/v1/webhooks", tags=["webhooks"], route_class=AuditedRoute)

Service = Annotated[TenantWebhooks, Depends(_service_of)]
WebhookId = Annotated[str, Path(description="Id of the webhook.", examples=["wh_5f3a9c"])]
EventId = Annotated[str, Path(description="Id of the event.", examples=["ev_0f4c2b9d"])]
RepeatWebhook = Annotated[
    str | None,
    idempotency_header(
        "a second request with the same key changes nothing and gets the same secret. The same key with "
        "another request is refused.",
        alias="Idempotency-Key",
    ),
]
LOCATION = {"headers": {"Location": {"schema": {"type": "string"}, "description": "Path of the webhook."}}}
_ALLOWED = [needs(Scope.WEBHOOKS_WRITE)]


@router.post(
    "",
    dependencies=_ALLOWED,
    operation_id="create_webhook",
    status_code=201,
    summary="Create a webhook",
    description="Events of all sessions of the tenant are sent to it, from now on. Only this answer has the "
    "secret.",
    responses={201: LOCATION, **problems(*BODY, 401, 409)},
)
async def create(
    body: NewWebhook, response: Response, caller: Caller, webhooks: Service, repeat: RepeatWebhook = None
) -> WebhookText:
    record, secret = await webhooks.create(caller, body, repeat)
    response.headers["Location"] = f"/v1/webhooks/{record.id}"
    response.headers["Cache-Control"] = "no-store"
    return WebhookText.with_secret(record, secret)


@router.get(
    "",
    dependencies=_ALLOWED,
    operation_id="list_webhooks",
    summary="List the webhooks of the tenant",
    description="At most 20, without their secrets.",
    responses=problems(401),
)
async def list_webhooks(tenant: Tenant, webhooks: Service) -> WebhookRecords:
    found = await webhooks.list(tenant)
    return WebhookRecords(webhooks=[Webhook.of(record) for record in found.webhooks])


@router.get(
    "/{webhook}",
    dependencies=_ALLOWED,
    operation_id="get_webhook",
    summary="Read a webhook",
    description="The webhook without its secret, which is not stored.",
    responses=problems(401, 404),
)
async def read(webhook: WebhookId, tenant: Tenant, webhooks: Service) -> Webhook:
    return Webhook.of(await webhooks.get(tenant, webhook))


@router.patch(
    "/{webhook}",
    dependencies=_ALLOWED,
    operation_id="change_webhook",
    summary="Change, disable or enable a webhook",
    description="Sets what the request has. What waits is sent to the new URL. A repeat changes nothing.",
    responses=problems(*BODY, 401, 404),
)
async def change(webhook: WebhookId, body: WebhookChanges, tenant: Tenant, webhooks: Service) -> Webhook:
    return Webhook.of(await webhooks.change(tenant, webhook, body))


@router.delete(
    "/{webhook}",
    dependencies=_ALLOWED,
    operation_id="delete_webhook",
    status_code=204,
    summary="Delete a webhook",
    description="With its deliveries. An attempt that is under way may still arrive.",
    responses=problems(401, 404),
)
async def delete(webhook: WebhookId, tenant: Tenant, webhooks: Service) -> None:
    await webhooks.delete(tenant, webhook)


@router.post(
    "/{webhook}/secret",
    dependencies=_ALLOWED,
    operation_id="rotate_webhook_secret",
    summary="Rotate the secret of a webhook",
    description="Only this answer has the new secret. For a day, messages have signatures of both.",
    responses=problems(401, 404, 422),
)
async def rotate(
    webhook: WebhookId, response: Response, tenant: Tenant, webhooks: Service, repeat: RepeatWebhook = None
) -> WebhookText:
    record, secret = await webhooks.rotate(tenant, webhook, repeat)
    response.headers["Cache-Control"] = "no-store"
    return WebhookText.with_secret(record, secret)


@router.post(
    "/{webhook}/test",
    dependencies=_ALLOWED,
    operation_id="test_webhook",
    status_code=202,
    summary="Send a test event",
    description="Sends an event of the type `webhook.test`, which no filter holds back. Its delivery has the "
    "outcome.",
    responses=problems(401, 404, 409),
)
async def send_test_event(webhook: WebhookId, tenant: Tenant, webhooks: Service) -> Delivery:
    return Delivery.of(await webhooks.test(tenant, webhook))


@router.get(
    "/{webhook}/deliveries",
    dependencies=_ALLOWED,
    operation_id="list_webhook_deliveries",
    summary="List the deliveries of a webhook, newest first",
    description="What waits, and what has ended within the last days, by page.",
    responses=problems(401, 404, 422),
)
async def list_deliveries(
    webhook: WebhookId,
    tenant: Tenant,
    webhooks: Service,
    state: Annotated[
        DeliveryState | None, Query(description="Only deliveries in this state.", examples=["failed"])
    ] = None,
    limit: Annotated[
        int, Query(ge=1, le=1_000, description="Maximum number of deliveries on the page.", examples=[100])
    ] = 100,
    after: AfterNumber = None,
) -> DeliveryList:
    return DeliveryList.of(await webhooks.deliveries(tenant, webhook, state, limit, after))


@router.post(
    "/{webhook}/deliveries/{event}/redeliver",
    dependencies=_ALLOWED,
    operation_id="redeliver_webhook_event",
    status_code=202,
    summary="Send an event again",
    description="Under its id, so that receivers recognize what they have. The attempts count anew; a "
    "delivery that waits is only due at once.",
    responses=problems(401, 404, 409),
)
async def redeliver(webhook: WebhookId, event: EventId, tenant: Tenant, webhooks: Service) -> Delivery:
    return Delivery.of(await webhooks.redeliver(tenant, webhook, event))
