"""Shows the first key with the scope `admin` of a stack whose API keys are in the database."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from turboserve.cli.supervisor.logs import LogHub
from turboserve.config import Settings
from turboserve.contracts.errors import TurboServeError
from turboserve.gateway.keys.first import UNCONFIRMED, ensure

if TYPE_CHECKING:
    import httpx


FIRST_LOOK_S = 0.1
"""Time after the creation in which gateways usually learn of a key, seconds."""
LOOK_S = 0.5
"""Interval of later requests. Each one with an unknown key counts as a failure of this address."""
ACCEPTED_S = 10.0
"""Time in which all gateways accept a new key, seconds. They read keys at least every two seconds."""
NOT_ACCEPTED = frozenset({401, 429})
"""Answers to a key that a gateway does not know."""


class FirstKeyTask:
    """Creates the key if there is none. The text goes to the console only: no log file has it."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(
        self, settings: Settings, urls: Sequence[str], hub: LogHub, log_format: Literal["text", "json"]
    ) -> None:
        """Begin in the running loop. `urls`: the gateways that must accept the key before it is shown."""
        self._task = asyncio.get_running_loop().create_task(_show(settings, urls, hub, log_format))


async def wait_until_accepted(urls: Sequence[str], key: str) -> bool:
    """Wait until every gateway accepts `key`, at most `ACCEPTED_S` seconds. Returns whether they do."""
    # Only a first start needs it.
    import httpx

    try:
        # Gateways of this machine, which no proxy reaches.
        client = httpx.AsyncClient(timeout=ACCEPTED_S, trust_env=False)
        async with asyncio.timeout(ACCEPTED_S), client as http:
            await asyncio.sleep(FIRST_LOOK_S)
            await asyncio.gather(*(_wait_until_accepted(http, url, key) for url in urls))
    except TimeoutError:
        return False
    return True


async def _wait_until_accepted(http: httpx.AsyncClient, url: str, key: str) -> None:
    from httpx import HTTPError

    headers = {"Authorization": f"Bearer {key}"}
    while True:
        # The supervisor restarts a gateway that is gone.
        with suppress(HTTPError):
            answer = await http.get(f"{url}/v1/models", headers=headers)
            if not answer.is_server_error and answer.status_code not in NOT_ACCEPTED:
                return
        await asyncio.sleep(LOOK_S)


async def _show(
    settings: Settings, urls: Sequence[str], hub: LogHub, log_format: Literal["text", "json"]
) -> None:
    try:
        found = await ensure(settings)
    except TurboServeError as error:
        hub.log("no admin key: start the stack again", "warning", error=error.detail)
        return
    if found.text is None:
        hub.log("admin key", id=found.id)
        hub.plain(f"  The key {found.id} has the scope admin. Its text is not stored.\n")
        return
    if await wait_until_accepted(urls, found.text):
        found = replace(found, confirmed=True)
    elif found.confirmed:
        hub.log("not every gateway accepts the admin key yet", "warning", id=found.id)
    if found.confirmed:
        hub.log("admin key created", id=found.id)
    else:
        hub.log("admin key not confirmed", "warning", id=found.id, error=UNCONFIRMED)
    # Not through the log: no file may have the text.
    if log_format == "json":
        shown = {"event": "admin key", "id": found.id, "key": found.text, "confirmed": found.confirmed}
        print(json.dumps(shown), flush=True)
    else:
        print(f"  The first key, with the scope admin, is shown only once:\n\n  {found.text}\n", flush=True)
