"""The waits that count for a user: not those during the user's own pauses."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from turboserve.bench.streaming.viewer import Viewer
from turboserve.experiments.chaos.simulated_clients import SimulatedClient


@pytest.fixture
async def client() -> Any:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(202, json={"id": "ses", "phase": "active"})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://gateway") as api:
        yield SimulatedClient(0, Viewer(api, "ses"))


async def test_a_wait_is_until_the_next_chunk_unless_a_pause_lies_in_it(client: SimulatedClient) -> None:
    client.arrivals = [1.0, 2.0, 9.0, 10.0]
    client.pauses = [(2.5, 5.0)]
    assert client.wait_after(0.5) == 0.5
    assert client.wait_after(2.2) is None
    assert client.wait_after(6.0) == 3.0
    assert client.wait_after(10.0) is None, "no chunk came any more"


async def test_to_resume_once_more_does_not_make_an_old_pause_longer(client: SimulatedClient) -> None:
    """Incident: all clients are resumed at the end, and faults since the last pause counted as paused."""
    client.pauses = [(2.5, 5.0)]
    await client.resume()
    assert client.pauses == [(2.5, 5.0)]
    client.pauses.append((7.0, float("inf")))
    await client.resume()
    assert client.pauses[-1][1] < float("inf")
