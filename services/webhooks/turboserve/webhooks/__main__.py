"""`python -m turboserve.webhooks`."""

from __future__ import annotations

import turboserve.program_start  # noqa: F401
from turboserve import service
from turboserve.webhooks import app
from turboserve.webhooks.client import WebhookClient
from turboserve.webhooks.settings import Settings

NAME = "webhooks"


def main() -> None:
    settings = service.load(NAME, Settings)
    if settings.webhook_key is None:
        service.refuse(NAME, ["TURBOSERVE_WEBHOOK_KEY: required, at least 16 random characters"])
    master = settings.webhook_key.get_secret_value().encode()
    try:
        client = WebhookClient(
            settings.address_rules,
            settings.webhook_timeout_s,
            settings.webhook_sends,
            settings.webhook_ca_file,
        )
    except OSError as error:
        service.refuse(NAME, [f"TURBOSERVE_WEBHOOK_CA_FILE: {error}"])

    async def start(runtime: service.Runtime) -> None:
        await app.start(runtime, settings, master, client)

    service.run(NAME, settings, start)


if __name__ == "__main__":
    main()
