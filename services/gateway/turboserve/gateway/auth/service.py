"""API keys: who has which rights, and the limit of wrong keys."""

from __future__ import annotations

import hmac
from collections.abc import Collection
from dataclasses import dataclass

from turboserve import logs
from turboserve.clock import Clock
from turboserve.contracts.errors import UnauthorizedError
from turboserve.gateway import metrics
from turboserve.gateway.auth.hashing import KeySet, StoredKey
from turboserve.gateway.auth.throttle import FailureThrottle, LogBudget, network_of
from turboserve.gateway.problems.errors import TooManyWrongKeysError

DEFAULT_TENANT = "default"
LOG_LINES_PER_MINUTE = 20

log = logs.get("auth")


@dataclass(frozen=True)
class Identity:
    """The sender of a request."""

    tenant: str
    operator: bool
    """Whether the sender may control the pool and migrate every tenant's sessions."""
    key_id: str | None = None
    """Id of the sender's key. None: this gateway needs no key."""


class Keys:
    """Maps keys to identities. Without `key_set` no key is needed: every caller is the tenant `default`."""

    def __init__(self, key_set: KeySet | None, operators: Collection[str] = ()) -> None:
        self._operators = frozenset(operators)
        self._key_set: KeySet | None = None
        self._by_hash: dict[str, StoredKey] = {}
        self._by_id: dict[str, StoredKey] = {}
        if key_set is not None:
            self.replace(key_set)

    def __bool__(self) -> bool:
        """Whether a key is needed."""
        return self._key_set is not None

    @property
    def stored(self) -> tuple[StoredKey, ...]:
        return () if self._key_set is None else self._key_set.keys

    @property
    def operators(self) -> tuple[str, ...]:
        """Tenants with at least one operator key."""
        return tuple(sorted({key.tenant for key in self.stored if self._identity(key).operator}))

    def replace(self, key_set: KeySet) -> None:
        """Replace all keys. An empty set admits no client."""
        self._key_set = key_set
        self._by_hash = {key.hash: key for key in key_set.keys}
        self._by_id = {key.id: key for key in key_set.keys}

    def identify(self, key: str | None) -> Identity | None:
        """Return the identity that `key` belongs to; None for an unknown key.

        The time taken reveals nothing about any key: the lookup is by a hash, which cannot be predicted
        without the salt.
        """
        if self._key_set is None:
            return Identity(DEFAULT_TENANT, not self._operators or DEFAULT_TENANT in self._operators)
        if not key:
            return None
        digest = self._key_set.hash_of(key)
        found = self._by_hash.get(digest)
        if found is None or not hmac.compare_digest(found.hash, digest):
            return None
        return self._identity(found)

    def holds(self, identity: Identity) -> bool:
        """Return whether the key of `identity` is still valid and has the same rights."""
        if self._key_set is None:
            return True
        found = self._by_id.get(identity.key_id or "")
        return found is not None and self._identity(found) == identity

    def _identity(self, key: StoredKey) -> Identity:
        return Identity(key.tenant, key.operator or key.tenant in self._operators, key.id)


def bearer(header: str | None) -> str | None:
    """Return the bearer token of an Authorization header, or None."""
    scheme, _, token = (header or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


class Authenticator:
    """Identifies requests by their key. Answers `failures_per_minute` wrong keys of one address with 401."""

    def __init__(self, keys: Keys, clock: Clock, failures_per_minute: int) -> None:
        self._keys = keys
        self._clock = clock
        self._limit = failures_per_minute
        self._throttle = FailureThrottle(failures_per_minute)
        self._log_budget = LogBudget(LOG_LINES_PER_MINUTE)

    def identify(self, key: str | None, address: str | None) -> Identity:
        """Return the identity that `key` belongs to.

        Raises:
            UnauthorizedError: There is no key, or the key is unknown.
            TooManyWrongKeysError: The address has sent too many wrong keys. A known key still passes.
        """
        identity = self._keys.identify(key)
        if identity is not None:
            return identity
        if not key:
            # Counted, not throttled: a missing key is no guess. A page sends none before its user enters one.
            metrics.keys_refused.add(1, {"reason": "missing"})
            raise UnauthorizedError(
                "an API key is needed: Authorization: Bearer KEY, or for streams ?access_token=KEY",
                field="Authorization",
            )
        network = network_of(address)
        now_s = self._clock.monotonic()
        wait_s = self._throttle.failed(network, now_s)
        reason = "unknown" if wait_s is None else "throttled"
        metrics.keys_refused.add(1, {"reason": reason})
        left_out = self._log_budget.take(now_s)
        if left_out is not None:
            log.warning("api key refused", address=network, reason=reason, others_not_logged=left_out)
        if wait_s is None:
            raise UnauthorizedError("unknown API key", field="Authorization")
        raise TooManyWrongKeysError(
            f"more than {self._limit} wrong API keys a minute came from this address",
            field="Authorization",
            limit=self._limit,
            retry_after_s=round(wait_s, 1),
        )
