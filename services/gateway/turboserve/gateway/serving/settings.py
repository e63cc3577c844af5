"""Settings of the HTTP server: limits and deadlines of connections and requests."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_network
from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from turboserve.config import Seconds, Settings
from turboserve.connections import Network

LOOPBACK = (ip_network("127.0.0.0/8"), ip_network("::1/128"))
LEAST_HEADER_BYTES = 2_048
# A request on a connection that is being closed fails at the client. So the client should be the one that
# closes, and the gateway waits longer than clients do by default: httpx 5 s, aiohttp 15 s, nginx 60 s. A full
# server, and an address at its limit, give up idle connections, so these keep no client out.
KEEP_ALIVE_S = 75.0


class ServerSettings(Settings):
    """The settings of the HTTP server, which are part of the gateway's settings."""

    connection_limit: int = Field(default=2_048, ge=1)
    """Maximum number of open connections of all kinds; lower if the process may open fewer descriptors. A
    full server closes the connection that has waited longest for a complete request, or answers 503."""
    connections_per_address: int = Field(default=256, ge=1)
    """Maximum number of open connections of one address. One more replaces the address's connection that has
    been idle longest since its last answer. If none is idle, it is answered 429. Addresses of one IPv6 /64
    count as one. All clients of a proxy have the proxy's address: limit them at the proxy."""
    connections_exempt: Annotated[tuple[Network, ...], NoDecode] = LOOPBACK
    """Networks without a limit per address, separated by commas. Trusted proxies have no such limit."""
    trusted_proxies: Annotated[tuple[Network, ...], NoDecode] = ()
    """Networks of reverse proxies, separated by commas. The gateway uses `X-Forwarded-For` and
    `X-Forwarded-Proto` only from these. None: it ignores both headers."""
    descriptor_reserve: int = Field(default=64, ge=16)
    """File descriptors that clients' connections never use. They are for the broker, health and logs."""
    header_limit_bytes: int = Field(default=16_384, ge=LEAST_HEADER_BYTES)
    """Maximum size of the request line and headers of one request together, bytes; more is answered 431."""
    header_limit_count: int = Field(default=100, ge=20, le=128)
    """Maximum number of headers of one request; more are answered 431."""
    header_timeout_s: Seconds = 10.0
    """A connection that has not sent the whole head of a request after this long is closed."""
    body_timeout_s: Seconds = 20.0
    """A request whose body is not complete after this long is answered 408."""
    keep_alive_s: Seconds = KEEP_ALIVE_S
    """An answered connection that sends nothing for this long is closed. Clients and proxies should give up
    idle connections sooner."""
    write_timeout_s: Seconds = 30.0
    """A connection whose client has not read the waiting bytes after this long is closed."""
    frame_rate_limit: float = Field(default=100.0, ge=10)
    """WebSocket frames of one client that are read per second, up to ten seconds' worth at once. The gateway
    reads more slowly from faster clients."""

    @field_validator("connections_exempt", "trusted_proxies", mode="before")
    @classmethod
    def _networks(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(ip_network(part.strip()) for part in value.split(",") if part.strip())
        return value


def as_text(networks: Sequence[Network]) -> list[str]:
    """Return networks in the form that uvicorn takes."""
    return [str(network) for network in networks]
