"""`turboserve bench NAME`: run a benchmark, show its results and write them as JSON."""

from __future__ import annotations

import asyncio
import functools
import inspect
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from turboserve.cli.errors import failure
from turboserve.cli.progress import progress

JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write the results to this file, as one JSON object.")
]
HELP_NAMES = ("--help", "-h")


def bench(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(help="Name of the benchmark. Without a name, list all.")
    ] = None,
) -> None:
    """Run a benchmark: `turboserve bench NAME --json FILE`. `… NAME --help` shows its options."""
    from rich.console import Console

    from turboserve.bench import registry

    if name is None or name in HELP_NAMES:
        Console().print(_listing())
        return
    try:
        found = registry.find(name)
        module = found.load()
    except (registry.UnknownBenchmarkError, ImportError) as error:
        raise failure(str(error)) from None
    app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    app.command()(command(name, module.run, getattr(module, "table", None)))
    raise typer.Exit(typer.main.get_command(app)(context.args, f"turboserve bench {name}"))


def command(name: str, run: Callable[..., Any], table: Callable[[Any], Any] | None) -> Callable[..., None]:
    """Return a function with the parameters of `run` and `--json` that calls `run` and reports its result."""
    from rich.console import Console

    from turboserve.bench import report

    @functools.wraps(run)
    def wrapped(json_file: Path | None = None, **options: Any) -> None:
        started_s = time.monotonic()
        try:
            with progress(f"bench {name}"), cleaning_up_on_sigterm():
                result = run(**options)
                if inspect.isawaitable(result):
                    result = asyncio.run(_finish(result))
            whole = report.compose(name, options, result, time.monotonic() - started_s)
            Console().print((table or report.table)(result))
            if json_file is not None:
                report.write(json_file, whole)
        except report.BenchError as error:
            raise failure(str(error)) from None

    signature = inspect.signature(run, eval_str=True)
    json_parameter = inspect.Parameter(
        "json_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=JsonFile
    )
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in signature.parameters.values()
    ]
    wrapped.__signature__ = inspect.Signature([*parameters, json_parameter])  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in [*parameters, json_parameter]}
    return wrapped


@contextmanager
def cleaning_up_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the program as an exception does, so that a stack of a benchmark's own ends with it."""

    def end(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


async def _finish(result: Any) -> Any:
    return await result


def _listing() -> Any:
    from rich.table import Table

    from turboserve.bench.registry import benchmarks

    listing = Table("benchmark", "measurement", box=None, pad_edge=False)
    for name, known in benchmarks().items():
        try:
            summary = known.summary
        except ImportError as error:
            summary = f"cannot be imported: {error}"
        listing.add_row(name, summary)
    return listing
