"""Answers a viewer's checks whether the gateway still consents to send: STUN as bytes.

aioice makes objects of each attribute. Browsers ask every few seconds for as long as they watch.

Source: RFC 8489 (STUN), 14; RFC 7675, 5.1.
"""

from __future__ import annotations

import hmac
import socket
import struct
import zlib

_HEADER = struct.Struct(">HHI12s")
_REQUEST, _RESPONSE, _COOKIE = 0x0001, 0x0101, 0x2112A442
_MAPPED_ADDRESS = struct.Struct(">HHBBHI")
_XOR_MAPPED_ADDRESS, _IPV4 = 0x0020, 1
_INTEGRITY, _FINGERPRINT = b"\x00\x08\x00\x14", b"\x80\x28\x00\x04"
_FINGERPRINT_XOR = 0x5354554E
_HEADER_BYTES, _ADDRESS_BYTES, _INTEGRITY_BYTES, _FINGERPRINT_BYTES = 20, 12, 24, 8


def answer(request: bytes, address: tuple[str, int], password: bytes) -> bytes | None:
    """Return the response to a binding request that ends as browsers end it. None: it is another message.

    `address`: that of the viewer, which has proven itself with the `password` of this side. Only IPv4.
    """
    size = len(request)
    signed = size - _FINGERPRINT_BYTES - _INTEGRITY_BYTES
    if signed < _HEADER_BYTES or "." not in address[0]:
        return None
    kind, length, cookie, transaction = _HEADER.unpack_from(request)
    if (kind, length, cookie) != (_REQUEST, size - _HEADER_BYTES, _COOKIE):
        return None
    if request[signed : signed + 4] != _INTEGRITY or request[-8:-4] != _FINGERPRINT:
        return None
    if request[-4:] != _checksum(request[:-8]):
        return None
    # The signature covers a length that ends with itself.
    header = _HEADER.pack(kind, length - _FINGERPRINT_BYTES, cookie, transaction)
    proof = hmac.digest(password, header + request[_HEADER_BYTES:signed], "sha1")
    if not hmac.compare_digest(proof, request[signed + 4 : -8]):
        return None
    host = int.from_bytes(socket.inet_aton(address[0]), "big")
    mapped = _MAPPED_ADDRESS.pack(
        _XOR_MAPPED_ADDRESS, 8, 0, _IPV4, address[1] ^ (_COOKIE >> 16), host ^ _COOKIE
    )
    length = _ADDRESS_BYTES + _INTEGRITY_BYTES
    body = _HEADER.pack(_RESPONSE, length, _COOKIE, transaction) + mapped
    proof = hmac.digest(password, body, "sha1")
    header = _HEADER.pack(_RESPONSE, length + _FINGERPRINT_BYTES, _COOKIE, transaction)
    response = header + mapped + _INTEGRITY + proof
    return response + _FINGERPRINT + _checksum(response)


def _checksum(message: bytes) -> bytes:
    """Return the value of FINGERPRINT. `message`: what precedes it, whose length includes it."""
    return (zlib.crc32(message) ^ _FINGERPRINT_XOR).to_bytes(4, "big")
