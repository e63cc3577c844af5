"""Mutual authentication of the two workers of one migration, and the keys that protect their frames.

Both sides hold the migration's key, which the state store generates and delivers with their rows. Each side
sends a nonce and proves the key by a MAC over both nonces, the migration's identity and its own role. The key
itself is never sent, and no message of one connection is valid in another.

    target → source   Open       session, migration, target, nonce
    source → target   Challenge  nonce
    target → source   Proof
    source → target   Proof, or Denied

The source answers `Denied` alike for an unknown session, an unknown migration and a wrong key. It allocates
no memory and decides nothing for a peer before it has verified the peer's proof.
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
"""Largest frame before both sides are authenticated, bytes."""
_LABEL = b"turboserve migration 2"


@dataclass(frozen=True)
class Keys:
    """Keys that both sides derive from the migration's key and the two nonces. 32 bytes each."""

    target_proof: bytes
    source_proof: bytes
    target_frames: bytes
    """Key of the MACs on frames that the target sends."""
    source_frames: bytes
    link: bytes
    """Key of the MACs by which both ends of a new link recognize each other."""


def derive(key: bytes, opened: Open, challenge: Challenge) -> Keys:
    """Derive the keys of one connection."""
    parts = (
        opened.session.encode(),
        struct.pack(">Q", opened.migration),
        opened.worker.encode(),
        bytes.fromhex(opened.nonce),
        bytes.fromhex(challenge.nonce),
    )
    # Each part follows its length: no two different identities have the same transcript.
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
    """The proof that the end with this role sends over a new link, 32 bytes."""
    return hmac.digest(key, f"{link}\0{role}".encode(), "sha256")


async def authenticate(channel: Channel, opened: Open, key: bytes, seconds: float) -> Keys:
    """As the target: prove the key, verify the source's proof, and protect the channel from then on.

    `seconds` is the limit of each step. Raises `AuthenticationError` and the errors of `Channel`.
    """
    await channel.send(opened, seconds)
    challenge = await channel.receive(seconds, OPEN_LIMIT)
    if not isinstance(challenge, Challenge):
        raise _refused(opened, f"{challenge.type} instead of a challenge")
    keys = derive(key, opened, challenge)
    await channel.send(Proof(mac=keys.target_proof.hex()), seconds)
    answer = await channel.receive(seconds, OPEN_LIMIT)
    if isinstance(answer, Denied):
        raise _refused(opened, "the source refused it")
    if not isinstance(answer, Proof) or not _equal(answer, keys.source_proof):
        raise _refused(opened, "the source did not prove the key")
    channel.protect(sends=keys.target_frames, receives=keys.source_frames)
    return keys


async def admit(
    channel: Channel, key_of: Callable[[str, int], bytes | None], seconds: float
) -> tuple[Open, Keys]:
    """As the source: verify the target's proof of the key, prove the key, and protect the channel.

    `key_of` returns the key of a session's migration, or `None`. `seconds` is the limit of each step. Raises
    `AuthenticationError` after `Denied` was sent, and the errors of `Channel`.
    """
    opened = await channel.receive(seconds, OPEN_LIMIT)
    if not isinstance(opened, Open):
        raise TransferProtocolError(f"{opened.type}: the first frame is open")
    if opened.version != VERSION:
        raise TransferProtocolError(f"version: {opened.version}, {VERSION} is the version of this worker")
    challenge = Challenge(nonce=new_nonce())
    known = key_of(opened.session, opened.migration)
    # A random key makes an unknown migration take the same steps as a known one.
    keys = derive(secrets.token_bytes(NONCE_BYTES) if known is None else known, opened, challenge)
    await channel.send(challenge, seconds)
    answer = await channel.receive(seconds, OPEN_LIMIT)
    if not isinstance(answer, Proof) or not _equal(answer, keys.target_proof):
        await channel.send(Denied(), seconds)
        raise _refused(opened, "its target did not prove the key")
    await channel.send(Proof(mac=keys.source_proof.hex()), seconds)
    channel.protect(sends=keys.source_frames, receives=keys.target_frames)
    return opened, keys


def new_nonce() -> str:
    """A random nonce, hexadecimal."""
    return secrets.token_hex(NONCE_BYTES)


def _equal(proof: Proof, wanted: bytes) -> bool:
    return hmac.compare_digest(bytes.fromhex(proof.mac), wanted)


def _refused(opened: Open, why: str) -> AuthenticationError:
    return AuthenticationError(f"session {opened.session}, migration {opened.migration}: {why}")
