"""`turboserve session`: create, watch, prompt, record and end sessions, by the Python client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turboserve.cli.errors import failure
from turboserve.cli.frame_size import Size, sides
from turboserve.cli.progress import progress
from turboserve.wording import counted

if TYPE_CHECKING:
    from turboserve.client import Chunk, Client, Session, SessionInfo

app = typer.Typer(help="Create, watch, prompt, record and end sessions.", no_args_is_help=True)

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="TURBOSERVE_URL",
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
Prompt = Annotated[str, typer.Argument(help='Prompt, e.g. "a red circle moving left".')]
STACK = Path(".turboserve")


@app.command()
def create(
    prompt: Prompt,
    model: Annotated[str | None, typer.Option(help="Model. The default is the gateway's.")] = None,
    size: Size = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the noise. The default is random.")] = None,
    url: Url = None,
    data: Data = STACK,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Create a session, and print its id."""
    width, height = sides(size)
    with _client(url, data, key) as client:
        session = client.create(prompt, model=model, width=width, height=height, seed=seed)
        typer.echo(_json(session.info) if as_json else session.id)


WIDE_COLUMNS = 120
"""Width of a terminal from which on lists have columns that can be left out, characters."""


@app.command(name="list")
def list_sessions(
    all_: Annotated[bool, typer.Option("--all", help="List ended sessions, too.")] = False,
    url: Url = None,
    data: Data = STACK,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """List sessions, newest first. Below 120 columns without model and worker: `--json` has all."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    with _client(url, data, key) as client:
        shown = [one.info for one in client.sessions() if one.info and (all_ or not one.info.ended)]
    if as_json:
        for info in shown:
            typer.echo(_json(info))
        return
    console = Console()
    # In a narrow terminal, the prompt would have room for three letters a line.
    wide = console.width >= WIDE_COLUMNS
    names = ("session", "phase", "activity", *(("model", "worker") if wide else ()), "chunks")
    texts = ("prompt", "reason") if any(info.reason for info in shown) else ("prompt",)
    table = Table(*(Column(name, no_wrap=True) for name in names), *texts, box=None, pad_edge=False)
    for info in shown:
        row = [info.id, info.phase, "–" if info.ended else info.activity]
        row += [info.model, info.worker or "–"] if wide else []
        row += [str(info.next_chunk), escape(info.prompt), escape(info.reason or "–")]
        table.add_row(*row[: len(table.columns)])
    console.print(table)


@app.command()
def show(
    session: SessionId, url: Url = None, data: Data = STACK, key: Key = None, as_json: AsJson = False
) -> None:
    """Print a session as JSON, on several lines unless `--json` is given."""
    with _client(url, data, key) as client:
        typer.echo(_json(client.session(session).refresh(), indent=None if as_json else 2))


@app.command()
def prompt(
    session: SessionId,
    prompt: Prompt,
    wait: Annotated[bool, typer.Option(help="Wait until a chunk shows the prompt.")] = True,
    url: Url = None,
    data: Data = STACK,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Change the prompt of a session."""
    with _client(url, data, key) as client:
        found = client.session(session)
        receipt = found.prompt(prompt)
        chunk = found.applied(receipt) if wait else None
    if as_json:
        typer.echo(json.dumps(receipt.model_dump(mode="json") | {"chunk_index": chunk}))
    elif chunk is None:
        typer.echo(f"accepted as {receipt.prompt_id}")
    else:
        typer.echo(f"chunk {chunk} is the first one that shows it")


@app.command()
def watch(
    session: SessionId,
    after: Annotated[
        int | None,
        typer.Option(min=-1, help="Begin after this chunk; -1: at the first. The default is the playhead."),
    ] = None,
    url: Url = None,
    data: Data = STACK,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Print the chunks, skips and events of a session as they come, until the session ends."""
    from turboserve.client.models import Chunk, Skip

    with _client(url, data, key) as client, client.session(session).watch(after=after) as stream:
        for item in stream.items():
            if isinstance(item, Chunk):
                chunk = {
                    "type": "chunk",
                    "index": item.index,
                    "start_s": item.start_s,
                    "duration_s": item.duration_s,
                    "control_seq": item.control_seq,
                    "worker": item.worker,
                    "compute_s": item.compute_s,
                    "bytes": len(item.fragment),
                }
                text = f"{item.start_s:8.2f} s  chunk {item.index}, {item.compute_s:.2f} s on {item.worker}"
                typer.echo(json.dumps(chunk) if as_json else text)
            elif isinstance(item, Skip):
                text = f"{item.start_s:8.2f} s  skip to chunk {item.index}"
                typer.echo(json.dumps({"type": "skip", **asdict(item)}) if as_json else text)
            else:
                more = " ".join(f"{name}={value}" for name, value in item.more.items())
                typer.echo(_json(item) if as_json else f"            {item.type} {more}".rstrip())
        if stream.end is not None and not as_json:
            typer.echo(stream.end.summary)


@app.command()
def timeline(
    session: SessionId,
    chunk: Annotated[int, typer.Option(min=0, help="Index of the chunk.")] = 0,
    url: Url = None,
    data: Data = STACK,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Print how a chunk came about, from the request to the screen, with the time of each step."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    with _client(url, data, key) as client:
        found = client.session(session).chunk(chunk)
    if as_json:
        typer.echo(_json(found))
        return
    of = f"chunk {found.index} of {found.session}: epoch {found.epoch}, prompt {found.control_seq}"
    typer.echo(f"{of}, {found.bytes} bytes, {found.total_s:.3f} s in all")
    if found.decision is not None:
        numbers = " ".join(f"{name}={value:g}" for name, value in found.decision.numbers.items())
        typer.echo(f"{found.decision.kind}: {found.decision.reason} {numbers}".rstrip())
    first = found.hops[0].at
    table = Table(
        "step", Column("after, s", justify="right"), Column("step, ms", justify="right"), "clock of"
    )
    for hop in found.hops:
        step = "" if hop.since_s is None else f"{round(1000 * hop.since_s, 1) + 0.0:.1f}"
        table.add_row(hop.name, f"{(hop.at - first).total_seconds():.3f}", step, escape(hop.by))
    Console().print(table)


@app.command()
def record(
    session: SessionId,
    output: Annotated[Path, typer.Option("--output", "-o", help="MP4 file to write.")],
    seconds: Annotated[
        float | None, typer.Option(min=0.1, help="Length. The default is until the session ends.")
    ] = None,
    after: Annotated[
        int, typer.Option(min=-1, help="Begin after this chunk; -1: at the first that is kept.")
    ] = -1,
    url: Url = None,
    data: Data = STACK,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Write a session's video to an MP4 file."""
    if not output.parent.is_dir():
        raise failure(f"--output: the directory {output.parent} does not exist")
    recorded_s = 0.0

    def on_chunk(chunk: Chunk) -> None:
        nonlocal recorded_s
        recorded_s += chunk.duration_s
        advance(recorded_s)

    with progress("recording", seconds) as advance, _client(url, data, key) as client:
        written = client.session(session).record(output, seconds, after=after, on_chunk=on_chunk)
    if as_json:
        result = {"file": str(output), "chunks": written.chunks, "seconds": written.seconds}
        typer.echo(json.dumps(result | {"end": written.end and written.end.model_dump(mode="json")}))
    else:
        how = f"; {written.end.summary}" if written.end else ""
        typer.echo(f"{output}: {counted(written.chunks, 'chunk')}, {written.seconds:.2f} s{how}")


@app.command()
def pause(
    session: SessionId, url: Url = None, data: Data = STACK, key: Key = None, as_json: AsJson = False
) -> None:
    """Pause a session: it keeps its state and frees its slot."""
    _steer(session, lambda one: one.pause(), url, data, key, as_json)


@app.command()
def resume(
    session: SessionId, url: Url = None, data: Data = STACK, key: Key = None, as_json: AsJson = False
) -> None:
    """Resume a paused session."""
    _steer(session, lambda one: one.resume(), url, data, key, as_json)


@app.command()
def end(
    session: SessionId, url: Url = None, data: Data = STACK, key: Key = None, as_json: AsJson = False
) -> None:
    """End a session for good."""
    _steer(session, lambda one: one.end(), url, data, key, as_json)


def _steer(
    session: str,
    act: Callable[[Session], SessionInfo],
    url: str | None,
    data: Path,
    key: str | None,
    as_json: bool,
) -> None:
    """Call one action of a session, and print the session after it if JSON is asked for."""
    with _client(url, data, key) as client:
        info = act(client.session(session))
    if as_json:
        typer.echo(_json(info))


@contextmanager
def _client(url: str | None, data: Path, key: str | None) -> Iterator[Client]:
    from turboserve.client import Client, TurboServeError

    try:
        with Client(url or _running(data), key=key) as client:
            yield client
    except (TurboServeError, ValueError, OSError) as error:
        raise failure(str(error)) from None


def _running(data: Path) -> str:
    from turboserve.cli.stack import record as records

    try:
        return records.read(data).url
    except records.StackNotRunningError as error:
        raise failure(f"{error}, or name a gateway with --url") from None


def _json(model: SessionInfo | Any, indent: int | None = None) -> str:
    return json.dumps(model.model_dump(mode="json"), indent=indent)
