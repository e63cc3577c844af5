"""The waits that count for a user: not those during the user's own pauses."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from websockets.asyncio.server import ServerConnection, serve

from tests.helpers.waiting import eventually
from turboserve.bench.streaming import viewer
from turboserve.bench.streaming.viewer import Viewer
from turboserve.experiments.chaos.simulated_clients import BUFFER_S, SimulatedClient
from turboserve.experiments.chaos.user_actions import UserAction, UserActionKind

SENT: list[tuple[str, Any]] = []
"""Method and body of each request of the present test."""


@pytest.fixture
async def client() -> Any:
    SENT.clear()

    def answer(request: httpx.Request) -> httpx.Response:
        SENT.append((request.method, json.loads(request.content or b"null")))
        return httpx.Response(202, json={"id": "ses", "phase": "active", "prompt_id": "p", "control_seq": 1})

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


async def test_a_client_drops_its_buffer_and_changes_its_limits(client: SimulatedClient) -> None:
    kinds = (UserActionKind.PROMPT, UserActionKind.DROP, UserActionKind.CHANGE)
    await client.live([UserAction(0.0, 0, kind) for kind in kinds], 0.0)
    (_, plain), (_, dropping), change = SENT
    assert plain == {"prompt": plain["prompt"]}
    assert dropping == {"prompt": dropping["prompt"], "drop_buffer": True}
    assert change == ("PATCH", {"max_lead_s": 0.75})
    assert client.done == {kind.value: 1 for kind in kinds}


async def test_a_viewer_skips_to_the_chunk_after_the_message(client: SimulatedClient) -> None:
    viewer = client.viewer
    for index in range(4):
        viewer._text({"type": "skip", "index": 2}) if index == 2 else None
        announced = {
            "type": "chunk", "index": index, "start_s": float(index), "duration_s": 1.0, "epoch": 1,
            "worker": "w", "control_seq": 0, "compute_s": 0.1, "published_at": "2026-11-23T10:00:00Z",
        }  # fmt: skip
        viewer._binary(announced, b"fragment")
    assert viewer.skips == [(2, 2)]
    assert viewer.player.position_s >= 2.0
    assert viewer.player.buffered_s <= 2.0


class Gateway:
    """A gateway that greets, answers pings until it freezes, and counts its viewers."""

    def __init__(self) -> None:
        self.frozen = False
        self.viewers = self.pongs = 0

    async def serve(self, socket: ServerConnection) -> None:
        self.viewers += 1
        await socket.send(json.dumps({"type": "hello"}))
        async for message in socket:
            if not self.frozen and json.loads(message)["type"] == "ping":
                await socket.send(json.dumps({"type": "pong"}))
                self.pongs += 1


async def test_a_viewer_leaves_a_frozen_gateway_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    # Longer than a busy machine interrupts the test, which is both ends of the connection.
    monkeypatch.setattr(viewer, "SILENT_S", 60.0)
    first, second = Gateway(), Gateway()
    async with (
        serve(first.serve, "127.0.0.1", 0) as one,
        serve(second.serve, "127.0.0.1", 0) as two,
        httpx.AsyncClient(base_url="http://127.0.0.1:1") as api,
    ):
        ports = [next(iter(server.sockets)).getsockname()[1] for server in (one, two)]
        urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
        async with Viewer(api, "ses", gateways=urls, report_s=0.05).watching():
            await eventually(lambda: first.pongs >= 3)
            assert (first.viewers, second.viewers) == (1, 0)
            first.frozen = True
            monkeypatch.setattr(viewer, "SILENT_S", 1.0)
            await eventually(lambda: second.viewers)


def test_a_stall_counts_what_the_buffer_does_not_hide(client: SimulatedClient) -> None:
    client.viewer.player.start_buffer_s = BUFFER_S
    for index in range(4):
        client.viewer.player.arrived(index, 0.75 * index, 0.75 * (index + 1), 100.0)
    assert client.stall_s(102.9) == 0.0
    assert client.stall_s(105.0) == pytest.approx(2.0)
