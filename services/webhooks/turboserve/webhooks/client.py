"""Sends one message over HTTP, only to addresses that the rules allow."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpcore

from turboserve.webhooks.core.addresses import Address, AddressRules, Target

ANSWER_BYTES = 16 * 1024
"""Bytes of an answer's body that are read, so that the connection can be used again. The rest is not read."""
IDLE_S = 15.0
"""Time for which a connection without a request is kept, seconds."""


@dataclass(frozen=True)
class Answer:
    """What a receiver has answered."""

    status: int
    retry_after_s: float | None = None


class SendError(Exception):
    """There was no answer. The message is for the webhook's owner, who must learn nothing of this network.

    Another attempt may succeed.
    """


class BlockedAddressError(SendError):
    """The host has no address that the rules allow."""


class CheckedBackend(httpcore.AsyncNetworkBackend):
    """Resolves a name once, and connects to an address of it that the rules allow.

    The address that is checked is the one that is connected to, so a name server cannot answer one address to
    the check and another one to the connection (DNS rebinding).
    """

    def __init__(self, rules: AddressRules, scheme: str, resolver: ThreadPoolExecutor) -> None:
        self._rules, self._scheme, self._resolver = rules, scheme, resolver
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        target = Target(self._scheme, host, port, "/")
        addresses = self._rules.choose(await self._resolve(host, port), target)
        if not addresses:
            raise BlockedAddressError(f"{host} has no address to which this deployment sends")
        problem: Exception | None = None
        for address in addresses:
            try:
                return await self._inner.connect_tcp(str(address), port, timeout, None, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                problem = error
        assert problem is not None
        raise problem

    async def _resolve(self, host: str, port: int) -> list[Address]:
        loop = asyncio.get_running_loop()
        try:
            # In threads of its own: slow name servers delay nothing else of this process.
            found = await loop.run_in_executor(
                self._resolver, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            )
        except (OSError, UnicodeError):
            raise SendError(f"the name {host} does not resolve") from None
        # A scope such as fe80::1%eth0 is of a link, and never allowed.
        return [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found]


class WebhookClient:
    """Posts messages. Follows no redirect, uses no proxy, and keeps no cookies."""

    def __init__(self, rules: AddressRules, timeout_s: float, connections: int, ca_file: Path | None) -> None:
        """Raises OSError (ssl.SSLError included) if `ca_file` cannot be read."""
        self._rules, self._timeout_s = rules, timeout_s
        context = ssl.create_default_context()
        if ca_file is not None:
            context.load_verify_locations(ca_file)
        self._resolver = ThreadPoolExecutor(max_workers=connections, thread_name_prefix="resolver")
        self._pools = {
            scheme: httpcore.AsyncConnectionPool(
                ssl_context=context,
                max_connections=connections,
                max_keepalive_connections=connections,
                keepalive_expiry=IDLE_S,
                network_backend=CheckedBackend(rules, scheme, self._resolver),
            )
            for scheme in ("https", "http")
        }

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Send one message. Raises SendError, and InvalidInputError for a URL that is never called."""
        target = self._rules.parse(url)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._post(target, headers, body)
        except (TimeoutError, httpcore.TimeoutException):
            raise SendError(f"no answer within {self._timeout_s:g} s") from None
        except httpcore.ConnectError as error:
            raise SendError(_connection_problem(error)) from None
        except httpcore.NetworkError:
            raise SendError("the connection broke") from None
        except httpcore.ProtocolError:
            raise SendError("the answer is not HTTP") from None

    async def _post(self, target: Target, headers: Mapping[str, str], body: bytes) -> Answer:
        given = {"host": target.authority, **headers}
        url = httpcore.URL(
            scheme=target.scheme.encode(),
            host=target.host.encode(),
            port=target.port,
            target=target.path.encode(),
        )
        options = {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), self._timeout_s)}
        sent = [(name.encode(), value.encode()) for name, value in given.items()]
        async with self._pools[target.scheme].stream(
            "POST", url, headers=sent, content=body, extensions=options
        ) as response:
            read = 0
            async for part in response.aiter_stream():
                read += len(part)
                if read > ANSWER_BYTES:
                    break
            return Answer(response.status, _retry_after_s(response.headers))

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.aclose()
        self._resolver.shutdown(wait=False, cancel_futures=True)


def _connection_problem(error: httpcore.ConnectError) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"the certificate is refused: {cause.verify_message}"
        if isinstance(cause, ssl.SSLError):
            return "the TLS handshake failed"
        cause = cause.__cause__ or cause.__context__
    return "the connection was refused"


def _retry_after_s(headers: list[tuple[bytes, bytes]]) -> float | None:
    """Return the time of `Retry-After` in seconds; None without it, or for a date."""
    for name, value in headers:
        if name.lower() == b"retry-after" and value.isdigit() and len(value) < 8:
            return float(value)
    return None
