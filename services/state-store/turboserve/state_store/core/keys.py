"""Rules of API keys. No I/O, no clock: `now` is Unix seconds."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from turboserve.contracts.errors import ConflictError, InvalidInputError, KeyLimitError
from turboserve.contracts.keys import KEYS_LIMIT, CreateKey, KeyRecord, KeyUse

USE_INTERVAL_S = 60.0
"""Time between two written uses of one key, seconds."""
CLOCK_SKEW_S = 60.0
"""Wall clocks of gateways and of the store differ by less than this, seconds."""


def created(request: CreateKey, valid: int, now: float) -> KeyRecord:
    """Return the row of a new key. `valid`: number of valid keys.

    Raises InvalidInputError for a key that has expired already, and KeyLimitError.
    """
    if request.expires_at is not None and request.expires_at <= now:
        # The API's form of a time.
        earliest = datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        raise InvalidInputError(f"expires_at: must be after {earliest}", field="expires_at", limit=earliest)
    if valid >= KEYS_LIMIT:
        raise KeyLimitError(
            f"there are {valid} valid keys, at most {KEYS_LIMIT} are allowed: revoke some",
            field="keys",
            limit=KEYS_LIMIT,
        )
    return KeyRecord.model_validate({**_wanted(request), "created_at": now})


def repeated(found: KeyRecord, request: CreateKey) -> KeyRecord:
    """Return the row that has the request's id. Raises ConflictError if another request created it."""
    if any(getattr(found, name) != value for name, value in _wanted(request).items() if name != "limits"):
        raise ConflictError(f"the key id {request.id} is taken", field="id")
    return found


def plausible_uses(uses: Iterable[KeyUse], now: float) -> dict[str, float]:
    """Return the last use of each key. Leaves out uses in the future, which would hide all later ones."""
    found: dict[str, float] = {}
    for use in uses:
        if use.at <= now + CLOCK_SKEW_S:
            found[use.key] = max(use.at, found.get(use.key, 0.0))
    return found


def _wanted(request: CreateKey) -> dict[str, object]:
    scopes = tuple(sorted(set(request.scopes)))
    return request.model_dump(exclude={"hash", "scopes"}) | {"scopes": scopes}
