"""Which URLs and addresses may be called. Protects the deployment's own network from its tenants (SSRF)."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from turboserve.contracts.errors import InvalidInputError
from turboserve.host_port import host_port, shown_host

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_SPECIAL = tuple(
    ipaddress.ip_network(network) for network in ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20", "5f00::/16")
)
"""Special networks (RFC 6890 and its registry) that not every version of Python knows."""
_PORTS = {"https": 443, "http": 80}
_HOST_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789.-_:")
_TARGET = "".join(chr(code) for code in range(0x21, 0x7F))


@dataclass(frozen=True)
class Target:
    """A parsed URL of a webhook."""

    scheme: str
    host: str
    """Name or address, without brackets, in lower case."""
    port: int
    path: str
    """Path and query."""

    @property
    def authority(self) -> str:
        """The header `Host`."""
        if self.port == _PORTS[self.scheme]:
            return shown_host(self.host)
        return host_port(self.host, self.port)


@dataclass(frozen=True)
class AddressRules:
    """What the operator allows."""

    http_to_loopback: bool = False
    """Whether `http://` to this machine is called, for development."""
    hosts: tuple[str, ...] = ()
    """If any are named, only these hosts are called: names, and `*.example.com`."""
    networks: tuple[Network, ...] = ()
    """Networks that are called although they are not public."""

    def parse(self, url: str) -> Target:
        """Return the target of a URL. Raises InvalidInputError for one that is never called."""
        target = _parse(url)
        literal = _literal(target.host)
        if target.scheme == "http" and not (self.http_to_loopback and _is_this_machine(target.host)):
            hint = "http is only for this machine, and only with TURBOSERVE_WEBHOOK_HTTP_LOOPBACK=1"
            raise _invalid(f"must begin with https:// ({hint})", "https")
        if self.hosts and not any(_matches(target.host, pattern) for pattern in self.hosts):
            raise _invalid(f"{target.host} is not a host to which this deployment sends", "hosts")
        if literal is not None and not self.allows(literal, target):
            raise _invalid(f"{literal} is not a public address", "public addresses")
        return target

    def allows(self, address: Address, target: Target) -> bool:
        """Return whether a connection to this address may be made for the target."""
        real = _embedded(address)
        if target.scheme == "http":
            return self.http_to_loopback and real.is_loopback
        if any(real.version == network.version and real in network for network in self.networks):
            return True
        return is_public(real)

    def choose(self, addresses: Sequence[Address], target: Target) -> list[Address]:
        """Return those of the addresses that may be connected to, in their order, each once."""
        return [one for one in dict.fromkeys(addresses) if self.allows(one, target)]


def is_public(address: Address) -> bool:
    """Return whether any host of the internet may have this address."""
    real = _embedded(address)
    if isinstance(real, ipaddress.IPv6Address) and (real.sixtofour or real.teredo or real.is_site_local):
        # Addresses of tunnels name IPv4 addresses, and reach them by relays.
        return False
    if any(real.version == network.version and real in network for network in _SPECIAL):
        return False
    return real.is_global and not (
        real.is_multicast or real.is_reserved or real.is_unspecified or real.is_loopback
    )


def _embedded(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address stands for, or the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _parse(url: str) -> Target:
    if not url.isascii() or not all(character in _TARGET for character in url):
        raise _invalid("must have printable ASCII characters only, without spaces", "ASCII")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _invalid(str(error), "RFC 3986") from None
    if parts.scheme not in _PORTS:
        raise _invalid("must begin with https://", "https")
    host = (parts.hostname or "").removesuffix(".")
    if not host or not set(host) <= _HOST_CHARACTERS or host.startswith(".") or ".." in host:
        raise _invalid("needs the name of a host", "RFC 3986")
    if "@" in parts.netloc:
        raise _invalid("must have no user and no password", "no user")
    if parts.fragment or "#" in url:
        raise _invalid("must have no fragment", "no fragment")
    if port == 0:
        raise _invalid("port 0 is no port", "1 to 65535")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme, host, port or _PORTS[parts.scheme], path)


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_this_machine(host: str) -> bool:
    literal = _literal(host)
    return host == "localhost" if literal is None else literal.is_loopback


def _matches(host: str, pattern: str) -> bool:
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


def _invalid(reason: str, limit: str) -> InvalidInputError:
    return InvalidInputError(f"url: {reason}", field="url", limit=limit)
