"""Derives the secrets of webhooks for gateways, which show each once."""

from __future__ import annotations

from pydantic import SecretStr

from turboserve.contracts.webhooks import DeriveSecret, WebhookSecret
from turboserve.subject_types import Caller
from turboserve.webhooks.core.addresses import AddressRules
from turboserve.webhooks.core.signing import derive_key, secret_text


class WebhookSecrets:
    """The endpoint `webhooks.secret`. Only this service has the master key."""

    def __init__(self, master: bytes, rules: AddressRules) -> None:
        self._master, self._rules = master, rules

    async def derive(self, request: DeriveSecret, _caller: Caller) -> WebhookSecret:
        """Check the URL, and return the secret. Raises InvalidInputError."""
        if request.url is not None:
            self._rules.parse(request.url)
        key = derive_key(self._master, request.salt, request.webhook)
        return WebhookSecret(secret=SecretStr(secret_text(key)))
