"""`turboserve down`: stop the stack that runs on a data directory."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from turboserve.cli.errors import failure
from turboserve.cli.progress import progress
from turboserve.cli.up import DATA

STOP_LIMIT_S = 60.0
POLL_S = 0.05


def down(
    data: Annotated[Path, DATA] = Path(".turboserve"),
    timeout: Annotated[
        float, typer.Option(min=0.1, max=3600.0, help="Longest time to wait for the end, in seconds.")
    ] = STOP_LIMIT_S,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Stop the running stack, as Ctrl-C does, and wait until all of its processes have ended.

    Sessions stay in the stack's data, and continue when it is started again.
    """
    import psutil

    from turboserve.cli.stack import record

    try:
        stack = record.read(data)
        supervisor = psutil.Process(stack.supervisor_pid)
        with progress("stopping the stack"):
            supervisor.send_signal(signal.SIGINT)
            until = time.monotonic() + timeout
            # A process whose parent has not collected it yet has ended, too.
            while supervisor.is_running() and supervisor.status() != psutil.STATUS_ZOMBIE:
                if time.monotonic() >= until:
                    raise failure(
                        f"--timeout: the stack has not ended within {timeout:g} s "
                        f"(process {stack.supervisor_pid})"
                    )
                time.sleep(POLL_S)
    except psutil.NoSuchProcess:
        # It ended by itself in this moment.
        pass
    except (record.StackNotRunningError, psutil.AccessDenied) as error:
        raise failure(str(error)) from None
    result = {"stopped": True, "url": stack.url, "supervisor_pid": stack.supervisor_pid}
    typer.echo(json.dumps(result) if as_json else f"stopped {stack.url}")
