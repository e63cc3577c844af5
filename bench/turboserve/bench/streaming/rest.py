"""Calls of the gateway's REST API."""

from __future__ import annotations

from typing import Any

import httpx

from turboserve.bench.streaming.problems import ProblemError, json_of

REQUEST_S = 10.0
LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=2.0)
"""A connection that is idle for longer is not used again. A gateway with a short `TURBOSERVE_KEEP_ALIVE_S`
closes it: a request in that moment would end with ReadError."""


async def request(api: httpx.AsyncClient, method: str, path: str, **more: Any) -> dict[str, Any]:
    """Make one call of the REST API and return its JSON. Raises ProblemError."""
    answer = await api.request(method, path, timeout=REQUEST_S, **more)
    if answer.is_error:
        raise ProblemError(answer.status_code, json_of(answer.content))
    body: dict[str, Any] = answer.json() if answer.content else {}
    return body
