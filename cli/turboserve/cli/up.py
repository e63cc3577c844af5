"""`turboserve up` and `turboserve status`: the whole stack on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import ValidationError

from turboserve import program_start
from turboserve.cli.errors import failure
from turboserve.config import SettingsError

DATA = typer.Option("--data", envvar="TURBOSERVE_DATA", help="Folder of the stack's data.")


def up(
    workers: Annotated[
        str | None, typer.Option(help="Number of workers, or a range such as 1..4. The default is 1.")
    ] = None,
    pool: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with the kinds of workers that the pool may have, with which models. It takes "
            "the place of --workers and --model."
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65_535, help="Port of the gateway. The default is 8080 or the next free port."
        ),
    ] = None,
    schedulers: Annotated[
        int, typer.Option(min=1, max=8, help="Number of schedulers. One leads, the others stand by.")
    ] = 1,
    gateways: Annotated[
        int, typer.Option(min=1, max=8, help="Number of gateways. Each has a port, from --port on.")
    ] = 1,
    state_stores: Annotated[
        int, typer.Option(min=1, max=8, help="Number of state stores. They share the requests.")
    ] = 1,
    nats: Annotated[
        int, typer.Option(help="Number of NATS servers: 1, or a cluster of 3 or 5.", show_default=True)
    ] = 1,
    autoscalers: Annotated[
        int, typer.Option(min=1, max=8, help="Number of autoscalers. One leads, the others stand by.")
    ] = 1,
    decode_workers: Annotated[
        int,
        typer.Option(
            min=0,
            max=8,
            help="Number of decode workers, which decode what the workers denoise. 0: each worker does both.",
        ),
    ] = 0,
    auth: Annotated[
        bool,
        typer.Option(
            "--auth",
            help="Require API keys, which the database has. The first start prints one of the scope admin.",
        ),
    ] = False,
    webhooks: Annotated[
        bool, typer.Option("--webhooks", help="Also start the service that sends events to webhooks.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model of the workers, and of sessions that name none. The default is that of "
            "TURBOSERVE_MODEL and TURBOSERVE_DEFAULT_MODEL. Several models, with commas between them: "
            "each worker serves all of them, and sessions that name none get the first."
        ),
    ] = None,
    data: Annotated[Path, DATA] = Path(".turboserve"),
    log_format: Annotated[Literal["text", "json"], typer.Option(help="Format of the logs.")] = "text",
) -> None:
    """Start NATS, Redis, Postgres and the six services. Ctrl-C stops all of them."""
    program_start.begin()
    from turboserve.cli.embedded import PortTakenError
    from turboserve.cli.embedded.binaries import BinaryMissingError
    from turboserve.cli.stack.options import External, InvalidOptionError, Options, PoolOption, Workers
    from turboserve.cli.stack.run import AlreadyRunningError, run

    program_start.finish()
    try:
        pool_option = None if pool is None else PoolOption.read(pool, workers=workers, model=model)
        options = Options(
            data,
            Workers.parse("1" if workers is None else workers)
            if pool_option is None
            else pool_option.workers,
            port,
            schedulers,
            gateways,
            state_stores,
            nats,
            autoscalers,
            decode_workers=decode_workers,
            auth=auth,
            webhooks=webhooks,
            model=model,
            pool=pool_option,
            log_format=log_format,
            external=External(),
        )
        status = run(options)
    except ValidationError as error:
        raise failure(str(SettingsError.of(error))) from None
    except (AlreadyRunningError, PortTakenError, InvalidOptionError, BinaryMissingError, OSError) as error:
        raise failure(str(error)) from None
    raise typer.Exit(status)


def status(
    data: Annotated[Path, DATA] = Path(".turboserve"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole record, including passwords.")
    ] = False,
) -> None:
    """Show the running stack: its address and its processes."""
    from turboserve.cli.stack import record
    from turboserve.cli.supervisor.disk_space import room

    try:
        stack = record.read(data)
    except record.StackNotRunningError as error:
        raise failure(str(error)) from None
    if as_json:
        typer.echo(json.dumps(vars(stack), indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    alarms = {name: process["alarm"] for name, process in stack.processes.items() if process.get("alarm")}
    table = Table("process", "state", "pid", "port", "restarts", title=stack.url, title_justify="left")
    for name, process in stack.processes.items():
        table.add_row(
            name, *(str(process[key] or "–") for key in ("state", "pid", "port")), str(process["restarts"])
        )
    for pid in stack.worker_pids():
        table.add_row("worker", "running", str(pid), "–", "–")
    console = Console()
    console.print(table)
    for name, reason in alarms.items():
        console.print(f"ALARM {name}: {reason}", style="bold red", markup=False, soft_wrap=True)
    found = room(Path(stack.data))
    if found.low:
        state = "low" if found.enough else "full"
        console.print(f"The disk of {stack.data} is {state}: {found}", style="bold red", markup=False)
