"""The texts of links and stream tickets: what they grant, signed with HMAC-SHA256.

A text is `PREFIX KEY_ID . PAYLOAD . MAC`. The prefix is part of what is signed, so a ticket is no link.
There is one algorithm, so no header names it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from turboserve.contracts.keys import Scope
from turboserve.contracts.links import Role, SigningKey

LENGTH_LIMIT = 1_024
"""Maximum characters of a text."""


ROLE_SCOPES: Mapping[Role, frozenset[str]] = {
    Role.VIEWER: frozenset({Scope.SESSIONS_READ}),
    Role.CONTROLLER: frozenset({Scope.SESSIONS_READ, Scope.SESSIONS_WRITE}),
}


@dataclass(frozen=True)
class QueryCredentials:
    """What the query of a request contained. Only authentication sees it."""

    ticket: str | None = None
    has_key: bool = False
    """Whether there was an API key in `access_token`, which is refused."""


class GrantKind(StrEnum):
    """The prefix of a text. Scanners find a text that was published by mistake by it."""

    LINK = "tsl_"
    TICKET = "tst_"


@dataclass(frozen=True)
class Grant:
    """The right to one session. A link's holder sends it as a key; a ticket opens streams only."""

    session: str
    tenant: str
    role: Role
    expires_at: float
    """Unix seconds. A stream that a ticket has opened outlasts the ticket."""
    link: str | None = None
    """Id of the link itself, or of the link with which the ticket was made."""
    link_expires_at: float | None = None
    """When that link expires. A ticket's stream ends then."""
    key: str | None = None
    """Id of the API key with which the ticket was made. The stream ends with the key."""
    signing_key: str | None = field(default=None, compare=False)
    """Id of the key that has signed the text; None: it is not signed yet."""


def kind_of(text: str | None) -> GrantKind | None:
    """Return the kind of a text by its prefix; None: it is neither a link nor a ticket."""
    return next((kind for kind in GrantKind if text is not None and text.startswith(kind)), None)


def signed(kind: GrantKind, grant: Grant, key: SigningKey) -> str:
    """Return the text of a grant."""
    values = {
        "s": grant.session,
        "t": grant.tenant,
        "r": grant.role.value,
        "e": grant.expires_at,
        "l": grant.link,
        "m": grant.link_expires_at,
        "k": grant.key,
    }
    present = {name: value for name, value in values.items() if value is not None}
    payload = json.dumps(present, separators=(",", ":"))
    head = f"{kind}{key.id}.{_encoded(payload.encode())}"
    return f"{head}.{_encoded(_mac(head, key))}"


def verified(kind: GrantKind, text: str, keys: Mapping[str, SigningKey]) -> Grant | None:
    """Return what the text grants; None if no key of `keys` has signed it. The expiry is not checked."""
    head, _, mac = text.rpartition(".")
    name = head.removeprefix(kind).partition(".")[0]
    key = keys.get(name)
    if len(text) > LENGTH_LIMIT or not text.isascii() or not head.startswith(kind) or key is None:
        return None
    if not hmac.compare_digest(_encoded(_mac(head, key)), mac):
        return None
    return _read(head.rpartition(".")[2], key.id)


def _read(payload: str, signing_key: str) -> Grant | None:
    try:
        values: dict[str, Any] = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return Grant(
            session=values["s"],
            tenant=values["t"],
            role=Role(values["r"]),
            expires_at=float(values["e"]),
            link=values.get("l"),
            link_expires_at=values.get("m"),
            key=values.get("k"),
            signing_key=signing_key,
        )
    except (ValueError, KeyError, TypeError, binascii.Error):
        # Signed by a gateway of another version.
        return None


def _mac(head: str, key: SigningKey) -> bytes:
    return hmac.digest(bytes.fromhex(key.secret.get_secret_value()), head.encode(), hashlib.sha256)


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
