"""The interface of the broker's client: implemented by nats-py, and by a client in memory for simulations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext


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

    async def flush(self) -> None:
        """Wait until the broker has answered a ping."""

    async def drain(self) -> None:
        """End the subscriptions, process what has arrived, then close the connection."""

    async def close(self) -> None:
        """Close the connection."""

    def jetstream(self, *, timeout: float) -> JetStreamContext:
        """Return the client of JetStream. `timeout` is the deadline of each request, seconds."""


Connect = Callable[..., Awaitable[BrokerClient]]
"""A function with the parameters of `nats.connect`."""
