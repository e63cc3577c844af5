"""The frames of the control channel: JSON, validated before use."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, IPvAnyAddress, TypeAdapter

from turboserve.contracts.base import Id

PAGES_LIMIT = 16_384
VERSION = 2
NONCE_BYTES = 32
ENTRY_LIMIT = 1 << 16
"""Largest rendezvous entry, bytes."""

Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""32 bytes, hexadecimal."""
Addresses = Annotated[tuple[IPvAnyAddress, ...], Field(max_length=16)]


class _Frame(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Open(_Frame):
    """target → source, the first frame: names the migration. See `handshake`."""

    type: Literal["open"] = "open"
    version: int = VERSION
    session: Id
    migration: int = Field(ge=0, lt=1 << 63)
    worker: Id
    """Id of the target."""
    nonce: Hex32


class Challenge(_Frame):
    """source → target: the source's nonce."""

    type: Literal["challenge"] = "challenge"
    nonce: Hex32


class Proof(_Frame):
    """Either direction: the sender holds the migration's key."""

    type: Literal["proof"] = "proof"
    mac: Hex32


class Denied(_Frame):
    """source → target: the proof belongs to no migration that the source knows; the connection ends."""

    type: Literal["denied"] = "denied"


class Hello(_Frame):
    """target → source, the first frame after authentication: how the target can receive the state."""

    type: Literal["hello"] = "hello"
    model: str = Field(max_length=64)
    """`state_fingerprint` of the target's model: configuration and weights."""
    backends: tuple[str, ...] = Field(max_length=16)
    """The target's backends, in order of preference."""
    warm: tuple[str, ...] = Field(default=(), max_length=64)
    """Names of the target's idle links to this source."""
    machine: str = Field(default="", max_length=128)
    """See `shm.machine`."""
    limit_s: float = Field(default=20.0, gt=0, allow_inf_nan=False)
    """Time after which the target gives up, seconds."""
    device: str = Field(default="cpu", max_length=16)
    gpu: str = Field(default="", max_length=128)
    """UUID of the target's GPU; empty if its states are in host memory, or if it does not say."""
    addresses: Addresses = ()
    """Addresses from which the target's libraries may connect."""


class Welcome(_Frame):
    """source → target: the link that carries the state."""

    type: Literal["welcome"] = "welcome"
    backend: str
    link: Id
    warm: bool = False
    """Whether both sides already have the link; otherwise both create it now."""
    addresses: Addresses = ()
    """Addresses from which the source's libraries may connect."""


class StoreEntry(_Frame):
    """Either direction, while a link is created: a key and value of the rendezvous of a group of two."""

    type: Literal["store_entry"] = "store_entry"
    key: str = Field(max_length=256)
    value: str = Field(max_length=2 * ENTRY_LIMIT, pattern=r"^([0-9a-f]{2})*$")
    """The value, hexadecimal."""


class Linked(_Frame):
    """Either direction: the sender's end of the new link is ready, and no more entries follow."""

    type: Literal["linked"] = "linked"


class Refuse(_Frame):
    """Either direction: the sender refuses, with the reason; the connection ends."""

    type: Literal["refuse"] = "refuse"
    code: str = Field(max_length=64)
    detail: str = Field(max_length=2_000)


class PageSpec(_Frame):
    """One page of a round."""

    name: str = Field(max_length=160)
    size: int = Field(ge=0)
    dtype: str = ""
    shape: tuple[int, ...] = Field(default=(), max_length=8)


class Round(_Frame):
    """source → target: these pages come next, in this order."""

    type: Literal["round"] = "round"
    number: int
    pages: tuple[PageSpec, ...] = Field(max_length=PAGES_LIMIT)
    offer: dict[str, Any] = {}
    """The backend's description of the pages (`Link.offer`)."""


class Taken(_Frame):
    """target → source: the round's pages have arrived."""

    type: Literal["taken"] = "taken"
    number: int
    size: int


class Wait(_Frame):
    """source → target: the source is alive, and still waits for the chunk boundary or hashes pages."""

    type: Literal["wait"] = "wait"


class Manifest(_Frame):
    """source → target: everything is sent. The session is quiesced, and the log has all its chunks."""

    type: Literal["seal"] = "seal"
    header: dict[str, Any]
    pages: tuple[str, ...] = Field(max_length=PAGES_LIMIT)
    """All pages of the state. Pages of earlier rounds that are not among them are dropped."""
    digest: str = Field(max_length=128)


class Verified(_Frame):
    """target → source: the state has arrived, bit for bit."""

    type: Literal["verified"] = "verified"
    digest: str = Field(max_length=128)


class AskManifest(_Frame):
    """receiver → source, after the link is made: the manifest of the weights with this digest."""

    type: Literal["ask_manifest"] = "ask_manifest"
    digest: str = Field(max_length=128)


class WeightManifestText(_Frame):
    """source → receiver: the manifest that was asked for, as `weight_transfer.manifest_text` writes it."""

    type: Literal["weight_manifest"] = "weight_manifest"
    text: str


class AskShard(_Frame):
    """receiver → source: one shard of the weights."""

    type: Literal["ask_shard"] = "ask_shard"
    shard: int = Field(ge=0)


class ShardOffer(_Frame):
    """source → receiver: the shard comes next, over the link."""

    type: Literal["shard_offer"] = "shard_offer"
    shard: int
    size: int | None = Field(default=None, ge=0)
    """Bytes of the shard; None: a source of an earlier version."""
    offer: dict[str, Any] = {}
    """The backend's description of the memory (`Link.offer`)."""
    sent_bytes: int = Field(default=0, ge=0)
    """What the source has sent to all receivers, bytes."""


class ShardTaken(_Frame):
    """receiver → source: the shard has arrived."""

    type: Literal["shard_taken"] = "shard_taken"
    shard: int


class NotNow(_Frame):
    """source → receiver: the source sends nothing for a while, because its viewers need its time."""

    type: Literal["not_now"] = "not_now"
    retry_s: float = Field(gt=0, le=60)


Frame = Annotated[
    Open
    | Challenge
    | Proof
    | Denied
    | Hello
    | Welcome
    | Refuse
    | StoreEntry
    | Linked
    | Round
    | Taken
    | Wait
    | Manifest
    | Verified
    | AskManifest
    | WeightManifestText
    | AskShard
    | ShardOffer
    | ShardTaken
    | NotNow,
    Field(discriminator="type"),
]
FRAME: TypeAdapter[Frame] = TypeAdapter(Frame)
