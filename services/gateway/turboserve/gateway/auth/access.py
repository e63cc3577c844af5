"""Who may call the gateway: API keys and their rights, host names and origins.

A browser sends two headers that a page cannot forge: `Host`, the name under which the page calls this server,
and `Origin`, where the page came from. `Host` reveals a foreign name that was made to resolve to this address
(DNS rebinding). `Origin` reveals a request of a foreign page.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from turboserve.clock import Clock, SystemClock
from turboserve.contracts.keys import Scope
from turboserve.gateway.auth.grants import Grant
from turboserve.gateway.auth.hashing import OPERATOR_SCOPES, TENANT_SCOPES, KeySet, StoredKey
from turboserve.gateway.problems.errors import KeysUnreadError, MissingScopeError

DEFAULT_TENANT = "default"
RETRY_S = 1.0

SCHEME_PORTS = {"http": 80, "https": 443}
ANY = "*"
_AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9_.-]{1,254}))(?::([0-9]{1,5})?)?")
_PATTERN = re.compile(r"(?:\*\.)?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*")
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Identity:
    """The sender of a request."""

    tenant: str
    scopes: frozenset[str]
    key_id: str | None = None
    """Id of the sender's key. None: this gateway needs no key, or the sender has a link."""
    grant: Grant | None = None
    """The sender's link or ticket, which bounds the sender to one session. None: the sender has a key."""

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or Scope.ADMIN in self.scopes

    def require(self, scope: Scope) -> None:
        """Raise MissingScopeError if the sender's key lacks the scope."""
        if not self.may(scope):
            holder = "API key" if self.grant is None else f"{self.grant.role.value}'s link or ticket"
            raise MissingScopeError(
                f"this {holder} lacks the scope {scope}", field="scope", limit=scope.value
            )

    @property
    def operator(self) -> bool:
        """Whether the sender may control the pool and migrate every tenant's sessions."""
        return self.may(Scope.POOL_WRITE)


class Keys:
    """Maps keys to identities. Without `key_set` no key is needed: every caller is the tenant `default`."""

    def __init__(
        self,
        key_set: KeySet | None,
        operators: Collection[str] = (),
        clock: Clock | None = None,
        *,
        stored: bool = False,
    ) -> None:
        """`stored`: the keys are in the database, and `replace` gets them later. Until then none is known."""
        self._operators = frozenset(operators)
        self._clock = clock or SystemClock()
        self.in_database = stored
        self.uses: dict[str, float] = {}
        """When each key was last presented, Unix seconds, by the key's id."""
        self._key_set: KeySet | None = None
        self.stream_limits: dict[str, int] = {}
        """How many streams keys may have open at this gateway, by the key's id. Others have no such limit."""
        self._by_hash: dict[str, StoredKey] = {}
        self._by_id: dict[str, tuple[StoredKey, Identity]] = {}
        if key_set is not None:
            self.replace(key_set)

    def __bool__(self) -> bool:
        """Whether a key is needed."""
        return self.in_database or self._key_set is not None

    @property
    def known(self) -> bool:
        """Whether keys can be checked. False until the keys of the database were read."""
        return self._key_set is not None or not self.in_database

    @property
    def stored(self) -> tuple[StoredKey, ...]:
        return () if self._key_set is None else self._key_set.keys

    @property
    def operators(self) -> tuple[str, ...]:
        """Tenants with at least one key that has the scope `pool:write`."""
        return tuple(sorted({key.tenant for key, identity in self._by_id.values() if identity.operator}))

    def replace(self, key_set: KeySet) -> None:
        """Replace all keys. An empty set admits no client."""
        self._key_set = key_set
        self._by_hash = {key.hash: key for key in key_set.keys}
        self._by_id = {key.id: (key, self._identity(key)) for key in key_set.keys}
        self.uses = {key: at for key, at in self.uses.items() if key in self._by_id}

    def hash_of(self, key: str) -> str:
        """Return the hash of a key's text. Raises KeysUnreadError."""
        if self._key_set is None:
            raise KeysUnreadError(
                "the API keys are not read yet", field="Authorization", retry_after_s=RETRY_S
            )
        return self._key_set.hash_of(key)

    def identify(self, key: str | None) -> Identity | None:
        """Return the identity that `key` belongs to; None for an unknown or expired key.

        The time taken reveals nothing about any key: the lookup is by a hash, which cannot be predicted
        without the salt. Raises KeysUnreadError.
        """
        if not self:
            operator = not self._operators or DEFAULT_TENANT in self._operators
            scopes = OPERATOR_SCOPES if operator else TENANT_SCOPES
            return Identity(DEFAULT_TENANT, scopes | {Scope.WEBHOOKS_WRITE})
        if not key:
            return None
        digest = self.hash_of(key)
        found = self._by_hash.get(digest)
        if found is None or not hmac.compare_digest(found.hash, digest) or self._expired(found):
            return None
        self.uses[found.id] = self._clock.wall()
        return self._by_id[found.id][1]

    def holds(self, identity: Identity) -> bool:
        """Return whether the key of `identity` is still valid and has the same rights."""
        if not self:
            return True
        found = self._by_id.get(identity.key_id or "")
        return found is not None and found[1] == identity and not self._expired(found[0])

    def allows(self, key_id: str, tenant: str, scopes: Collection[str]) -> bool:
        """Return whether the key with this id is valid, the tenant's, and has the scopes."""
        found = self._by_id.get(key_id)
        if found is None or self._expired(found[0]):
            return False
        identity = found[1]
        return identity.tenant == tenant and all(identity.may(Scope(scope)) for scope in scopes)

    def _expired(self, key: StoredKey) -> bool:
        return key.expires_at is not None and key.expires_at <= self._clock.wall()

    def _identity(self, key: StoredKey) -> Identity:
        scopes = key.effective_scopes
        # A key with named scopes has these only, also if its tenant is an operator.
        if key.scopes is None and key.tenant in self._operators:
            scopes |= OPERATOR_SCOPES
        return Identity(key.tenant, scopes, key.id)


def bearer(header: str | None) -> str | None:
    """Return the bearer token of an Authorization header, or None."""
    scheme, _, token = (header or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


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
