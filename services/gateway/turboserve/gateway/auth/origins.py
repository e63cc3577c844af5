"""Which host names are answered, and pages of which origins may call the gateway.

A browser sends two headers that a page cannot forge: `Host`, the name under which the page calls this server,
and `Origin`, where the page came from. `Host` reveals a foreign name that was made to resolve to this address
(DNS rebinding). `Origin` reveals a request of a foreign page.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

SCHEME_PORTS = {"http": 80, "https": 443}
ANY = "*"
_AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9_.-]{1,254}))(?::([0-9]{1,5})?)?")
_PATTERN = re.compile(r"(?:\*\.)?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*")
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Authority:
    """`host[:port]` in normal form: lower case, no final dot, addresses as `ipaddress` writes them."""

    host: str
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> Authority:
        """Parse `text`. Raises ValueError if it is no authority, for example has a user, a path or a zone."""
        match = _AUTHORITY.fullmatch(text)
        if match is None:
            raise ValueError("is not host[:port]")
        port = int(match[3]) if match[3] else None
        if port is not None and port > 65_535:
            raise ValueError("has a port above 65535")
        if match[1] is not None:
            address = ipaddress.IPv6Address(match[1])
            return cls(str(address.ipv4_mapped or address), port)
        host = match[2].lower().removesuffix(".")
        if not host or host.startswith(".") or ".." in host:
            raise ValueError("has an empty label")
        return cls(host, port)

    @property
    def address(self) -> _Address | None:
        """The host as an IP address; None if it is a name."""
        return _address(self.host)


class HostRules:
    """Decides which values of `Host` are answered.

    - Names and addresses of the loopback: always, since no name server decides about them.
    - The address that the gateway is bound to. If it is bound to all addresses: any address, since an address
      cannot be made to resolve to another one.
    - Other names: only if `allowed` lists them as `api.example.com`, `*.example.com` or `*`.
    """

    def __init__(self, allowed: Sequence[str], bound: str) -> None:
        self._any = ANY in allowed
        self._names = frozenset(name for name in allowed if not name.startswith("*"))
        self._suffixes = tuple(name[1:] for name in allowed if name.startswith("*."))
        self._bound = bound.strip("[]").lower()
        bound_address = _address(self._bound)
        self._any_address = bound_address is not None and bound_address.is_unspecified

    def allows(self, authority: Authority) -> bool:
        host, address = authority.host, authority.address
        if self._any or host in self._names or (host == self._bound and not self._any_address):
            return True
        if address is not None:
            return address.is_loopback or (self._any_address and not address.is_unspecified)
        return host == "localhost" or host.endswith((".localhost", *self._suffixes))


class OriginRules:
    """Decides which pages may change something or open a WebSocket: the gateway's own and `allowed` ones."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._any = ANY in allowed
        self._allowed = frozenset(allowed)

    def allows(self, authority: Authority, origins: Sequence[str], fetch_site: str | None) -> bool:
        """Return whether a request for `authority` with these Origin headers may pass.

        Without Origin, `Sec-Fetch-Site` decides. A request without both is not from a browser, and passes.
        """
        if self._any:
            return True
        if not origins:
            return fetch_site in (None, "same-origin", "none")
        return len(origins) == 1 and (
            origins[0].lower() in self._allowed or _same_site(origins[0], authority)
        )


def parse_origin(text: str) -> str:
    """Return an origin as browsers write it, `scheme://host[:port]`. Raises ValueError for anything else."""
    if text == ANY:
        return text
    parts = urlsplit(text)
    if parts.scheme not in SCHEME_PORTS or text != f"{parts.scheme}://{parts.netloc}":
        raise ValueError(f"{text[:200]!r} is not an origin such as https://app.example.com")
    Authority.parse(parts.netloc)
    return text.lower()


def parse_host(text: str) -> str:
    """Return an entry of the allowed hosts in normal form. Raises ValueError for an invalid entry."""
    name = text.lower().removesuffix(".")
    if name == ANY or _PATTERN.fullmatch(name):
        return name
    try:
        found = Authority.parse(name)
    except ValueError:
        found = None
    if found is None or found.port is not None:
        raise ValueError(
            f"{text[:200]!r} is neither a host name without a port nor a pattern such as *.example.com"
        )
    return found.host


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that is bound to `host`."""
    address = _address(host.strip("[]"))
    return host.lower() == "localhost" if address is None else address.is_loopback


def _same_site(origin: str, authority: Authority) -> bool:
    try:
        parts = urlsplit(origin)
        found = Authority.parse(parts.netloc)
    except ValueError:
        return False
    default = SCHEME_PORTS.get(parts.scheme)
    # The page's scheme counts: a proxy may use another scheme between itself and the gateway.
    return default is not None and (found.host, found.port or default) == (
        authority.host,
        authority.port or default,
    )


def _address(host: str) -> _Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
