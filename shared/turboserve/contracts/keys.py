"""API keys in the database: their records, and the requests of gateways about them.

No message contains the text of a key. The gateway makes the key and sends its hash.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from turboserve.contracts.base import NUMBER_LIMIT, Contract, Count, Id, Text, UnixSeconds

KEYS_LIMIT = 10_000
"""Maximum number of keys that are neither revoked nor expired. One message has all of them."""
LABEL_LIMIT = 200
SCOPES_LIMIT = 16
"""Maximum number of scopes of one key."""


class Scope(StrEnum):
    """What a key may do. A key has any set of scopes. `admin` includes all others."""

    SESSIONS_READ = "sessions:read"
    """Read and watch the tenant's sessions. Read the state of models, workers, pools and cost."""
    SESSIONS_WRITE = "sessions:write"
    """Create, change, migrate and end the tenant's sessions."""
    POOL_WRITE = "pool:write"
    """Order pools, correct the cost, and see the reasons of pools. With `sessions:write`: migrate all
    tenants' sessions."""
    WEBHOOKS_WRITE = "webhooks:write"
    """Read and change the tenant's webhooks, which receive all its events."""
    ADMIN = "admin"
    """Create, list and revoke keys of every tenant. Includes all other scopes."""


# No enumeration: a reader that does not know a new scope must still read all other keys.
ScopeName = Annotated[str, StringConstraints(pattern=r"^[a-z]{1,32}(:[a-z]{1,32})?$", max_length=65)]
Scopes = Annotated[tuple[ScopeName, ...], Field(min_length=1, max_length=SCOPES_LIMIT)]
KeyHashText = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$", max_length=64)]
SaltText = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$", max_length=32)]
Label = Annotated[Text, Field(max_length=LABEL_LIMIT)]
Expiry = Annotated[float, Field(ge=0, le=NUMBER_LIMIT)]
"""Time at which a key expires, Unix seconds. Gateways compare it with their wall clocks."""


_Most = Annotated[int, Field(ge=1, le=NUMBER_LIMIT)]


class KeyLimits(Contract):
    """What may be used through one key. A session counts for the key that created it, with its prompts,
    whoever sends them. The limits of the key's tenant hold as well. None: the key has no such limit.
    """

    weight: float | None = Field(default=None, ge=0.01, le=100)
    """Weight of the key's sessions among those that wait for slots. None: 1. Sessions get it when they are
    created or resumed."""
    sessions: _Most | None = None
    """Sessions that have not ended."""
    slots: _Most | None = None
    """Sessions that hold a slot or wait for one, over all models."""
    streams: _Most | None = None
    """Streams that the key has open at one gateway."""
    creations_per_minute: _Most | None = None
    prompts_per_minute: _Most | None = None
    """Prompts, pauses and changes of the key's sessions together."""
    gpu_seconds_per_day: float | None = Field(default=None, ge=1, le=NUMBER_LIMIT)
    """GPU-seconds of the key's sessions in one day of UTC. A spent budget refuses creations and resumptions.
    Sessions that run go on."""


LIMIT_NAMES = tuple(KeyLimits.model_fields)


class KeyRecord(Contract):
    """A row of `api_keys` without its hash."""

    id: Id
    tenant: Id
    scopes: Scopes
    label: Label = ""
    limits: KeyLimits = KeyLimits()
    created_at: UnixSeconds
    expires_at: Expiry | None = None
    """None: the key does not expire."""
    revoked_at: UnixSeconds | None = None
    """None: the key is not revoked."""
    last_used_at: UnixSeconds | None = None
    """When a gateway last saw the key, by the gateway's clock, accurate to about a minute. None: not yet."""


class CreateKey(Contract):
    """gateway → state store: create a key. Answered with `CreatedKey`.

    A repeat with a known id and the same tenant, scopes, expiry and label creates no second key.
    """

    id: Id
    """Chosen by the gateway."""
    tenant: Id
    scopes: Scopes
    hash: KeyHashText
    """Hash of the key under the salt of `ValidKeys`."""
    expires_at: Expiry | None = None
    label: Label = ""
    limits: KeyLimits = KeyLimits()
    """A repeated request may have other limits: they may have changed since."""


class CreatedKey(Contract):
    """The row after a `CreateKey`."""

    key: KeyRecord
    created: bool
    """Whether this request created the key. If not, the row has the hash of an earlier request."""


class KeyRef(Contract):
    """gateway → state store: read or revoke a key. Answered with `KeyRecord`. A repeat changes nothing."""

    key: Id


class ChangeKey(KeyRef):
    """gateway → state store: change the limits of a key. Answered with `KeyRecord`."""

    changes: tuple[Annotated[str, Field(max_length=32)], ...] = Field(default=(), max_length=16)
    """Names of the limits to set. The others stay."""
    limits: KeyLimits = KeyLimits()


class ListKeys(Contract):
    """gateway → state store: list keys, newest first. Answered with `KeyPage`."""

    tenant: Id | None = None
    """Only keys of this tenant. None: of all tenants."""
    limit: int = Field(default=100, ge=1, le=1_000)
    after: Count | None = None
    """The `next` of the previous page."""


class KeyPage(Contract):
    """One page of keys. `next` None: the last page."""

    keys: tuple[KeyRecord, ...]
    next: Count | None = None


class GetValidKeys(Contract):
    """gateway → state store, every second: read the keys that requests may have."""

    version: Count | None = None
    """The version that the gateway has. None: no version."""


class ValidKey(Contract):
    """What a gateway needs to check a key."""

    id: Id
    tenant: Id
    scopes: Scopes
    hash: KeyHashText
    expires_at: Expiry | None = None
    limits: KeyLimits = KeyLimits()


class ValidKeys(Contract):
    """The keys that are neither revoked nor expired."""

    salt: SaltText
    """Salt of all hashes. It is made once for each database."""
    version: Count
    """Raised with every creation, change and revocation."""
    keys: tuple[ValidKey, ...] | None = None
    """None: the gateway's version is the current one."""


class KeyUse(Contract):
    """When a gateway last saw a key, by the gateway's clock."""

    key: Id
    at: UnixSeconds


class NoteKeyUses(Contract):
    """gateway → state store, at most once a minute for each key: when keys were last used."""

    uses: tuple[KeyUse, ...] = Field(min_length=1, max_length=KEYS_LIMIT)


class KeyChange(Contract):
    """state store → gateway, a hint: a key was created, changed or revoked. Gateways read all at once."""

    key: Id
    version: Count
