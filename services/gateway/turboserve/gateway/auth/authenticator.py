"""Identifies the sender of a request before the routes see it. Counts, logs and throttles wrong keys."""

from __future__ import annotations

from turboserve import logs
from turboserve.clock import Clock
from turboserve.contracts.errors import UnauthorizedError
from turboserve.gateway import metrics
from turboserve.gateway.auth.service import Identity, Keys
from turboserve.gateway.auth.throttle import FailureThrottle, LogBudget, network_of
from turboserve.gateway.problems.errors import TooManyWrongKeysError

log = logs.get("auth")

LOG_LINES_PER_MINUTE = 20


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
