"""Checks whether a NATS server works: its health, and an append to a stream of the supervisor's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import nats
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import api
from nats.js.errors import APIError, NoStreamResponseError

from turboserve.cli.embedded.server import (
    NotReadyError,
    ServerFullError,
    ServerUnhealthyError,
    ServerUnresponsiveError,
)

HEALTH_USER = "health"
"""The supervisor's user in the system account. It may only request the server's health."""
HEALTH_SUBJECT = "$SYS.REQ.SERVER.PING.HEALTHZ"
HEALTH_INBOX = "_INBOX_health"
HEALTH_ANSWER_S = 2.0
PROBE_STREAM = api.StreamConfig(
    name="SUPERVISOR",
    description="What the supervisor appends to see that appends are stored",
    subjects=["supervisor.probe"],
    storage=api.StorageType.FILE,
    # No `max_bytes`, since the broker would reserve it, and other streams may have reserved everything.
    max_msgs=1,
)
APPEND_ANSWER_S = 2.0


async def server_health(url: str, password: str, options: Mapping[str, Any]) -> None:
    """Request the health of the broker at `url` as the health user.

    `options` are those of nats-server's `/healthz`, such as `{"js-enabled-only": True}`.

    Raises ServerUnhealthyError with the broker's reason, ServerUnresponsiveError if the broker does not
    answer, and NotReadyError if there is no connection.
    """

    async def ignore(_: Exception) -> None:
        """Errors are raised to the caller as well."""

    try:
        client = await nats.connect(
            url,
            name=HEALTH_USER,
            user=HEALTH_USER,
            password=password,
            inbox_prefix=HEALTH_INBOX.encode(),
            allow_reconnect=False,
            connect_timeout=HEALTH_ANSWER_S,
            error_cb=ignore,
        )
        try:
            answer = await _request(client, HEALTH_SUBJECT, json.dumps(dict(options)).encode())
        finally:
            await client.close()
        health = json.loads(answer.data)
    except (TimeoutError, nats.errors.TimeoutError) as error:
        raise ServerUnresponsiveError(f"nats: {error!r}") from error
    except (OSError, nats.errors.Error, ValueError) as error:
        raise NotReadyError(f"nats: {error!r}") from error
    data = health.get("data", {})
    if data.get("status") != "ok":
        raise ServerUnhealthyError(f"nats: {data.get('error') or health.get('error') or data.get('status')}")


async def _request(client: Client, subject: str, data: bytes) -> Msg:
    """Send a request, and repeat it until an answer arrives.

    A server that has just started accepts clients before it subscribes to its own subjects. Raises
    TimeoutError after HEALTH_ANSWER_S.
    """
    timeout_s, left_s = 0.1, HEALTH_ANSWER_S
    while True:
        try:
            return await client.request(subject, data, timeout=min(timeout_s, left_s))
        except TimeoutError:
            left_s -= timeout_s
            timeout_s *= 2
            if left_s <= 0:
                raise


async def append(url: str, stream: api.StreamConfig = PROBE_STREAM) -> None:
    """Append to the supervisor's `stream` at the broker `url`, and create it if it is missing.

    The user in `url` must be allowed to create the stream.

    Raises ServerUnhealthyError if the append is not acknowledged, ServerFullError if the broker refuses it,
    and NotReadyError if the broker does not answer at all.
    """

    async def ignore(_: Exception) -> None:
        """Errors are raised to the caller as well."""

    try:
        client = await nats.connect(
            url, name="supervisor", allow_reconnect=False, connect_timeout=APPEND_ANSWER_S, error_cb=ignore
        )
    except (OSError, TimeoutError, nats.errors.Error) as error:
        raise NotReadyError(f"nats: {error!r}") from error
    try:
        jetstream = client.jetstream(timeout=APPEND_ANSWER_S)
        subject = stream.subjects[0] if stream.subjects else ""
        try:
            await jetstream.publish(subject)
        except NoStreamResponseError:
            try:
                await jetstream.add_stream(stream)
            except (TimeoutError, nats.errors.TimeoutError, APIError):
                if stream.placement is None:
                    raise
                # The leader of the cluster creates streams. This server is not at fault if there is none.
                return
            await jetstream.publish(subject)
    except APIError as error:
        raise ServerFullError(f"nats: append refused: {error.description}") from error
    except (TimeoutError, nats.errors.TimeoutError) as error:
        raise ServerUnhealthyError(
            f"nats: an append was not acknowledged in {APPEND_ANSWER_S:.0f} s"
        ) from error
    except (OSError, nats.errors.Error) as error:
        raise NotReadyError(f"nats: {error!r}") from error
    finally:
        await client.close()
