"""STUN and TURN servers: how settings name them, and how viewers learn of them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address

from turboserve.gateway.auth.access import is_loopback

CREDENTIAL_LIFETIME_S = 86_400
_SERVER = re.compile(
    r"(?:stun|turns?):(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::\d{1,5})?(\?transport=(?:udp|tcp))?"
)


@dataclass(frozen=True)
class IceServer:
    """One server, with what it asks of its users. Servers without a relay ask for nothing."""

    url: str
    username: str | None = None
    credential: str | None = None

    @property
    def link(self) -> str:
        """Value of the header `Link`. Source: draft-ietf-wish-whep, 4.6."""
        value = f'<{self.url}>; rel="ice-server"'
        if self.username is not None:
            value += (
                f'; username="{self.username}"; credential="{self.credential}"; credential-type="password"'
            )
        return value


def parse_ice_server(text: str) -> str:
    """Return the address of a server. Raises ValueError for anything but stun:, turn: and turns:."""
    match = _SERVER.fullmatch(text)
    if match is None or (match[1] and not is_relay(text)):
        raise ValueError(
            f"{text[:200]!r} is no server such as stun:stun.example.com or turn:turn.example.com:3478"
        )
    return text


def is_relay(url: str) -> bool:
    """Whether the server relays media, and so asks for a password."""
    return not url.startswith("stun:")


def ice_servers(urls: Iterable[str], secret: str | None, viewer: str, wall_s: float) -> tuple[IceServer, ...]:
    """Return the servers for `viewer`, which may use relays until `CREDENTIAL_LIFETIME_S` after `wall_s`.

    Source: draft-uberti-behave-turn-rest-00, 2.2, as coturn implements it.
    """
    username = f"{int(wall_s) + CREDENTIAL_LIFETIME_S}:{viewer}"
    credential = ""
    if secret is not None:
        digest = hmac.new(secret.encode(), username.encode(), hashlib.sha1).digest()
        credential = base64.b64encode(digest).decode()
    return tuple(IceServer(url, username, credential) if is_relay(url) else IceServer(url) for url in urls)


def own_addresses(gateway_host: str) -> tuple[str, ...] | None:
    """Return the addresses that media is sent from, by the address of the API; None: all of this machine.

    An API that only this machine can reach sends media from the loopback only.
    """
    host = gateway_host.strip("[]")
    try:
        address = ip_address(host)
    except ValueError:
        return ("127.0.0.1",) if is_loopback(host) else None
    return None if address.is_unspecified else (str(address),)
