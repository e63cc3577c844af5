"""Shows the first key with the scope `admin` of a stack whose API keys are in the database."""

from __future__ import annotations

import asyncio
import json
from typing import Literal

from turboserve.cli.supervisor.logs import LogHub
from turboserve.config import Settings
from turboserve.contracts.errors import TurboServeError
from turboserve.gateway.keys.first import UNCONFIRMED, ensure


class FirstKeyTask:
    """Creates the key if there is none. The text goes to the console only: no log file has it."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self, settings: Settings, hub: LogHub, log_format: Literal["text", "json"]) -> None:
        """Begin in the running loop."""
        self._task = asyncio.get_running_loop().create_task(_show(settings, hub, log_format))


async def _show(settings: Settings, hub: LogHub, log_format: Literal["text", "json"]) -> None:
    try:
        found = await ensure(settings)
    except TurboServeError as error:
        hub.log("no admin key: start the stack again", "warning", error=error.detail)
        return
    if found.text is None:
        hub.log("admin key", id=found.id)
        hub.plain(f"  The key {found.id} has the scope admin. Its text is not stored.\n")
        return
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
