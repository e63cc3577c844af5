"""`turboserve keys`: API keys in the database of a running gateway, or in a file of hashed keys."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from turboserve.cli.errors import failure
from turboserve.cli.session_client import URL_VARIABLE
from turboserve.contracts.keys import LIMIT_NAMES, Scope

if TYPE_CHECKING:
    from turboserve.cli.gateway_keys import GatewayKeys
    from turboserve.gateway.auth.hashing import StoredKey

FILE_VARIABLE = "TURBOSERVE_API_KEYS_FILE"
File = Annotated[Path | None, typer.Option("--file", envvar=FILE_VARIABLE, help="The file of hashed keys.")]
Url = Annotated[
    str | None,
    typer.Option("--url", envvar=URL_VARIABLE, help="Address of a gateway whose keys are in the database."),
]
Key = Annotated[
    str | None,
    typer.Option("--key", envvar="TURBOSERVE_API_KEY", help="Your own key, with the scope admin, for --url."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
COLUMNS = ("tenant", "scopes", "label", "limits", "created", "expires", "last used", "revoked")
NAMES = f"Names: {', '.join(LIMIT_NAMES)}."

app = typer.Typer(
    help="Create, list and revoke API keys: in the database by a gateway (--url), or in a file (--file).",
    no_args_is_help=True,
)


@app.command()
def add(
    tenant: Annotated[str, typer.Argument(help="Tenant of the key. Sessions belong to a tenant.")],
    file: File = None,
    url: Url = None,
    key: Key = None,
    operator: Annotated[
        bool,
        typer.Option("--operator", help="The key may also resize the pool and migrate any session."),
    ] = False,
    scope: Annotated[
        list[Scope] | None,
        typer.Option(
            help="A scope of the key; may be repeated. The default is reading and writing sessions."
        ),
    ] = None,
    expires: Annotated[
        datetime | None,
        typer.Option(formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"], help="When the key expires, in UTC."),
    ] = None,
    label: Annotated[str, typer.Option(help="A text for people. Only with --url.")] = "",
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help=f"A limit of the key; may be repeated. Only with --url. {NAMES}"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key. The key is printed once, on stdout. Only its hash is kept."""
    if operator and scope:
        raise failure("--operator and --scope: give one of them")
    ends = None if expires is None else expires.replace(tzinfo=UTC)
    with _source(file, url, key) as keys:
        if isinstance(keys, Path):
            made, text = _add_to_file(keys, tenant, operator, scope, ends, label, limit)
        else:
            request: dict[str, Any] = {"tenant": tenant, "scopes": _scopes(operator, scope), "label": label}
            request |= {"limits": limits} if (limits := _limits(limit or ())) else {}
            made = keys.add(request | ({} if ends is None else {"expires_at": ends.isoformat()}))
            text = made.pop("key")
        where = keys if isinstance(keys, Path) else url
    if text is None:
        raise failure(
            f"key {made['id']} was created and the answer with its text was lost: "
            f"`turboserve keys revoke {made['id']}`, then add another"
        )
    if as_json:
        typer.echo(json.dumps({**made, "key": text}))
        return
    kind = "operator's key" if operator else "key"
    typer.echo(f"{kind} {made['id']} of {tenant}, in {where}; it is shown only once:", err=True)
    typer.echo(text)


@app.command(name="list")
def list_keys(file: File = None, url: Url = None, key: Key = None, as_json: AsJson = False) -> None:
    """List all keys. The keys themselves are not stored."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    with _source(file, url, key) as keys:
        found = _of_file(keys) if isinstance(keys, Path) else list(keys.list())
    if as_json:
        for one in found:
            typer.echo(json.dumps(one))
        return
    table = Table(Column("id", no_wrap=True), *COLUMNS)
    for one in found:
        times = (_short(one[name]) for name in ("created_at", "expires_at", "last_used_at", "revoked_at"))
        shown = " ".join(one["scopes"]), escape(one["label"]), _in_words(one)
        table.add_row(one["id"], one["tenant"], *shown, *times)
    Console().print(table)


@app.command(name="limit")
def set_limits(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Key id, as in `turboserve keys list`.")],
    limits: Annotated[
        list[str], typer.Argument(metavar="NAME=VALUE...", help=f"`none` removes a limit. {NAMES}")
    ],
    url: Url = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Change limits of a key of the database. The others stay. Gateways apply it within two seconds."""
    wanted = _limits(limits)
    with _source(None, url, key) as keys:
        assert not isinstance(keys, Path)
        changed = keys.change(key_id, wanted)
    typer.echo(json.dumps(changed) if as_json else f"{changed['id']}: {_in_words(changed) or 'no limits'}")


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Key id, as in `turboserve keys list`.")],
    file: File = None,
    url: Url = None,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a key. Within two seconds, gateways refuse the key and end the streams that it has opened."""
    with _source(file, url, key) as keys:
        if isinstance(keys, Path):
            from turboserve.gateway.auth import key_file

            revoked = _shown(key_file.revoke(keys, key_id))
        else:
            revoked = keys.revoke(key_id)
    typer.echo(json.dumps(revoked) if as_json else f"revoked {revoked['id']} of {revoked['tenant']}")


@contextmanager
def _source(file: Path | None, url: str | None, key: str | None) -> Iterator[Path | GatewayKeys]:
    """Yield the file or the gateway, exactly one of which must be named. Its errors end the command."""
    from turboserve.cli.gateway_keys import GatewayKeys
    from turboserve.client import TurboServeError
    from turboserve.gateway.auth.key_file import KeyFileError

    if (file is None) == (url is None):
        problem = "none is set, name one of them" if file is None else "both are set, keep one"
        raise failure(f"--url ({URL_VARIABLE}) and --file ({FILE_VARIABLE}): {problem}")
    try:
        if file is not None:
            yield file
        else:
            yield GatewayKeys(url or "", key)
    except ValidationError:
        raise failure("TENANT: 1 to 64 letters, digits, '_' or '-'") from None
    except (KeyFileError, TurboServeError, OSError) as error:
        raise failure(str(error)) from None


def _add_to_file(
    file: Path,
    tenant: str,
    operator: bool,
    scope: list[Scope] | None,
    ends: datetime | None,
    label: str,
    limit: list[str] | None,
) -> tuple[dict[str, Any], str]:
    from turboserve.gateway.auth import key_file

    if label or limit:
        name = "label" if label else "limit"
        raise failure(f"--{name}: only with --url, the file has no {name}s")
    if ends is not None and ends <= datetime.now(UTC):
        raise failure(f"--expires: {ends.isoformat()} is not in the future")
    scopes = None if scope is None else tuple(_scopes(operator, scope))
    record, text = key_file.add(
        file,
        tenant,
        operator=operator,
        scopes=scopes,
        expires_at=None if ends is None else ends.timestamp(),
    )
    return _shown(record), text


def _of_file(file: Path) -> list[dict[str, Any]]:
    from turboserve.gateway.auth import key_file

    return [_shown(key) for key in key_file.read(file).keys]


def _shown(key: StoredKey) -> dict[str, Any]:
    """Return a key of a file as the API shows one of the database."""
    created = None if key.created_at is None else key.created_at.isoformat()
    expires = None if key.expires_at is None else datetime.fromtimestamp(key.expires_at, UTC).isoformat()
    return {
        "id": key.id,
        "tenant": key.tenant,
        "scopes": sorted(key.effective_scopes),
        "label": "",
        "limits": {},
        "created_at": created,
        "expires_at": expires,
        "revoked_at": None,
        "last_used_at": None,
    }


def _scopes(operator: bool, scope: list[Scope] | None) -> list[str]:
    from turboserve.gateway.auth.hashing import OPERATOR_SCOPES, TENANT_SCOPES

    if scope:
        return sorted({one.value for one in scope})
    return sorted(OPERATOR_SCOPES if operator else TENANT_SCOPES)


def _limits(texts: Iterable[str]) -> dict[str, float | None]:
    """Parse `NAME=VALUE`. The gateway checks the values. Dashes in names are underscores."""
    found: dict[str, float | None] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        name = name.replace("-", "_")
        if not separator or name not in LIMIT_NAMES:
            raise failure(f"{text!r} is no NAME=VALUE. {NAMES}")
        try:
            number = None if value == "none" else float(value)
        except ValueError:
            raise failure(f"{name}: {value!r} is neither a number nor `none`") from None
        whole = number is not None and number.is_integer()
        found[name] = int(number) if whole and number is not None else number
    return found


def _in_words(key: Mapping[str, Any]) -> str:
    limits: Mapping[str, Any] = key.get("limits") or {}
    return " ".join(f"{name}={value:g}" for name, value in limits.items() if value is not None)


def _short(time: str | None) -> str:
    return "–" if time is None else f"{datetime.fromisoformat(time):%Y-%m-%d %H:%M}"
