"""Requests of a command to a gateway."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turboserve.cli.session_client import STACK, URL_VARIABLE, running_gateway

if TYPE_CHECKING:
    from turboserve.client.transport import Transport

ATTEMPTS = 3
TIMEOUT_S = 30.0
PAGE = 1_000
"""Maximum number of entries of one answer."""

Url = Annotated[
    str,
    typer.Option(
        "--url",
        envvar=URL_VARIABLE,
        default_factory=lambda: running_gateway(Path(os.environ.get("TURBOSERVE_DATA") or STACK)),
        show_default="the stack that runs on TURBOSERVE_DATA",
        help="Address of a gateway.",
    ),
]


def ask(url: str, key: str | None, method: str, path: str, **options: Any) -> Any:
    """Return the answer's JSON. `options` are those of `Transport.request`. Raises the client's errors."""

    async def answer() -> Any:
        transport = _transport(url, key)
        async with transport.http:
            return await transport.request(method, path, **options)

    return asyncio.run(answer())


def listed(
    url: str, key: str | None, path: str, name: str, query: Mapping[str, Any], limit: int | None = None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Read all pages of a listing, at most `limit` entries. Raises the client's errors.

    Returns the entries, which each page has under `name`, and the last page.
    """

    async def answer() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        transport = _transport(url, key)
        found: list[dict[str, Any]] = []
        params = dict(query)
        async with transport.http:
            while True:
                params["limit"] = PAGE if limit is None else min(PAGE, limit - len(found))
                page = await transport.request("GET", path, params=params)
                found += page[name]
                if page["next"] is None or len(found) == limit:
                    return found, page
                params["after"] = page["next"]

    return asyncio.run(answer())


def _transport(url: str, key: str | None) -> Transport:
    # Not at the top: commands that ask no gateway start without the client.
    from turboserve.client.transport import Transport

    return Transport(url, {} if key is None else {"Authorization": f"Bearer {key}"}, TIMEOUT_S, ATTEMPTS)
