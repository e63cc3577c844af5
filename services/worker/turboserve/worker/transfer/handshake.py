"""Mutual authentication of the two workers of one migration, and the keys that protect their frames.

Both hold the migration's key, which the state store made and delivers with their rows. Each sends a nonce and
proves the key by a MAC over both nonces, the migration's identity and its own role. The key itself is never
sent, and no message of one connection is valid in another.

    target → source   Open       session, move, target, nonce
    source → target   Challenge  nonce
    target → source   Proof
    source → target   Proof, or Denied

The source answers `Denied` alike for a session or move that it does not know and for a wrong key. It takes
neither memory nor any decision for a peer before that peer's proof is verified.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass

from turboserve.worker.transfer.channel import Channel
from turboserve.worker.transfer.errors import AuthenticationError, TransferProtocolError
from turboserve.worker.transfer.frames import (
    NONCE_BYTES,
    VERSION,
    Challenge,
    Denied,
    Open,
    Proof,
)

OPEN_LIMIT = 1 << 10
"""Bytes of one frame before both sides are authenticated."""
_LABEL = b"turboserve migration 2"


@dataclass(frozen=True)
class Keys:
    """What both sides derive from the migration's key and the two nonces. 32 bytes each."""

    target_proof: bytes
    source_proof: bytes
    target_frames: bytes
    """Key of the MACs on frames that the target sends."""
    source_frames: bytes
    link: bytes
    """Key of the MACs by which both ends of a new link recognize each other."""


def derive(key: bytes, opened: Open, challenge: Challenge) -> Keys:
    """The keys of one connection."""
    parts = (
        opened.session.encode(),
        struct.pack(">Q", opened.move),
        opened.worker.encode(),
        bytes.fromhex(opened.nonce),
        bytes.fromhex(challenge.nonce),
    )
    # Each part behind its length: no two different identities have the same transcript.
    transcript = hashlib.sha256(b"".join(struct.pack(">I", len(part)) + part for part in parts)).digest()

    def expand(purpose: bytes) -> bytes:
        return hmac.digest(key, _LABEL + b"\0" + purpose + b"\0" + transcript, "sha256")

    return Keys(
        target_proof=expand(b"target proof"),
        source_proof=expand(b"source proof"),
        target_frames=expand(b"target frames"),
        source_frames=expand(b"source frames"),
        link=expand(b"link"),
    )


def link_proof(key: bytes, link: str, role: str) -> bytes:
    """What the end with this role sends over a new link. 32 bytes."""
    return hmac.digest(key, f"{link}\0{role}".encode(), "sha256")


async def authenticate(channel: Channel, opened: Open, key: bytes, seconds: float) -> Keys:
    """At the target: prove the key, verify the source's proof, protect the channel from here on.

    `seconds` is the limit of each step. Raises `AuthenticationError` and what `Channel` raises.
    """
    await channel.send(opened, seconds)
    challenge = await channel.receive(seconds, OPEN_LIMIT)
    if not isinstance(challenge, Challenge):
        raise _refused(opened, f"{challenge.type} instead of a challenge")
    keys = derive(key, opened, challenge)
    await channel.send(Proof(mac=keys.target_proof.hex()), seconds)
    answer = await channel.receive(seconds, OPEN_LIMIT)
    if isinstance(answer, Denied):
        raise _refused(opened, "the source denies it")
    if not isinstance(answer, Proof) or not _equal(answer, keys.source_proof):
        raise _refused(opened, "the source does not prove the key")
    channel.protect(sends=keys.target_frames, receives=keys.source_frames)
    return keys


async def admit(
    channel: Channel, key_of: Callable[[str, int], bytes | None], seconds: float
) -> tuple[Open, Keys]:
    """At the source: have the target prove the key, then prove it too, and protect the channel.

    `key_of` gives the key of a session's move, or `None`. `seconds` is the limit of each step. Raises
    `AuthenticationError` after `Denied` was sent, and what `Channel` raises.
    """
    opened = await channel.receive(seconds, OPEN_LIMIT)
    if not isinstance(opened, Open):
        raise TransferProtocolError(f"{opened.type}: the first frame is open")
    if opened.version != VERSION:
        raise TransferProtocolError(f"version: {opened.version}, {VERSION} is spoken here")
    challenge = Challenge(nonce=new_nonce())
    known = key_of(opened.session, opened.move)
    # With a key that nobody has, a move that is not known here takes the same steps.
    keys = derive(secrets.token_bytes(NONCE_BYTES) if known is None else known, opened, challenge)
    await channel.send(challenge, seconds)
    answer = await channel.receive(seconds, OPEN_LIMIT)
    if not isinstance(answer, Proof) or not _equal(answer, keys.target_proof):
        await channel.send(Denied(), seconds)
        raise _refused(opened, "its target does not prove the key")
    await channel.send(Proof(mac=keys.source_proof.hex()), seconds)
    channel.protect(sends=keys.source_frames, receives=keys.target_frames)
    return opened, keys


def new_nonce() -> str:
    """Hexadecimal."""
    return secrets.token_hex(NONCE_BYTES)


def _equal(proof: Proof, wanted: bytes) -> bool:
    return hmac.compare_digest(bytes.fromhex(proof.mac), wanted)


def _refused(opened: Open, why: str) -> AuthenticationError:
    return AuthenticationError(f"session {opened.session}, move {opened.move}: {why}")
