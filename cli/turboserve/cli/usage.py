"""`turboserve usage`: what tenants have used, by day."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from typing import Annotated, Any

import typer

from turboserve.cli.errors import failure
from turboserve.cli.keys import URL_VARIABLE, AsJson

PAGE = 1_000
ATTEMPTS = 3
TIMEOUT_S = 30.0
COLUMNS = ("day", "tenant", "key", "GPU-seconds", "money", "chunks", "viewers' seconds")


def usage(
    url: Annotated[str, typer.Option("--url", envvar=URL_VARIABLE, help="Address of a gateway.")],
    key: Annotated[
        str | None, typer.Option("--key", envvar="TURBOSERVE_API_KEY", help="An API key of the tenant.")
    ] = None,
    first: Annotated[
        datetime | None,
        typer.Option("--from", formats=["%Y-%m-%d"], help="First day, of UTC. Default: 31 days back."),
    ] = None,
    to: Annotated[
        datetime | None, typer.Option(formats=["%Y-%m-%d"], help="Last day, of UTC. Default: today.")
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(help="Only this tenant. Default: the key's own; with the scope admin, all."),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print GPU-seconds, money, chunks and viewers' seconds by day, tenant and API key."""
    from turboserve.client import TurboServeError

    if as_csv and as_json:
        raise failure("--csv and --json: give one of them")
    days = {name: f"{day:%Y-%m-%d}" for name, day in (("from", first), ("to", to)) if day is not None}
    query = days | ({} if tenant is None else {"tenant": tenant})
    try:
        if as_csv:
            typer.echo(asyncio.run(_csv(url, key, query)), nl=False)
            return
        found, currency = asyncio.run(_days(url, key, query))
    except (TurboServeError, OSError) as error:
        raise failure(str(error)) from None
    if as_json:
        for day in found:
            typer.echo(json.dumps(day | {"currency": currency}))
        return
    _print(found, currency)


async def _csv(url: str, key: str | None, query: dict[str, str]) -> str:
    import httpx

    from turboserve.client import GatewayUnreachableError
    from turboserve.client.transport import raise_for_problem

    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S) as http:
            answer = await http.get("/v1/usage.csv", params=query)
    except httpx.TransportError as error:
        raise GatewayUnreachableError(f"{url}: {error}") from error
    raise_for_problem(answer)
    return answer.text


async def _days(url: str, key: str | None, query: dict[str, str]) -> tuple[list[dict[str, Any]], str]:
    from turboserve.client.transport import Transport

    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    transport = Transport(url, headers, TIMEOUT_S, ATTEMPTS)
    found: list[dict[str, Any]] = []
    params: dict[str, Any] = {**query, "limit": PAGE}
    async with transport.http:
        while True:
            page = await transport.request("GET", "/v1/usage", params=params)
            found += page["usage"]
            if page["next"] is None:
                return found, page["currency"]
            params["after"] = page["next"]


def _print(days: list[dict[str, Any]], currency: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*COLUMNS)
    for day in days:
        table.add_row(
            day["day"],
            day["tenant"],
            day["key"] or "–",
            f"{day['gpu_seconds']:.1f}",
            f"{day['money']:.4f} {currency}",
            str(day["chunks"]),
            f"{day['viewer_seconds']:.1f}",
        )
    Console().print(table)
