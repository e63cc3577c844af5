"""What the commands of `turboserve session` share: their options, and the client of the gateway."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turboserve.cli.errors import failure

if TYPE_CHECKING:
    from turboserve.client import Client, SessionInfo

URL_VARIABLE = "TURBOSERVE_URL"
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar=URL_VARIABLE,
        help="Address of the gateway. The default is the stack that runs on --data.",
    ),
]
Data = Annotated[Path, typer.Option("--data", envvar="TURBOSERVE_DATA", help="Folder of the stack's data.")]
Key = Annotated[
    str | None,
    typer.Option("--key", envvar="TURBOSERVE_API_KEY", help="API key, if the gateway has keys."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
SessionId = Annotated[str, typer.Argument(metavar="SESSION", help="Id of the session.")]
STACK = Path(".turboserve")


@contextmanager
def connected(url: str | None, data: Path, key: str | None) -> Iterator[Client]:
    from turboserve.client import Client, TurboServeError

    try:
        with Client(url or running_gateway(data), key=key) as client:
            yield client
    except (TurboServeError, ValueError, OSError) as error:
        raise failure(str(error)) from None


def running_gateway(data: Path) -> str:
    from turboserve.cli.stack import record as records

    try:
        return records.read(data).url
    except records.StackNotRunningError as error:
        raise failure(f"{error}, or name a gateway with --url") from None


def json_text(model: SessionInfo | Any, indent: int | None = None) -> str:
    return json.dumps(model.model_dump(mode="json"), indent=indent)
