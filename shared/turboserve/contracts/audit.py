"""The audit log: who has changed keys, links, pools, costs and owners of sessions, with which result."""

from __future__ import annotations

from pydantic import Field

from turboserve.contracts.base import Contract, Count, Id, Note, UnixSeconds

ENTRIES_LIMIT = 200
"""Maximum number of entries of one request."""


class AuditEntry(Contract):
    """A row of `audit_log`. It has no text of a key, link or ticket."""

    id: Id
    """Chosen by the gateway. A repeat adds no second row."""
    at: UnixSeconds
    """When the gateway answered, by its clock."""
    operation: Id
    """The operation's id in OpenAPI."""
    tenant: Id
    """Tenant of the sender."""
    key: Id | None = None
    """Id of the sender's API key, which its text begins with, or of its link. None: no key is needed."""
    address: Note = ""
    """Address of the sender, as the gateway sees it."""
    path: Note
    """Path of the request."""
    target: Note = ""
    """Id of what was changed or created, if the request or its answer names one."""
    change: Note = ""
    """Body of an accepted request, as JSON, cut to the length of a note. Empty: refused, or no body."""
    status: int = Field(ge=100, le=599)
    """HTTP status of the answer."""
    code: Id | None = None
    """Code of the problem that was answered. None: the request was accepted."""


class NoteAudit(Contract):
    """gateway → state store: add entries to the audit log, and delete those beyond their retention."""

    entries: tuple[AuditEntry, ...] = Field(min_length=1, max_length=ENTRIES_LIMIT)


class ListAudit(Contract):
    """gateway → state store: list entries, newest first. Answered with `AuditPage`."""

    tenant: Id | None = None
    key: Id | None = None
    operation: Id | None = None
    refused: bool | None = None
    """Only refused requests, or only accepted ones. None: both."""
    since: UnixSeconds | None = None
    until: UnixSeconds | None = None
    """Only entries before this time."""
    limit: int = Field(default=100, ge=1, le=1_000)
    after: Count | None = None
    """The `next` of the previous page."""


class AuditPage(Contract):
    """One page of entries. `next` None: the last page."""

    entries: tuple[AuditEntry, ...]
    next: Count | None = None
