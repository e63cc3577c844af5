"""`turboserve webhooks`: where the events of a tenant's sessions are sent."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from turboserve.cli.errors import failure
from turboserve.cli.gateway_request import Url, ask, listed
from turboserve.cli.keys import AsJson

WEBHOOK_COLUMNS = ("id", "URL", "types", "label", "state", "failures")
DELIVERY_COLUMNS = ("event", "type", "session", "state", "attempts", "status", "error", "next attempt")

Key = Annotated[
    str | None,
    typer.Option("--key", envvar="TURBOSERVE_API_KEY", help="An API key with the scope webhooks:write."),
]
Webhook = Annotated[str, typer.Argument(metavar="WEBHOOK", help="Id of the webhook.")]
Types = Annotated[
    list[str] | None,
    typer.Option("--type", help="Send this type of events, or KIND.* for all of a kind. Default: all."),
]

app = typer.Typer(help="Send the events of a tenant's sessions to an address.", no_args_is_help=True)


@app.command()
def add(
    address: Annotated[str, typer.Argument(help="Where events are sent: https://…")],
    url: Url,
    types: Types = None,
    label: Annotated[str, typer.Option(help="A text for people.")] = "",
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Create a webhook, and print its secret, only once."""
    body = {"url": address, "types": types or [], "label": label}
    with _failures():
        made = ask(url, key, "POST", "/v1/webhooks", json=body, idempotent=False)
    _print_secret(made, as_json)


@app.command("list")
def list_webhooks(url: Url, key: Key = None, as_json: AsJson = False) -> None:
    """List the tenant's webhooks."""
    with _failures():
        found = ask(url, key, "GET", "/v1/webhooks")["webhooks"]
    if as_json:
        _print_json(found)
        return
    rows = (
        (
            *(one["id"], one["url"], ", ".join(one["types"]) or "all", one["label"]),
            *("enabled" if one["enabled"] else f"disabled: {one['disabled_reason']}", str(one["failures"])),
        )
        for one in found
    )
    _print_table(WEBHOOK_COLUMNS, rows)


@app.command()
def change(
    webhook: Webhook,
    url: Url,
    address: Annotated[str | None, typer.Option("--address", help="Where events are sent.")] = None,
    types: Types = None,
    label: Annotated[str | None, typer.Option(help="A text for people.")] = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Change the address, the types or the label of a webhook."""
    wanted = {"url": address, "types": types, "label": label}
    changes = {name: value for name, value in wanted.items() if value is not None}
    _change(url, key, webhook, changes, as_json)


@app.command()
def enable(webhook: Webhook, url: Url, key: Key = None, as_json: AsJson = False) -> None:
    """Send events again, from now on."""
    _change(url, key, webhook, {"enabled": True}, as_json)


@app.command()
def disable(webhook: Webhook, url: Url, key: Key = None, as_json: AsJson = False) -> None:
    """Send nothing, and give up what waits."""
    _change(url, key, webhook, {"enabled": False}, as_json)


@app.command()
def remove(webhook: Webhook, url: Url, key: Key = None, as_json: AsJson = False) -> None:
    """Delete a webhook and its deliveries."""
    with _failures():
        ask(url, key, "DELETE", f"/v1/webhooks/{webhook}")
    if as_json:
        typer.echo(json.dumps({"id": webhook, "removed": True}))


@app.command()
def rotate(webhook: Webhook, url: Url, key: Key = None, as_json: AsJson = False) -> None:
    """Print a new secret, only once. The old one signs as well for a while."""
    with _failures():
        made = ask(url, key, "POST", f"/v1/webhooks/{webhook}/secret", idempotent=False)
    _print_secret(made, as_json)


@app.command("test")
def send_test_event(webhook: Webhook, url: Url, key: Key = None, as_json: AsJson = False) -> None:
    """Send an event `webhook.test`, and print its id."""
    with _failures():
        delivery = ask(url, key, "POST", f"/v1/webhooks/{webhook}/test", idempotent=False)
    typer.echo(json.dumps(delivery) if as_json else delivery["event"])


@app.command()
def deliveries(
    webhook: Webhook,
    url: Url,
    state: Annotated[
        str | None, typer.Option(help="Only those in this state: waiting, delivered, failed.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of deliveries.")] = 100,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """List what was sent and what waits, newest first."""
    with _failures():
        query = {} if state is None else {"state": state}
        found, _ = listed(url, key, f"/v1/webhooks/{webhook}/deliveries", "deliveries", query, limit)
    if as_json:
        _print_json(found)
        return
    names = ("event", "type", "session", "state", "attempts", "status", "error", "next_attempt_at")
    rows = (["–" if one[name] is None else str(one[name]) for name in names] for one in found)
    _print_table(DELIVERY_COLUMNS, rows)


@app.command()
def redeliver(
    webhook: Webhook,
    event: Annotated[str, typer.Argument(metavar="EVENT", help="Id of the event.")],
    url: Url,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Send an event again, under its id."""
    with _failures():
        delivery = ask(url, key, "POST", f"/v1/webhooks/{webhook}/deliveries/{event}/redeliver")
    if as_json:
        typer.echo(json.dumps(delivery))


def _change(url: str, key: str | None, webhook: str, changes: dict[str, Any], as_json: bool) -> None:
    """Change a webhook, and print it if JSON is asked for."""
    with _failures():
        changed = ask(url, key, "PATCH", f"/v1/webhooks/{webhook}", json=changes)
    if as_json:
        typer.echo(json.dumps(changed))


@contextmanager
def _failures() -> Iterator[None]:
    """Turn errors of the gateway into a message and an exit status."""
    from turboserve.client import TurboServeError

    try:
        yield
    except (TurboServeError, OSError) as error:
        raise failure(str(error)) from None


def _print_secret(made: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(made))
        return
    typer.echo(f"{made['id']} {made['secret'] or '(the secret was shown before)'}")


def _print_json(found: Iterable[dict[str, Any]]) -> None:
    for one in found:
        typer.echo(json.dumps(one))


def _print_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    for number, name in enumerate(columns):
        # The first column has the id, which other commands take. What is too long goes on below.
        table.add_column(name, no_wrap=number == 0, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)
