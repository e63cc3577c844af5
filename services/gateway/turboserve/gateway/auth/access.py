"""Who may call the gateway: API keys and their rights, and the limit of wrong keys."""

from __future__ import annotations

import hmac
from collections.abc import Collection
from dataclasses import dataclass

from turboserve import logs
from turboserve.clock import Clock, SystemClock
from turboserve.contracts.errors import UnauthorizedError
from turboserve.contracts.keys import Scope
from turboserve.gateway import metrics
from turboserve.gateway.auth.hashing import OPERATOR_SCOPES, TENANT_SCOPES, KeySet, StoredKey
from turboserve.gateway.auth.throttle import FailureThrottle, LogBudget, network_of
from turboserve.gateway.problems.errors import KeysUnreadError, TooManyWrongKeysError
from turboserve.telemetry_names import REASON

DEFAULT_TENANT = "default"
LOG_LINES_PER_MINUTE = 20
RETRY_S = 1.0

log = logs.get("auth")


@dataclass(frozen=True)
class Identity:
    """The sender of a request."""

    tenant: str
    scopes: frozenset[str]
    key_id: str | None = None
    """Id of the sender's key. None: this gateway needs no key."""

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes or Scope.ADMIN in self.scopes

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
            return Identity(DEFAULT_TENANT, OPERATOR_SCOPES if operator else TENANT_SCOPES)
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

    def _expired(self, key: StoredKey) -> bool:
        return key.expires_at is not None and key.expires_at <= self._clock.wall()

    def _identity(self, key: StoredKey) -> Identity:
        scopes = key.effective_scopes
        if key.tenant in self._operators:
            scopes |= OPERATOR_SCOPES
        return Identity(key.tenant, scopes, key.id)


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
            metrics.keys_refused.add(1, {REASON: "missing"})
            raise UnauthorizedError(
                "an API key is needed: Authorization: Bearer KEY, or for streams ?access_token=KEY",
                field="Authorization",
            )
        network = network_of(address)
        now_s = self._clock.monotonic()
        wait_s = self._throttle.failed(network, now_s)
        reason = "unknown" if wait_s is None else "throttled"
        metrics.keys_refused.add(1, {REASON: reason})
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
