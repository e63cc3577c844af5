"""What the bus needs of a broker's client: nats-py's, or one in memory with the same interface."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext


class BrokerClient(Protocol):
    """The part of `nats.aio.client.Client` that services use; everything raises nats-py's errors."""

    stats: dict[str, int]
    """`reconnects`: how often the client has connected again. Rises before anything arrives."""

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection, as far as the client knows."""

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Send a message; it waits in the client while there is no connection."""

    async def subscribe(
        self, subject: str, queue: str = "", cb: Callable[[Msg], Awaitable[None]] | None = None
    ) -> Subscription:
        """Call `cb` for each message on `subject`, one after the other; without `cb`, see `Subscription`."""

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
        """A subject that no other client uses."""

    async def flush(self) -> None:
        """Wait until the broker has answered a ping."""

    async def drain(self) -> None:
        """End the subscriptions once what has arrived is processed, then close."""

    async def close(self) -> None:
        """Leave."""

    def jetstream(self, *, timeout: float) -> JetStreamContext:
        """Streams; `timeout` is for each request, in seconds."""


Connect = Callable[..., Awaitable[BrokerClient]]
"""As `nats.connect`."""
