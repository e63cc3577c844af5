"""Addresses of gateways as clients reach them, and the origins of the pages that they serve."""

from __future__ import annotations

from contextlib import suppress
from urllib.parse import urlsplit

from turboserve.gateway.auth.access import ANY, Authority, is_loopback, parse_origin
from turboserve.host_port import shown_host


def parse_address(text: str) -> str:
    """Return the address of a gateway without a slash at its end. Raises ValueError for anything else."""
    parts = urlsplit(text)
    if ANY not in text and not parts.query and not parts.fragment:
        with suppress(ValueError):
            parse_origin(f"{parts.scheme}://{parts.netloc}")
            return text.rstrip("/")
    raise ValueError(f"{text[:200]!r} is not the address of a gateway such as https://video.example.com")


def origins_of(address: str) -> tuple[str, ...]:
    """Return the origins of the pages that a gateway's address serves. Browsers have two for loopback."""
    parts = urlsplit(address)
    origin = f"{parts.scheme}://{parts.netloc}".lower()
    host = Authority.parse(parts.netloc).host
    if not is_loopback(host):
        return (origin,)
    port = "" if parts.port is None else f":{parts.port}"
    names = ("localhost", shown_host(host))
    return tuple(f"{parts.scheme}://{name}{port}" for name in names)
