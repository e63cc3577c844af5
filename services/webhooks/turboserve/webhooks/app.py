"""Assembles the webhooks service and starts it in the service runner."""

from __future__ import annotations

from turboserve.service import Runtime
from turboserve.webhook_subjects import DERIVE_SECRET
from turboserve.webhooks.client import WebhookClient
from turboserve.webhooks.secrets import WebhookSecrets
from turboserve.webhooks.sender import Sender
from turboserve.webhooks.settings import Settings


async def start(runtime: Runtime, settings: Settings, master: bytes, client: WebhookClient) -> Sender:
    """Start the service. It is ready once the state store has answered."""
    sender = Sender(runtime, settings, client, master)
    runtime.check("deliveries", lambda: sender.reached)
    runtime.on_stop(sender.close)
    await runtime.bus.serve(DERIVE_SECRET, WebhookSecrets(master, settings.address_rules).derive)
    runtime.spawn(sender.run(), "deliveries")
    return sender
