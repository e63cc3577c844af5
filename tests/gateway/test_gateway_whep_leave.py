"""A viewer over WebRTC leaves by a request to another gateway, which the broker cannot pass on."""

from __future__ import annotations

import httpx
import pytest

from tests.helpers.problem import problem
from tests.helpers.service_process import connected
from turboserve.cli.embedded import NatsServer
from turboserve.clock import SystemClock
from turboserve.gateway.app import create_app, create_gateway
from turboserve.gateway.sessions.service import Sessions
from turboserve.gateway.settings import Settings
from turboserve.ids import new_id


async def test_without_a_connection_to_the_broker_the_answer_is_unavailable(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: the answer was 500, because the client's own errors had no status."""

    async def known(*_: object) -> None:
        """Stand in for the state store: the session exists."""

    monkeypatch.setattr(Sessions, "get_or_remembered", known)
    bus = await connected(nats_server, "gateway")
    app = create_app(create_gateway(Settings(), bus, SystemClock(), dict))
    await bus.close()
    other = new_id("gtw").removeprefix("gtw_")
    viewer = f"peer_{other}_{new_id('peer').removeprefix('peer_')}"
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(base_url="http://127.0.0.1", transport=transport) as api:
        answer = await api.delete(f"/v1/sessions/{new_id('ses')}/whep/{viewer}")
    problem(answer, 503, "unavailable")
