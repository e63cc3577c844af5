"""`turboserve session`: create, watch, prompt, record and end sessions, by the Python client."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turboserve.cli.errors import failure
from turboserve.cli.frame_size import Size, sides
from turboserve.cli.initial_values import initial_values
from turboserve.cli.progress import progress
from turboserve.cli.session_client import STACK, AsJson, Data, Key, SessionId, Url, connected, json_text
from turboserve.cli.session_timeline import timeline
from turboserve.wording import counted

if TYPE_CHECKING:
    from turboserve.client import Chunk, Session, SessionInfo

app = typer.Typer(help="Create, watch, prompt, record and end sessions.", no_args_is_help=True)
app.command()(timeline)

Prompt = Annotated[str, typer.Argument(help='Prompt, e.g. "a red circle moving left".')]


@app.command()
def create(
    prompt: Prompt,
    model: Annotated[str | None, typer.Option(help="Model. The default is the gateway's.")] = None,
    size: Size = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the noise. The default is random.")] = None,
    pin: Annotated[
        bool,
        typer.Option("--pin", help="Lower no chunk: equal prompts and seeds then give the same video."),
    ] = False,
    control: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Value of a control of the model from the first chunk on; may be repeated. `@FILE`: that "
            "file in base64, for a model that takes an image.",
        ),
    ] = None,
    record: Annotated[bool, typer.Option("--record", help="Record the session from its beginning.")] = False,
    url: Url = None,
    data: Data = STACK,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Create a session, and print its id."""
    width, height = sides(size)
    more: dict[str, Any] = {"controls": initial_values(control or ()) or None, "record": record or None}
    quality = {"pin": True} if pin else None
    with connected(url, data, key) as client:
        session = client.create(
            prompt, model=model, width=width, height=height, seed=seed, quality=quality, **more
        )
        typer.echo(json_text(session.info) if as_json else session.id)


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

    with connected(url, data, key) as client:
        shown = [one.info for one in client.sessions() if one.info and (all_ or not one.info.ended)]
    if as_json:
        for info in shown:
            typer.echo(json_text(info))
        return
    console = Console()
    # In a narrow terminal, the prompt would have room for three letters a line.
    wide = console.width >= WIDE_COLUMNS
    names = ("session", "phase", "activity", *(("model", "worker") if wide else ()), "chunks")
    # There, a reason stands below its prompt.
    texts = ("prompt", "reason") if wide and any(info.reason for info in shown) else ("prompt",)
    table = Table(*(Column(name, no_wrap=True) for name in names), *texts, box=None, pad_edge=False)
    for info in shown:
        row = [info.id, info.phase, "–" if info.ended else info.activity]
        row += [info.model, info.worker or "–"] if wide else []
        below = f"\n[dim]{escape(info.reason)}[/dim]" if info.reason and not wide else ""
        row += [str(info.next_chunk), escape(info.prompt) + below, escape(info.reason or "–")]
        table.add_row(*row[: len(table.columns)])
    console.print(table)


@app.command()
def show(
    session: SessionId, url: Url = None, data: Data = STACK, key: Key = None, as_json: AsJson = False
) -> None:
    """Print a session as JSON, on several lines unless `--json` is given."""
    with connected(url, data, key) as client:
        typer.echo(json_text(client.session(session).refresh(), indent=None if as_json else 2))


@app.command()
def prompt(
    session: SessionId,
    prompt: Prompt,
    wait: Annotated[bool, typer.Option(help="Wait until a chunk shows the prompt.")] = True,
    timeout: Annotated[float, typer.Option(min=0.1, help="Longest time to wait, in seconds.")] = 30.0,
    url: Url = None,
    data: Data = STACK,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Change the prompt of a session."""
    with connected(url, data, key) as client:
        found = client.session(session)
        receipt = found.prompt(prompt)
        try:
            with progress("waiting for a chunk that shows it"):
                chunk = found.applied(receipt, timeout) if wait else None
        except TimeoutError:
            raise failure(
                f"accepted as {receipt.prompt_id}, but no chunk shows it after {timeout:g} s: a session "
                f"generates while someone watches it, such as `turboserve session watch {session}`"
            ) from None
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

    with connected(url, data, key) as client, client.session(session).watch(after=after) as stream:
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
                typer.echo(json_text(item) if as_json else f"            {item.type} {more}".rstrip())
        if stream.end is not None and not as_json:
            typer.echo(stream.end.summary)


@app.command()
def record(
    session: SessionId,
    output: Annotated[Path, typer.Option("--output", "-o", help="MP4 file to write.")],
    seconds: Annotated[
        float | None,
        typer.Option(min=0.1, help="Least length: the last chunk is whole. The default is until the end."),
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

    with progress("recording", seconds) as advance, connected(url, data, key) as client:
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
    with connected(url, data, key) as client:
        info = act(client.session(session))
    if as_json:
        typer.echo(json_text(info))
