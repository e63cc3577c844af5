"""A host with its port, as in URLs."""

from __future__ import annotations


def shown_host(host: str) -> str:
    """Return a host as URLs have it: an IPv6 address has brackets (RFC 3986, 3.2.2)."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def host_port(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"{shown_host(host)}:{port}"
