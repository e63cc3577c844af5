"""Schemas of API keys in REST requests and answers."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field

from turboserve.contracts.base import ID_PATTERN, NUMBER_LIMIT, Text
from turboserve.contracts.keys import LABEL_LIMIT, CreatedKey, KeyPage, KeyRecord, Scope
from turboserve.gateway.public import InputTime, PublicInput, PublicOutput, Timestamp

_Most = Annotated[int, Field(ge=1, le=NUMBER_LIMIT)]


class LimitsInput(PublicInput):
    """Limits of a key. What the request leaves out stays as it is; `null` removes a limit."""

    weight: Annotated[float, Field(ge=0.01, le=100)] | None = Field(
        None,
        description="Weight of the key's sessions among those that wait for slots: of two tenants that wait, "
        "twice the weight gets twice the slots. `null`: 1. Sessions get it when they are created or resumed.",
        examples=[2.0],
    )
    sessions: _Most | None = Field(None, description="Sessions that have not ended.", examples=[20])
    slots: _Most | None = Field(
        None, description="Sessions that run or wait for a slot, over all models.", examples=[5]
    )
    streams: _Most | None = Field(
        None, description="Streams that the key has open at one gateway.", examples=[50]
    )
    creations_per_minute: _Most | None = Field(None, description="Creations of sessions.", examples=[30])
    prompts_per_minute: _Most | None = Field(
        None, description="Prompts, pauses and changes of the key's sessions together.", examples=[120]
    )
    gpu_seconds_per_day: Annotated[float, Field(ge=1, le=NUMBER_LIMIT)] | None = Field(
        None,
        description="GPU-seconds of the key's sessions in a day of UTC. A spent budget refuses creations and "
        "resumptions; sessions that run go on.",
        examples=[36_000.0],
    )

    @classmethod
    def none(cls) -> Self:
        return cls.model_validate({})


class Limits(PublicOutput):
    """Limits of a key. `null`: the key has no such limit. Those of its tenant hold as well."""

    weight: float | None = Field(
        None, description="Weight of the key's sessions among those that wait for slots.", examples=[2.0]
    )
    sessions: int | None = Field(None, description="Sessions that have not ended.", examples=[20])
    slots: int | None = Field(None, description="Sessions that run or wait for a slot.", examples=[5])
    streams: int | None = Field(None, description="Streams at one gateway.", examples=[50])
    creations_per_minute: int | None = Field(None, description="Creations of sessions.", examples=[30])
    prompts_per_minute: int | None = Field(None, description="Prompts, pauses and changes.", examples=[120])
    gpu_seconds_per_day: float | None = Field(
        None, description="GPU-seconds in a day of UTC.", examples=[36_000.0]
    )


class KeyChanges(PublicInput):
    """What to change of a key."""

    limits: LimitsInput = Field(description="The limits to set or to remove.")


class NewKey(PublicInput):
    """A key to create."""

    tenant: str = Field(
        pattern=ID_PATTERN, description="Tenant of the key. Sessions belong to a tenant.", examples=["acme"]
    )
    scopes: list[Annotated[Scope, Field(strict=False)]] = Field(
        min_length=1,
        max_length=len(Scope),
        description="What the key may do. `admin` includes all other scopes.",
        examples=[["sessions:read", "sessions:write"]],
    )
    expires_at: InputTime | None = Field(
        None,
        description="When the key expires. `null`: it does not expire.",
        examples=["2027-11-22T21:04:05Z"],
    )
    label: Annotated[Text, Field(max_length=LABEL_LIMIT)] = Field(
        "", description="A text for people.", examples=["nightly renders"]
    )
    limits: LimitsInput = Field(
        default_factory=LimitsInput.none,
        description="Limits of what may be used through the key.",
    )


class Key(PublicOutput):
    """An API key without its text, which is not stored."""

    id: str = Field(description="Id of the key. The key's text contains it.", examples=["2d06c5c4a1b2c3d4"])
    tenant: str = Field(description="Tenant of the key.", examples=["acme"])
    scopes: list[str] = Field(
        description="What the key may do.", examples=[["sessions:read", "sessions:write"]]
    )
    label: str = Field(description="A text for people.", examples=["nightly renders"])
    limits: Limits = Field(description="Limits of what may be used through the key.")
    created_at: Timestamp = Field(description="When the key was created.")
    expires_at: Timestamp | None = Field(description="When the key expires. `null`: it does not expire.")
    revoked_at: Timestamp | None = Field(description="When the key was revoked. `null`: it is not revoked.")
    last_used_at: Timestamp | None = Field(
        description="When the key was last used, accurate to about a minute. `null`: not yet."
    )

    @classmethod
    def of(cls, record: KeyRecord) -> Self:
        return cls.model_validate(record.model_dump())


class NewKeyText(Key):
    """A created key, with its text."""

    key: str | None = Field(
        description="Text of the key, for `Authorization: Bearer`. It is shown only once. `null`: an "
        "earlier request with this Idempotency-Key created the key.",
        examples=["ts_2d06c5c4a1b2c3d4_0a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f6071"],
    )

    @classmethod
    def created(cls, made: CreatedKey, text: str) -> Self:
        return cls.model_validate({**made.key.model_dump(), "key": text if made.created else None})


class KeyList(PublicOutput):
    """A page of keys, newest first."""

    keys: list[Key] = Field(description="The keys, also revoked and expired ones.")
    next: int | None = Field(
        description="Value of `after` for the next page. `null`: this is the last page.", examples=[1024]
    )

    @classmethod
    def of(cls, page: KeyPage) -> Self:
        return cls(keys=[Key.of(record) for record in page.keys], next=page.next)
