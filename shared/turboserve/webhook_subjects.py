"""The part of `subjects` about webhooks."""

from __future__ import annotations

from turboserve.contracts import requests, webhooks
from turboserve.contracts.base import Contract
from turboserve.subject_types import Endpoint

_STORE = "state-store"
CREATE_WEBHOOK = Endpoint(
    "state.webhook.create", webhooks.CreateWebhook, webhooks.WebhookRecord, _STORE, ("gateway",)
)
GET_WEBHOOK = Endpoint("state.webhook.get", webhooks.WebhookRef, webhooks.WebhookRecord, _STORE, ("gateway",))
LIST_WEBHOOKS = Endpoint(
    "state.webhook.list", webhooks.ListWebhooks, webhooks.WebhookList, _STORE, ("gateway",)
)
CHANGE_WEBHOOK = Endpoint(
    "state.webhook.change", webhooks.ChangeWebhook, webhooks.WebhookRecord, _STORE, ("gateway",)
)
DELETE_WEBHOOK = Endpoint("state.webhook.delete", webhooks.WebhookRef, requests.Done, _STORE, ("gateway",))
ROTATE_SECRET = Endpoint(
    "state.webhook.rotate", webhooks.RotateSecret, webhooks.WebhookRecord, _STORE, ("gateway",)
)
LIST_DELIVERIES = Endpoint(
    "state.webhook.deliveries", webhooks.ListDeliveries, webhooks.DeliveryPage, _STORE, ("gateway",)
)
REDELIVER = Endpoint(
    "state.webhook.redeliver", webhooks.DeliveryRef, webhooks.DeliveryRecord, _STORE, ("gateway",)
)
SEND_TEST_EVENT = Endpoint(
    "state.webhook.test", webhooks.SendTestEvent, webhooks.DeliveryRecord, _STORE, ("gateway",)
)
TAKE_DELIVERIES = Endpoint(
    "state.webhook.take",
    webhooks.TakeDeliveries,
    webhooks.TakenDeliveries,
    _STORE,
    ("webhooks",),
    periodic=True,
)
REPORT_DELIVERY = Endpoint(
    "state.webhook.report", webhooks.ReportDelivery, requests.Done, _STORE, ("webhooks",)
)
DERIVE_SECRET = Endpoint(
    "webhooks.secret", webhooks.DeriveSecret, webhooks.WebhookSecret, "webhooks", ("gateway",)
)

ENDPOINTS: tuple[Endpoint[Contract, Contract], ...] = (  # type: ignore[assignment]
    CREATE_WEBHOOK,
    GET_WEBHOOK,
    LIST_WEBHOOKS,
    CHANGE_WEBHOOK,
    DELETE_WEBHOOK,
    ROTATE_SECRET,
    LIST_DELIVERIES,
    REDELIVER,
    SEND_TEST_EVENT,
    TAKE_DELIVERIES,
    REPORT_DELIVERY,
    DERIVE_SECRET,
)
