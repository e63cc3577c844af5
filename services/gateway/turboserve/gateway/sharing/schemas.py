"""Schemas of links and tickets in REST requests and answers."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field

from turboserve.contracts.base import Text
from turboserve.contracts.keys import LABEL_LIMIT
from turboserve.contracts.links import LinkRecord, Role
from turboserve.gateway.public import InputTime, PublicInput, PublicOutput, Timestamp

RoleInput = Annotated[Role, Field(strict=False)]


class NewTicket(PublicInput):
    """A ticket to create."""

    role: RoleInput | None = Field(
        None,
        description="What the stream's viewer may do. `null`: what the sender may do, at most `controller`.",
        examples=["viewer"],
    )


class Ticket(PublicOutput):
    """Opens streams of one session for a short time. Opened streams last longer."""

    ticket: str = Field(
        description="For `?ticket=` of the WebSocket, `stream.mp4` and `events`.", examples=["tst_…"]
    )
    role: Role = Field(description="What the stream's viewer may do.", examples=["viewer"])
    expires_at: Timestamp = Field(description="Until when the ticket opens streams.")


class NewLink(PublicInput):
    """A link to create."""

    role: RoleInput = Field(
        Role.VIEWER,
        description="`viewer`: watch. `controller`: also change the prompt and limits, pause and resume.",
        examples=["viewer"],
    )
    expires_at: InputTime | None = Field(
        None,
        description="When the link expires. `null`: after the deployment's `TURBOSERVE_LINK_LIFETIME_S`.",
        examples=["2026-11-25T21:04:05Z"],
    )
    label: Annotated[Text, Field(max_length=LABEL_LIMIT)] = Field(
        "", description="A text for people.", examples=["review on Monday"]
    )


class Link(PublicOutput):
    """A link to one session, without its text."""

    id: str = Field(description="Id of the link.", examples=["lnk_5f3a9c"])
    session: str = Field(description="Id of the session.", examples=["ses_5f3a9c"])
    role: Role = Field(description="What the holder may do.", examples=["viewer"])
    label: str = Field(description="A text for people.", examples=["review on Monday"])
    created_at: Timestamp = Field(description="When the link was created.")
    created_by: str | None = Field(
        description="Id of the API key that created the link. `null`: the gateway needs no keys.",
        examples=["2d06c5c4a1b2c3d4"],
    )
    expires_at: Timestamp = Field(description="When the link expires.")
    revoked_at: Timestamp | None = Field(description="When the link was revoked. `null`: it is not revoked.")

    @classmethod
    def of(cls, record: LinkRecord) -> Self:
        return cls.model_validate(record.model_dump())


class NewLinkText(Link):
    """A created link, with its text."""

    token: str = Field(
        description="Text of the link, for `Authorization: Bearer`. Only this answer has it.",
        examples=["tsl_…"],
    )
    url: str = Field(
        description="Path of the page that plays the session. Browsers do not send the part after `#`.",
        examples=["/#session=ses_5f3a9c&link=tsl_…"],
    )
    embed_url: str = Field(
        description="Path of the player for frames of other pages.",
        examples=["/embed/ses_5f3a9c#link=tsl_…"],
    )

    @classmethod
    def created(cls, record: LinkRecord, token: str) -> Self:
        url = f"/#session={record.session}&link={token}"
        embed_url = f"/embed/{record.session}#link={token}"
        return cls.model_validate({**record.model_dump(), "token": token, "url": url, "embed_url": embed_url})


class LinkList(PublicOutput):
    """Links of one session, newest first."""

    links: list[Link] = Field(description="The links that have not expired, also revoked ones.")
