"""Asks the gateways of `TURBOSERVE_GATEWAY_URLS` whether one of them can deliver, over HTTP."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

ASK_TIMEOUT_S = 0.5
MAX_ANSWER_BYTES = 64 * 1024


class OtherGateways:
    """The gateways of a list of addresses.

    The list may have addresses of the gateway that asks. It asks while its own broker is silent, so its own
    answer says that it cannot deliver.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = tuple(urls)
        # Threads of its own: a slow name server must not keep the threads that other work needs.
        self._threads = ThreadPoolExecutor(max(1, len(self._urls)), "other gateways")

    async def can_deliver(self) -> bool:
        """Ask all at once. Return whether one of them is ready and hears its broker."""
        loop = asyncio.get_running_loop()
        asked = [loop.run_in_executor(self._threads, delivers, url) for url in self._urls]
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                for answer in asyncio.as_completed(asked):
                    if await answer:
                        return True
        except TimeoutError:
            pass
        finally:
            for question in asked:
                question.cancel()
        return False


def delivers(url: str) -> bool:
    """Return whether the gateway at `url` answers that it is ready and hears its broker.

    Follows no redirect, and reads no long answer.
    """
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = connect(parts.hostname or "", parts.port, timeout=ASK_TIMEOUT_S)
    try:
        connection.request("GET", f"{parts.path}/readyz", headers={"Accept": "application/json"})
        response = connection.getresponse()
        body = response.read(MAX_ANSWER_BYTES + 1)
        return response.status == 200 and len(body) <= MAX_ANSWER_BYTES and _hears_its_broker(body)
    except (OSError, http.client.HTTPException, ValueError, RecursionError):
        return False
    finally:
        connection.close()


def _hears_its_broker(readiness: bytes) -> bool:
    """Return whether an answer of /readyz has the condition `delivery`, and no warning about it."""
    answer = json.loads(readiness)
    if not isinstance(answer, dict):
        return False
    checks, warnings = answer.get("checks"), answer.get("warnings")
    return (
        isinstance(checks, dict)
        and checks.get("delivery") is True
        and isinstance(warnings, dict)
        and "delivery" not in warnings
    )
