"""`turboserve usage`: what tenants have used, by day or hour and by model."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from typing import Annotated, Any

import typer

from turboserve.cli.errors import failure
from turboserve.cli.gateway_request import TIMEOUT_S, Url, listed
from turboserve.cli.keys import AsJson

COLUMNS = (
    "day",
    "tenant",
    "key",
    "GPU-seconds",
    "money",
    "chunks",
    "video seconds",
    "viewers' seconds",
    "MB delivered",
)

Query = dict[str, str | list[str]]


def usage(
    url: Url,
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
    group_by: Annotated[
        list[str] | None,
        typer.Option(
            "--group-by",
            help="Sum over all but this: day, hour, tenant, key or model. May be given several times.",
        ),
    ] = None,
    by: Annotated[
        str | None, typer.Option("--by", help="Length of time of a line, hour or day, added to --group-by.")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print GPU-seconds, money, chunks, video and what viewers were sent, by day, tenant and API key.

    --by hour prints it by hour, --group-by model by model.
    """
    from turboserve.client import TurboServeError

    if as_csv and as_json:
        raise failure("--csv and --json: give one of them")
    days = {name: f"{day:%Y-%m-%d}" for name, day in (("from", first), ("to", to)) if day is not None}
    query: Query = {**days, **({} if tenant is None else {"tenant": tenant})}
    if group_by:
        query["group_by"] = group_by
    if by is not None:
        query["by"] = by
    try:
        if as_csv:
            typer.echo(asyncio.run(_csv(url, key, query)), nl=False)
            return
        found, last = listed(url, key, "/v1/usage", "usage", query)
        currency = last["currency"]
    except (TurboServeError, OSError) as error:
        raise failure(str(error)) from None
    if as_json:
        for day in found:
            typer.echo(json.dumps(day | {"currency": currency}))
        return
    _print(found, currency)


async def _csv(url: str, key: str | None, query: Query) -> str:
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


def _print(days: list[dict[str, Any]], currency: str) -> None:
    from rich.console import Console
    from rich.table import Table

    # Only an answer by hour or by model has these.
    fine = [name for name in ("hour", "model") if any(day.get(name) for day in days)]
    table = Table(*COLUMNS[:3], *fine, *COLUMNS[3:])
    for day in days:
        table.add_row(
            day["day"] or "–",
            day["tenant"] or "–",
            day["key"] or "–",
            *(_fine(name, day) for name in fine),
            f"{day['gpu_seconds']:.1f}",
            f"{day['money']:.4f} {currency}",
            str(day["chunks"]),
            # A gateway of an earlier version has neither video nor bytes.
            _amount(day.get("video_seconds")),
            _amount(day["viewer_seconds"]),
            _amount(day.get("delivered_bytes"), 1e6),
        )
    Console().print(table)


def _fine(name: str, entry: dict[str, Any]) -> str:
    """Return the hour as a time of UTC, or the model with its frame size."""
    value = entry.get(name)
    if value is None:
        return "–"
    if name == "hour":
        return str(value)[11:16]
    return f"{value} {entry['width']}x{entry['height']}" if entry["width"] else str(value)


def _amount(number: float | None, unit: float = 1.0) -> str:
    return "–" if number is None else f"{number / unit:.1f}"
