"""Describes who can reach this gateway and what they may do, for its log and for `turboserve up`."""

from __future__ import annotations

from typing import Any

from turboserve.gateway.auth.access import ANY, Keys, is_loopback
from turboserve.gateway.settings import Settings
from turboserve.host_port import host_port

KEYLESS = (
    "no API keys: every client that reaches this address may create, watch, change and end every session, "
    "and resize the pool"
)

_WITHOUT = "Without a key: /healthz, /readyz, /metrics, /openapi.json, /asyncapi.json and the pages."


def fields(settings: Settings, keys: Keys, port: int) -> dict[str, Any]:
    """Return the exposure as the fields of a log line."""
    return {
        "address": host_port(settings.gateway_host, port),
        "reachable_by": "this machine" if is_loopback(settings.gateway_host) else "others",
        **_of_keys(keys),
        "hosts": ",".join(settings.allowed_hosts) or "its own",
        "origins": ",".join(settings.cors_origins) or "its own",
    }


def sentences(settings: Settings, keys: Keys, port: int) -> list[str]:
    """Return the exposure as sentences for the user who starts a stack."""
    shown = fields(settings, keys, port)
    reach = (
        "this machine's users and programs"
        if is_loopback(settings.gateway_host)
        else f"every client that can connect to {shown['address']}; without TLS, so put a proxy in front"
    )
    found = [f"Reachable by {reach}."]
    if keys.in_database:
        found.append("API keys: in the database; /v1/keys creates and revokes them. " + _WITHOUT)
    elif keys:
        found.append(
            f"API keys: {shown['keys']}; tenants: {shown['tenants']}; operators: {shown['operators']}. "
            + _WITHOUT
        )
    else:
        found.append(f"{KEYLESS[0].upper()}{KEYLESS[1:]}.")
    if ANY in settings.allowed_hosts:
        found.append("TURBOSERVE_ALLOWED_HOSTS is *: no protection against DNS rebinding.")
    if settings.cors_origins:
        found.append(f"Pages of these origins may call it: {shown['origins']}.")
    return found


def _of_keys(keys: Keys) -> dict[str, Any]:
    if keys.in_database:
        return {"keys": "in the database"}
    return {
        "keys": len(keys.stored),
        "tenants": len({key.tenant for key in keys.stored}),
        "operators": ",".join(keys.operators) or ("none" if keys else "everyone"),
    }
