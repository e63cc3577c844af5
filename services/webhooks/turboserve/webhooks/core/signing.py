"""Secrets and signatures of webhooks, as the Standard Webhooks specification 1.0 has them."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable

PREFIX = "whsec_"
_INFO = b"turboserve webhook 1 "


def derive_key(master: bytes, salt: str, webhook: str) -> bytes:
    """Return the 32 bytes with which a webhook's messages are signed: HKDF-SHA256 (RFC 5869).

    So no secret is stored: who reads the database has only salts, and needs the deployment's master key.

    Args:
        master: The master key, at least 16 random bytes.
        salt: Hexadecimal digits, new with each rotation.
        webhook: Id of the webhook.
    """
    extracted = hmac.digest(bytes.fromhex(salt), master, hashlib.sha256)
    return hmac.digest(extracted, _INFO + webhook.encode() + b"\x01", hashlib.sha256)


def secret_text(key: bytes) -> str:
    """Return the key as its receiver gets it: `whsec_` and Base64."""
    return PREFIX + base64.b64encode(key).decode()


def signatures(keys: Iterable[bytes], message_id: str, timestamp: int, body: bytes) -> str:
    """Return the header `webhook-signature`: one `v1,…` for each key, separated by spaces."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    return " ".join(
        "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode() for key in keys
    )
