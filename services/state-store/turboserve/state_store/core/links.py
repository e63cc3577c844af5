"""Rules of links to sessions and of the keys that sign them. No I/O, no clock: `now` is Unix seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise

from turboserve.contracts.errors import ConflictError, InvalidInputError, LinkLimitError
from turboserve.contracts.links import (
    LINKS_LIMIT,
    SESSION_LINKS_LIMIT,
    TENANT_LINKS_LIMIT,
    CreateLink,
    LinkRecord,
    SigningKey,
)

CLOCK_SKEW_S = 60.0
"""Wall clocks of gateways and of the store differ by less than this, seconds."""


@dataclass(frozen=True)
class LinkCounts:
    """Numbers of links that have not expired."""

    session: int
    tenant: int
    all: int


@dataclass(frozen=True)
class LinkRules:
    """Lifetimes of links and signing keys, seconds."""

    lifetime_s: float
    """Of a link whose creator names no expiry."""
    lifetime_max_s: float
    signing_key_lifetime_s: float
    """Time after which a new key signs."""

    def created(self, request: CreateLink, counts: LinkCounts, now: float) -> LinkRecord:
        """Return the row of a new link. `counts`: links that have not expired.

        Raises InvalidInputError for an expiry in the past or beyond the maximum, and LinkLimitError.
        """
        expires_at = now + self.lifetime_s if request.expires_at is None else request.expires_at
        if expires_at <= now:
            raise InvalidInputError(
                f"expires_at: must be after {_time(now)}", field="expires_at", limit=_time(now)
            )
        if expires_at > now + self.lifetime_max_s + CLOCK_SKEW_S:
            latest = _time(now + self.lifetime_max_s)
            raise InvalidInputError(
                f"expires_at: must be at most {latest}, TURBOSERVE_LINK_LIFETIME_MAX_S "
                f"({self.lifetime_max_s:g} s) from now",
                field="expires_at",
                limit=latest,
            )
        for field, found, limit in (
            ("session", counts.session, SESSION_LINKS_LIMIT),
            ("tenant", counts.tenant, TENANT_LINKS_LIMIT),
            ("deployment", counts.all, LINKS_LIMIT),
        ):
            if found >= limit:
                raise LinkLimitError(
                    f"this {field} has {found} links that have not expired, at most {limit} are allowed; "
                    "revoked ones count until their expiry",
                    field=field,
                    limit=limit,
                )
        values = request.model_dump() | {"created_at": now, "expires_at": expires_at}
        return LinkRecord.model_validate(values)

    def is_new_key_due(self, keys: Sequence[SigningKey], now: float) -> bool:
        """Whether a new key is to sign. `keys`: oldest first."""
        return not keys or keys[-1].created_at + self.signing_key_lifetime_s <= now

    def unused_keys(self, keys: Sequence[SigningKey], now: float) -> list[SigningKey]:
        """Return the keys that have signed nothing that is still valid. `keys`: oldest first."""
        keep_s = self.lifetime_max_s + 2 * CLOCK_SKEW_S
        return [key for key, after in pairwise(keys) if after.created_at + keep_s <= now]


def repeated(found: LinkRecord, request: CreateLink) -> LinkRecord:
    """Return the row that has the request's id. Raises ConflictError if another request created it."""
    wanted = request.model_dump(exclude={"created_by", "expires_at"})
    if request.expires_at is not None:
        wanted["expires_at"] = request.expires_at
    if any(getattr(found, name) != value for name, value in wanted.items()):
        raise ConflictError(f"the link id {request.id} is taken", field="id")
    return found


def _time(unix_s: float) -> str:
    # The API's form of a time.
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
