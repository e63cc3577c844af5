"""Runs servers during a `with` block, for tests and offline tools that have no supervisor."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from turboserve.cli.embedded.server import EmbeddedServer, wait_ready
from turboserve.environment import SYSTEM, child
from turboserve.lifeline import FD_VARIABLE, PARENT_VARIABLE

START_LIMIT_S = 60.0
UMASK = 0o027


@contextmanager
def running(servers: Sequence[EmbeddedServer], log: Path) -> Iterator[None]:
    """Start `servers`, wait until all are ready, and stop them at the end. The file `log` gets their output.

    The servers end with this process, even if it is killed. Call this function from the main thread, outside
    any event loop. Raises NotReadyError with the end of the log if a server does not start.
    """
    lifeline_read, lifeline_write = os.pipe()
    lifeline = {FD_VARIABLE: str(lifeline_read), PARENT_VARIABLE: str(os.getpid())}
    environment = child(os.environ, SYSTEM) | lifeline
    guards: list[subprocess.Popen[bytes]] = []
    try:
        asyncio.run(_prepare(servers))
        with log.open("ab") as output:
            guards = [
                subprocess.Popen(
                    server.command(),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    pass_fds=(lifeline_read,),
                    start_new_session=True,
                    umask=UMASK,
                )
                for server in servers
            ]
        asyncio.run(_wait(servers, log))
        yield
    finally:
        for guard in guards:
            guard.terminate()
        for guard in guards:
            guard.wait()
        os.close(lifeline_read)
        os.close(lifeline_write)


async def _prepare(servers: Sequence[EmbeddedServer]) -> None:
    await asyncio.gather(*(server.prepare() for server in servers))


async def _wait(servers: Sequence[EmbeddedServer], log: Path) -> None:
    try:
        await asyncio.gather(*(wait_ready(server, START_LIMIT_S) for server in servers))
    except Exception as error:
        error.add_note(log.read_text(errors="replace")[-4000:])
        raise
