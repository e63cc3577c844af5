"""Traces that an OTLP receiver got from a stack: requests that begin one, and what a test looks for in it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

import httpx

from tests.helpers.otlp_receiver import ReceivedSpan

LIMIT_S = 180.0
SESSION = "turboserve.session.id"


class Client:
    """A client with trace contexts of its own."""

    def __init__(self) -> None:
        self.trace, self.span = secrets.token_hex(16), secrets.token_hex(8)

    @property
    def headers(self) -> dict[str, str]:
        return {"traceparent": f"00-{self.trace}-{self.span}-01"}

    async def post(self, api: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request until a service has time for it. All attempts are one trace."""
        headers = {**self.headers, "Idempotency-Key": self.trace}
        async with asyncio.timeout(LIMIT_S):
            while (answer := await api.post(path, json=body, headers=headers)).status_code >= 500:
                await asyncio.sleep(0.5)
        assert answer.is_success, answer.text
        found: dict[str, Any] = answer.json()
        return found


def named(spans: Sequence[ReceivedSpan], service: str, name: str) -> list[ReceivedSpan]:
    return [span for span in spans if span.service == f"turboserve-{service}" and span.name == name]


def connected(spans: Sequence[ReceivedSpan], client: Client) -> bool:
    """Whether each span's parent is a span of the trace, or the client's own."""
    ids = {span.id for span in spans} | {client.span}
    return all(span.parent in ids for span in spans)


def about(spans: Sequence[ReceivedSpan], session: str) -> None:
    """Assert that spans of this trace name no session but `session`, and that the services' own name it."""
    assert {span.attributes[SESSION] for span in spans if SESSION in span.attributes} == {session}
    for span in spans:
        operation, *rest = span.name.split()
        if operation in ("request", "process") and rest[0].startswith("state.session."):
            assert span.attributes.get(SESSION) == session, span
        if operation in ("send", "admit", "deliver", "show", "generate"):
            assert span.attributes.get(SESSION) == session, span


def ancestors(spans: Sequence[ReceivedSpan], span: ReceivedSpan) -> list[str]:
    """Names of the spans above `span`, the nearest first, with the services' names."""
    by_id = {each.id: each for each in spans}
    found = []
    while span.parent in by_id:
        span = by_id[span.parent]
        found.append(f"{span.service.removeprefix('turboserve-')}: {span.name}")
    return found
