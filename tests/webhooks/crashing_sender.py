"""The service as a process that kills itself at one point: `python crashing_sender.py`.

The points are inserted here, from outside: the service itself has none. `CRASH` is the point.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from turboserve.webhooks.__main__ import main
from turboserve.webhooks.client import WebhookClient
from turboserve.webhooks.sender import Sender

Work = Callable[..., Awaitable[Any]]

POINTS: dict[str, tuple[type, str, bool]] = {
    "after the claim": (Sender, "_take", True),
    "before the message": (WebhookClient, "post", False),
    "after the answer": (WebhookClient, "post", True),
    "before the report": (Sender, "_report", False),
    "after the report": (Sender, "_report", True),
}
"""Point → class, method, whether the process dies after the call."""


def crash_at(point: str) -> None:
    owner, method, after = POINTS[point]
    work: Work = getattr(owner, method)

    async def run(*args: Any, **options: Any) -> Any:
        if not after:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = await work(*args, **options)
        # Requests for deliveries are answered without any, too.
        if answer or method != "_take":
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(owner, method, run)


if __name__ == "__main__":
    wanted = os.environ.get("CRASH")
    if wanted:
        crash_at(wanted)
    main()
