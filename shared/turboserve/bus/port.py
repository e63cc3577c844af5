"""The broker's client: its interface, which nats-py and a client in memory implement, and how it connects."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any, Protocol
from urllib.parse import urlsplit

import nats
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext

from turboserve import logs
from turboserve.bus import connection
from turboserve.config import Settings
from turboserve.subjects import inbox_prefix

COMPLAIN_S = 5.0
"""Interval of log lines while the broker is unreachable, seconds."""

log = logs.get("bus")


class BrokerClient(Protocol):
    """The part of `nats.aio.client.Client` that services use. Every method raises nats-py's errors."""

    stats: dict[str, int]
    """Counters by name. `reconnects` counts new connections, and rises before anything arrives on one."""

    @property
    def is_connected(self) -> bool:
        """Whether the client is connected, as far as the client knows."""

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Send a message. While there is no connection, the client keeps the message."""

    async def subscribe(
        self, subject: str, queue: str = "", cb: Callable[[Msg], Awaitable[None]] | None = None
    ) -> Subscription:
        """Call `cb` for each message on `subject`, one at a time. Without `cb`, see `Subscription`."""

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,
        old_style: bool = False,
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        """Send a message and wait for the first answer."""

    def new_inbox(self) -> str:
        """Return a reply subject that no other client uses."""

    async def flush(self, timeout: int = 10) -> None:
        """Wait until the broker has answered a ping, at most `timeout` seconds."""

    async def drain(self) -> None:
        """End the subscriptions, process what has arrived, then close the connection."""

    async def close(self) -> None:
        """Close the connection."""

    def jetstream(self, *, timeout: float) -> JetStreamContext:
        """Return the client of JetStream. `timeout` is the deadline of each request, seconds."""


Connect = Callable[..., Awaitable[BrokerClient]]
"""A function with the parameters of `nats.connect`."""


async def open_client(
    service: str, settings: Settings, connect: Connect = connection.connect
) -> tuple[BrokerClient, asyncio.Event]:
    """Connect as `service`. Retries until the broker is reachable.

    Returns the client, and an event that is set when the client has closed for good.
    """

    async def disconnected() -> None:
        log.warning("broker disconnected")

    async def reconnected() -> None:
        log.info("broker reconnected")

    closed = asyncio.Event()

    async def ended() -> None:
        closed.set()

    monotonic = asyncio.get_running_loop().time
    complained_at = -COMPLAIN_S

    async def failed(error: Exception) -> None:
        # The client retries forever, several times a second.
        nonlocal complained_at
        if isinstance(error, OSError) and monotonic() >= complained_at + COMPLAIN_S:
            complained_at = monotonic()
            log.warning("broker not reachable", url=_without_password(settings.nats_url), error=repr(error))
        elif "permissions violation" in str(error).lower():
            # A message that the broker refuses is lost, and nothing else reports it.
            log.warning("broker refuses", error=str(error))
        else:
            log.debug("broker error", error=repr(error))

    while True:
        try:
            client = await connect(
                settings.nats_url.split(","),
                name=service,
                user=broker_user(service, settings) if settings.nats_password else None,
                password=settings.nats_password.get_secret_value() if settings.nats_password else None,
                inbox_prefix=inbox_prefix(broker_user(service, settings)).encode(),
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.2,
                connect_timeout=2,
                ping_interval=settings.broker_ping_s,
                max_outstanding_pings=2,
                disconnected_cb=disconnected,
                reconnected_cb=reconnected,
                error_cb=failed,
                closed_cb=ended,
            )
            return client, closed
        except (TimeoutError, OSError, nats.errors.Error) as error:
            url = _without_password(settings.nats_url)
            log.warning("broker not reachable yet", url=url, error=repr(error))
            await asyncio.sleep(0.5)


def broker_user(service: str, settings: Settings) -> str:
    """Return the broker user of `service`: from the settings, from the URL, or the service's name."""
    if settings.nats_password is not None:
        return settings.nats_user or service
    return urlsplit(settings.nats_url.split(",")[0]).username or service


def _without_password(url: str) -> str:
    return re.sub(r"//[^@/,]*@", "//", url)
