"""Links to one session, their rows, and the keys that sign links and stream tickets.

The text of a link is signed by a gateway and is in no message. Gateways need the signing keys and the list of
revoked links to check one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from turboserve.contracts.base import Contract, Count, Id, Secret, UnixSeconds
from turboserve.contracts.keys import Expiry, Label, SaltText

LINKS_LIMIT = 10_000
"""Maximum number of links that have not expired, revoked ones included. One message has all revoked ones."""
TENANT_LINKS_LIMIT = 1_000
"""Maximum number of links of one tenant that have not expired, revoked ones included."""
SESSION_LINKS_LIMIT = 100
"""Maximum number of links of one session that have not expired, revoked ones included."""
SIGNING_KEYS_LIMIT = 1_000
"""Maximum number of signing keys that are kept."""


class Role(StrEnum):
    """What the holder of a link or ticket may do with its session."""

    VIEWER = "viewer"
    """Watch: the session's state, video and events."""
    CONTROLLER = "controller"
    """Watch; change the prompt and the limits, pause and resume."""

    def includes(self, other: Role) -> bool:
        return self is Role.CONTROLLER or other is Role.VIEWER


SigningSecret = Annotated[Secret, Field(min_length=64, max_length=128)]
"""Hexadecimal digits of a random key for HMAC-SHA256."""
_KeyName = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$", max_length=16)]


class SigningKey(Contract):
    """A key that signs links and tickets."""

    id: _KeyName
    secret: SigningSecret
    created_at: UnixSeconds


class LinkRecord(Contract):
    """A row of `session_links`."""

    id: Id
    session: Id
    tenant: Id
    role: Role
    label: Label = ""
    created_at: UnixSeconds
    created_by: Id | None = None
    """Id of the API key that created the link. None: the gateway needs no keys."""
    expires_at: Expiry
    revoked_at: UnixSeconds | None = None
    """None: the link is not revoked."""


class CreateLink(Contract):
    """gateway → state store: create a link to a session of the tenant. Answered with `LinkRecord`.

    A repeat with a known id and the same role, label and expiry creates no second link.
    """

    id: Id
    """Chosen by the gateway."""
    session: Id
    tenant: Id
    role: Role
    label: Label = ""
    created_by: Id | None = None
    expires_at: Expiry | None = None
    """None: `TURBOSERVE_LINK_LIFETIME_S` after now."""


class LinkRef(Contract):
    """gateway → state store: revoke a link. Answered with `LinkRecord`. A repeat changes nothing."""

    link: Id
    session: Id
    tenant: Id


class ListLinks(Contract):
    """gateway → state store: list the links of a session that have not expired. Answered with `LinkList`."""

    session: Id
    tenant: Id


class LinkList(Contract):
    """Links of one session, newest first."""

    links: tuple[LinkRecord, ...] = Field(max_length=SESSION_LINKS_LIMIT)


class GetSigning(Contract):
    """gateway → state store: read what is needed to check links and tickets. Answered with `Signing`."""

    version: Count | None = None
    """The version that the gateway has. None: no version."""


class Signing(Contract):
    """What gateways need to sign and check links and tickets."""

    database: SaltText
    """Identifies the database. Another database may have the same version by chance."""
    version: Count
    """Raised with every revocation and every new signing key."""
    keys: tuple[SigningKey, ...] | None = Field(default=None, max_length=SIGNING_KEYS_LIMIT)
    """The newest one signs, all of them verify. None: the gateway's version is the current one."""
    revoked: tuple[Id, ...] = Field(default=(), max_length=LINKS_LIMIT)
    """Links that are revoked and have not expired. Empty if `keys` is None."""


class LinkChange(Contract):
    """state store → gateway, a hint: a link was revoked. Gateways read `Signing` at once."""

    link: Id
    version: Count
