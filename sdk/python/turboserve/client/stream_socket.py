"""The WebSocket of a stream: how it begins, and what the client sends over it by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from turboserve.client.gateways import SilenceWatch
from turboserve.client.transport import problem_in, with_retry_after

MESSAGE_LIMIT_BYTES = 64 * 2**20


async def open_socket(url: str, headers: dict[str, str]) -> ClientConnection:
    """Connect. Raises InvalidStatus if the gateway refuses the handshake."""
    return await connect(url, additional_headers=headers, max_size=MESSAGE_LIMIT_BYTES, open_timeout=10)


async def greeting(socket: ClientConnection, refused: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Return the first message. A gateway that refuses sends a problem, for `refused`, and closes."""
    while True:
        message: dict[str, Any] = json.loads(await socket.recv())
        if message.get("type") != "error":
            return message
        refused(message)


async def send_reports(
    socket: ClientConnection,
    interval_s: float,
    position_s: Callable[[], float],
    received_s: Callable[[], float],
    silence: SilenceWatch | None,
) -> None:
    """Report the playhead every `interval_s` until the connection ends.

    `silence`: decides about pings, and the connection is ended if the gateway is silent. None: no pings.
    """
    now = asyncio.get_running_loop().time
    with suppress(ConnectionClosed):
        while True:
            playhead_s = position_s()
            buffered_s = max(0.0, received_s() - playhead_s)
            await socket.send(
                json.dumps({"type": "playhead", "playhead_s": playhead_s, "buffered_s": buffered_s})
            )
            if silence is not None and silence.silent(now()):
                silence.left()
                socket.transport.abort()
            elif silence is not None and silence.wants_ping:
                silence.asked(now())
                await socket.send(json.dumps({"type": "ping"}))
            await asyncio.sleep(interval_s)


def refusal(refused: InvalidStatus) -> tuple[int, dict[str, Any]]:
    """Return the status of a refused handshake, and its problem."""
    response = refused.response
    problem = problem_in(bytes(response.body or b""))
    return response.status_code, dict(with_retry_after(problem, response.headers.get("Retry-After")))
