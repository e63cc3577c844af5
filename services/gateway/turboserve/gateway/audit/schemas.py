"""Schemas of the audit log in REST answers."""

from __future__ import annotations

from typing import Self

from pydantic import Field

from turboserve.contracts.audit import AuditEntry, AuditPage
from turboserve.gateway.public import PublicOutput, Timestamp


class AuditRecord(PublicOutput):
    """One changing request. It has no text of a key, link or ticket."""

    id: str = Field(description="Id of the entry.", examples=["aud_5f3a9c"])
    at: Timestamp = Field(description="When the gateway answered, by its clock.")
    operation: str = Field(description="The operation's id in this document.", examples=["create_key"])
    tenant: str = Field(description="Tenant of the sender.", examples=["ops"])
    key: str | None = Field(
        description="Id of the sender's key, which its text begins with, or of its link. `null`: the gateway "
        "needs no keys.",
        examples=["2d06c5c4a1b2c3d4"],
    )
    address: str = Field(
        description="Address of the sender, as the gateway sees it.", examples=["203.0.113.7"]
    )
    path: str = Field(description="Path of the request.", examples=["/v1/keys"])
    target: str = Field(
        description="Id of what was changed or created. Empty: none is known.", examples=["5f3a9c77d1e04b2a"]
    )
    change: str = Field(
        description="The body of an accepted request, at most 1,000 characters. Empty: refused, or no body.",
        examples=['{"tenant": "acme", "scopes": ["sessions:read"]}'],
    )
    status: int = Field(description="HTTP status of the answer.", examples=[201])
    code: str | None = Field(
        description="Code of the problem that was answered. `null`: the request was accepted.",
        examples=["missing_scope"],
    )

    @classmethod
    def of(cls, entry: AuditEntry) -> Self:
        return cls.model_validate(entry.model_dump())


class AuditRecordList(PublicOutput):
    """A page of entries, newest first."""

    entries: list[AuditRecord] = Field(description="The entries.")
    next: int | None = Field(
        description="Value of `after` for the next page. `null`: this is the last page.", examples=[1024]
    )

    @classmethod
    def of(cls, page: AuditPage) -> Self:
        return cls(entries=[AuditRecord.of(entry) for entry in page.entries], next=page.next)
