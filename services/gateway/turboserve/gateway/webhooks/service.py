"""Operations on webhooks. The text of a secret passes through this process once."""

from __future__ import annotations

from turboserve.bus import Bus
from turboserve.contracts.base import is_id
from turboserve.contracts.errors import ConflictError, NotFoundError
from turboserve.contracts.webhooks import (
    ChangeWebhook,
    CreateWebhook,
    DeliveryPage,
    DeliveryRecord,
    DeliveryRef,
    DeliveryState,
    DeriveSecret,
    ListDeliveries,
    ListWebhooks,
    RotateSecret,
    SendTestEvent,
    WebhookList,
    WebhookRecord,
    WebhookRef,
)
from turboserve.gateway.auth.access import Identity
from turboserve.gateway.repeats import digest, id_of, key_reused
from turboserve.gateway.webhooks.schemas import NewWebhook, WebhookChanges
from turboserve.ids import new_id, random_token
from turboserve.webhook_subjects import (
    CHANGE_WEBHOOK,
    CREATE_WEBHOOK,
    DELETE_WEBHOOK,
    DERIVE_SECRET,
    GET_WEBHOOK,
    LIST_DELIVERIES,
    LIST_WEBHOOKS,
    REDELIVER,
    ROTATE_SECRET,
    SEND_TEST_EVENT,
)

SALT_BYTES = 16


class TenantWebhooks:
    """Webhooks of tenants. All raise the typed errors of the state store and of the webhooks service."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def create(
        self, caller: Identity, request: NewWebhook, repeat: str | None
    ) -> tuple[WebhookRecord, str | None]:
        """Create a webhook. Returns its row and its secret.

        A repeat of the tenant with the same Idempotency-Key (`repeat`) creates no other webhook. Raises
        KeyReusedError if that was a different request, InvalidInputError, WebhookLimitError.
        """
        webhook = id_of("wh", caller.tenant, "id", repeat=repeat, purpose="webhook")
        salt = _salt(caller.tenant, webhook, repeat)
        # The secret first: nothing is created while no service could send, or if none sends to this URL.
        secret = await self._secret(webhook, salt, request.url)
        wanted = CreateWebhook(
            id=webhook,
            tenant=caller.tenant,
            url=request.url,
            types=tuple(request.types),
            label=request.label,
            salt=salt,
            created_by=caller.key_id,
        )
        try:
            record = await self._bus.call(CREATE_WEBHOOK, wanted)
        except ConflictError:
            if repeat is None:
                raise
            raise key_reused() from None
        return record, secret if record.salt == salt else None

    async def rotate(self, tenant: str, webhook: str, repeat: str | None) -> tuple[WebhookRecord, str | None]:
        """Use a new secret. Returns the row and the secret."""
        ref = _ref(tenant, webhook)
        salt = _salt(tenant, ref.webhook, repeat, "rotate")
        await self._bus.call(GET_WEBHOOK, ref)
        secret = await self._secret(ref.webhook, salt, None)
        record = await self._bus.call(
            ROTATE_SECRET, RotateSecret(webhook=ref.webhook, tenant=tenant, salt=salt)
        )
        return record, secret if record.salt == salt else None

    async def list(self, tenant: str) -> WebhookList:
        return await self._bus.call(LIST_WEBHOOKS, ListWebhooks(tenant=tenant))

    async def get(self, tenant: str, webhook: str) -> WebhookRecord:
        return await self._bus.call(GET_WEBHOOK, _ref(tenant, webhook))

    async def change(self, tenant: str, webhook: str, changes: WebhookChanges) -> WebhookRecord:
        """Change what the request names. Raises InvalidInputError for a URL that is never called."""
        ref = _ref(tenant, webhook)
        if changes.url is not None:
            before = await self._bus.call(GET_WEBHOOK, ref)
            await self._secret(ref.webhook, before.salt, changes.url)
        values = changes.model_dump() | ref.model_dump()
        return await self._bus.call(CHANGE_WEBHOOK, ChangeWebhook.model_validate(values))

    async def delete(self, tenant: str, webhook: str) -> None:
        await self._bus.call(DELETE_WEBHOOK, _ref(tenant, webhook))

    async def deliveries(
        self, tenant: str, webhook: str, state: DeliveryState | None, limit: int, after: int | None
    ) -> DeliveryPage:
        ref = _ref(tenant, webhook)
        wanted = ListDeliveries(webhook=ref.webhook, tenant=tenant, state=state, limit=limit, after=after)
        return await self._bus.call(LIST_DELIVERIES, wanted)

    async def redeliver(self, tenant: str, webhook: str, event: str) -> DeliveryRecord:
        ref = _ref(tenant, webhook)
        if not is_id(event):
            raise NotFoundError("this webhook has no such delivery", field="event")
        return await self._bus.call(REDELIVER, DeliveryRef(webhook=ref.webhook, tenant=tenant, event=event))

    async def test(self, tenant: str, webhook: str) -> DeliveryRecord:
        ref = _ref(tenant, webhook)
        wanted = SendTestEvent(webhook=ref.webhook, tenant=tenant, event=new_id("ev"))
        return await self._bus.call(SEND_TEST_EVENT, wanted)

    async def _secret(self, webhook: str, salt: str, url: str | None) -> str:
        found = await self._bus.call(DERIVE_SECRET, DeriveSecret(webhook=webhook, salt=salt, url=url))
        return found.secret.get_secret_value()


def _ref(tenant: str, webhook: str) -> WebhookRef:
    if not is_id(webhook):
        raise NotFoundError("there is no such webhook", field="webhook")
    return WebhookRef(webhook=webhook, tenant=tenant)


def _salt(tenant: str, webhook: str, repeat: str | None, purpose: str = "create") -> str:
    """Return a new salt; for a repeated request, the same one. Salts are not secret."""
    if repeat is None:
        return random_token(SALT_BYTES)
    return digest("webhook", tenant, purpose, webhook, repeat)[: 2 * SALT_BYTES]
